"""FSDP2."""

from ddpforge.strategies.fsdp.strategy import FSDP

__all__ = ["FSDP"]
