"""Built-in trackers: where metrics go."""
