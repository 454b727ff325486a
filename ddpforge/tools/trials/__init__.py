"""Steps that leave nothing behind: dry runs, overfitting some batches, tests of learning rates and of batch sizes."""
