"""Sections of a recipe: keys, types, limits and defaults. Each setting of a run has exactly one key."""

from __future__ import annotations

import os
import re
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from ddpforge.components.kinds import KINDS
from ddpforge.errors import unexpanded
from ddpforge.interfaces.durations import Duration

VERSION = 2
"""The version of the recipe format."""

# Larger numbers are typing errors; the limit prevents overflows in later code.
Count = Annotated[int, Field(ge=1, le=2**31)]


_LONGEST_WAIT = 720 * 3600.0  # seconds
_BYTES = "\0"  # prefix of the encoding of a path whose bytes are not text; no real path contains it
_LONGEST_NAME = 200  # bytes; file systems allow 255, and names of temporary files are longer


def _name(value: str) -> str:
    if len(os.fsencode(value)) > _LONGEST_NAME:
        raise ValueError(f"must be at most {_LONGEST_NAME} bytes long")
    if value in (".", "..") or value.startswith((".", "-")) or not all(c.isalnum() or c in "._-" for c in value):
        raise ValueError("must be a plain folder name: letters, digits, `.`, `_` and `-`, not starting with `.` or `-`")
    return value


def _device(value: str) -> str:
    from ddpforge.components.registry import Registry  # reads the installed plugins, which only this key needs

    known = ["auto", *Registry.installed().names("device")]
    if value not in known:
        raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, known))})
    return value


def reject_remote(value: str) -> None:
    """Raises ValueError for an address such as "s3://bucket/x", and for control characters."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", value):
        raise ValueError("must be a folder of a file system; to copy it to an address, set checkpoint.mirror")
    if unexpanded(value):
        raise ValueError("has `~` or a variable, which only a shell expands; in Python: os.path.expanduser, expandvars")
    on_one_line(value)


def _address(value: str) -> str:
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://.", value):
        raise ValueError('must be an address, such as "s3://bucket/runs" or "file:///mnt/runs"')
    return on_one_line(value)


def on_one_line(value: str) -> str:
    """Returns `value`; raises ValueError if it contains control characters."""
    if not value.isprintable():
        raise ValueError("must not contain control characters, such as newlines")
    return value


def _inside(value: str) -> str:
    if unexpanded(value):
        raise ValueError(
            "must be a relative folder below the current one, without `~` and variables; use `--out DIR` for any other"
        )
    reject_remote(value)
    parts = value.replace("\\", "/").split("/")
    if value.startswith(("/", "~")) or ".." in parts or not value.strip() or "\0" in value:
        raise ValueError("must be a relative folder below the current one; use `--out DIR` for any other place")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise ValueError(f"must not have a folder name longer than {_LONGEST_NAME} bytes")
    return value


def _positive(value: Duration) -> Duration:
    if value.value <= 0:
        raise ValueError("must be more than zero")
    return value


def _wall_time(value: Duration) -> Duration:
    if not value.is_time:
        raise ValueError('must be a wall time such as "30s", "10m" or "2h"')
    if value.seconds > _LONGEST_WAIT:
        raise ValueError("must be at most 720h")
    if 0 < value.seconds < 1:
        raise ValueError("must be at least 1s")
    return _positive(value)


def _training_time(value: Duration) -> Duration:
    if value.is_time:
        raise ValueError('must be in epochs, steps or percent of the run, such as "5ep", "100st" or "10%"')
    return _positive(value)


def _absolute(value: Duration) -> Duration:
    if value.unit == "%":
        raise ValueError(
            'must be in epochs, steps or wall time, such as "5ep", "1000st" or "2h": percentages refer to it'
        )
    return value


Amount = Annotated[Duration, AfterValidator(_positive)]
Length = Annotated[Amount, AfterValidator(_absolute)]
WallTime = Annotated[Duration, AfterValidator(_wall_time)]
TrainingTime = Annotated[Duration, AfterValidator(_training_time)]


class Resume(Enum):
    """Rule for resuming a run with another value of a key. Each key of a section has one, in its annotation.

    For a component, the rule of its table's key holds for all options.
    """

    FIXED = "fixed"  # not allowed: the key defines the computation
    TUNABLE = "tunable"  # allowed: the result depends on it from that step on
    FREE = "free"  # allowed: the result does not depend on it
    NOT_TRAINING = "not training"  # allowed: the result does not depend on it, and a finished run stays finished


class Section(BaseModel):
    """Table of the recipe: strict types, no unknown keys, immutable after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def written(path: Path) -> str:
    """Encodes a path as a string for JSON, also if its bytes are not valid text."""
    # Under LC_ALL=C, this is the case for every path that is not ASCII.
    text = str(path)
    return text if text.isascii() or _is_unicode(text) else f"{_BYTES}{os.fsencode(text).hex()}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_back(path: Path) -> Path:
    text = str(path)
    return Path(os.fsdecode(bytes.fromhex(text.removeprefix(_BYTES)))) if text.startswith(_BYTES) else path


class Component(BaseModel):
    """Table that names a component and holds its options, which are validated by the component's signature."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    use: str
    options: dict[str, Any] = {}
    # Folder of the relative paths `./file.py:Name` in `use` and the options; empty if there are none.
    base: Annotated[Path, Field(exclude=True), AfterValidator(_read_back)] = Path()


_Globs = tuple[Annotated[str, Field(min_length=1)], ...]
_ClipNorm = Annotated[float | None, Field(ge=1e-9, le=1e6)]


class UpdateComponent(Component):
    """One of several alternating updates, of a part of the parameters; [optimizer] is the default for missing keys."""

    use: Annotated[str, Resume.FIXED]
    parameters: Annotated[_Globs, Resume.FIXED] = Field(
        default=(),
        description='Parameters that it trains, as for a group; absent: "NAME.*", with the name of the update.',
    )
    n_updates: Annotated[int, Resume.FIXED] = Field(
        default=1, ge=1, le=10_000, description="Updates in every step, one after another."
    )
    new_batch: Annotated[bool, Resume.FIXED] = Field(
        default=False,
        description="Use a new global batch for each of these updates; otherwise the batch of the previous update.",
    )
    clip_norm: Annotated[_ClipNorm, Resume.TUNABLE] = Field(
        default=None, description="Largest norm of these parameters' gradient; absent: train.clip_norm."
    )
    schedule: Annotated[Component | None, Resume.TUNABLE] = Field(
        default=None, description="A schedule for this update only, as a table; absent: [schedule]."
    )


class GroupComponent(Component):
    """Group of parameters with its own settings; [optimizer] is the default for missing keys."""

    use: Annotated[str, Resume.FIXED]
    parameters: Annotated[_Globs, Resume.FIXED] = Field(
        min_length=1,
        description='Its parameters: globs over full names, and the words of `no_decay`; "!" before one excludes it.',
    )
    start: Annotated[Amount | None, Resume.TUNABLE] = Field(
        default=None, description='Learning rate 0 until then, e.g. "2ep": the group is trained from that step on.'
    )


class OptimizerComponent(Component):
    """Optimizer, parameters without weight decay, and parameters with their own settings or their own update."""

    use: Annotated[str, Resume.FIXED]
    no_decay: Annotated[_Globs, Resume.TUNABLE] = Field(
        default=(),
        description='Parameters without weight decay: "bias", "norm", "embedding", "1d", "2d", or a glob over full'
        " names.",
    )
    layer_decay: Annotated[float | None, Resume.TUNABLE] = Field(
        default=None,
        gt=0,
        lt=1,
        description="Factor of the learning rate for each block further from the output; absent: all layers have the"
        " same rate.",
    )
    groups: Annotated[dict[str, GroupComponent], Resume.TUNABLE] = Field(
        default={}, description="A table for each group of parameters with its own settings, see below."
    )
    updates: Annotated[dict[str, UpdateComponent], Resume.TUNABLE] = Field(
        default={}, description="A table for each of the task's alternating updates, see below."
    )
    schedules: Annotated[dict[str, Component], Resume.TUNABLE] = Field(
        default={},
        description="A table for each option with its own schedule: weight_decay, momentum, beta1, beta2 or another"
        " number of the optimizer. The factor of the schedule multiplies the option.",
    )


def _from_steps(value: float | dict[str, float]) -> float | dict[str, float]:
    if not isinstance(value, dict):
        if value <= 0:
            raise ValueError("must be more than 0; remove a source that is not used")
        return value
    starts = [Duration.parse(key) for key in value]
    if wrong := [start for start in starts if start.unit not in ("st", "ep")]:
        raise ValueError(f'"{wrong[0]}" is not a number of steps or epochs, e.g. 1000st')
    if not any(start.value == 0 for start in starts):
        raise ValueError("must have a weight from the start, 0st")
    if not any(value.values()):
        raise ValueError("must be more than 0 from some step on; remove a source that is not used")
    return value


_Weight = Annotated[float, Field(ge=0, le=1e9)]
_Weights = Annotated[_Weight | dict[str, _Weight], AfterValidator(_from_steps)]


class SourceComponent(Component):
    """One of several sources of training data, with its weight."""

    use: Annotated[str, Resume.FIXED]
    weight: Annotated[_Weights | None, Resume.FIXED] = Field(
        default=None,
        description="Weight of the source: its share is the weight divided by the sum of all weights. A table has the"
        " weight from each step on: { 0st = 0.8, 1000st = 0.5 }. Absent for all sources: by size, see"
        " `data.temperature`.",
    )


# With `use` it is one source. The tag makes errors about the table that was meant.
_Sources = Annotated[
    Annotated[Component, Tag("one")] | Annotated[dict[str, SourceComponent], Tag("several")],
    Discriminator(lambda table: "several" if isinstance(table, dict) and "use" not in table else "one"),
]


def settings_of(group: Component, component: Component) -> dict[str, Any]:
    """Returns the options of a group that differ from those of the optimizer around it."""
    return {key: value for key, value in group.options.items() if value != component.options.get(key)}


class DataSection(Section):
    """Source of the samples, and settings for fetching them."""

    train: Annotated[_Sources, Resume.FIXED]
    eval: Annotated[Component | dict[str, Component] | None, Resume.FIXED] = (
        None  # with `use` one set, otherwise several
    )
    sampler: Annotated[Component | None, Resume.FIXED] = None  # of training data; absent: shuffled
    temperature: Annotated[float | None, Field(gt=0, le=1e6), Resume.FIXED] = Field(
        default=None,
        description="Weight of a source [data.train.NAME] with n samples: n^(1 / temperature). 1 is by size; more gives"
        " small sources a larger share. Absent: 1, unless the sources have a `weight`.",
    )
    inputs: Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | None, Resume.FIXED] = Field(
        default=None,
        description="Keys of the model's inputs in a batch that is a dict; absent: the whole batch, or all keys but"
        " `targets`.",
    )
    targets: Annotated[str | None, Field(min_length=1), Resume.FIXED] = Field(
        default=None,
        description="Key of the targets in a batch that is a dict: the task then gets the pair (inputs, targets).",
    )
    lengths: Annotated[str | None, Field(min_length=1), Resume.TUNABLE] = Field(
        default=None,
        description="Number of tokens of each sample, for `train.max_tokens`: an attribute or method of the dataset, or"
        ' a file. Absent: "lengths".',
    )
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], Resume.NOT_TRAINING] = Field(
        default="auto",
        description='Loader processes per rank; 0 fetches in the training process. "auto": 0, but on a GPU up to 8,'
        " depending on the cores, for data that is `forkable` and takes more than 5 ms to fetch.",
    )
    prefetch: Annotated[int, Resume.NOT_TRAINING] = Field(
        default=2, ge=1, le=1024, description="Batches that each loader process keeps ready."
    )

    @property
    def sources(self) -> dict[str, Component]:
        """Returns the sources of training data by name, in alphabetical order; "" is a single source without a name."""
        if isinstance(self.train, Component):
            return {"": self.train}
        return dict(sorted(self.train.items()))  # the order of tables in a file must not matter

    @property
    def evaluations(self) -> dict[str, Component]:
        """Returns the evaluation sets by name; the name is "" for a single set without a name."""
        if isinstance(self.eval, Component):
            return {"": self.eval}
        return self.eval or {}


class TrainSection(Section):
    """Length, batches and precision of training, with the same meaning under every strategy."""

    length: Annotated[Length, Resume.TUNABLE] = Field(
        description='How long to train: epochs "5ep", steps "1000st" or wall time "2h".',
    )
    global_batch: Annotated[Count, Resume.FIXED] = Field(
        description="Samples per optimizer step, over all ranks. Fixed for the life of a run.",
    )
    micro_batch: Annotated[Count | None, Resume.TUNABLE] = Field(
        default=None,
        description="Samples per forward pass on one rank; absent: global_batch / ranks, no accumulation.",
    )
    max_tokens: Annotated[Count | None, Resume.TUNABLE] = Field(
        default=None,
        description="Largest number of tokens per forward pass on one rank, with padding: number of samples times the"
        " length of the longest. The samples of a step are divided by their lengths, see `data.lengths`; the step has"
        " the same samples as without it. Absent: no limit but `micro_batch`.",
    )
    virtual_ranks: Annotated[Count | None, Resume.FIXED] = Field(
        default=None,
        description="Make results independent of the number of ranks: every step is computed as on this many virtual"
        " ranks, on any number of ranks that divides it, including dropout, augmentation and BatchNorm statistics."
        " Forward passes then have at most global_batch / virtual_ranks samples.",
    )
    drop_last: Annotated[bool, Resume.FIXED] = Field(
        default=False,
        description="Drop an epoch's incomplete last batch; else train on it, weighted exactly.",
    )
    eval_every: Annotated[Amount, Resume.FREE] = Field(
        default=Duration(1, "ep"),
        description="How often to evaluate on [data.eval]; the end of training is always evaluated.",
    )
    eval_by: Annotated[Literal["run", "follower"], Resume.FREE] = Field(
        default="run",
        description='"follower": the run does not evaluate; `ddpforge eval --follow RUN`, another process, evaluates'
        " each of its checkpoints. None is removed before its evaluation.",
    )
    eval_batch: Annotated[Count | None, Resume.FREE] = Field(
        default=None,
        description="Samples per forward pass on one rank at evaluation; absent: as in training.",
    )
    device: Annotated[str, AfterValidator(_device), Resume.FREE] = Field(
        default="auto",
        max_length=100,
        description='Devices to compute on: "cpu", "cuda", or the name of a plugin\'s;'
        ' "auto": the machine\'s GPU if there is one. A GPU that torch cannot use is an error, not a run on the CPU.',
    )
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Resume.TUNABLE] = Field(
        default="fp32",
        description="Compute dtype; master weights and gradient reduction stay fp32. fp16 adds loss scaling.",
    )
    tf32: Annotated[bool, Resume.TUNABLE] = Field(
        default=False,
        description="Multiply fp32 numbers in TF32 on a GPU, in matrix products and convolutions: several times as"
        " fast, with 10 bits of precision instead of 23. Otherwise both use full fp32.",
    )
    fp8: Annotated[Literal["off", "tensorwise", "rowwise"], Resume.TUNABLE] = Field(
        default="off",
        description="Multiply in float8 in the linear layers of the model's blocks, scaled by tensor or by row; needs"
        ' precision = "bf16", which is used elsewhere, and a GPU with compute capability 8.9 or higher.',
    )
    fp8_skip: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Resume.TUNABLE] = Field(
        default=("*.router",),
        description="Linear layers that stay in bf16 under `fp8`, as globs over full names.",
    )
    deterministic: Annotated[bool, Resume.FREE] = Field(
        default=False,
        description="Compute the same bits in every run on the same hardware, also on a GPU; may be slower. An"
        " operation without a deterministic implementation in torch is an error.",
    )
    cudnn_benchmark: Annotated[bool, Resume.FREE] = Field(
        default=False,
        description="Let cuDNN find the fastest algorithm for each input shape of a convolution (CUDA only).",
    )
    channels_last: Annotated[bool, Resume.FREE] = Field(
        default=False,
        description="Store weights and activations of 2-D convolutions with channels last in memory, which is faster"
        " in bf16 and fp16 on a GPU.",
    )
    clip_norm: Annotated[float | None, Resume.TUNABLE] = Field(
        default=None, ge=1e-9, le=1e6, description="Largest global gradient norm; absent: no clipping."
    )
    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"], Resume.TUNABLE] = Field(
        default="stop",
        description="Action when a gradient is NaN or infinite: stop, skip the step, or return to the last"
        " checkpoint and then skip the step. Such a gradient never changes the weights.",
    )
    seed: Annotated[int, Resume.FIXED] = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of all random numbers: initial weights, sample order, dropout, augmentation.",
    )
    compile: Annotated[Literal["off", "default", "reduce-overhead", "max-autotune"], Resume.FREE] = Field(
        default="off", description="Mode of torch.compile, for the model and the task's loss."
    )
    compile_blocks: Annotated[bool, Resume.TUNABLE] = Field(
        default=False,
        description="Compile the model's blocks one by one, not the whole model; identical blocks are compiled once.",
    )
    activation_checkpointing: Annotated[bool | Literal["selective"], Resume.TUNABLE] = Field(
        default=False,
        description="Recompute each block's activations in the backward pass instead of keeping them. true: all;"
        ' "selective": all except those of attention, convolutions and every second matrix product, which are slow.',
    )
    activation_offload: Annotated[bool, Resume.FREE] = Field(
        default=False,
        description="Keep the tensors that a block saves for its backward pass in host memory; with"
        " `activation_checkpointing` these are the block's inputs. The same numbers. For GPUs: the copies overlap with"
        " computation.",
    )
    blocks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Resume.TUNABLE] = Field(
        default=(),
        description="Classes of the modules that are sharded, recomputed and compiled one by one; absent: the model's"
        " repeated blocks.",
    )
    freeze: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Resume.TUNABLE] = Field(
        default=(),
        description='Parameters that are not trained, as globs over full names, e.g. "blocks.*"; one with "!" excludes'
        ' parameters: ["*", "!head.*"] trains only the head. If all parameters'
        " of a BatchNorm are frozen, it also keeps its statistics, and normalizes by them.",
    )
    frozen_dtype: Annotated[Literal["bf16", "fp16", "fp32"] | None, Resume.TUNABLE] = Field(
        default=None,
        description="Dtype of weights that are not trained; absent: the dtype in which they were saved. It is that of"
        " memory: results equal those with the same values in fp32. Trained weights are always fp32.",
    )
    sync_batchnorm: Annotated[bool, Resume.TUNABLE] = Field(
        default=False, description="Compute BatchNorm statistics over all ranks (CUDA only)."
    )
    hang_timeout: Annotated[WallTime | Literal["off"], Resume.NOT_TRAINING] = Field(
        default=Duration(10, "m"),
        description="Maximum time that a rank may stay in one phase (data, forward, backward, ...) before the run"
        " fails, with the stacks of all ranks and the name of the rank that the others wait for. Three times as long in"
        " the first step and in evaluations, six times at the start, in saves and if the first step compiles."
        ' "off": no limit. For a single rank, only the wait for loader processes is limited.',
    )
    collective_timeout: Annotated[WallTime, Resume.NOT_TRAINING] = Field(
        default=Duration(15, "m"),
        description="Maximum time that a collective may wait for a rank, and a save for a disk, before the run fails."
        " If it is longer than `hang_timeout`, that limit comes first and reports more.",
    )

    @property
    def uses_cuda_graphs(self) -> bool:
        """True if compiled code replays CUDA graphs on a GPU."""
        return self.compile in ("reduce-overhead", "max-autotune")

    def per_pass(self, data_ranks: int) -> int:
        """Returns the samples per forward pass of one of `data_ranks` ranks; 0 if there are too many ranks."""
        return self.micro_batch or self.global_batch // (self.virtual_ranks or data_ranks)


class KeepSection(Section):
    """Rules for the checkpoints to keep."""

    last: Annotated[Count, Resume.NOT_TRAINING] = Field(default=2, description="Number of the newest to keep.")
    every: Annotated[TrainingTime | None, Resume.NOT_TRAINING] = Field(
        default=None, description='Also keep one checkpoint every N epochs or steps, e.g. "10ep"; absent: no others.'
    )
    best: Annotated[int, Resume.NOT_TRAINING] = Field(
        default=0, ge=0, le=1000, description="Number of the best to keep, according to the metric `monitor`."
    )
    monitor: Annotated[Annotated[str, AfterValidator(on_one_line)] | None, Resume.NOT_TRAINING] = Field(
        default=None, description='Metric that defines the best checkpoints, e.g. "eval/loss".'
    )
    mode: Annotated[Literal["min", "max"] | None, Resume.NOT_TRAINING] = Field(
        default=None,
        description="Whether a lower or a higher metric is better. Required unless the metric declares it or its name"
        " implies it.",
    )


class CheckpointSection(Section):
    """Cadence and form of saving, and the checkpoints to keep."""

    every: Annotated[Amount, Resume.NOT_TRAINING] = Field(
        default=Duration(1, "ep"),
        description="How often to save; the end of training and every requested stop also save.",
    )
    at_start: Annotated[bool, Resume.NOT_TRAINING] = Field(
        default=False, description="Also save the initial weights, before the first step."
    )
    layout: Annotated[Literal["sharded", "full"], Resume.NOT_TRAINING] = Field(
        default="sharded",
        description='"sharded": every rank writes its own shard; "full" adds one file with the whole model, for other'
        " tools. Both can be resumed under any strategy.",
    )
    save: Annotated[Literal["all", "trainable"], Resume.NOT_TRAINING] = Field(
        default="all",
        description='"trainable" omits frozen weights: every start must load them again from the model, or from'
        " init_from; other weights than before are an error.",
    )
    async_save: Annotated[bool, Resume.NOT_TRAINING] = Field(
        default=True, description="Write while training continues, from a copy of the state in host memory."
    )
    on_failure: Annotated[Literal["stop", "continue"], Resume.NOT_TRAINING] = Field(
        default="stop",
        description="Action when a checkpoint cannot be written: stop, or warn and continue training.",
    )
    mirror: Annotated[Annotated[str, AfterValidator(_address)] | None, Resume.NOT_TRAINING] = Field(
        default=None,
        description='Copy the run\'s folder to "<mirror>/<name>" in the background, e.g. "s3://bucket/runs", and copy'
        " it back on a machine that does not have it.",
    )
    init_from: Annotated[Annotated[str, Field(min_length=1), AfterValidator(on_one_line)] | None, Resume.FREE] = Field(
        default=None,
        description="Begin with the weights of a run, a checkpoint or a safetensors file; tensors that are not in it"
        " keep their initial values, and are listed in the log.",
    )
    init_ignore: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Resume.FREE] = Field(
        default=(), description='Tensors that init_from does not change, as globs over full names, e.g. "head.*".'
    )
    keep: KeepSection = KeepSection()


class TrackSection(Section):
    """Cadence of reports. Every other key of [track] is a tracker and holds its options."""

    every: Annotated[TrainingTime, Resume.NOT_TRAINING] = Field(
        default=Duration(10, "st"), description="How often to write a row of training metrics."
    )
    memory_check: Annotated[Literal["auto", "on", "off"], Resume.NOT_TRAINING] = Field(
        default="off",
        description="Compare the memory of the second step with `ddpforge plan`, which runs in a process next to rank "
        "0, and write memory.json. auto: from a million parameters on; on: for any size, and wait for the plan at the "
        "end; not under compile. Unless off, an out-of-memory error also lists settings that would fit.",
    )
    trackers: Annotated[dict[str, Component], Resume.NOT_TRAINING] = {}


class Recipe(Section):
    """Validated settings of a whole run. `load_recipe` builds it, and also returns it as plain tables."""

    recipe: Annotated[Literal[2], Resume.TUNABLE] = Field(
        description="The recipe format version: write `recipe = 2` as the first line.",
    )
    name: Annotated[str, AfterValidator(_name), Resume.NOT_TRAINING] = Field(
        min_length=1, description="Name of the run and of its folder."
    )
    output_dir: Annotated[str, AfterValidator(_inside), Resume.NOT_TRAINING] = Field(
        default="runs", max_length=1000, description="Folder that contains the run's folder."
    )

    model: Annotated[Component, Resume.FIXED]
    data: DataSection
    task: Annotated[Component, Resume.FIXED]
    optimizer: Annotated[OptimizerComponent, Resume.TUNABLE]
    schedule: Annotated[Component, Resume.TUNABLE] = Component(use="constant")
    strategy: Annotated[Component, Resume.FREE] = Component(use="ddp")
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    callbacks: Annotated[dict[str, Component], Resume.TUNABLE] = {}

    def components(self) -> dict[tuple[str, ...], Component]:
        """Returns every component of the run by the path of its table, e.g. ("data", "train")."""
        found: dict[tuple[str, ...], Component | None] = {}
        for spec in KINDS.values():
            found |= {path: attrgetter(".".join(path))(self) for path in spec.tables if path[:1] != ("data",)}
            if spec.named_in:
                table = getattr(self, spec.named_in)
                named = table.trackers if isinstance(table, TrackSection) else table
                found |= {(spec.named_in, key): component for key, component in named.items()}
        for key, sets in (("train", self.data.sources), ("eval", self.data.evaluations)):
            found |= {("data", key, *filter(None, [name])): component for name, component in sets.items()}
        found["data", "sampler"] = self.data.sampler
        for name, update in self.optimizer.updates.items():
            found |= {
                ("optimizer", "updates", name): update,
                ("optimizer", "updates", name, "schedule"): update.schedule,
            }
        found |= {("optimizer", "groups", name): group for name, group in self.optimizer.groups.items()}
        found |= {("optimizer", "schedules", name): each for name, each in self.optimizer.schedules.items()}
        return {path: component for path, component in found.items() if component}


def declared(field: FieldInfo) -> Resume | None:
    """Returns the rule for resumed runs that a key of a section declares; None if it declares none."""
    return next((one for one in field.metadata if isinstance(one, Resume)), None)


def resume_policy(path: str) -> Resume:
    """Returns the rule for resuming a run with another value at `path`, a dotted key of a resolved recipe.

    A key that no longer exists, e.g. of an older run, is tunable.
    """
    section: object = Recipe
    found = Resume.TUNABLE
    for key in path.split("."):
        if get_origin(section) is dict:
            section = get_args(section)[1]  # the key is a name
            continue
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break  # a component among others: the rule of all of them
        fields = section.model_fields
        field = fields.get(key, fields.get("trackers"))
        if field is None:
            break  # an option of a component
        found, section = declared(field) or found, field.annotation
    return found
