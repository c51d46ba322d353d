"""Benchmarks of end-to-end training and kernels, against non-private training and Opacus."""
