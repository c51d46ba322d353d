"""Shared foundations: arguments, the process, numerics, autograd, builds."""
