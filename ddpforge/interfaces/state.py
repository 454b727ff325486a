"""State of a model and its optimizer by parameter name, for checkpoints and callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ddpforge.interfaces.regions import Region, TensorShard
from ddpforge.local_world import cores_per_rank, local_world_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ddpforge.interfaces.world import Ranks

__all__ = ["PACKED", "CanonicalState", "FullWeights", "SavedTensor", "ShardedWeights", "Weights", "read_all"]

PACKED = "packed"  # the name of the tensor that replaces the `weight` of a quantized layer in checkpoints
_SMALL = 1 << 12  # bytes
_READERS = 4  # threads per rank, at most

X = TypeVar("X")


class SavedTensor(Protocol):
    """Tensor in a checkpoint; any region of it can be read when needed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype that the tensor was saved in."""

    def read(self) -> Tensor:
        """Reads the whole tensor, on the CPU."""

    def read_into(self, region: Region, target: Tensor) -> None:
        """Fills `target`, on any device, with a region of the tensor; `target` has its dtype and the region's size.

        Must be thread-safe, see `read_all`.
        """


def read_all(reads: Iterable[tuple[SavedTensor, Region, Tensor]]) -> None:
    """Fills each target with a region of its tensor, in parallel if this rank has several CPU cores.

    Raises the error of a failed read; some of the other targets are filled by then.
    """
    small: list[tuple[SavedTensor, Region, Tensor]] = []
    large: list[tuple[SavedTensor, Region, Tensor]] = []
    for each in reads:
        (small if each[2].nbytes <= _SMALL else large).append(each)
    left = iter(large)  # shared: a free thread takes the next one

    def fill(first: Iterable[tuple[SavedTensor, Region, Tensor]] = ()) -> None:
        try:
            for saved, region, target in chain(first, left):
                saved.read_into(region, target)
        except BaseException:
            deque(left, maxlen=0)  # skip the remaining reads
            raise

    helpers = min(_READERS, cores_per_rank(local_world_size())) - 1
    with ThreadPoolExecutor(max(1, helpers), "reader of a checkpoint") as pool:
        others = [pool.submit(fill) for _ in range(helpers)]
        fill(small)  # in one thread: Python would take longer to switch between threads than to read one of them
        for other in others:
            other.result()


@dataclass
class CanonicalState(Generic[X]):
    """State dict of a model and its optimizer by parameter name, independent of the strategy that trained them.

    Names are those of the bare model (no wrapper prefixes). Readers ignore unknown keys. When saving, values are whole
    tensors (identical on every rank) or `TensorShard`s. When loading, they are `SavedTensor`s.

    Attributes:
        model: Parameters and buffers. A tied parameter appears once, under the first of its names.
        optimizer: Parameter name → key → tensor or plain number (a 0-d tensor counts as a number). A parameter that
            never had a gradient is absent.
        aliases: The other names of tied parameters → the first name.
        extra_state: State of no single parameter: an optimizer's own counters, state of the strategy.
        scalars: State that is kept if the optimizer changes, such as fp16's loss scale.
    """

    model: Mapping[str, X]
    optimizer: Mapping[str, Mapping[str, X | Tensor | int | float | bool | None]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra_state: Mapping[str, X | Tensor | int | float | bool | None] = field(default_factory=dict)
    scalars: Mapping[str, int | float] = field(default_factory=dict)


class Weights(ABC):
    """Weights by parameter name: this rank's part of each. For trained weights, the tensors that the optimizer updates.

    A callback that stores a value for each weight, such as an average, stores it in equal parts: `part.of(tensor)`.
    """

    @abstractmethod
    def shards(self) -> Mapping[str, TensorShard]:
        """Returns this rank's parts of the trained weights, without a copy and without gradients.

        Writing into them changes the weights; call `mark_changed` afterwards.
        """

    @abstractmethod
    def frozen(self) -> Mapping[str, TensorShard]:
        """Returns this rank's parts of the weights that are not trained, e.g. of a momentum encoder."""

    def remote_names(self) -> Collection[str]:
        """Returns the names of model tensors that only other ranks hold."""
        return ()

    def elements(self, name: str, region: Region) -> Tensor:
        """Returns the elements of a parameter, trained or frozen, in `region`, flattened.

        The region of a part also applies to another parameter of the same shape. For example, with `part` of a teacher,
        `elements(student, part.region)` returns the corresponding elements of the student.

        Raises:
            ValueError: This rank does not hold all of these elements.
        """
        trained = self.shards()
        return (trained[name] if name in trained else self.frozen()[name]).elements(region)

    def mark_changed(self) -> None:
        """Makes forward passes use the values that were written into the parts; called on every rank."""

    def callback_guard(self) -> AbstractContextManager[Any]:
        """Wraps callbacks, so that values that they write into the model's parameters take effect or are refused."""
        return nullcontext()

    def whole_guard(self) -> AbstractContextManager[Any]:
        """Wraps code of a task that expects whole weights: refuses reads of parameters that this rank has in part."""
        return nullcontext()


class ShardedWeights(Weights):
    """Weights of a model; this rank holds the part `part_of(name, parameter)` of each."""

    def __init__(self, model: nn.Module, part_of: Callable[[str, Tensor], TensorShard]) -> None:
        self._parts: dict[str, TensorShard] = {}
        self._frozen: dict[str, TensorShard] = {}
        for name, parameter in model.named_parameters():
            (self._parts if parameter.requires_grad else self._frozen)[name] = part_of(name, parameter.detach())

    def shards(self) -> Mapping[str, TensorShard]:
        """Returns the parts of all trained parameters."""
        return self._parts

    def frozen(self) -> Mapping[str, TensorShard]:
        """Returns the parts of all other parameters."""
        return self._frozen


class FullWeights(ShardedWeights):
    """Weights of a model that every rank of `ranks` holds whole."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model, lambda _, tensor: TensorShard.whole(tensor, replica=ranks.rank, replicas=ranks.size))
