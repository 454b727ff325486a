"""A run's folder: what is in it, and how it is found. Nothing here imports torch."""
