"""One real step, traced: which sample every entry of every tensor follows from."""
