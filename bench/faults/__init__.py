"""Faults in the middle of training: what is left of it, and of the account of it."""
