"""Microbenchmarks of the kernels: one file an operation, each a list of `Case`s."""
