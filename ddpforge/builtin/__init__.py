"""Built-in components of ddpforge; they follow the same rules as plugins."""
