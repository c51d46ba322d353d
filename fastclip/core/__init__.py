"""What belongs to no subject of its own: arguments, the process, numerics, autograd, builds."""
