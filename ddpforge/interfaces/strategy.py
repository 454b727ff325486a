"""Strategies, which distribute one model over ranks, and the replicas that they create."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from ddpforge.interfaces.optimizer import MultiPassOptimizer
from ddpforge.interfaces.regions import TensorShard
from ddpforge.interfaces.state import CanonicalState, FullWeights, SavedTensor, Weights
from ddpforge.interfaces.task import Task
from ddpforge.interfaces.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpforge.interfaces.metric import Total
    from ddpforge.recipe.schema import TrainSection

__all__ = [
    "AlternatesUpdates",
    "Compute",
    "Contract",
    "ForwardSplit",
    "Pass",
    "Replica",
    "Sharded",
    "Simulation",
    "Strategy",
    "SupportsMultiPass",
    "Unsupported",
]

Sharded = Literal["weights", "gradients", "optimizer state"]
ForwardSplit = Literal["layers", "positions", "experts", "steps"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Properties of a strategy: shown by `ddpforge show`, and verified at the start of a run."""

    shards: tuple[Sharded, ...] = ()
    """State that is sharded over ranks. Master weights are sharded like the optimizer state."""
    replicas: int = 1
    """Number of groups of ranks that each hold a complete copy of the sharded state."""
    averages: Literal["gradients", "weights"] = "gradients"
    """Ranks average gradients at every step, or weights from time to time; each rank then clips its own gradient."""
    master_dtype: str = "float32"
    """Dtype of the master weights, which the optimizer updates; a name of torch."""
    reduce_dtype: str = "float32"
    """Dtype in which gradients are summed over ranks."""
    clipping: str
    """Which ranks clip the gradient norm, and when, in words."""
    accumulation: str
    """Description of the memory in which gradients of micro-batches are accumulated."""
    reads_gradients: bool = False
    """Callbacks may read the reduced gradient: `Replica.step` calls `on_gradient`."""
    callable: bool = True
    """Each rank can run a forward pass of the model on its own."""
    optimizers: Literal["one", "several"] = "one"
    """Number of optimizers of a replica, each for some of the parameters; "several" requires `AlternatesUpdates`."""
    float8: bool = False
    """Linear layers run their own forward pass with whole weights; `train.fp8` requires this."""
    loss_in_model: bool = True
    """Each rank runs whole forward passes, so that the model can compute the loss: see `Task.loss_in_model`."""
    splits_forward: tuple[ForwardSplit, ...] = ()
    """Dimensions along which ranks share one forward pass. The run compares this with the whole model before the first
    step. Replicas must be `SupportsMultiPass`; within `perturb`, `gradients_by_name` returns the reduced gradient."""


class Unsupported(NamedTuple):
    """Reason why a strategy cannot run a recipe, found before the run starts."""

    key: str  # of the recipe, e.g. "strategy.replicas"
    message: str
    hints: tuple[str, ...] = ()


class Simulation:
    """Parameters with which `ddpforge plan` simulates a step of a strategy; the defaults assume equal ranks."""

    def ranks_to_simulate(self, ranks: int, model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[int, Hashable]:
        """Returns the ranks to simulate, in the order in which they send, each with a key for the layers that it holds.

        By default only rank 0, on behalf of all ranks; the others may hold a little less. If ranks have equal keys and
        receive equal shapes, only the first of them is simulated. The others must do the same work in the same memory,
        or less.
        """
        return {0: None}

    def micro_batches(self, ranks: int) -> tuple[int, int] | None:
        """Returns two numbers of micro-batches per step; `plan` simulates both, and extrapolates linearly.

        Returns None if micro-batches are computed one after the other, and several need the memory of one.
        """
        return None


class Strategy(ABC):
    """Base class of strategies: determines the data-parallel ranks, and distributes the model over ranks.

    Methods are called in the order of this class. A strategy changes only the model and the optimizer. The process
    group exists before `setup`; sample order and learning rate are functions of the step.
    """

    contract: Contract  # may depend on the options
    needs_process_group: ClassVar[bool] = False  # a single process needs a torch.distributed group too
    launcher: Mapping[str, str] = {}  # environment variables that the launcher must not contradict

    @property
    def simulation(self) -> Simulation:
        """Returns the parameters of `ddpforge plan`; override it if ranks are not all equal."""
        return Simulation()

    train: TrainSection  # these two are set by `setup`
    world: World

    @classmethod
    def layouts(cls, ranks: int) -> Iterable[Mapping[str, Any]]:
        """Returns the options of each layout over `ranks` ranks, for `ddpforge certify`; a run may refuse some."""
        return ({},)

    def generated_config(self, train: TrainSection, ranks: int) -> Mapping[str, Any]:
        """Returns the configurations generated for other libraries, by name; shown by `ddpforge show`."""
        return {}

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterable[Unsupported]:
        """Returns the reasons why the strategy cannot run on `ranks` ranks with `device` ("cpu", "cuda", …).

        Called before ranks join, by `ddpforge check` and `show` too. It must only read the recipe. This machine may
        not have such a device.
        """
        return ()

    @property
    def splits_model(self) -> bool:
        """True if only some models can be split: `ddpforge check` then builds the model on the meta device."""
        return False

    def check(self, model: nn.Module, task: Task, blocks: Sequence[nn.Module]) -> None:
        """Raises StrategyError or UsageError for a model or a task that the strategy cannot train.

        Called before ranks join, by `ddpforge check` too, with the bare model, which may be on the meta device.
        """

    def check_data(self, data: Any) -> None:
        """Raises UsageError if the strategy cannot distribute the samples of `data`; called before ranks join."""

    def data_ranks(self, ranks: int) -> int:
        """Returns the number of data-parallel ranks: `ranks`, unless the strategy splits one model over several."""
        return ranks

    def for_evaluation(self, ranks: int) -> tuple[Strategy, str]:
        """Returns the strategy for `ddpforge eval` on `ranks` ranks, and the reason if it is not this one.

        Evaluation may use a different number of ranks than training. Returns self and "" if this strategy supports
        `ranks`; otherwise another strategy, as evaluation does not depend on the layout of the model.
        """
        return self, ""

    def setup(self, train: TrainSection, world: World) -> World:
        """Sets up the strategy after the ranks joined; returns the world with its data-parallel process group.

        Raises StrategyError if the strategy cannot work in this world.
        """
        self.train, self.world = train, world
        return world

    def init_context(self) -> AbstractContextManager[Any]:
        """Wraps the construction of the model, e.g. to build it on the meta device."""
        return nullcontext()

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves the model to the device, and shards or replaces it, before the optimizer is built from its parameters.

        `blocks` are the modules to shard one by one: those named in `train.blocks`, or the model's repeated blocks. No
        block contains another.
        """
        return model.to(self.world.device)

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Prepares model and optimizer for training, equal on all ranks; compiles the model if the recipe requests it.

        `ddpforge eval` passes an SGD without state that never steps.
        """

    def place_auxiliary(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Weights:
        """Places an auxiliary module, which is never trained, on the ranks; returns its weights, all frozen.

        Called after `prepare`, once for each auxiliary module; `blocks` are the blocks of this module. By default every
        rank holds the whole module, with rank 0's values.
        """
        module.to(self.world.device)
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.global_ranks.broadcast(tensor.data)
        return FullWeights(module, self.world.global_ranks)


# ---------------------------------------------------------------------------------------------- replicas
@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forward (and backward) pass of one micro-batch on this rank.

    `scale` returns the factor on the summed loss, so that the mean of gradients over data-parallel ranks is the mean
    over all items of the step. Call it after the forward pass: ranks may count items during that pass.
    """

    batch: Any  # on the device
    samples: int | None = None  # in the batch; None if it is not known
    seed: Callable[[], None]  # seeds all RNGs for this pass
    scale: Callable[[], Tensor | float] = lambda: 1.0
    last: bool = True  # of its step
    needs_outputs: bool = True  # the outputs of `compute` are used for metrics
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # enter it for the whole pass, or for each part
    totals: Sequence[Callable[[Tensor, Any, Any], Mapping[str, Total]]] = ()  # further ones: of loss, outputs and batch


Compute = Callable[["nn.Module", Pass], "tuple[Tensor, Any]"]
"""Seeds the RNGs, runs model and task on a pass, and returns the summed loss and the outputs."""


def _ignore(norm: Tensor) -> None:
    """Does nothing: the default of `on_gradient`."""


class Replica(ABC):
    """Model and optimizer of one rank, distributed over ranks by the strategy.

    By default `run_microbatches` runs the micro-batches one after the other, each forward and backward.
    """

    module: nn.Module  # called in forward passes
    unwrapped: nn.Module  # the model as the recipe's component built it, for names and buffers
    weights: Weights
    computes_loss: bool = True  # False on ranks that send their outputs to other ranks, which call the task's `loss`
    may_evaluate_first: bool = True  # False if its first forward pass must be one of training

    # -- one step
    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs the passes of a step, or (`trains` is False) of an evaluation; the replica chooses the order.

        Yields the loss and the outputs of each pass, in the order of `passes`; None if another rank has them.
        """
        for one in passes:
            with one.context():
                with self.forward(last=one.last):
                    loss, outputs = compute(self.module, one)
                if trains:
                    self.backward(loss, one.scale())
            yield loss, outputs

    def compile_loss(self, loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor] | None:
        """Returns `loss`, a function of `module` and a batch, compiled together with the forward pass that it calls.

        None, the default, if the replica compiles only the model, or nothing.
        """
        return None

    def local_batch(self, batch: Any) -> Any:
        """Returns this rank's part of a batch on the device: the whole batch, unless ranks share its samples.

        The task still counts the items of the whole batch.
        """
        return batch

    def forward(self, *, last: bool = True) -> AbstractContextManager[Any]:
        """Wraps a forward pass and its loss, e.g. in autocast; gradients are reduced after the `last` one of a step."""
        return nullcontext()

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        """Accumulates the gradients of `loss` times `scale`."""
        (loss * scale).backward()  # type: ignore[no-untyped-call]

    @abstractmethod
    def step(self) -> Tensor:
        """Clips, updates the weights and clears the gradients; returns the norm before clipping (0-d, float32).

        If the norm is not finite, no rank may update. Ranks decide this from the norm without communication, so it must
        be finite on all ranks or on none. Must not synchronize host and device.
        """

    on_gradient: Callable[[Tensor], None] = staticmethod(_ignore)
    """Function that `step` calls with the norm, before clipping; the trainer sets it if a callback reads gradients."""

    def gradients_by_name(self) -> Mapping[str, TensorShard]:
        """Returns this rank's parts of the reduced gradient, in the layout of `weights.shards()`.

        Call it only within `on_gradient`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot return its gradients")

    def overflowed(self) -> bool:
        """True if the last non-finite norm was only an overflow of fp16's loss scale, which has been lowered."""
        return False

    def sync_buffers(self) -> None:
        """Makes the buffers equal on all ranks: averages BatchNorm's statistics, broadcasts the others from rank 0.

        Called on every rank before every evaluation and every save. If ranks diverge between these calls, the strategy
        synchronizes them here.
        """

    # -- checkpoints
    @abstractmethod
    def state(self) -> CanonicalState[Tensor | TensorShard]:
        """Returns this rank's parts of model and optimizer by parameter name, without a copy and without communication.

        A tensor is identical on every rank. Names that only other ranks have may be missing.
        """

    @abstractmethod
    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Restores the result of `state`, possibly of a different strategy; raises CheckpointError on any mismatch.

        Each rank reads only its own parts. With `partial` (initial weights, `ddpforge eval`), model tensors that the
        state lacks stay unchanged, and so does the optimizer if the state has no optimizer state.
        """

    def close(self) -> None:
        """Frees resources other than memory. Not called if training failed, because other ranks may be gone."""


@runtime_checkable
class SupportsMultiPass(Protocol):
    """Replica that supports multi-pass optimizers, see `MultiPassOptimizer`. Other replicas refuse them."""

    def perturb(self, optimizer: MultiPassOptimizer) -> Tensor:
        """Calls `optimizer.perturb` instead of an update, without clipping; otherwise does the same as `step`.

        Forward passes then use the moved weights. May wait for the device.
        """


@runtime_checkable
class AlternatesUpdates(Protocol):
    """Replica that supports alternating updates; the strategy's contract then has `optimizers = "several"`."""

    def select_update(self, name: str) -> AbstractContextManager[Any]:
        """Wraps the update `name`: only its parameters get gradients, and `step` updates only these."""
