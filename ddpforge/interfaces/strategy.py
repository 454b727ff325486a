"""Strategies, which spread one model over many ranks, and the replicas that they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from ddpforge.interfaces.optimizer import Exploring
from ddpforge.interfaces.regions import Part
from ddpforge.interfaces.state import CanonicalState, SavedTensor, Weights, WholeWeights
from ddpforge.interfaces.task import Task
from ddpforge.interfaces.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpforge.interfaces.task import Task
    from ddpforge.recipe.schema import TrainSection

__all__ = [
    "Compute",
    "Contract",
    "Cuts",
    "Explores",
    "Pass",
    "Refusal",
    "Replica",
    "Sharded",
    "Simulation",
    "Strategy",
    "TakesTurns",
]

Sharded = Literal["weights", "gradients", "optimizer state"]
Cuts = Literal["layers", "positions", "experts", "steps"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A strategy's promises: shown by `ddpforge show`, and proven at the start of a run."""

    shards: tuple[Sharded, ...] = ()
    """The things that are split over ranks; weights that the optimizer updates are split like the optimizer state."""
    replicas: int = 1
    """The number of groups of ranks that each hold all of that."""
    averages: Literal["gradients", "weights"] = "gradients"
    """What ranks average: gradients at every step, or weights now and then; each then clips its own gradient."""
    master_dtype: str = "float32"
    """The dtype of the weights that the optimizer updates, as torch spells it."""
    reduce_dtype: str = "float32"
    """The dtype in which gradients are summed over ranks."""
    clips: str
    """Which ranks clip the gradient norm, and when, in words."""
    accumulates: str
    """Where the gradients of micro-batches are added up, in words."""
    reads_gradients: bool = False
    """Callbacks may read the reduced gradient: `Replica.step` calls `on_gradient`."""
    callable: bool = True
    """A rank can run a forward pass by itself."""
    optimizers: Literal["one", "several"] = "one"
    """The number of optimizers, each for some of the parameters; replicas that take several are `TakesTurns`."""
    float8: bool = False
    """Linear layers are called with whole weights, by their own forward pass, as `train.fp8` needs it."""
    scores: bool = True
    """Each rank runs whole forward passes, which may compute the loss as well: see `Task.scores_in_model`."""
    cuts: tuple[Cuts, ...] = ()
    """The things of which ranks compute parts in one forward pass, compared with the whole model before the first step:
    replicas must be `Explores`, within whose `explore` `gradients_by_name` has the reduced gradient."""


class Refusal(NamedTuple):
    """The reason that a strategy cannot do what a recipe asks for, known before anything is started."""

    key: str  # of the recipe, e.g. "strategy.replicas"
    message: str
    hints: tuple[str, ...] = ()


class Simulation:
    """The facts of a strategy by which `ddpforge plan` simulates a step; the defaults are those of equal ranks."""

    def ranks(self, ranks: int, model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[int, Hashable]:
        """The ranks to simulate, in the order in which they send, and the form of what each holds.

        Rank 0 by default, which stands for all that hold as much as it does, or a little less. Where forms are equal,
        and so are the shapes that are received, the first stands for the others: they must do the same work and take as
        much memory, or less.
        """
        return {0: None}

    def micro_batches(self, ranks: int) -> tuple[int, int] | None:
        """Two numbers of micro-batches in a step, from which on each adds as much memory and work.

        None where one is computed after the other, and several take the memory of one.
        """
        return None


class Strategy(ABC):
    """Decides which ranks see different data, and how the model is spread over ranks, as a recipe asks.

    The order of calls is the order of this class. A strategy touches the model and the optimizer and nothing else:
    the ranks have joined before it is asked, sample order and learning rate are functions of the step.
    """

    contract: Contract  # may depend on the options
    joins_alone: ClassVar[bool] = False  # whether a single process needs a torch.distributed group as well
    launcher: Mapping[str, str] = {}

    @property
    def simulation(self) -> Simulation:
        """Returns the facts by which `ddpforge plan` simulates a step, where ranks are not all equal."""
        return Simulation()

    train: TrainSection  # these two are set by `setup`
    world: World

    def generated_config(self, train: TrainSection, ranks: int) -> Mapping[str, Any]:
        """The configuration that is generated for another library, by its name; shown by `ddpforge show`."""
        return {}

    def refusals(self, train: TrainSection, ranks: int, device: str) -> Iterable[Refusal]:
        """Names all that the strategy cannot do on `ranks` ranks that compute on `device` ("cpu" or "cuda").

        Called before ranks join, by `ddpforge check` and `show` too; it reads the recipe and starts nothing. This
        machine may lack such a device.
        """
        return ()

    @property
    def cuts_model(self) -> bool:
        """True where a model must be made so that it can be cut: then `ddpforge check` builds it, without memory."""
        return False

    def check(self, model: nn.Module, task: Task, blocks: Sequence[nn.Module]) -> None:
        """Raises StrategyError or UsageError for a model or a task that it cannot train, as far as known without ranks.

        Called before ranks join, by `ddpforge check` too, with the bare model, which may be on the meta device.
        """

    def check_data(self, data: Any) -> None:
        """The same of a dataset: raises UsageError for samples that it cannot share out."""

    def data_ranks(self, ranks: int) -> int:
        """Counts the ranks that see different data: all `ranks`, unless the strategy splits one model over several."""
        return ranks

    def evaluating(self, ranks: int) -> tuple[Strategy, str]:
        """The strategy for `ddpforge eval` on so many ranks, perhaps other than those that trained, and why that one.

        Itself, for no reason, where its layout fits; nothing is trained, so one that spreads the model otherwise does.
        """
        return self, ""

    def setup(self, train: TrainSection, world: World) -> World:
        """Takes its place among the ranks, which have joined; returns the world with the ranks that see other data.

        Raises StrategyError where it cannot work here.
        """
        self.train, self.world = train, world
        return world

    def building(self) -> AbstractContextManager[Any]:
        """Wraps the construction of the model, e.g. to build it on the meta device."""
        return nullcontext()

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves the model to the device; shards or replaces it, before the optimizer is built from its parameters.

        `blocks` are the modules to treat one by one: what the recipe's `train.blocks` names, or the model's own
        repeated blocks. None contains another.
        """
        return model.to(self.world.device)

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Makes both ready for training, the same on all ranks; compiles the model where the recipe asks for it.

        `ddpforge eval` brings an SGD that never steps: it keeps nothing.
        """

    def beside(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Weights:
        """Places a module that is used beside the model, and never trained; returns its weights, which are frozen.

        Called after `prepare`, for one such module after the other; `blocks` are the module's own. By default every
        rank holds it whole, with rank 0's values.
        """
        module.to(self.world.device)
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.all.broadcast(tensor.data)
        return WholeWeights(module, self.world.all)


# ---------------------------------------------------------------------------------------------- what is trained
@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One micro-batch on its way through the model, on this rank.

    `scale` gives what the summed loss is multiplied with, so that the mean of gradients over data ranks is that over
    the items of the whole step. Ranks may be counting them during the forward pass: call it once that is done.
    """

    batch: Any  # on the device
    seed: Callable[[], None]  # gives all generators the numbers of this pass
    scale: Callable[[], Tensor | float] = lambda: 1.0
    last: bool = True  # of its step
    measured: bool = True  # whether what `compute` returns beside the loss is read
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # to be entered for all of the pass, or each part


Compute = Callable[["nn.Module", Pass], "tuple[Tensor, Any]"]
"""Seeds random numbers and calls a task: the summed loss of a pass and its outputs, from what a model makes of it."""


def _nobody_reads(norm: Tensor) -> None:
    """Stands where no callback reads gradients."""


class Replica(ABC):
    """The model that one rank trains, spread over ranks as the strategy does it, with its optimizer.

    A strategy that leaves `passes` as it is gets one micro-batch after the other, forward and backward.
    """

    module: nn.Module  # what forward passes call
    bare: nn.Module  # the same as the recipe's component built it, for names and buffers
    weights: Weights
    computes_loss: bool = True  # False on ranks that pass their outputs on to others, which call the task's `loss`

    # -- one step
    def passes(self, passes: Iterable[Pass], compute: Compute, *, trains: bool) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs the passes of a step, or (not `trains`) of an evaluation, in an order of its own.

        Yields the loss and the outputs of each, in the order of `passes`; None where another rank has them.
        """
        for one in passes:
            with one.around():
                with self.forward(last=one.last):
                    loss, outputs = compute(self.module, one)
                if trains:
                    self.backward(loss, one.scale())
            yield loss, outputs

    def own_part(self, batch: Any) -> Any:
        """Takes out of a batch, on the device, what this rank computes: all, unless ranks share its samples.

        The task counts the items of the whole batch.
        """
        return batch

    def forward(self, *, last: bool = True) -> AbstractContextManager[Any]:
        """Wraps a forward pass and its loss, e.g. in autocast; after the `last` of a step gradients are exchanged."""
        return nullcontext()

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        """Adds the gradients of `loss` times `scale`."""
        (loss * scale).backward()  # type: ignore[no-untyped-call]

    @abstractmethod
    def step(self) -> Tensor:
        """Clips, updates the weights and clears the gradients; returns the norm before clipping (0-d, float32).

        When the norm is not finite the update must not happen, on any rank; whether it is finite must be the same on
        all ranks, which decide by it without talking. No host-device synchronisation.
        """

    on_gradient: Callable[[Tensor], None] = staticmethod(_nobody_reads)
    """Set by the trainer where a callback reads gradients: `step` calls it with the norm, before clipping."""

    def gradients_by_name(self) -> Mapping[str, Part]:
        """This rank's parts of the reduced gradient, laid out as `weights.parts()`; within `on_gradient` only."""
        raise NotImplementedError(f"{type(self).__name__} does not show its gradients")

    def overflowed(self) -> bool:
        """True when the last non-finite norm only means that fp16's loss scale was too high and has been lowered."""
        return False

    def sync_buffers(self) -> None:
        """Makes the buffers equal on all ranks: BatchNorm's statistics their mean over ranks, others rank 0's.

        Called on every rank before every evaluation and every save: a strategy whose ranks come apart in between makes
        them equal here.
        """

    # -- to disk and back
    @abstractmethod
    def state(self) -> CanonicalState[Tensor | Part]:
        """Model and optimizer by parameter name: what this rank holds of them, live, without communication.

        A tensor is one that every rank holds alike. Names that only other ranks have may be missing.
        """

    @abstractmethod
    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Takes back what `state` gave, possibly under another strategy; raises CheckpointError on any mismatch.

        Each rank reads what it holds and no more. Where `partial` (initial weights, `ddpforge eval`), tensors of the
        model that the state lacks stay as they are, and the optimizer does where it has none.
        """

    def close(self) -> None:
        """Frees what it holds beside memory; not called when training failed, where peers may be gone."""


@runtime_checkable
class Explores(Protocol):
    """A replica for optimizers that make several passes per step, see `Exploring`; others refuse those."""

    def explore(self, optimizer: Exploring) -> Tensor:
        """Like `step`, with `optimizer.explore` for the update and without clipping; may wait for the device.

        Afterwards forward passes use the moved weights.
        """


@runtime_checkable
class TakesTurns(Protocol):
    """A replica for tasks with several updates a step; a strategy that makes them says so in its contract."""

    def turn(self, name: str) -> AbstractContextManager[Any]:
        """Wraps an update of the turn: within, others' parameters get no gradients, and `step` updates the turn's."""
