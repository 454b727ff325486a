"""Components that each break their kind's contract in one way, for the conformance kit to find."""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ddpforge.interfaces import (
    BatchSampler,
    Callback,
    CanonicalState,
    EpochBatchSampler,
    Horizon,
    Metric,
    Replica,
    RunContext,
    Schedule,
    ShardedDataset,
    StepInfo,
    Task,
    Total,
    Tracker,
    World,
)
from ddpforge.ranks.collectives import SingleRank
from ddpforge.strategies.ddp import DDP

RANK = int(os.environ.get("RANK", "0"))


# ---------------------------------------------------------------------------------------------- every kind
class Undocumented(Callback):
    def __init__(self, *, often: int = 3, rarely: Annotated[int, Field(description="How rarely.")] = 5) -> None:
        pass


class Loose(Callback):
    """Takes anything for an option."""

    def __init__(self, *, thing: Annotated[Any, Field(description="Something.")] = None) -> None:
        pass


class TakesUse(Callback):
    """Has an option that no recipe can set."""

    def __init__(self, *, use: Annotated[str, Field(description="What to use.")] = "a") -> None:
        pass


# ---------------------------------------------------------------------------------------------- models
class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())


class UnusedLayer(_Net):
    """Has a layer that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)


class RandomNames(_Net):
    """Calls a layer something else every time."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"layer{random.SystemRandom().randrange(10**9)}", nn.Linear(8, 8))


class OwnGenerator(_Net):
    """Draws initial weights from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.body.weight.normal_(generator=torch.Generator().manual_seed(time.time_ns()))


class ReadsValues(_Net):
    """Looks at its weights while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.body.weight.std().item()


class ForgetsAStep(_Net):
    """Doubles what it returns, and not in the steps that it declares."""

    pipeline = (("leave", "body", "head"),)

    def leave(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.leave(x)


class UsesMore(_Net):
    """Scales by what another step has."""

    pipeline = (("enter", "body"), ("leave", "head"))

    def enter(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1))

    def leave(self, x: Tensor) -> Tensor:
        return self.head(x) * self.body.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x))


class Infinite(_Net):
    """Divides by nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.0


class DependsOnRank(_Net):
    """Computes something else on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + RANK)


class NeedsOptions(_Net):
    """Cannot be built without an option."""

    def __init__(self, *, width: Annotated[int, Field(ge=2, description="Units.")]) -> None:
        super().__init__()


class FitsNothing(nn.Module):
    """Takes what no built-in data gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a + b)


# ---------------------------------------------------------------------------------------------- data
class _Numbers:
    random = False

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), 1.0]), torch.tensor(index % 2)


class Repeats(_Numbers):
    """Knows only half as many samples as it says."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index // 2)


class RepeatsInBatches(_Numbers):
    """Fetches the first sample again and again when asked for several."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[ids[0]] for _ in ids]


class Restless(_Numbers):
    """Draws random numbers that nobody seeds."""

    random = True

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([random.SystemRandom().random()]), torch.tensor(0)


class SecretlyRandom(_Numbers):
    """Says that it draws no random numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(2) + index, torch.tensor(0)


class NotPicklable(_Numbers):
    """Holds a function that was made on the spot."""

    def __init__(self) -> None:
        self.transform = lambda x: x


class ShardsItself:
    """A stream that gives every rank only its own samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(RANK, 40, int(os.environ.get("WORLD_SIZE", "1"))):
            yield torch.tensor([float(index)]), torch.tensor(0)


class LosesSamples(_Numbers):
    """Makes batches without their last sample."""

    def collate(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples[:-1] or samples)


# ---------------------------------------------------------------------------------------------- tasks and metrics
class AveragesPerBatch(Task):
    """Has the mean of a batch for a loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1]), outputs


class NoisyAverage(Task):
    """Has the mean of a noisy batch for a loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0] + 0.1 * torch.randn_like(batch[0]))
        return F.cross_entropy(outputs, batch[1]), outputs


class ForgetsOutputs(Task):
    """Returns the loss alone."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class CountsOnes(Task):
    """Counts one item whatever the batch."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1], reduction="sum"), outputs

    def count(self, batch: Any) -> Tensor:
        return torch.tensor(1)


class SeesItsOwn(Task):
    """Compares samples with the mean of this rank's."""

    whole_batch = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return (outputs - outputs.mean(0)).square().sum(), outputs


class LosesGradients(Task):
    """Compares samples with those of all ranks, of which only its own have gradients."""

    whole_batch = True

    def start(self, model: nn.Module, world: World) -> None:
        self.ranks = world.dp_ranks

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        everyones, begin = self.ranks.all_gather(outputs.detach())
        everyones = everyones.clone()
        everyones[begin : begin + len(outputs)] = outputs
        return (outputs @ everyones.T).square().sum(), outputs


class LooksAtAll(LosesGradients):
    """Does it as it should be."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        everyones, _ = self.ranks.all_gather(outputs)
        return (outputs @ everyones.T).square().sum(), outputs


class LosesState(CountsOnes):
    """Takes back another number than it gave."""

    def __init__(self) -> None:
        self.seen = 0

    def count(self, batch: Any) -> None:  # type: ignore[override]
        self.seen += 1

    def state(self) -> dict[str, int]:
        return {"seen": self.seen + 5}

    def load_state(self, state: Any) -> None:
        self.seen = state["seen"]


class AveragesMetrics(CountsOnes):
    """Reports means as sums."""

    def count(self, batch: Any) -> None:  # type: ignore[override]
        return None

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        return {"size": Total(outputs.abs().mean(), len(outputs))}


class MeanMetric(Metric):
    """Averages before it adds up."""

    name = "mean"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        return Total((outputs.argmax(-1) == targets).float().mean() + 1.0, 1)


class Endless(IterableDataset[tuple[Tensor, int]]):
    """A stream of torch's own kind, shuffled with its generator: nothing wrong with that."""

    classes = 10

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for index in torch.randperm(40).tolist():
            yield torch.full((64,), float(index)), index % 10


class Empty:
    """Holds nothing."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Tensor:
        raise IndexError(index)


class IsALoader(Endless):
    """A stream that a loader deals out."""

    def __init__(self) -> None:
        self.loader: Any = DataLoader(Endless(), batch_size=2)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class ForgetsWhere(ShardedDataset):
    """Begins every part at its beginning."""

    shard_sizes = (5, 9)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[float]:
        return iter([100.0 * part + number for number in range(self.shard_sizes[part])])


class TooShort(ShardedDataset):
    """Has less than it says."""

    shard_sizes = (5, 9)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[float]:
        return iter([100.0 * part + number for number in range(skip, 4)])


# ---------------------------------------------------------------------------------------------- orders
class Rolls(BatchSampler):
    """Draws its samples."""

    def __call__(self, step: int) -> list[int]:
        return [random.randrange(100)]


class Overshoots(BatchSampler):
    """Counts on."""

    def __call__(self, step: int) -> list[int]:
        return [2 * step]


class SaysOnce(BatchSampler):
    """Comes back to where it was."""

    once = True

    def __call__(self, step: int) -> list[int]:
        return [step % 5]


class LooksAround(EpochBatchSampler):
    """Sorts the places that it is asked for."""

    def __init__(self, data: Any, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)

    def at(self, epochs: Any, places: Any) -> Any:
        return np.sort(places)


# ---------------------------------------------------------------------------------------------- numbers
class Forgetful(SGD):
    """Keeps how far it is in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / self.steps


def forgetful(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Slows down, and begins anew when it is resumed."""
    return Forgetful(params, lr=lr)


class _ByRows(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / parameter.grad.norm()


def by_norm(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Makes steps as long as the learning rate, parameter by parameter."""
    return _ByRows(params, lr=lr)


def one_group(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Throws the groups together."""
    return SGD([parameter for group in params for parameter in group["params"]], lr=lr)


def counting(horizon: Horizon) -> Schedule:
    """Counts its calls instead of looking at the step."""
    calls = iter(range(10**9))
    return lambda step: 1.0 / (1 + next(calls))


def negative(horizon: Horizon) -> Schedule:
    """Falls below zero at the end."""
    return lambda step: 1.0 - step / 50


def undefined(horizon: Horizon) -> Schedule:
    """Has no factor for steps beyond the run."""
    factors = [1.0] * (horizon.total or 1)
    return lambda step: factors[step]


# ---------------------------------------------------------------------------------------------- trackers
class Raises(Tracker):
    """Cannot log what is not finite."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for value in metrics.values():
            int(value)


class NeedsItsFolder(Tracker):
    """Writes and does not look whether it can."""

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        (folder / "mine.txt").write_text("started")


# ---------------------------------------------------------------------------------------------- callbacks
class StopsAlone(Callback):
    """Ends the run on rank 1 only."""

    def on_step(self, info: StepInfo) -> bool:
        return RANK == 1 and info.step == 4


class ForgetsItsCount(Callback):
    """Counts steps, and saves nothing of it that it takes back."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step(self, info: StepInfo) -> None:
        self.seen += 1

    def state(self) -> Mapping[str, int]:
        return {"seen": self.seen}


class StateByRank(Callback):
    """Saves another number on every rank."""

    def state(self) -> Mapping[str, int]:
        return {"rank": RANK}


class LeavesWeights(Callback):
    """Evaluates other weights and does not put the old ones back."""

    def on_start(self, run: RunContext) -> None:
        self.weights = run.weights

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for part in self.weights.shards().values():
            part.tensor.mul_(0.5)
        yield


# ---------------------------------------------------------------------------------------------- strategies
def _changed(replica: Replica, **methods: Callable[[Any], Any]) -> Replica:
    """The replica with other methods, each made of the one that it had."""
    for name, make in methods.items():
        setattr(replica, name, make(getattr(replica, name)))
    return replica


class ForgetsToAverage(DDP):
    """Never comes to the last micro-batch of a step, in which gradients are averaged."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        return _changed(
            super().prepare(model, optimizer), forward=lambda forward: lambda *, last=True: forward(last=False)
        )


class LosesMicroBatches(DDP):
    """Clears gradients before every micro-batch."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        def backward(loss: Tensor, scale: Tensor | float, inner: Callable[..., None]) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            inner(loss, scale)

        return _changed(super().prepare(model, optimizer), backward=lambda inner: partial(backward, inner=inner))


class ClipsEachParameter(DDP):
    """Clips parameter by parameter."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        def clip(largest: float, norm: Tensor) -> None:
            for parameter in model.parameters():
                torch.nn.utils.clip_grad_norm_([parameter], largest)

        return _changed(super().prepare(model, optimizer), clip=lambda _: clip)


class SavesRounded(DDP):
    """Trains well and saves something else."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        def rounded(state: CanonicalState[Any]) -> CanonicalState[Any]:
            return replace(state, model={name: weight.bfloat16().float() for name, weight in state.model.items()})

        return _changed(super().prepare(model, optimizer), state=lambda state: lambda: rounded(state()))


class ForgetsMomentum(DDP):
    """Saves no optimizer state."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        return _changed(super().prepare(model, optimizer), state=lambda state: lambda: replace(state(), optimizer={}))


class PromisesTooMuch(DDP):
    """Says that it shards, and does not."""

    contract = replace(DDP.contract, shards=("optimizer state",))


class TrainsApart(ForgetsToAverage):
    """Says that ranks average weights, and never does it."""

    contract = replace(DDP.contract, averages="weights")


class SeesTheSame(DDP):
    """Both ranks see the same data: nothing wrong with that."""

    def setup(self, train: Any, world: World) -> World:
        return super().setup(train, replace(world, dp_ranks=SingleRank()))

    def data_ranks(self, ranks: int) -> int:
        return 1


class CountsTwice(SeesTheSame):
    """Adds up over all ranks what should be added up over those that see different data."""

    def setup(self, train: Any, world: World) -> World:
        alone = SingleRank()
        alone.all_reduce_sum = world.global_ranks.all_reduce_sum  # type: ignore[method-assign]
        self.world = replace(super().setup(train, world), dp_ranks=alone)
        return self.world
