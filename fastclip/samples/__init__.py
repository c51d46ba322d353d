"""Where the samples are in every tensor, and that no sample follows from another."""
