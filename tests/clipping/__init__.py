"""The clipping strategies against the papers that they come from."""
