"""Mixed precision, loss scaling, checkpointing, compilation: exact, to the rounding of each."""
