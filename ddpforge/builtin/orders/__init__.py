"""Orders of training data."""
