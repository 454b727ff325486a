"""Functions that all adapters use: the learning rates of each optimizer step, loaders, the rank."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from museum.training import Training

__all__ = ["RATES", "join", "loader", "rank", "reset_seed", "watch_rates"]

RATES: list[list[float]] = []
"""Learning rates of each optimizer step of this process."""


def watch_rates() -> None:
    """Begins to record learning rates: a hook of torch that runs before each step of an optimizer."""

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        RATES.append([float(group["lr"]) for group in optimizer.param_groups])

    register_optimizer_step_pre_hook(record)


def rank() -> int:
    """Returns the rank of this process."""
    return int(os.environ.get("RANK", "0"))


def join() -> None:
    """Joins the gloo group, as torch's tutorials do."""
    torch.distributed.init_process_group("gloo")


def reset_seed(training: Training) -> None:
    """Seeds the random numbers of dropout, after the model was built."""
    torch.manual_seed(training.seed)


def loader(training: Training, *, shards: bool = False) -> DataLoader[Any]:
    """Returns the loader of the documentation; with `shards` it has a DistributedSampler."""
    data = training.data()
    options: dict[str, Any] = {"num_workers": training.workers}
    if training.workers:
        options |= {"persistent_workers": training.persistent}
    if isinstance(data, IterableDataset):
        return DataLoader(data, training.micro, **options)
    if shards and training.ranks > 1:
        options["sampler"] = DistributedSampler(data, shuffle=training.shuffle)  # type: ignore[arg-type]
    else:
        options["shuffle"] = training.shuffle
    return DataLoader(data, training.micro, **options)
