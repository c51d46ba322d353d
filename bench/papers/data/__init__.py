"""Data sets of the papers, read from a folder that the user names, or generated."""
