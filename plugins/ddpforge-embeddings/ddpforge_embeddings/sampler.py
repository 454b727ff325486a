"""The sampler `no_duplicates`: no text comes twice in a step, so no negative is a positive."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from ddpforge.errors import UsageError
from ddpforge.interfaces import BatchSampler
from ddpforge.interfaces.permutation import permute

__all__ = ["NoDuplicates"]

ddpforge_plugin_api = 3


class NoDuplicates(BatchSampler):
    """Sampler of global batches in which no text comes twice, in any column, as NO_DUPLICATES of sentence-transformers.

    Each epoch goes through a random order, and each step takes the next samples without a text of the step; others
    wait for the next step. An epoch has len(data) // global_batch steps, all of global_batch samples. If samples wait
    at the end of an epoch because they share texts, others of the epoch take their places.
    """

    steps_per_epoch: int

    def __init__(self, data: Any, seed: int, global_batch: int, drop_last: bool) -> None:
        keys = getattr(data, "text_keys", None)
        if keys is None:
            raise UsageError(
                f"no_duplicates needs data with texts, not {type(data).__name__}",
                hints=["it is for the datasets pairs and triplets", "or give your dataset a method text_keys()"],
                key="data.sampler",
            )
        self._rows = [frozenset(row) for row in np.asarray(keys()).tolist()]
        self._batch, self._seed = global_batch, seed
        self.steps_per_epoch = len(self._rows) // global_batch
        if not self.steps_per_epoch:
            raise UsageError(
                f"the data has {len(self._rows)} samples, fewer than train.global_batch = {global_batch}",
                hints=["no_duplicates takes only whole batches: lower train.global_batch"],
                key="train.global_batch",
            )
        self._steps = lru_cache(maxsize=2)(self._epoch)
        self._steps(0)

    def __call__(self, step: int) -> Sequence[int]:
        """Returns the samples of a step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return self._steps(epoch)[number]

    def _epoch(self, epoch: int) -> list[list[int]]:
        places = np.arange(len(self._rows), dtype=np.uint64)
        order = permute(places, np.full_like(places, epoch), len(self._rows), self._seed).tolist()
        steps: list[list[int]] = []
        waiting: list[int] = []
        ahead = iter(order)
        for _ in range(self.steps_per_epoch):
            step: list[int] = []
            texts: set[int] = set()
            waiting = [sample for sample in waiting if not self._takes(sample, step, texts)]
            while len(step) < self._batch and (sample := next(ahead, None)) is not None:
                if not self._takes(sample, step, texts):
                    waiting.append(sample)
            for sample in order if len(step) < self._batch else ():
                self._takes(sample, step, texts)
            if len(step) < self._batch:
                raise UsageError(
                    f"only {len(step)} samples could be found that share no text, fewer than train.global_batch ="
                    f" {self._batch}",
                    hints=["lower train.global_batch", "or remove the sampler, and set task.mask_duplicates = true"],
                    key="data.sampler",
                )
            steps.append(step)
        return steps

    def _takes(self, sample: int, step: list[int], texts: set[int]) -> bool:
        """Adds a sample to a step; False if the step is full or has one of its texts."""
        if len(step) == self._batch or not texts.isdisjoint(self._rows[sample]):
            return False
        step.append(sample)
        texts |= self._rows[sample]
        return True
