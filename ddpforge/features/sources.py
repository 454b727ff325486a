"""Mixtures: several sources of training data as one dataset, and the order of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ddpforge.data.collating import collate_of
from ddpforge.data.fetching import is_stream
from ddpforge.data.pytree import merge
from ddpforge.errors import PluginError, UsageError
from ddpforge.features.mixture import MixtureSampler, Shares, cycle_of, tempered, weights_over_steps
from ddpforge.interfaces import Horizon, ShardedDataset, class_names_of
from ddpforge.interfaces.durations import Duration
from ddpforge.training.features import Assembled, Feature
from ddpforge.training.problems import Problems
from ddpforge.training.stages import MISSING, Chosen
from ddpforge.training.updates import batches_per_step

if TYPE_CHECKING:
    from ddpforge.recipe.schema import DataSection

__all__ = [
    "BatchedSources",
    "JoinedSources",
    "Mixtures",
    "ShardedSources",
    "Sources",
    "by_name",
    "check_source",
    "join_sources",
    "mixture_of",
]


class JoinedSources:
    """Several datasets as one, one after the other.

    Batches are made by `collate` of the first source that has its own; sources that fetch whole batches have none.
    Columns such as `lengths` are those of all sources together; any other attribute exists if all sources have the same
    value.
    """

    def __init__(self, sources: Mapping[str, Any], *, like: JoinedSources | None = None) -> None:
        """Joins the sources; `like` is a mixture with the same `collate`."""
        self.names, self._sources = tuple(sources), list(sources.values())
        self.sizes = [len(source) for source in self._sources]
        self._ends = np.cumsum(self.sizes)
        self.random = any(getattr(source, "random", True) for source in self._sources)
        self.forkable = all(getattr(source, "forkable", False) for source in self._sources)
        own = [one.collate for one in self._sources if hasattr(one, "collate") and not hasattr(one, "__getitems__")]
        self.keeps_places = True  # in micro-batches of training, see `source_of`
        self.collate: Callable[[Any], Any] | None = like.collate if like else next(iter(own), None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and the dataset of each source."""
        return zip(self.names, self._sources, strict=True)

    @property
    def class_names(self) -> list[str]:
        """Returns the names of the classes of all sources; a check compares them."""
        return max(map(class_names_of, self._sources), key=len)

    @property
    def input_names(self) -> list[str]:
        """Returns the names of the input columns of the first source that has them."""
        return next((list(found) for one in self._sources if (found := getattr(one, "input_names", []))), [])

    @property
    def begins(self) -> NDArray[np.int64]:
        """Returns the number of the first sample of each source."""
        found: NDArray[np.int64] = self._ends - np.array(self.sizes)
        return found

    def source_of(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Returns the number of the source of each sample."""
        found: NDArray[np.int64] = np.searchsorted(self._ends, ids, side="right")
        return found

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


class Sources(JoinedSources):
    """Map-style dataset of several map-style datasets.

    Samples are fetched one by one with `__getitem__`, so that the random numbers of a sample do not depend on the
    others of its batch. `set_epoch` of a source receives its own epoch.
    """

    def __init__(self, sources: Mapping[str, Any], *, like: JoinedSources | None = None) -> None:
        """Joins the sources; `like` is a mixture with the same `collate`."""
        super().__init__(sources, like=like)
        self._order: MixtureSampler | None = None
        self._epochs: dict[int, int] = {}  # that were set, by source

    def __getitem__(self, index: int) -> Any:
        source = int(self.source_of([index])[0])
        return self._sources[source][index - int(self.begins[source])]

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


class BatchedSources(Sources):
    """Sources that all fetch whole batches without random numbers, so that samples need not be fetched one by one."""

    def __init__(self, sources: Mapping[str, Any], *, like: JoinedSources | None = None) -> None:
        """Joins the sources; `like` has no effect."""
        super().__init__(sources)
        self.collate = _unchanged  # of `__getitems__`

    def __getitems__(self, ids: list[int]) -> Any:
        """Returns a batch: that of each source, as it makes it alone, merged in the order of `ids`."""
        sources, batches, rows = self.source_of(ids), [], []
        for number in np.unique(sources).tolist():
            source, here = self._sources[number], np.flatnonzero(sources == number)
            fetched = source.__getitems__((np.array(ids)[here] - self.begins[number]).tolist())
            batches.append(collate_of(source)(fetched))
            rows.append(here.tolist())
        if len(batches) == 1:
            return batches[0]
        try:
            return merge(batches, rows)
        except RuntimeError as error:
            raise PluginError(
                f"batches of the sources {', '.join(self.names)} cannot be joined: {error}",
                hints=["give all sources samples of one shape, or no `__getitems__` and one `collate` that pads"],
            ) from error

    @classmethod
    def fits(cls, sources: Mapping[str, Any]) -> bool:
        """True if all sources fetch whole batches, and none uses random numbers."""
        return all(hasattr(one, "__getitems__") and not getattr(one, "random", True) for one in sources.values())


def _unchanged(batch: Any) -> Any:
    return batch


class ShardedSources(JoinedSources):
    """Iterable dataset of several datasets in parts of known length, see `interfaces.ShardedDataset`."""

    @property
    def shard_sizes(self) -> list[int]:
        """Returns the number of samples in each part of all sources."""
        return [size for source in self._sources for size in source.shard_sizes]

    def __iter__(self) -> Iterator[Any]:
        for source in self._sources:
            yield from source


def _is_column(value: Any, samples: int) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and len(value) == samples


def by_name(data: Any) -> dict[str, Any]:
    """Returns the sources of a dataset by name; "" is a dataset that is a single source."""
    return dict(data.items()) if isinstance(data, JoinedSources) else {"": data}


def join_sources(sources: Mapping[str, Any]) -> Sources | ShardedSources:
    """Joins datasets that `check_source` accepts; raises UsageError if only some of them are in parts."""
    in_parts = [name for name, source in sources.items() if isinstance(source, ShardedDataset)]
    if not in_parts:
        return BatchedSources(sources) if BatchedSources.fits(sources) else Sources(sources)
    if other := next((name for name in sources if name not in in_parts), None):
        raise UsageError(
            f"[data.train.{in_parts[0]}] is an iterable dataset in parts and [data.train.{other}] a dataset with "
            "__getitem__: the sources of a mixture are of one kind",
            hints=["use datasets of one kind for all sources"],
            key=f"data.train.{other}",
        )
    return ShardedSources(sources)


def check_source(name: str, data: Any) -> None:
    """Raises UsageError for a stream without known parts, PluginError for other or empty objects."""
    if is_stream(data) and not isinstance(data, ShardedDataset):
        raise UsageError(
            f"[data.train.{name}] is one of several sources, but {type(data).__name__} is an iterable dataset without "
            "parts of known length, so that a resume would have to read it from the beginning",
            hints=[
                "use a dataset with __len__ and __getitem__, or in parts: ddpforge.interfaces.ShardedDataset",
                "or train on it alone: [data.train]",
            ],
            key=f"data.train.{name}",
        )
    if not isinstance(data, ShardedDataset) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise PluginError(
            f"{type(data).__name__} is not a dataset: it has neither __len__ and __getitem__ nor __iter__",
            hints=["see `ddpforge.interfaces.Data` for the methods of a dataset"],
        )
    if not len(data):
        raise PluginError(f"{type(data).__name__} is empty: it has no samples")


def mixture_of(
    section: DataSection, data: JoinedSources, *, seed: int, global_batch: int, batches_per_step: int = 1
) -> MixtureSampler:
    """Returns the order of the recipe's sources; raises UsageError for weights that are 0 for all sources.

    `batches_per_step`: number of global batches that a step of the run uses, each a step of the order.
    """
    batches = MixtureSampler(data.sizes, (), seed=seed, global_batch=global_batch).steps_per_epoch
    horizon = Horizon(None, math.ceil(batches / batches_per_step))
    weights = {
        name: _by_step(name, getattr(one, "weight", None), horizon, batches_per_step)
        for name, one in section.sources.items()
    }
    if not any(weights.values()):
        of_sizes = tempered(data.sizes, section.temperature or 1.0)
        stages = [Shares(0, cycle_of(of_sizes))]
    else:
        changes = weights_over_steps(weights)
        stages = [Shares(start, _cycle(start // batches_per_step, of_sources)) for start, of_sources in changes]
    order = MixtureSampler(data.sizes, stages, seed=seed, global_batch=global_batch)
    order.names = data.names
    if isinstance(data, Sources):
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


def _by_step(
    name: str, weight: float | Mapping[str, float] | None, horizon: Horizon, batches_per_step: int
) -> dict[int, float]:
    """Returns the weight of a source from each step of the order on; empty without a weight."""
    if not isinstance(weight, Mapping):
        return {} if weight is None else {0: weight}
    found: dict[int, float] = {}
    for text, value in weight.items():
        step = horizon.steps(Duration.parse(text))
        if step * batches_per_step in found:
            key = f"data.train.{name}.weight"
            raise UsageError(f"`{key}` has two weights from step {step} on", hints=["remove one"], key=key)
        found[step * batches_per_step] = value
    return found


class Mixtures(Feature):
    """Several sources of training data: joins them, orders their samples, and shows their epochs in rows."""

    def __init__(self, order: MixtureSampler, batches: int) -> None:
        """Prepares for the order of the sources; a step of the run is `batches` steps of it."""
        self._order, self._batches = order, batches

    @staticmethod
    def join(chosen: Chosen, data: dict[str, Any], problems: Problems) -> None:
        """Replaces the sources in `data` by one dataset; removes them if one cannot be used."""
        sources: dict[str, Any] = {}
        for name in chosen.recipe.data.sources:
            with problems.at("data", "train", name):
                check_source(name, source := data.pop(f"train.{name}", MISSING))
                sources[name] = source
        if sources.keys() == chosen.recipe.data.sources.keys():
            with problems.at("data", "train"):
                data["train"] = join_sources(sources)

    @staticmethod
    def order(chosen: Chosen, data: Any) -> MixtureSampler | None:
        """Returns the order of several sources by their weights."""
        if not isinstance(data, JoinedSources):
            return None
        return mixture_of(
            chosen.recipe.data,
            data,
            seed=chosen.recipe.train.seed,
            global_batch=chosen.recipe.train.global_batch,
            batches_per_step=batches_per_step(chosen.updates),
        )

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature if the training data has several sources."""
        order = run.parts.sampler
        return cls(order, batches_per_step(run.parts.updates)) if isinstance(order, MixtureSampler) else None

    @override
    def row(self, step: int) -> Mapping[str, float]:
        epochs = self._order.epochs_of_sources(step * self._batches)
        return {f"train/{name}/epochs": count for name, count in zip(self._order.names, epochs, strict=True)}
