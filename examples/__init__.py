"""Short scripts to copy from. Run them from the repository root."""
