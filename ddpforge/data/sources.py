"""Several sources of training data as one map-style dataset, and the order of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpforge.builtin.samplers.mixture import MixtureSampler, Shares, cycle_of, tempered, weights_over_steps
from ddpforge.data.streams import is_stream
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import Horizon
from ddpforge.interfaces.durations import Duration

if TYPE_CHECKING:
    from ddpforge.recipe.schema import DataSection

__all__ = ["Sources", "by_name", "check_source", "mixture_of"]


class Sources:
    """Map-style dataset of several datasets, one after the other.

    Samples are fetched one by one with `__getitem__`, so that the random numbers of a sample do not depend on the
    others of its batch. Batches are made by `collate` of the first source that has its own; sources that fetch whole
    batches have none. Columns such as `lengths` are those of all sources together; any other attribute exists if all
    sources have the same value. `set_epoch` of a source receives its own epoch.
    """

    def __init__(self, sources: Mapping[str, Any], *, like: Sources | None = None) -> None:
        """Joins the sources; `like` is a mixture with the same `collate`."""
        self.names, self._sources = tuple(sources), list(sources.values())
        self.sizes = [len(source) for source in self._sources]
        self._ends = np.cumsum(self.sizes)
        self._order: MixtureSampler | None = None
        self._epochs: dict[int, int] = {}  # that were set, by source
        self.random = any(getattr(source, "random", True) for source in self._sources)
        self.forkable = all(getattr(source, "forkable", False) for source in self._sources)
        own = [one.collate for one in self._sources if hasattr(one, "collate") and not hasattr(one, "__getitems__")]
        self.collate: Callable[[Sequence[Any]], Any] | None = like.collate if like else next(iter(own), None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        source = int(self.source_of([index])[0])
        return self._sources[source][index - int(self._ends[source] - self.sizes[source])]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and the dataset of each source."""
        return zip(self.names, self._sources, strict=True)

    def source_of(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Returns the number of the source of each sample."""
        found: NDArray[np.int64] = np.searchsorted(self._ends, ids, side="right")
        return found

    def follow(self, order: MixtureSampler) -> None:
        """Makes `set_step` set the epochs of the sources in this order."""
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: `set_step` sets the epochs of the sources, which differ from those of the mixture."""

    def set_step(self, step: int) -> None:
        """Sets the training step in all sources, and the epoch in which each is at the first sample of the step."""
        epochs = (self._order.samples(step) // self.sizes).tolist() if self._order else [0] * len(self.names)
        for number, (source, epoch) in enumerate(zip(self._sources, epochs, strict=True)):
            if hasattr(source, "set_epoch") and self._epochs.get(number) != epoch:
                source.set_epoch(epoch)
                self._epochs[number] = epoch
            if hasattr(source, "set_step"):
                source.set_step(step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sources":  # while the object is unpickled
            raise AttributeError(name)
        found = [getattr(source, name) for source in self._sources]
        if not all(map(callable, found)):
            return self._together(name, found)
        return lambda *given: self._together(name, [one(*given) for one in found])

    def _together(self, name: str, found: Sequence[Any]) -> Any:
        """Returns the columns of all sources as one, or the value that all have; raises AttributeError for others."""
        if all(map(_is_column, found, self.sizes)):
            return np.concatenate([np.asarray(one) for one in found])
        if all(type(one) is type(found[0]) and bool(np.all(one == found[0])) for one in found):
            return found[0]
        raise AttributeError(f"the sources {', '.join(self.names)} have no common `{name}`")


def _is_column(value: Any, samples: int) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and len(value) == samples


def by_name(data: Any) -> dict[str, Any]:
    """Returns the sources of a dataset by name; "" is a dataset that is a single source."""
    return dict(data.items()) if isinstance(data, Sources) else {"": data}


def check_source(name: str, data: Any) -> None:
    """Raises UsageError for a stream, PluginError for an object that is no dataset or is empty."""
    if is_stream(data):
        raise UsageError(
            f"[data.train.{name}] is one of several sources, whose samples are fetched by number, but "
            f"{type(data).__name__} is an iterable dataset and yields samples in its own order",
            hints=["use a dataset with __len__ and __getitem__", "or train on it alone: [data.train]"],
            key=f"data.train.{name}",
        )
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise PluginError(
            f"{type(data).__name__} is not a dataset: it has neither __len__ and __getitem__ nor __iter__",
            hints=["see `ddpforge.interfaces.Data` for the methods of a dataset"],
        )
    if not len(data):
        raise PluginError(f"{type(data).__name__} is empty: it has no samples")


def mixture_of(section: DataSection, data: Sources, *, seed: int, global_batch: int) -> MixtureSampler:
    """Returns the order of the recipe's sources; raises UsageError for weights that are 0 for all sources."""
    one_stage = MixtureSampler(data.sizes, (), seed=seed, global_batch=global_batch)
    weights = {
        name: _by_step(name, getattr(one, "weight", None), one_stage.steps_per_epoch)
        for name, one in section.sources.items()
    }
    if not any(weights.values()):
        of_sizes = tempered(data.sizes, section.temperature or 1.0)
        stages = [Shares(0, cycle_of(of_sizes))]
    else:
        stages = [Shares(start, _cycle(start, of_sources)) for start, of_sources in weights_over_steps(weights)]
    order = MixtureSampler(data.sizes, stages, seed=seed, global_batch=global_batch)
    data.follow(order)
    return order


def _cycle(start: int, weights: Sequence[float]) -> tuple[int, ...]:
    if not any(weights):
        raise UsageError(
            f"from step {start} on, all sources have the weight 0",
            hints=["give one of them a weight"],
            key="data.train",
        )
    return cycle_of(weights)


def _by_step(name: str, weight: float | Mapping[str, float] | None, steps_per_epoch: int) -> dict[int, float]:
    """Returns the weight of a source from each step on; empty without a weight."""
    if not isinstance(weight, Mapping):
        return {} if weight is None else {0: weight}
    found: dict[int, float] = {}
    for text, value in weight.items():
        step = Horizon(None, steps_per_epoch).steps(Duration.parse(text))
        if step in found:
            key = f"data.train.{name}.weight"
            raise UsageError(f"`{key}` has two weights from step {step} on", hints=["remove one"], key=key)
        found[step] = value
    return found
