"""Models of other libraries, in the environments that have them: one private step, compared exactly."""
