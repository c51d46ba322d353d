"""Where the samples are in every tensor, and that no row follows from another."""
