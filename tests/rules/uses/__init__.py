"""What becomes of parameters where functions use them."""
