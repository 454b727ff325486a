"""From a dataset to the micro-batches of one rank: their order, how they are fetched and moved to the device."""

from ddpforge.data.fetching import Batches, open_data
from ddpforge.data.nests import to_device
from ddpforge.data.order import MicroBatch, Share, permute
from ddpforge.data.randomness import mix, seed_all

__all__ = ["Batches", "MicroBatch", "Share", "mix", "open_data", "permute", "seed_all", "to_device"]
