"""Several processes that train one private model: who has which samples, and what they exchange."""
