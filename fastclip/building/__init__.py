"""How the modules of csrc/ are compiled."""
