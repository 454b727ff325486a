"""From a dataset to the micro-batches of one rank: their order, how they are fetched and moved to the device."""

from ddpforge.data.fetching import Batches, open_data
from ddpforge.data.nests import to_device
from ddpforge.data.order import MicroBatch, RankShare, permute
from ddpforge.data.randomness import mix, seed_all

__all__ = ["Batches", "MicroBatch", "RankShare", "mix", "open_data", "permute", "seed_all", "to_device"]
