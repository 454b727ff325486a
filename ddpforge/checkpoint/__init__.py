"""Checkpoints on disk: their format, how they are committed, verified, kept, and exported.

Finding and verifying checkpoints needs no torch: the names below are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpforge.checkpoint.format import Checkpoint as Checkpoint
    from ddpforge.checkpoint.manager import Checkpoints as Checkpoints

__all__ = ["Checkpoint", "Checkpoints"]

_LAZY = {"Checkpoint": "ddpforge.checkpoint.format", "Checkpoints": "ddpforge.checkpoint.manager"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'ddpforge.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
