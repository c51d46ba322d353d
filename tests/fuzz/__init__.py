"""Random networks: trained exactly, or refused."""
