"""The trace of a real step, held against brute force."""
