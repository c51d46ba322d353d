"""Which samples a step may hold: sampling, loaders, draws."""
