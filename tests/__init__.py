"""Tests of fastclip; `tests.oracle` holds the reference that they compare with."""
