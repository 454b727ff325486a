"""Pipeline parallelism: every rank holds some consecutive layers; micro-batches travel from rank to rank."""

from ddpforge.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
