"""A folder for checkpoints, on a disk that nobody waits for: the fixtures of tests/checkpoint."""

from checkpoint.conftest import _fast_disk, folder

__all__ = ["_fast_disk", "folder"]
