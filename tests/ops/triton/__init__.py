"""Kernels against the float64 reference, through Triton's interpreter where there is no GPU."""
