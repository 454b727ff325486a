"""Built-in tasks: losses and metrics."""
