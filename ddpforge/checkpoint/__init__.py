"""Checkpoints on disk: their format, how they are committed, verified, kept, and exported.

Finding and verifying checkpoints needs no torch: the names below are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpforge.checkpoint.contents import Facts as Facts
    from ddpforge.checkpoint.contents import Share as Share
    from ddpforge.checkpoint.manager import Checkpoints as Checkpoints
    from ddpforge.checkpoint.peers import Peers as Peers
    from ddpforge.checkpoint.reader import Reader as Reader

__all__ = ["Checkpoints", "Facts", "Peers", "Reader", "Share"]

_LAZY = {
    "Checkpoints": "manager",
    "Facts": "contents",
    "Peers": "peers",
    "Reader": "reader",
    "Share": "contents",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'ddpforge.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"ddpforge.checkpoint.{_LAZY[name]}"), name)
