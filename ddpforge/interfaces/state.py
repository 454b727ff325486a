"""A model and its optimizer by parameter name: what checkpoints hold, and what callbacks read and write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ddpforge.cores import ranks_here, share_of_cores
from ddpforge.interfaces.regions import Part, Region

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ddpforge.interfaces.world import Ranks

__all__ = ["CanonicalState", "PartWeights", "SavedTensor", "Weights", "WholeWeights", "read_all"]

_READERS = 4  # threads at most, of a rank

X = TypeVar("X")


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
        """Fills `target`, on any device, with a region of the tensor; it has the tensor's dtype, the region's size.

        Several threads may do so, see `read_all`.
        """


def read_all(reads: Iterable[tuple[SavedTensor, Region, Tensor]]) -> None:
    """Fills each target with a region of its tensor, several at a time where this rank has several cores.

    Raises the error of one that cannot be read; some of the others have been filled by then.
    """
    left = iter(list(reads))  # shared: whichever thread is free takes the next

    def fill() -> None:
        try:
            for saved, region, target in left:
                saved.read_into(region, target)
        except BaseException:
            deque(left, maxlen=0)  # what is left need not be read
            raise

    helpers = min(_READERS, share_of_cores(ranks_here())) - 1
    with ThreadPoolExecutor(max(1, helpers), "reader of a checkpoint") as pool:
        others = [pool.submit(fill) for _ in range(helpers)]
        fill()
        for other in others:
            other.result()


@dataclass
class CanonicalState(Generic[X]):
    """A model and its optimizer by parameter name, the same whatever strategy trained them.

    Names are those of the bare model (no wrapper prefixes). A tied parameter appears once, under the first of its
    names; `aliases` maps the other names to it. `optimizer` maps parameter name → key → tensor or plain number (a 0-d
    tensor counts as one); a parameter that never got a gradient is absent. `shared` belongs to no single parameter: an
    optimizer's own counters, what a strategy must remember. `numbers` survive a change of the optimizer: fp16's loss
    scale. Readers ignore keys that they do not know.

    When saving, values are whole tensors (identical on every rank) or `Part`s. When loading, they are `SavedTensor`s.
    """

    model: Mapping[str, X]
    optimizer: Mapping[str, Mapping[str, X | Tensor | int | float | bool | None]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, X | Tensor | int | float | bool | None] = field(default_factory=dict)
    numbers: Mapping[str, int | float] = field(default_factory=dict)


class Weights(ABC):
    """The weights by parameter name, as much of each as this rank holds; trained ones as the optimizer updates them.

    Whoever keeps something per weight (averages, say) keeps it in parts like these: `part.of(tensor)` is one.
    """

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """This rank's parts of what is trained, live and without gradients.

        Writing into them changes the weights; call `changed` afterwards.
        """

    @abstractmethod
    def frozen(self) -> Mapping[str, Part]:
        """The same of what is not trained: a momentum encoder, say."""

    def elsewhere(self) -> Collection[str]:
        """The names of tensors of the model, of which this rank holds nothing, and others do."""
        return ()

    def elements(self, name: str, region: Region) -> Tensor:
        """The elements of a parameter, trained or frozen, that are in `region`, in one dimension.

        For parameters of one shape, the region of one's part is good for the other: `elements(student, part.region)`
        is what a teacher's `part` follows. Raises ValueError for elements that this rank does not hold.
        """
        trained = self.parts()
        return (trained[name] if name in trained else self.frozen()[name]).elements(region)

    def changed(self) -> None:
        """Makes forward passes use what was written into the parts; called on every rank."""

    def observing(self) -> AbstractContextManager[Any]:
        """Wraps callbacks: what they write into the model's parameters, past these weights, counts or is refused."""
        return nullcontext()


class PartWeights(Weights):
    """The weights of a model, of each of which this rank holds what `part_of(name, parameter)` says."""

    def __init__(self, model: nn.Module, part_of: Callable[[str, Tensor], Part]) -> None:
        self._parts: dict[str, Part] = {}
        self._frozen: dict[str, Part] = {}
        for name, parameter in model.named_parameters():
            (self._parts if parameter.requires_grad else self._frozen)[name] = part_of(name, parameter.detach())

    def parts(self) -> Mapping[str, Part]:
        """Of every trained parameter."""
        return self._parts

    def frozen(self) -> Mapping[str, Part]:
        """Of every other parameter."""
        return self._frozen


class WholeWeights(PartWeights):
    """The weights of a model that each of `ranks` holds whole."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model, lambda _, tensor: Part.whole(tensor, replica=ranks.rank, replicas=ranks.size))
