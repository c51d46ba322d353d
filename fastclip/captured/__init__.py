"""Passes that are captured once and replayed: `engine.make_step`."""
