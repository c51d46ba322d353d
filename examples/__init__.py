"""Short scripts to copy from; run them from the repository root."""
