"""Pipeline parallelism: every rank holds a stretch of the model's layers, micro-batches travel from rank to rank."""

from ddpforge.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
