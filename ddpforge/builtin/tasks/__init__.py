"""Built-in tasks: losses and what to report about them."""
