"""Built-in callbacks."""
