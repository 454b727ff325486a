"""Fixtures of tests/checkpoint: a folder for checkpoints, and an fsync that does nothing."""

from checkpoint.conftest import _fast_disk, folder

__all__ = ["_fast_disk", "folder"]
