"""All random numbers that ddpforge seeds: what changes them, and what does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from support.doubles import Elsewhere, Plain
from support.stages import staged
from torch import Tensor, nn

from ddpforge.data import MicroBatch, RankShare
from ddpforge.data.rng import isolated_rng
from ddpforge.interfaces import Callback, Pass, ShardedDataset, Shuffled, Task
from ddpforge.strategies.fsdp.context_parallel import ContextParallel
from ddpforge.strategies.pipeline.stage import _seed_on
from ddpforge.strategies.tensor.tensor_parallel import TensorParallelRNG
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.loaders import open_data
from ddpforge.training.stages import Built
from ddpforge.training.step import Stepper


# ---------------------------------------------------------------------------------------------- passes
class Noisy(nn.Module):
    """Model that records a random number of torch in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.drawn = nn.Parameter(torch.ones(())), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return self.w * x


class Plainly(Task):
    """Task that records the random numbers that it draws for samples, too."""

    def __init__(self) -> None:
        self.rows = list[list[float]]()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch)
        for _ in range(2):
            self.rows.append(self.rng.rand(len(batch)).tolist())
        return outputs.sum(), outputs


def micro(samples: int, shard: int, number: int, places: Any = None, *, last: bool = True) -> MicroBatch:
    return MicroBatch(torch.ones(samples), samples, samples, last, shard, number, places=places)


def training(
    seed: int, step: int, shard: int, number: int, update: int, rank: int = 0, samples: int = 3, measure: int = 0
) -> float:
    model = Noisy()
    replica = Plain(ranks=4, rank=rank).holding(model, torch.optim.SGD([torch.zeros(())], lr=0.1))
    stepper = Stepper(replica.world, replica, Plainly(), seed=seed)
    one = micro(samples, shard, number)
    stepper.train_step(step, one, [one], measure=bool(measure), update=update)
    return model.drawn[-1]


class Measures(Callback):
    def while_evaluating(self, step: int) -> dict[str, float]:
        return {"drawn": torch.rand(()).item()}


class Places:
    """Evaluation set with samples 10, 11, 12, …, in passes of `samples`."""

    def __init__(self, passes: int, samples: int) -> None:
        self.passes, self.samples = passes, samples

    def evaluation(self) -> Iterator[MicroBatch]:
        for n in range(self.passes):
            places = 10 + torch.arange(n * self.samples, (n + 1) * self.samples)
            yield micro(self.samples, 0, n, places.numpy(), last=n + 1 == self.passes)


def evaluated(seed: int, rank: int, step: int, samples: int = 2, name: str = "") -> tuple[Noisy, Plainly, Any]:
    model, task = Noisy(), Plainly()
    replica = Plain(ranks=4, rank=rank).holding(model, None)  # type: ignore[arg-type]
    sets = {name: Places(12 // samples, samples)}
    callbacks = {"measures": Measures()}
    ours = Evaluator(world=replica.world, replica=replica, task=task, sets=sets, callbacks=callbacks, seed=seed)  # type: ignore[arg-type]
    return model, task, ours.evaluate(step)


def evaluation(seed: int, rank: int, number: int, step: int = 0, other_set: int = 0) -> float:
    return evaluated(seed, rank, step, name="other" * other_set)[0].drawn[number]


def evaluated_sample(seed: int, place: int, call: int, rank: int = 0, step: int = 0, samples: int = 2) -> float:
    rows = evaluated(seed, rank, step, samples)[1].rows
    return [x for row in rows[call::2] for x in row][place]


def measured(seed: int, rank: int, step: int = 0) -> float:
    return float(evaluated(seed, rank, step)[2]["eval/drawn"])


def stage(seed: int, number: int, drawn: int = 0) -> float:
    torch.manual_seed(seed)
    torch.rand(drawn)
    _seed_on(number, torch.device("cpu"))
    return torch.rand(()).item()


def positions(seed: int, rank: int) -> float:
    cut = ContextParallel(Elsewhere(4, rank))
    cut.seed(Pass(batch=None, seed=lambda: torch.manual_seed(seed), scale=lambda: 1.0, last=True))  # type: ignore[arg-type, return-value]
    return torch.rand(()).item()


def share_of_layer(seed: int, rank: int, outside: bool = False) -> float:
    torch.manual_seed(seed)
    numbers = TensorParallelRNG(rank, torch.device("cpu"))
    numbers.begin()
    if outside:
        torch.rand(rank + 1)
        numbers.end()
    return torch.rand(()).item()


def whole_layer(seed: int, rank: int = 0) -> float:
    return share_of_layer(seed, rank, outside=True)


# ---------------------------------------------------------------------------------------------- data
SAMPLES, BATCH = 8, 4  # of an epoch, and of a step


class Numbers:
    """Dataset whose samples are their index and a random number of torch."""

    random = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


class Batches(Numbers):
    """Dataset that fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn = torch.rand(())
        return [(index, drawn) for index in indices]


class Stream:
    """Stream whose samples are their index and a random number of python; collating draws a number, too."""

    def __iter__(self) -> Iterator[Any]:
        return ((index, random.random()) for index in range(SAMPLES))

    def collate(self, samples: list[Any]) -> Any:
        return *zip(*samples, strict=True), torch.rand(()).item()


class Shards(ShardedDataset):
    """Sharded dataset: a sample is 10 times its shard plus its place, and a random number of torch."""

    random, shuffle, shuffle_buffer, interleave, shard_sizes = True, True, 3, (2, 1), (4, 4)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[Any]:
        return iter(range(10 * part + skip, 10 * part + self.shard_sizes[part]))

    def prepare(self, sample: Any) -> Any:
        return sample, torch.rand(()).item()


def epoch_of(
    data: Any, seed: int, epoch: int, *, ranks: int = 1, size: int = BATCH, workers: int = 0, disturb: bool = False
) -> Iterator[tuple[int, MicroBatch]]:
    """Yields every micro-batch of an epoch on any rank, with its step in the epoch."""
    order = Shuffled(data, seed, BATCH, False) if hasattr(data, "__len__") else None
    options: dict[str, Any] = {"drop_last": False, "workers": workers, "prefetch": 2, "pin": False}
    for rank in range(ranks):
        share = RankShare(rank, ranks, size)
        source = open_data(data, order=order, global_batch=BATCH, share=share, seed=seed, **options)
        step, start = 0, epoch * SAMPLES // BATCH
        for one in source.training(start):
            yield step, one
            step += one.last
            if step == SAMPLES // BATCH:
                break
            if disturb:
                random.seed(rank), torch.manual_seed(rank)


def fetched(kind: Callable[[], Any]) -> Callable[..., float]:
    """Returns a function that returns the random number of a sample."""

    def draw(seed: int, epoch: int, sample: int, **more: Any) -> float:
        for _, one in epoch_of(kind(), seed, epoch, **more):
            indices, drawn = one.data[:2]
            for index, x in zip(indices[: one.samples], drawn, strict=False):
                if int(index) == sample:
                    return float(x)
        raise AssertionError(sample)

    return draw


def collated(seed: int, step: int, first: int, workers: int = 0) -> float:
    """Returns the random number of a stream's micro-batch, by the step and by the place of its first sample in the
    step."""
    epoch, within = divmod(step, SAMPLES // BATCH)
    for number, one in epoch_of(Stream(), seed, epoch, size=2, workers=workers):
        if number == within and one.data[0][0] % BATCH == first:
            return float(one.data[2])
    raise AssertionError(first)


# ---------------------------------------------------------------------------------------------- built parts
RECIPE = """
recipe = 2
name = "run"
model.use = "./mine.py:Net"
data.train = { use = "digits", split = "train" }
task.use = "./mine.py:Teaches"
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "4st", global_batch = 8 }
"""
CODE = """
import torch
from torch import nn
from ddpforge.interfaces import Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.rand(()))

class Teaches(Task):
    def __init__(self):
        self.drawn = torch.rand(())
    def loss(self, model, batch):
        return model.drawn, None
"""


def built(seed: int, ranks: int, drawn: int) -> Built:
    with TemporaryDirectory() as folder:
        (Path(folder) / "run.toml").write_text(RECIPE)
        (Path(folder) / "mine.py").write_text(CODE)
        torch.rand(drawn)
        return staged(Path(folder) / "run.toml", f"train.seed={seed}", ranks=ranks, meta=False).stage


def weights(seed: int, ranks: int = 1, drawn: int = 0) -> float:
    return float(built(seed, ranks, drawn).model.drawn.detach())  # type: ignore[operator, union-attr]


def teacher(seed: int, ranks: int = 1, drawn: int = 0) -> float:
    return float(built(seed, ranks, drawn).task.drawn)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- the table
class Row(NamedTuple):
    """`draw(**place)` returns a number. It changes with each value of `differs`, and does not with those of `same`."""

    draw: Callable[..., float]
    place: dict[str, Any]
    differs: dict[str, Any]
    same: dict[str, Any]
    pinned: float


FETCHED = {"ranks": 2, "size": 1, "workers": 2, "disturb": True}
TABLE = {
    "initial weights": Row(weights, {"seed": 1}, {"seed": 2}, {"ranks": 2, "drawn": 5}, 0.371337),
    "a model that the task holds": Row(teacher, {"seed": 1}, {"seed": 2}, {"ranks": 2, "drawn": 5}, 0.719411),
    "a pass of training": Row(
        training,
        {"seed": 1, "step": 3, "shard": 0, "number": 0, "update": 0},
        {"seed": 2, "step": 4, "shard": 1, "number": 1, "update": 1},
        {"rank": 2, "samples": 5, "measure": 1},
        0.543147,
    ),
    "a pass of an evaluation": Row(
        evaluation,
        {"seed": 1, "rank": 0, "number": 0},
        {"seed": 2, "rank": 1, "number": 1},
        {"step": 7, "other_set": 1},
        0.408944,
    ),
    "a sample of an evaluation": Row(
        evaluated_sample,
        {"seed": 1, "place": 5, "call": 0},
        {"seed": 2, "place": 6, "call": 1},
        {"rank": 2, "step": 7, "samples": 3},
        0.027729,
    ),
    "a callback within an evaluation": Row(
        measured, {"seed": 1, "rank": 0}, {"seed": 2, "rank": 1}, {"step": 7}, 0.437222
    ),
    "a stage of a pipeline": Row(stage, {"seed": 1, "number": 0}, {"seed": 2, "number": 1}, {"drawn": 5}, 0.079640),
    "positions of a sequence": Row(positions, {"seed": 1, "rank": 0}, {"seed": 2, "rank": 1}, {}, 0.757632),
    "a share of a layer": Row(share_of_layer, {"seed": 1, "rank": 0}, {"seed": 2, "rank": 1}, {}, 0.294498),
    "behind a shared layer": Row(whole_layer, {"seed": 1}, {"seed": 2}, {"rank": 1}, 0.403069),
    "a sample": Row(
        fetched(Numbers),
        {"seed": 1, "epoch": 1, "sample": 5},
        {"seed": 2, "epoch": 2, "sample": 6},
        FETCHED,
        0.379771,
    ),
    "a batch that is fetched at once": Row(
        fetched(Batches),
        {"seed": 1, "epoch": 1, "sample": 6},
        {"seed": 2, "epoch": 2, "sample": 5},
        {"workers": 2},
        0.369832,
    ),
    "a sample of a stream": Row(
        fetched(Stream),
        {"seed": 1, "epoch": 1, "sample": 5},
        {"seed": 2, "epoch": 2, "sample": 6},
        FETCHED,
        0.224372,
    ),
    "a micro-batch of a stream": Row(
        collated, {"seed": 1, "step": 3, "first": 0}, {"seed": 2, "step": 2, "first": 2}, {"workers": 2}, 0.214797
    ),
    "a sample of sharded data": Row(
        fetched(Shards),
        {"seed": 1, "epoch": 1, "sample": 1},
        {"seed": 2, "epoch": 2, "sample": 11},
        FETCHED,
        0.129223,
    ),
}


def drawn(name: str, **changed: Any) -> float:
    row = TABLE[name]
    with isolated_rng():
        return row.draw(**row.place | changed)


@pytest.mark.parametrize("name", TABLE)
def test_random_numbers_depend_on_each_listed_condition(name: str) -> None:
    found = [drawn(name), *(drawn(name, **{key: value}) for key, value in TABLE[name].differs.items())]
    assert len(set(found)) == len(found), dict(zip(["", *TABLE[name].differs], found, strict=True))


@pytest.mark.parametrize("name", TABLE)
def test_random_numbers_do_not_depend_on_other_conditions(name: str) -> None:
    found = {key: drawn(name, **{key: value}) for key, value in TABLE[name].same.items()}
    assert found == dict.fromkeys(found, drawn(name))


def test_random_numbers_are_pinned_and_differ_between_uses() -> None:
    """Runs of today must continue with the same numbers under any later version."""
    found = {name: drawn(name) for name in TABLE}
    assert found == {name: pytest.approx(row.pinned, abs=1e-6) for name, row in TABLE.items()}
    assert len(set(found.values())) == len(found)
