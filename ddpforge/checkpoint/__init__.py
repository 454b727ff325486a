"""Checkpoints on disk: their format, how they are committed, verified, kept, and exported."""
