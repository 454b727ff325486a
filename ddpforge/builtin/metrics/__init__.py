"""Built-in metrics: sums and counts over samples."""
