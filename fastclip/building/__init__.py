"""Modules of csrc/ that fit one torch alone, compiled where fastclip runs: once, in the background."""
