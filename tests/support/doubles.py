"""Doubles for tests of the loop in one process: a strategy without ranks, checkpoints in memory, a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.data import RankShare
from ddpforge.errors import CheckpointError
from ddpforge.features.frozen_weights import FrozenWeights, OmittedWeights
from ddpforge.features.multi_pass import MultiPass
from ddpforge.features.restored_buffers import RestoredBuffers
from ddpforge.features.streams import IterableData
from ddpforge.interfaces import (
    Callback,
    CanonicalState,
    Contract,
    FullWeights,
    Ranks,
    Replica,
    RunContext,
    Shuffled,
    StepInfo,
    Task,
    TensorShard,
    Total,
    Tracker,
    World,
)
from ddpforge.ranks.collectives import SingleRank
from ddpforge.recipe.run_plan import RunPlan, plan_batch
from ddpforge.recipe.schema import CheckpointSection, Component, DataSection, OptimizerComponent, Recipe, TrackSection
from ddpforge.recipe.schema import TrainSection as Train
from ddpforge.training.assemble import connect
from ddpforge.training.features import Assembled, Feature
from ddpforge.training.loaders import open_data
from ddpforge.training.media import MediaLogger
from ddpforge.training.stages import MISSING, Dealt


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Elsewhere(SingleRank):
    """Rank `rank` of `ranks`; the others do not exist: `counts` is their contribution to every sum."""

    def __init__(self, ranks: int = 1, rank: int = 0, counts: float = 0.0) -> None:
        super().__init__()
        self.rank, self.size, self.counts = rank, ranks, counts
        self.asked: list[Tensor] = []

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        self.asked.append(values)
        return values + self.counts

    all_reduce_sum_async = Ranks.all_reduce_sum_async


def run_of(model: nn.Module, world: World, **given: Any) -> RunContext:
    """Returns the run context of a model that each rank holds whole; `given` overrides its fields."""
    context = {
        "model": model,
        "world": world,
        "weights": FullWeights(model, world.global_ranks),
        "folder": Path("runs/run"),
        "forward": nullcontext,
        "log_media": MediaLogger(Tracker(), is_rank_zero=world.is_rank_zero),
        "gradients": dict,
    }
    return RunContext(**context | given)  # type: ignore[arg-type]


class Plain(Replica):
    """Model on one rank of `ranks`, with an optimizer. Records its calls in `events`."""

    contract = Contract(clipping="never", accumulation="autograd")

    def __init__(self, ranks: int = 1, rank: int = 0, elsewhere: float = 0.0) -> None:
        self.ranks = Elsewhere(ranks, rank, elsewhere)
        self.world = World(global_ranks=self.ranks, dp_ranks=self.ranks, device=torch.device("cpu"), local_rank=rank)
        self.events: list[str] = []
        self.synced = 0
        self.loop: dict[str, float] = {}

    def holding(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Plain:
        self.module = self.unwrapped = model
        self.optimizer, self.weights = optimizer, FullWeights(model, self.ranks)
        return self

    def step(self) -> Tensor:
        self.events.append("step")
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        self.on_gradient(norm)
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def gradients_by_name(self) -> Mapping[str, TensorShard]:
        return {name: TensorShard.whole(p.grad) for name, p in self.module.named_parameters() if p.grad is not None}

    def sync_buffers(self) -> None:
        self.synced += 1

    def state(self) -> CanonicalState[Any]:
        weights = {name: value.clone() for name, value in self.module.state_dict().items()}
        return CanonicalState(weights, {"w": {"momentum": 0.5}}, scalars={"scale": 3.0})

    def load_state(self, state: CanonicalState[Any], *, partial: bool = False) -> None:
        self.module.load_state_dict(dict(state.model))
        self.loaded, self.loop = state, dict(state.scalars)


class Saved:
    """A checkpoint in memory, as a reader of it."""

    def __init__(
        self, facts: CheckpointMetadata, share: RankState, extra_state: Mapping[str, Any] | None = None
    ) -> None:
        self.metadata, self.share, self.extra_state = facts, share, extra_state or {}

    def state(self) -> CanonicalState[Any]:
        return CanonicalState(
            self.share.model, self.share.optimizer, extra_state=self.extra_state, scalars=self.metadata.loop
        )

    def callbacks(self) -> Any:
        return self.share.callbacks

    def finish(self) -> None: ...


class Memory:
    """Checkpoints in memory; a checkpoint exists once `wait` has returned."""

    def __init__(self, events: list[str], fails_at: Sequence[int] = ()) -> None:
        self.events, self.fails_at = events, fails_at
        self.saved: list[Saved] = []
        self.waiting: Saved | None = None
        self.asked_for_best: list[tuple[dict[str, float], list[int]]] = []
        self.best = False

    @property
    def pending(self) -> bool:
        return self.waiting is not None

    def ready(self) -> bool:
        return self.waiting is not None

    def save(self, facts: CheckpointMetadata, share: RankState) -> None:
        assert self.waiting is None
        self.events.append("save")
        self.waiting = Saved(facts, share)

    def reserve(self, share: RankState) -> None: ...

    def before_update(self) -> None: ...

    def finish(self) -> None: ...

    def wait(self) -> Path:
        assert self.waiting is not None
        done, self.waiting = self.waiting, None
        if done.metadata.step in self.fails_at:
            raise CheckpointError("no space")
        self.saved.append(done)
        return Path(str(done.metadata.step))

    def open(self) -> Saved | None:
        return self.saved[-1] if self.saved else None

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        self.asked_for_best.append((dict(metrics), self.steps()))
        return self.best

    def steps(self) -> list[int]:
        return [saved.metadata.step for saved in self.saved]


class Rows(Tracker):
    """The rows that were logged."""

    def __init__(self, events: list[str]) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.events, self.rewound = events, list[int]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append("evaluate" if any(name.startswith("eval/") for name in metrics) else "log")
        self.rows.append((step, dict(metrics)))

    def rewind(self, step: int) -> None:
        self.rewound.append(step)
        self.rows = [row for row in self.rows if row[0] <= step]

    def steps(self, name: str = "train/loss") -> list[int]:
        """Returns the steps of rows that have the column."""
        return [step for step, row in self.rows if name in row]


class Line(nn.Module):
    """w·x for scalars x; `modes` records the training flag of each forward pass."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=dtype))
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return self.w * x


class Sums(Task):
    """The loss of x is w·x."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch)
        return outputs.sum(), outputs

    def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Total]:
        return {"x": Total(batch.sum(), len(batch))}


class Numbers:
    """The sample at index i is the number i; the samples at the indices in `bad` are NaN."""

    random = False

    def __init__(self, samples: int, bad: Sequence[int] = ()) -> None:
        self.values = torch.arange(float(samples))
        self.values[list(bad)] = torch.nan

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


class Loop:
    """Trainer built from doubles, which record its calls. `bad` are steps, in training order, with a NaN gradient.

    `evaluation` is the number of samples of each evaluation set by name; true stands for one of 3 without a name.
    """

    def __init__(
        self,
        *,
        steps: int = 6,
        batch: int = 1,
        bad: Sequence[int] = (),
        callbacks: Mapping[str, Callback] | None = None,
        evaluation: bool | Mapping[str, int] = True,
        train: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        track: str = "1st",
        schedule: Callable[[int], float] = lambda step: 1.0,
        length: str = "",
        fails_at: Sequence[int] = (),
        optimizer: str = "sgd",
        replica: Plain | None = None,
        model: nn.Module | None = None,
        task: Task | None = None,
    ) -> None:
        self.replica = replica or Plain()
        self.events = self.replica.events
        self.model = model or Line()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.replica.holding(self.model, self.optimizer)
        self.checkpoints, self.tracker = Memory(self.events, fails_at), Rows(self.events)
        self.clock = Clock()
        samples = steps * batch
        order = [number for step in range(1, steps + 1) for number in _samples_of(step, batch, samples)]
        training = Numbers(samples, bad=[order[(step - 1) * batch] for step in bad])
        recipe = Recipe(
            recipe=2,
            name="run",
            model=Component(use="line"),
            data=DataSection(train=Component(use="numbers"), eval=Component(use="numbers") if evaluation else None),
            task=Component(use="sums"),
            optimizer=OptimizerComponent(use=optimizer),
            train=Train.model_validate({"length": length or f"{steps}st", "global_batch": batch} | dict(train or {})),
            checkpoint=CheckpointSection.model_validate({"every": "999999st"} | dict(checkpoint or {})),
            track=TrackSection.model_validate({"every": track}),
            callbacks={name: Component(use=name) for name in callbacks or {}},
        )
        plan = RunPlan.of(recipe, plan_batch(recipe.train, 1), steps)
        assert plan is not None
        kind = OmittedWeights if recipe.checkpoint.save == "trainable" else FrozenWeights
        features: list[Feature] = [
            IterableData(),
            kind(self.replica, self.replica.world.global_ranks),
            MultiPass(self.replica),
        ]
        if recipe.train.on_nonfinite == "skip":
            features.append(RestoredBuffers())
        sizes = evaluation if isinstance(evaluation, Mapping) else {"": 3} if evaluation else {}
        given = {
            "loaded": SimpleNamespace(recipe=recipe),
            "task": task or Sums(),
            "updates": {},
            "schedules": {"": schedule},
            "value_schedules": {},
            "plan": plan,
            "training": _open(training, batch, shuffle=True),
            "evaluation": {name: _open(Numbers(size), 2, shuffle=False) for name, size in sizes.items()},
        }
        parts = Dealt(**dict.fromkeys((one.name for one in fields(Dealt)), MISSING) | given)
        run = Assembled(parts=parts, world=self.replica.world, replica=self.replica, begins=True, trains=True)
        self.trainer = connect(run, self.optimizer, callbacks or {}, features, self.checkpoints, self.tracker)  # type: ignore[arg-type]
        self.trainer.saving.begin({"strategy": "plain", "world_size": 1})

    def fit(self) -> str:
        return self.trainer.fit()


def _samples_of(step: int, batch: int, samples: int) -> list[int]:
    """Returns the ids that a step of the first epoch trains on."""
    source = _open(Numbers(samples), batch, shuffle=True).training(step - 1)
    return [int(x) for x in next(source).data]


def _open(data: Any, batch: int, *, shuffle: bool) -> Any:
    return open_data(
        data,
        global_batch=batch,
        share=RankShare(0, 1, batch),
        seed=0,
        order=Shuffled(data, 0, batch, False) if shuffle else None,
        drop_last=False,
        workers=0,
        prefetch=2,
        pin=False,
    )


@contextmanager
def noting(events: list[str], name: str) -> Iterator[None]:
    """Records in `events` when the context is entered and left."""
    events.append(f"{name} begins")
    yield
    events.append(f"{name} ends")


class Watcher(Callback):
    """Callback that records its calls, and requests a stop after step `until`."""

    def __init__(
        self, events: list[str] | None = None, until: int = 0, action: Callable[[int], Any] | None = None
    ) -> None:
        self.events = [] if events is None else events
        self.until, self.action = until, action
        self.told: list[StepInfo] = []
        self.evaluated: list[tuple[int, dict[str, float]]] = []
        self.checkpoints: list[int] = []
        self.taken: Any = None

    def on_step(self, info: StepInfo) -> bool:
        self.events.append("callback")
        self.told.append(info)
        if self.action:
            self.action(info.step)
        return info.step == self.until

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        return {"twice": 2.0 * info.step}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.evaluated.append((step, dict(metrics)))
        return step == -self.until

    def evaluating(self) -> AbstractContextManager[None]:
        return noting(self.events, "evaluation")

    def on_checkpoint(self, step: int, folder: Any) -> None:
        self.checkpoints.append(step)

    def state(self) -> dict[str, int]:
        return {"told": len(self.told)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.taken = state


def saved(step: int, **more: Any) -> Saved:
    """Returns a checkpoint of a loop at `step`; `more` are facts of it."""
    facts: dict[str, Any] = {"position": {"seconds": 5.0, "skipped": 1, "left_out": [2]}, "loop": {"scale": 2.0}}
    facts |= {"strategy": "plain", "world_size": 1, "samples": step} | more
    share = RankState(
        model={"w": Loop().model.w.detach() + 6}, optimizer={"w": {"m": 1.0}}, callbacks={"watch": {"n": 3}}
    )  # type: ignore[union-attr, operator]
    return Saved(CheckpointMetadata(step=step, **facts), share, {"sgd": {"steps": 7}})
