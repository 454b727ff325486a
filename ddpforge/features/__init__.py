"""Features that some runs use: the kernel names none of them, and calls them by `training.features.Feature`."""
