"""Micro-batches of one rank from a dataset: sample order, fetching, and the move to the device."""

from ddpforge.data.batch_assignment import MicroBatch, RankShare, end_of_epochs
from ddpforge.data.fetching import Batches, check_data, fetch_some, open_data
from ddpforge.data.pytree import to_device
from ddpforge.data.rng import seed_all
from ddpforge.interfaces import mix

__all__ = [
    "Batches",
    "MicroBatch",
    "RankShare",
    "check_data",
    "end_of_epochs",
    "fetch_some",
    "mix",
    "open_data",
    "seed_all",
    "to_device",
]
