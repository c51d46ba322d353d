"""Opacus' own modes: gradients by Opacus' code, clipping, noise and accounting by this engine."""
