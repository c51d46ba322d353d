"""A zoo of small models, families by what makes them hard: trained exactly, or refused."""
