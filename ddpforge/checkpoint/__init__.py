"""Checkpoints on disk: their format, how they are written, committed, read, verified and kept."""
