"""Everything the author of a component reads: the value objects and base classes that ddpforge's own parts use too.

Models are plain `torch.nn.Module`s, optimizers plain `torch.optim.Optimizer`s and schedules plain functions of the
step; the contracts of the other kinds are below. This module does not import torch when it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from ddpforge.direction import lower_is_better
from ddpforge.durations import Duration, Horizon
from ddpforge.regions import Box, Part, Range, Region

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpforge.recipe.schema import TrainSection

__all__ = [
    "Box",
    "Callback",
    "CanonicalState",
    "Contract",
    "Data",
    "Duration",
    "Exploring",
    "Horizon",
    "Metric",
    "Part",
    "Range",
    "Refusal",
    "Region",
    "SavedTensor",
    "Schedule",
    "StepInfo",
    "Strategy",
    "Task",
    "Total",
    "Tracker",
    "Weights",
    "World",
    "lower_is_better",
]

T = TypeVar("T")
X = TypeVar("X")
Sharded = Literal["weights", "gradients", "optimizer state"]
Schedule = Callable[[int], float]
"""Maps a step (0 for the first) to the factor on the recipe's learning rate. A pure function: nothing to save."""


# ---------------------------------------------------------------------------------------------- value objects
@dataclass(frozen=True, kw_only=True)
class World:
    """Who this process is among all processes of the run.

    `data_rank` and `data_size` count the ranks that see different data. They equal `rank` and `size` unless a
    strategy splits one model over several ranks.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    data_rank: int
    data_size: int

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs, trackers and manifests."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Total:
    """A quantity on its way to a mean: add up `sum` and `count` over batches and ranks, divide once at the end.

    Both are added up in float64, whatever their dtype. Ranks may name different quantities.
    """

    sum: Tensor
    count: Tensor | int


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """What is known after an optimizer step; the numbers are already reduced over ranks.

    `metrics` holds the row that was logged at this step and is empty at steps that log nothing (reading a metric
    waits for the device). `samples` counts every sample the run has trained on. `seconds` is the wall time a step
    took, averaged over the steps since the last row.
    """

    step: int
    samples: int
    lr: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a strategy promises: shown by `ddpforge show`, and proven at the start of a run.

    `shards` says of what each rank holds only a part, and `copies` how often the parts exist among all ranks; where
    the optimizer's state is sharded, the weights that the optimizer updates are sharded like it. Where ranks average
    weights now and then, and not gradients at every step, each clips its own gradient, and the norm that
    `Strategy.step` returns has no counterpart under other strategies.
    """

    shards: tuple[Sharded, ...] = ()
    copies: int = 1
    averages: Literal["gradients", "weights"] = "gradients"
    master_dtype: str = "float32"  # of the weights that the optimizer updates, as torch spells it
    reduce_dtype: str = "float32"  # in which gradients are summed over ranks
    clips: str  # who clips the gradient norm, and when
    accumulates: str  # who adds up micro-batches, and where


class SavedTensor(Protocol):
    """A tensor in a checkpoint: read what is needed of it, when it is needed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it was saved in."""

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""

    def read_into(self, region: Region, target: Tensor) -> None:
        """Fills `target`, on any device, with a region of the tensor; it has the tensor's dtype, the region's size."""


class Weights:
    """The weights, by parameter name: as much of each as this rank holds; trained ones as the optimizer updates them.

    This class is for strategies under which every rank holds every weight whole; others have a subclass. Whoever
    keeps something per weight (averages, say) keeps it in parts like these: `part.of(tensor)` is one.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._parts = {
            name: Part.whole(parameter.detach(), replica=world.rank, replicas=world.size)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._frozen = {
            name: Part.whole(parameter.detach(), replica=world.rank, replicas=world.size)
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }

    def parts(self) -> dict[str, Part]:
        """This rank's parts of what is trained, live and without gradients: what is written there changes the weights,
        see `changed`."""
        return self._parts

    def frozen(self) -> dict[str, Part]:
        """The same of what is not trained: a momentum encoder, say."""
        return self._frozen

    def elements(self, name: str, region: Region) -> Tensor:
        """The elements of a parameter, trained or frozen, that are in `region`, in one dimension.

        For parameters of one shape, the region of one's part is good for the other: `elements(student, part.region)`
        is what a teacher's `part` follows. Raises ValueError for elements that this rank does not hold.
        """
        part = self._parts[name] if name in self._parts else self._frozen[name]
        return part.elements(region)

    def changed(self) -> None:
        """Makes forward passes use what was written into the parts; called on every rank."""


@dataclass
class CanonicalState(Generic[X]):
    """A model and its optimizer by parameter name, the same whatever strategy trained them.

    Names are those of the bare model (no wrapper prefixes). A tied parameter appears once, under the first of its
    names; `aliases` maps the other names to it. `optimizer` maps parameter name → key → tensor or plain number (a 0-d
    tensor counts as one); a parameter that never got a gradient is simply absent. `shared` is what belongs to no one
    parameter: an optimizer's own counters, what a strategy must remember. Who does not know a key leaves it alone.

    What is on its way to a checkpoint is tensors that every rank holds alike, and parts; what comes from one is
    `SavedTensor`s.
    """

    model: Mapping[str, X]
    optimizer: Mapping[str, Mapping[str, X | Tensor | int | float | bool | None]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, X | Tensor | int | float | bool | None] = field(default_factory=dict)


class Refusal(NamedTuple):
    """Why a strategy cannot do what a recipe asks for, known before anything is started."""

    key: str  # of the recipe, e.g. "strategy.replicas"
    message: str
    hints: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------- components
@runtime_checkable
class Data(Protocol):
    """A map-style dataset: `len(data)` samples, fetched a batch at a time.

    A dataset with `__getitem__` alone works too: its samples are stacked by torch's `default_collate`. Optional:

    - `__getitems__(ids: list[int])` fetches a whole batch at once (what it returns goes to `collate`);
    - `collate(samples)` makes a batch out of what was fetched; return it unchanged when it already is one;
    - `random = False` says that fetching draws no random numbers, which saves seeding per sample. Otherwise
      python's, numpy's and torch's generators are seeded from (recipe seed, epoch, sample) before each sample, or
      from (recipe seed, epoch, first sample) before each `__getitems__`;
    - `set_epoch(epoch: int)` is called before the first sample of each epoch is fetched.

    An iterable dataset is a `torch.utils.data.IterableDataset`, or has `__iter__` and no `__getitem__`. It must yield
    the same samples in the same order on every rank and in every worker; ddpforge deals them out so that each is used
    once, and compares what ranks have read. Its `set_epoch(epoch: int)`, if it has one, is called before each pass,
    and python's, numpy's and torch's generators are seeded from (recipe seed, epoch), the same everywhere; `random =
    False` saves that. Do the expensive part of loading in `collate`, which sees only the samples that this rank keeps.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Metric(ABC):
    """A quantity worth averaging over samples, computed from a task's outputs."""

    name: str

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """The sum over the batch and how many items it covers; no gradients, no waiting for the device."""


class Task(ABC):
    """What is learnt: the loss of a batch, and what to report about it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """The loss *summed* over the batch's items (0-d, with gradients), and the outputs that `metrics` reads.

        Return a sum, not a mean: gradients are divided once, by the number of items in the whole global batch,
        so that accumulation, ranks and uneven ends all weigh every item the same.
        """

    def count(self, batch: Any) -> Tensor | None:
        """How many items the loss of `batch` sums over (0-d tensor on the batch's own device), or their weights' sum.

        None means one per sample, which needs no communication. Tasks that weigh tokens, pixels or samples override
        it; weights are real numbers, 0 or more. The batch is still on the CPU when this is called.
        """
        return None

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        """Further quantities of a batch, computed at evaluation and at the steps that log; never for training."""
        return {}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Turns averaged metrics into what is reported, e.g. adds a perplexity; keys have no `train/` prefix yet."""
        return metrics

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError when model and data cannot belong together (classes, vocabulary), before training."""


class Tracker:
    """Where metrics go. This base class is the null tracker. Only the main rank has real ones.

    No method may raise into training or block it for long: a tracker is a mirror, `metrics.jsonl` is the truth.
    """

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Called once before the first step; `resumed_at` is the step that training goes on from."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row: metrics of `step`, with their `train/` and `eval/` prefixes."""

    def rewind(self, step: int) -> None:
        """Training went back to `step`: rows after it are superseded and will be logged again."""

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Called once at the end; `state` is that of `status.json` (done, failed, stopped, diverged)."""


@runtime_checkable
class Exploring(Protocol):
    """An optimizer that looks at a step's gradient more than once, at different weights; optional.

    It is a `torch.optim.Optimizer` whose `passes`, read once, is more than 1. In each pass the trainer computes the
    gradient of the whole step, with the same micro-batches and the same random numbers. After every pass but the last
    it calls `explore` where else it would call `step`; then `restore`, and `step` with the last gradient. What is
    logged of the loss is that of the first pass, and so are buffers; the norm is that of the last gradient, which alone
    is clipped. A gradient that is not finite, in any pass, ends the step: there is a `restore` and no `step`.
    """

    passes: int

    def explore(self, norm: float) -> None:
        """Moves the weights in `param_groups`, each of which has its gradient; `norm` is that of all gradients.

        Gradients are not clipped. A strategy may call this several times in a pass, each time with other weights in
        `param_groups`.
        """

    def restore(self) -> None:
        """Gives every weight that was moved exactly the value it had before; `param_groups` may be empty."""


class Callback:
    """Something that watches the run; every method does nothing by default.

    Callbacks run on every rank. What they are told is already reduced over ranks, so a decision made from it is
    the same everywhere; returning True from `on_step` or `on_eval` ends training after this step.
    """

    def on_start(self, model: nn.Module, world: World, weights: Weights) -> None:
        """Before the first step and before a checkpoint is restored.

        `model` is the bare model. Where a strategy shards, its parameters are not whole: use `weights` to read or
        write them, frozen ones too; writing into the model's own is refused where it would be lost.
        """

    def on_step(self, info: StepInfo) -> bool | None:
        """After every optimizer step."""

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        """At every step that logs: further columns for the row."""
        return {}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """After every evaluation."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Wraps every evaluation, e.g. to swap in averaged weights; must restore them even when it raises."""
        return nullcontext()

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """After a checkpoint was committed."""

    def on_end(self, error: BaseException | None) -> None:
        """After the last step, also when training failed."""

    def state(self) -> Mapping[str, Tensor | Part | int | float | str | bool | None]:
        """What a checkpoint must hold so that a resumed run goes on as if nothing had happened.

        A tensor is one that is the same on every rank; a part is this rank's own. No communication.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave, possibly on another number of ranks; tensors arrive as `SavedTensor`s."""


class Strategy(ABC):
    """How one model becomes many: joins the ranks, wraps the model, and steps the optimizer.

    The order of calls is the order of this class. A strategy touches the model and the optimizer and nothing else:
    sample order and learning rate are functions of the step and belong to the trainer. `contract` may depend on the
    strategy's options; it is read before `setup` by `ddpforge show`, and after `prepare` by the run itself.
    """

    contract: Contract
    world: World  # set by `setup`

    def generated(self, train: TrainSection, ranks: int) -> Mapping[str, Any]:
        """What another library is told, as generated from the recipe for `ranks` ranks; for `ddpforge show`."""
        return {}

    def refusals(self, train: TrainSection, ranks: int, device: str) -> Iterable[Refusal]:
        """What the strategy cannot do on `ranks` ranks that compute on `device` ("cpu" or "cuda").

        Called before ranks join, by `ddpforge check` and `show` too; it reads the recipe and starts nothing.
        """
        return ()

    def device_type(self, train: TrainSection) -> str:
        """What ranks on this machine compute on, "cuda" or "cpu": what the recipe says, or a GPU where there is one."""
        import torch

        if train.device != "auto":
            return train.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def data_ranks(self, ranks: int) -> int:
        """How many of `ranks` ranks see different data: all, unless the strategy splits one model over several."""
        return ranks

    # -- before the loop
    @abstractmethod
    def setup(self, train: TrainSection) -> World:
        """Joins the process group and proves that it is the one that was asked for; raises StrategyError if not."""

    def building(self) -> AbstractContextManager[Any]:
        """Wraps the construction of the model, e.g. to build it on the meta device."""
        return nullcontext()

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Shards or replaces the model, before the optimizer is built from its parameters.

        `blocks` are the modules to treat one by one: what the recipe's `train.blocks` names, or the model's own
        repeated blocks. None contains another.
        """
        return model

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Makes both ready for training; the model comes back placed on the device and synchronised over ranks."""

    def observing(self) -> AbstractContextManager[Any]:
        """Wraps callbacks: what they write into the model's parameters, past `Weights`, must count or be refused."""
        return nullcontext()

    # -- one step
    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Wraps forward and backward of one micro-batch; gradients are summed over ranks in the last one only."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[Any]:
        """Wraps every forward pass and its loss, in training and evaluation, e.g. in autocast."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, which the trainer has scaled so that averaging over data ranks is right."""

    @abstractmethod
    def step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """Clips, updates the weights and clears the gradients; returns the norm before clipping (0-d, float32).

        When the norm is not finite the update must not happen, on any rank; whether it is finite must be the same on
        all ranks, which decide by it without talking. No host-device synchronisation.
        """

    def explore(self, model: nn.Module, optimizer: Exploring) -> Tensor:
        """Like `step`, with `optimizer.explore` for the update and without clipping; may wait for the device.

        Afterwards forward passes use the moved weights. A strategy that leaves this out refuses such optimizers.
        """
        raise NotImplementedError

    def overflowed(self) -> bool:
        """True when the last non-finite norm only means that fp16's loss scale was too high and has been lowered."""
        return False

    # -- agreement
    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """`values` (float64, of any shape) summed over data ranks, on the device; may be on its way until it is used.

        A data rank's values count once, however many ranks see its data.
        """

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank; a small picklable object."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Makes the buffers equal on all ranks: BatchNorm's statistics their mean over ranks, others rank 0's.

        Called on every rank before every evaluation and every save: a strategy whose ranks come apart in between makes
        them equal here.
        """

    # -- to disk and back
    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The bare model, as the recipe's component built it."""

    def weights(self, model: nn.Module, optimizer: Optimizer) -> Weights:
        """The weights that the optimizer updates; here, for strategies that shard nothing."""
        return Weights(self.unwrap(model), self.world)

    @abstractmethod
    def state(self, model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
        """Model and optimizer by parameter name: what this rank holds of them, live, without communication.

        A tensor is one that every rank holds alike. Names that only other ranks have may be missing.
        """

    @abstractmethod
    def load_state(
        self, model: nn.Module, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False
    ) -> None:
        """Takes back what `state` gave, possibly under another strategy; raises CheckpointError on any mismatch.

        Each rank reads what it holds and no more. Where `partial`, tensors of the model that the state lacks stay as
        they are.
        """

    def loop_state(self) -> Mapping[str, int | float]:
        """Further numbers a checkpoint must hold, e.g. the loss scale of fp16."""
        return {}

    def load_loop_state(self, state: Mapping[str, int | float]) -> None:
        """Takes back what `loop_state` gave; empty after a change of precision."""

    def close(self) -> None:
        """Leaves the process group; not called when training failed, where peers may be gone."""
