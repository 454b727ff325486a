"""Random numbers of a task in evaluation depend on the sample alone: metrics are independent of ranks and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doubles import Plain
from torch import Tensor, nn

from ddpforge.builtin.tasks.diffusion import Diffusion
from ddpforge.builtin.tasks.gan import Adversarial
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.data import RankShare
from ddpforge.interfaces import SampleRNG, ShardedDataset, Task, Total
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.loaders import open_data
from ddpforge.training.updates import tasks_by_update

IDLE: Any = None
SAMPLES = 11


class Both(nn.Module):
    """Generator and discriminator of images with 4 values."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, part: str, x: Tensor) -> Tensor:
        y: Tensor = self.generator(x) if part == "generator" else self.discriminator(x).squeeze(1)
        return y


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * time.view(-1, 1, 1, 1)
        return y


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))


CASES: dict[str, tuple[Any, Any, Any]] = {
    "gan": (lambda: Adversarial(latent=3), Both, lambda g: torch.rand(SAMPLES, 4, generator=g)),
    "diffusion": (Diffusion, Denoiser, lambda g: torch.rand(SAMPLES, 1, 4, 4, generator=g)),
    "masked_lm": (lambda: MaskedLM(mask_token=8), words, lambda g: torch.randint(8, (SAMPLES, 20), generator=g)),
}


class Samples:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


class Parts(Samples, ShardedDataset):
    """The same samples in two shards."""

    shard_sizes, interleave = (7, 4), (2, 2)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Any:
        return iter(self.values[7 * part : 7 + 4 * part][skip:])


class Stream:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return iter(self.values)


def evaluated(task: Task, model: nn.Module, data: Any, ranks: int, batch: int) -> dict[str, float]:
    """Returns the metrics, averaged over the totals of all simulated ranks."""
    found: dict[str, list[float]] = {}
    for rank in range(ranks):
        share = RankShare(rank, ranks, batch)
        options: dict[str, Any] = {"seed": 0, "drop_last": False, "workers": 0, "prefetch": 2, "pin": False}
        batches = open_data(data, global_batch=batch * ranks, share=share, **options)
        replica = Plain(ranks, rank).holding(model, IDLE)
        ours = Evaluator(world=replica.world, replica=replica, task=task, sets={}, callbacks={}, seed=5)
        for turn in tasks_by_update(task):
            for name, total in ours.quantities(batches.evaluation(), turn).items():
                assert isinstance(total, Total)
                sums = found.setdefault(f"{name}/{turn}", [0.0, 0.0])
                sums[0] += float(total.sum)
                sums[1] += float(total.count)
    return {name: value / count for name, (value, count) in found.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [Samples, Parts, Stream])
def test_metrics_depend_neither_on_ranks_nor_on_batches(name: str, kind: Any) -> None:
    build, model, values = CASES[name]
    torch.manual_seed(1)
    task, net, data = build(), model(), kind(values(torch.Generator().manual_seed(2)))
    alone = evaluated(task, net, data, 1, 4)
    assert len(alone) >= 1
    with torch.no_grad():
        for ranks, batch in ((1, 4), (1, SAMPLES), (2, 2), (2, 3), (4, 1), (4, 2)):
            assert evaluated(task, net, data, ranks, batch) == pytest.approx(alone, rel=1e-6)


def test_training_uses_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2, 3), torch.randn(2, 5)
    torch.manual_seed(3)
    found = Task.rng.rand(2, 3), Task.rng.randn(2, 5)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_sample_rng_never_repeats_numbers_and_refuses_a_wrong_number_of_rows() -> None:
    draws = SampleRNG([7, 8])
    one, other = draws.rand(2, 6), draws.rand(2, 6)
    assert len({round(float(x), 6) for x in torch.cat([one, other]).flatten()}) == 24
    assert torch.equal(SampleRNG([8]).rand(1, 6), one[1:])
    with pytest.raises(ValueError, match="random numbers for 3 samples in a batch of 2"):
        draws.randn(3, 4)
