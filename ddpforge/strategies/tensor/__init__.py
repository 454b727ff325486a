"""Tensor parallelism: neighbouring ranks compute shares of the same layers, as a model's plan says."""

from ddpforge.strategies.tensor.cut import Cut
from ddpforge.strategies.tensor.gradients import ShareGradients
from ddpforge.strategies.tensor.moves import Moves
from ddpforge.strategies.tensor.plan import Plan, resolve
from ddpforge.strategies.tensor.shares import Shares, refuse_uneven

__all__ = ["Cut", "Moves", "Plan", "ShareGradients", "Shares", "refuse_uneven", "resolve"]
