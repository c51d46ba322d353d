"""One backward pass: contributions in, clipped sums out."""
