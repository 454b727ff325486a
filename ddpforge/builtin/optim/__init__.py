"""Built-in optimizers, learning-rate schedules and parameter groups."""
