"""The sections of a recipe: their keys, types, limits and defaults. Each fact about a run has exactly one key here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ddpforge.durations import Duration

# Larger numbers are slips of the keyboard; the limits keep them from becoming overflows three layers down.
Count = Annotated[int, Field(ge=1, le=2**31)]


def _name(value: str) -> str:
    if value in (".", "..") or value.startswith((".", "-")) or not all(c.isalnum() or c in "._-" for c in value):
        raise ValueError("must be a plain folder name: letters, digits, `.`, `_` and `-`, not starting with `.` or `-`")
    return value


def _inside(value: str) -> str:
    parts = value.replace("\\", "/").split("/")
    if value.startswith(("/", "~")) or ".." in parts or not value.strip() or "\0" in value:
        raise ValueError("must be a relative folder below the current one; use `--out DIR` for any other place")
    return value


def _positive(value: Duration) -> Duration:
    if value.value <= 0:
        raise ValueError("must be longer than nothing")
    return value


def _wall_time(value: Duration) -> Duration:
    if not value.is_time:
        raise ValueError('must be a wall time such as "30s", "10m" or "2h"')
    return _positive(value)


def _training_time(value: Duration) -> Duration:
    if value.is_time:
        raise ValueError('must be in epochs or steps, such as "5ep" or "100st"')
    return _positive(value)


Amount = Annotated[Duration, AfterValidator(_positive)]
WallTime = Annotated[Duration, AfterValidator(_wall_time)]
TrainingTime = Annotated[Duration, AfterValidator(_training_time)]


class Section(BaseModel):
    """A table of the recipe: strict types, no unknown keys, immutable once loaded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Component(BaseModel):
    """A table that names a component and holds its options, which the component's own signature validates."""

    model_config = ConfigDict(frozen=True)

    use: str
    options: dict[str, Any] = {}
    base: Annotated[Path, Field(exclude=True)] = Path()   # the folder that a `./file.py:attr` in `use` is relative to


class OptimizerComponent(Component):
    """The optimizer, and which parameters it must not decay."""

    no_decay: tuple[str, ...] = ()


class DataSection(Section):
    """Where samples come from and how they are fetched."""

    train: Component
    eval: Component | None = None
    workers: Annotated[int, Field(ge=0, le=1024, description="Loader processes per rank; 0 fetches in the training process.")] = 0
    prefetch: Annotated[int, Field(ge=1, le=1024, description="Batches that each loader process keeps ready.")] = 2


class TrainSection(Section):
    """How long, in what batches and how precisely to train: the same meaning under every strategy."""

    length: Annotated[Amount, Field(description='How long to train: epochs "5ep", steps "1000st" or wall time "2h".')]
    global_batch: Annotated[Count, Field(description="Samples per optimizer step, over all ranks. The invariant of a run.")]
    micro_batch: Annotated[Count | None, Field(description="Samples per forward pass on one rank; absent: global_batch / data ranks, no accumulation.")] = None
    last_batch: Annotated[Literal["keep", "drop"], Field(description="An epoch's incomplete last batch: train on it (weighted exactly) or drop it.")] = "keep"
    eval_every: Annotated[Amount, Field(description="How often to evaluate on [data.eval]; the end of training always does.")] = Duration(1, "ep")
    eval_batch: Annotated[Count | None, Field(description="Samples per forward pass on one rank at evaluation; absent: as in training.")] = None
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Field(description="Compute dtype; master weights and gradient reduction stay fp32. fp16 adds loss scaling.")] = "fp32"
    clip_norm: Annotated[float | None, Field(gt=0, le=1e6, description="Largest global gradient norm; absent: no clipping.")] = None
    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"], Field(description="What to do when a gradient is NaN or infinite: stop, skip the step, or return to the last checkpoint and leave the step out. No such gradient ever reaches the weights.")] = "stop"
    seed: Annotated[int, Field(ge=0, lt=2**63, description="The source of all randomness: initial weights, sample order, dropout, augmentation.")] = 0
    compile: Annotated[Literal["off", "default", "reduce-overhead", "max-autotune"], Field(description="torch.compile mode.")] = "off"
    sync_batchnorm: Annotated[bool, Field(description="Compute BatchNorm statistics over all ranks (CUDA only).")] = False
    timeout: Annotated[WallTime, Field(description="How long a collective may wait for a rank before the run fails.")] = Duration(10, "m")


class KeepSection(Section):
    """Which checkpoints outlive newer ones."""

    last: Annotated[Count, Field(description="How many of the newest to keep.")] = 2
    best: Annotated[int, Field(ge=0, le=1000, description="How many of the best to keep, judged by `by`.")] = 0
    by: Annotated[str | None, Field(description='The metric that decides what is best, e.g. "eval/loss".')] = None
    mode: Annotated[Literal["min", "max"] | None, Field(description='Whether less or more is better; absent: "min" for losses, "max" for everything else.')] = None


class CheckpointSection(Section):
    """When to save, and what to keep."""

    every: Annotated[Amount, Field(description="How often to save; the end of training and every requested stop save too.")] = Duration(1, "ep")
    keep: KeepSection = KeepSection()


class TrackSection(Section):
    """How often to report. Every other key of [track] is a tracker and holds its options."""

    every: Annotated[TrainingTime, Field(description="How often to write a row of training metrics.")] = Duration(10, "st")
    trackers: dict[str, Component] = {}


class Recipe(Section):
    """A whole run, validated. Built by `load_recipe`; `resolved` is the same as plain tables, defaults included."""

    recipe: Literal[1]
    name: Annotated[str, AfterValidator(_name), Field(min_length=1, max_length=100, description="The run's name and the name of its folder.")]
    output_dir: Annotated[str, AfterValidator(_inside), Field(max_length=1000, description="The folder that holds the run's folder.")] = "runs"

    model: Component
    data: DataSection
    task: Component
    optimizer: OptimizerComponent
    schedule: Component = Component(use="constant")
    strategy: Component = Component(use="ddp")
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    callbacks: dict[str, Component] = {}
