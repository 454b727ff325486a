"""Built-in trackers."""
