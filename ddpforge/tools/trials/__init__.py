"""Trials that leave nothing behind: dry runs, overfitting a few batches, tests of learning rates and batch sizes."""
