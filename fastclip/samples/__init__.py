"""Locates the samples in every tensor, and checks that samples are independent."""
