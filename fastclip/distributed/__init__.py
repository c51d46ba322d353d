"""Several processes that train one private model, their shares of samples and their exchanges."""
