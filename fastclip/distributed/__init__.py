"""Several processes that train one private model: who has which rows, and what they exchange."""
