"""Sampling of the batches that a step trains on, private data loaders and their checks."""
