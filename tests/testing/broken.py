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
    """Accepts any value for an option."""

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
    """Has a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)


class RandomNames(_Net):
    """Gives a layer a new name in each build."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"layer{random.SystemRandom().randrange(10**9)}", nn.Linear(8, 8))


class OwnGenerator(_Net):
    """Draws initial weights from a generator without a fixed seed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.body.weight.normal_(generator=torch.Generator().manual_seed(time.time_ns()))


class ReadsValues(_Net):
    """Reads values of its weights while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.body.weight.std().item()


class ForgetsAStep(_Net):
    """Doubles its result, but not in the steps that it declares."""

    pipeline = (("leave", "body", "head"),)

    def leave(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.leave(x)


class UsesMore(_Net):
    """Uses a weight of another step."""

    pipeline = (("enter", "body"), ("leave", "head"))

    def enter(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1))

    def leave(self, x: Tensor) -> Tensor:
        return self.head(x) * self.body.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x))


class Infinite(_Net):
    """Divides by zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.0


class DependsOnRank(_Net):
    """Computes another result on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + RANK)


class NeedsOptions(_Net):
    """Cannot be built without an option."""

    def __init__(self, *, width: Annotated[int, Field(ge=2, description="Units.")]) -> None:
        super().__init__()


class FitsNothing(nn.Module):
    """Takes inputs that no built-in data provides."""

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
    """Has only half as many different samples as its length."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index // 2)


class RepeatsInBatches(_Numbers):
    """Returns copies of the first sample from __getitems__."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[ids[0]] for _ in ids]


class Restless(_Numbers):
    """Draws random numbers without a fixed seed."""

    random = True

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([random.SystemRandom().random()]), torch.tensor(0)


class SecretlyRandom(_Numbers):
    """Draws random numbers, but declares that it draws none."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(2) + index, torch.tensor(0)


class NotPicklable(_Numbers):
    """Holds a lambda."""

    def __init__(self) -> None:
        self.transform = lambda x: x


class ShardsItself:
    """Stream that yields on every rank only the rank's own samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(RANK, 40, int(os.environ.get("WORLD_SIZE", "1"))):
            yield torch.tensor([float(index)]), torch.tensor(0)


class LosesSamples(_Numbers):
    """Makes batches without their last sample."""

    def collate(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples[:-1] or samples)


# ---------------------------------------------------------------------------------------------- tasks and metrics
class AveragesPerBatch(Task):
    """Returns the mean of a batch as its loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1]), outputs


class LooksAtPlaces(Task):
    """Gives the later samples of a batch more weight, and hides it from the value of the loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        each = F.cross_entropy(outputs, batch[1], reduction="none")
        places = torch.arange(len(each), dtype=each.dtype) - (len(each) - 1) / 2
        return each.sum() + ((each - each.detach()) * places).sum(), outputs


class HalvesABatch(Task):
    """Has the gradient of a mean, and the value of a sum."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        mean = F.cross_entropy(outputs, batch[1])
        return mean + (len(batch[1]) - 1) * mean.detach(), outputs


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        return torch.ones(())


class DropsItsScale(Task):
    """Ignores the factor with which its loss is multiplied."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        fixed: Tensor = _Fixed.apply(F.cross_entropy(outputs, batch[1], reduction="sum"))
        return fixed, outputs


class NoisyAverage(Task):
    """Returns the mean of a noisy batch as its loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0] + 0.1 * torch.randn_like(batch[0]))
        return F.cross_entropy(outputs, batch[1]), outputs


class ForgetsOutputs(Task):
    """Returns only the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class CountsOnes(Task):
    """Counts one item whatever the batch."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1], reduction="sum"), outputs

    def count(self, batch: Any) -> Tensor:
        return torch.tensor(1)


class HasTwoLosses(Task):
    """Computes another loss from its outputs."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return self.loss_from_outputs(outputs, batch) * len(outputs), outputs

    def loss_from_outputs(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


class SeesItsOwn(Task):
    """Compares samples with the mean of this rank's samples only."""

    whole_batch = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return (outputs - outputs.mean(0)).square().sum(), outputs


class LosesGradients(Task):
    """Compares samples with the samples of all ranks, but only its own samples have gradients."""

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
    """Compares samples of all ranks, correctly."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        everyones, _ = self.ranks.all_gather(outputs)
        return (outputs @ everyones.T).square().sum(), outputs


class LosesState(CountsOnes):
    """Saves another number than it has."""

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
    """Stream of torch's class, shuffled with torch's generator: correct."""

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
    """Stream that reads a DataLoader."""

    def __init__(self) -> None:
        self.loader: Any = DataLoader(Endless(), batch_size=2)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class ForgetsWhere(ShardedDataset):
    """Ignores `skip`: begins every shard at its first sample."""

    shard_sizes = (5, 9)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[float]:
        return iter([100.0 * part + number for number in range(self.shard_sizes[part])])


class TooShort(ShardedDataset):
    """Yields fewer samples than it declares."""

    shard_sizes = (5, 9)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[float]:
        return iter([100.0 * part + number for number in range(skip, 4)])


# ---------------------------------------------------------------------------------------------- samplers
class Rolls(BatchSampler):
    """Draws its samples from an RNG without a fixed seed."""

    def __call__(self, step: int) -> list[int]:
        return [random.randrange(100)]


class Overshoots(BatchSampler):
    """Returns indices beyond the last sample."""

    def __call__(self, step: int) -> list[int]:
        return [2 * step]


class SaysOnce(BatchSampler):
    """Repeats samples, but declares that each is used once."""

    once = True

    def __call__(self, step: int) -> list[int]:
        return [step % 5]


class LooksAround(EpochBatchSampler):
    """Sorts the requested places."""

    def __init__(self, data: Any, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)

    def at(self, epochs: Any, places: Any) -> Any:
        return np.sort(places)


# ------------------------------------------------------------------------------------------- optimizers, schedules
class Forgetful(SGD):
    """Keeps its step count in an attribute, not in its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / self.steps


def forgetful(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Makes smaller steps over time, and begins again after a resume."""
    return Forgetful(params, lr=lr)


class _ByRows(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / parameter.grad.norm()


class _ByFirst(SGD):
    def step(self, closure: Any = None) -> Any:
        parameters = [one for group in self.param_groups for one in group["params"]]
        largest = max((float(one.grad.norm()) for one in parameters[:2] if one.grad is not None), default=1.0)
        for one in parameters:
            if one.grad is not None:
                one.data -= self.param_groups[0]["lr"] * one.grad / max(largest, 1e-6)


def by_first(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Divides all gradients by the norm of the first ones."""
    return _ByFirst(params, lr=lr)


def by_norm(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Divides each parameter's gradient by its norm."""
    return _ByRows(params, lr=lr)


def one_group(params: Any, *, lr: Annotated[float, Field(gt=0, description="Learning rate.")]) -> Optimizer:
    """Merges the parameter groups."""
    return SGD([parameter for group in params for parameter in group["params"]], lr=lr)


def counting(horizon: Horizon) -> Schedule:
    """Counts its calls instead of using the step."""
    calls = iter(range(10**9))
    return lambda step: 1.0 / (1 + next(calls))


def negative(horizon: Horizon) -> Schedule:
    """Returns a negative factor at the end."""
    return lambda step: 1.0 - step / 50


def undefined(horizon: Horizon) -> Schedule:
    """Has no factor for steps beyond the run."""
    factors = [1.0] * (horizon.total or 1)
    return lambda step: factors[step]


# ---------------------------------------------------------------------------------------------- trackers
class Raises(Tracker):
    """Raises an error for a value that is not finite."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for value in metrics.values():
            int(value)


class NeedsItsFolder(Tracker):
    """Writes without a check that it can."""

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        (folder / "mine.txt").write_text("started")


# ---------------------------------------------------------------------------------------------- callbacks
class StopsAlone(Callback):
    """Ends the run on rank 1 only."""

    def on_step(self, info: StepInfo) -> bool:
        return RANK == 1 and info.step == 4


class ForgetsItsCount(Callback):
    """Counts steps and saves the count, but does not load it."""

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
    """Evaluates other weights and does not restore the old ones."""

    def on_start(self, run: RunContext) -> None:
        self.weights = run.weights

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for part in self.weights.shards().values():
            part.tensor.mul_(0.5)
        yield


# ---------------------------------------------------------------------------------------------- strategies
def _changed(replica: Replica, **methods: Callable[[Any], Any]) -> Replica:
    """Returns the replica after it has replaced methods; each new method is made from the old one."""
    for name, make in methods.items():
        setattr(replica, name, make(getattr(replica, name)))
    return replica


class ForgetsToAverage(DDP):
    """Never marks the last micro-batch of a step, in which gradients are averaged."""

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
    """Clips each parameter by its own norm."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        def clip(largest: float, norm: Tensor) -> None:
            for parameter in model.parameters():
                torch.nn.utils.clip_grad_norm_([parameter], largest)

        return _changed(super().prepare(model, optimizer), clip=lambda _: clip)


class SavesRounded(DDP):
    """Trains correctly, but saves rounded weights."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        def rounded(state: CanonicalState[Any]) -> CanonicalState[Any]:
            return replace(state, model={name: weight.bfloat16().float() for name, weight in state.model.items()})

        return _changed(super().prepare(model, optimizer), state=lambda state: lambda: rounded(state()))


class ForgetsMomentum(DDP):
    """Saves no optimizer state."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        return _changed(super().prepare(model, optimizer), state=lambda state: lambda: replace(state(), optimizer={}))


class PromisesTooMuch(DDP):
    """Declares shards, but does not shard."""

    contract = replace(DDP.contract, shards=("optimizer state",))


class TrainsApart(ForgetsToAverage):
    """Declares that ranks average weights, but never averages them."""

    contract = replace(DDP.contract, averages="weights")


class SeesTheSame(DDP):
    """Both ranks see the same data: correct."""

    def setup(self, train: Any, world: World) -> World:
        return super().setup(train, replace(world, dp_ranks=SingleRank()))

    def data_ranks(self, ranks: int) -> int:
        return 1


class CountsTwice(SeesTheSame):
    """Sums over all ranks instead of the data-parallel ranks."""

    def setup(self, train: Any, world: World) -> World:
        alone = SingleRank()
        alone.all_reduce_sum = world.global_ranks.all_reduce_sum  # type: ignore[method-assign]
        self.world = replace(super().setup(train, world), dp_ranks=alone)
        return self.world
