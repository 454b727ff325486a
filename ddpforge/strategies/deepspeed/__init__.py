"""DeepSpeed's ZeRO."""

from ddpforge.strategies.deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed"]
