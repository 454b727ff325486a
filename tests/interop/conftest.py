"""Fixtures of tests/checkpoint: a folder for checkpoints, and a disk without fsync."""

from checkpoint.conftest import _fast_disk, folder

__all__ = ["_fast_disk", "folder"]
