"""Checks that the sources of a mixture can form one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ddpforge.builtin.tasks.forms import described
from ddpforge.data import fetch_some
from ddpforge.data.pytree import digest
from ddpforge.data.rng import isolated_rng
from ddpforge.data.sources import Sources, by_name
from ddpforge.errors import ForgeError, UsageError
from ddpforge.training.stages import Built

__all__ = ["check_sources"]


def check_sources(built: Built) -> Iterator[ForgeError]:
    """Yields an error for each source whose samples have another structure, or that makes other batches, than the rest.

    Fetches the first, the middle and the last sample of each source, in a loader process if the recipe has some. A
    sample that cannot be fetched is left to training.
    """
    data, workers = built.data.get("train"), built.recipe.data.workers
    if not isinstance(data, Sources):
        return
    fetching = {"seed": built.recipe.train.seed, "workers": 0 if workers == "auto" else workers}
    first: tuple[str, Any] | None = None
    for name, source in by_name(data).items():
        places = sorted({0, len(source) // 2, len(source) - 1})
        try:
            with isolated_rng():
                alone = [batch for _, batch in fetch_some(source, places, **fetching)]
        except Exception:
            return
        first = first or (name, alone[0])
        if _form(alone[0], data) != _form(first[1], data):
            yield UsageError(
                f"a sample of [data.train.{name}] is {described(alone[0])}, but one of [data.train.{first[0]}] is "
                f"{described(first[1])}, so they cannot be in one batch",
                hints=[
                    "give all sources samples of one structure: by their options, or by a dataset that changes them"
                ],
                key=f"data.train.{name}",
            )
        elif difference := _other_batches(Sources({name: source}, like=data), places, alone, fetching):
            ways = ["do the work that differs in `__getitem__`, and pad in `collate`"]
            if hasattr(source, "__getitems__"):
                ways.insert(0, "let `__getitem__` and `__getitems__` give the same samples")
            yield UsageError(
                f"[data.train.{name}]: the samples of several sources are fetched one by one and share one `collate`, "
                f"and {difference}",
                hints=["give the sources the same options for batches", *ways],
                key=f"data.train.{name}",
            )


def _other_batches(mixture: Sources, places: list[int], alone: list[Any], fetching: Mapping[str, Any]) -> str:
    """Describes how the mixture's batches of single samples differ from those of the source; empty if they do not."""
    try:
        with isolated_rng():
            together = [batch for _, batch in fetch_some(mixture, places, **fetching)]
    except Exception as error:
        return f"this fails with samples of this source: {type(error).__name__}: {error}"
    for place, own, shared in zip(places, alone, together, strict=True):
        if digest(own) != digest(shared):
            return f"the batch of sample {place} differs from the batch that this source makes alone"
    return ""


def _form(batch: Any, data: Sources) -> Any:
    """Returns the structure of a batch with one sample; with the sizes of tensors if these must be equal."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.ndim if data.collate else tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: _form(value, data) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_form(value, data) for value in batch]
    return type(batch)
