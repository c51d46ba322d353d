"""Which rows a step may hold: sampling, loaders, draws."""
