"""Tensor parallelism: neighbouring ranks compute shares of the same layers, as a model's plan says."""

from ddpforge.strategies.tensor.cut import Cut
from ddpforge.strategies.tensor.moves import Moves
from ddpforge.strategies.tensor.options import Loss, Sequenced, Sharing, Styles, Tensored
from ddpforge.strategies.tensor.plan import Plan, resolve
from ddpforge.strategies.tensor.shares import ShareGradients, Shares

__all__ = [
    "Cut",
    "Loss",
    "Moves",
    "Plan",
    "Sequenced",
    "ShareGradients",
    "Shares",
    "Sharing",
    "Styles",
    "Tensored",
    "resolve",
]
