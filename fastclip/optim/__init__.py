"""The optimizer: noise, the real step, Opacus' own modes, gradient scaling."""
