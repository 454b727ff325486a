"""Sampling and order: samples that come twice, never, or in the same order."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from museum.case import Case
from museum.cases.a_denominators import classes, numbered
from museum.training import ENTROPY, Perceptron, Recorded, Training

THEME = "Sampling and order"


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Stream of 1 … 8, as a script writes it first."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(1, 9):
            yield torch.tensor([float(number)]), torch.zeros(1, dtype=torch.long)

    def __len__(self) -> int:
        return 8


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are random numbers, drawn when they are read: an augmentation."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(self.draw())]), torch.zeros(1, dtype=torch.long)


def _flat(rank: Any) -> list[float]:
    return list(itertools.chain(*rank["extra"]["seen"]))


def _distinct(found: list[Any]) -> int:
    """Returns the number of different samples over all ranks."""
    return len({round(one, 9) for rank in found for one in _flat(rank)})


def _orders_differ(found: list[Any]) -> bool:
    """Returns whether the second half of the samples has another order than the first."""
    seen = [one[0] for one in found[0]["extra"]["seen"]][-24:]
    return seen[-12:] != seen[-24:-12]


def _numpy() -> float:
    return float(np.random.rand())


def _torch() -> float:
    return float(torch.rand(()))


CASES = [
    Case(
        name="ragged-end-over-ranks",
        wrong="The sampler repeats samples so that all ranks have equally many: these count twice.",
        references=["pytorch#25162", "pytorch-lightning#2398"],
        training=Training(data=lambda: numbered(7), micro=2, ranks=2),
        notes=dict.fromkeys(
            ("loop", "pl", "zero"),
            "documented: https://docs.pytorch.org/docs/stable/data.html (drop_last of DistributedSampler)",
        ),
    ),
    Case(
        name="unshuffled-on-ranks",
        wrong="On several ranks the training data are shuffled, though the loader has shuffle=False.",
        references=["https://lightning.ai/docs/pytorch/stable/common/trainer.html#use-distributed-sampler"],
        training=Training(model=Perceptron, data=lambda: classes(16), loss=ENTROPY, ranks=2, defaults=True),
        notes={"pl": "documented: the sampler that is added for training shuffles"},
    ),
    Case(
        name="shuffled-epochs-differ",
        wrong="Each epoch has the same order, because set_epoch is not called or reaches a copy.",
        references=["TRL#6351", "VeOmni#1075", "accelerate#654"],
        training=Training(model=Recorded, data=lambda: numbered(12), micro=1, epochs=2, shuffle=True, ranks=1),
        measure=_orders_differ,
        expected=True,
    ),
    Case(
        name="shuffled-epochs-differ-on-ranks",
        wrong="Each epoch has the same order on ranks.",
        references=["TRL#6351", "VeOmni#1075", "accelerate#654"],
        training=Training(model=Recorded, data=lambda: numbered(24), micro=1, epochs=2, shuffle=True, ranks=2),
        measure=_orders_differ,
        expected=True,
    ),
    *(
        Case(
            name=f"augmentation-of-{name}",
            wrong=f"Random numbers of {name} in the loader's processes are the same in other workers, ranks or epochs.",
            references=["transformers#31412", "fastMRI#123"],
            training=Training(model=Recorded, data=partial(Noise, draw), micro=1, epochs=2, ranks=2, workers=2),
            measure=lambda found: _distinct(found) >= 32,
            expected=True,
            notes=dict.fromkeys(("loop", "zero"), "the tutorial gives all ranks the same seed"),
        )
        for name, draw in (("numpy", _numpy), ("python", random.random), ("torch", _torch))
    ),
    Case(
        name="augmentation-persistent-workers",
        wrong="Loader processes that live on repeat the augmentation of the first epoch.",
        references=["Megatron-Bridge#5762", "AlbumentationsX#266"],
        training=Training(model=Recorded, data=partial(Noise, _numpy), micro=1, epochs=2, workers=2, persistent=True),
        measure=lambda found: _distinct(found) >= 32,
        expected=True,
    ),
    *(
        Case(
            name=f"stream-over-{name}",
            wrong=f"Each of the {name} reads the whole stream: samples count several times.",
            references=["datasets#5360", "datasets#3423"],
            training=Training(model=Recorded, data=Numbers, micro=1, ranks=ranks, workers=workers, iterable=True),
            measure=lambda found: sorted(itertools.chain(*map(_flat, found))),
            expected=[float(number) for number in range(1, 9)],
            notes=dict.fromkeys(
                ("loop", "accelerated", "hf", "pl", "zero"),
                "documented: https://docs.pytorch.org/docs/stable/data.html (an iterable dataset divides itself)",
            ),
        )
        for name, ranks, workers in (("ranks", 2, 0), ("workers", 1, 2))
    ),
]
