"""Micro-batches of one rank from a dataset: sample order, fetching, and the move to the device."""

from ddpforge.data.batch_assignment import MicroBatch, RankShare, end_of_epochs
from ddpforge.data.fetching import Batches, fetch_some, is_stream
from ddpforge.data.pytree import to_device
from ddpforge.data.rng import seed_all
from ddpforge.interfaces import mix

__all__ = [
    "Batches",
    "MicroBatch",
    "RankShare",
    "end_of_epochs",
    "fetch_some",
    "is_stream",
    "mix",
    "seed_all",
    "to_device",
]
