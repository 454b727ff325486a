"""Checks that the sources of a mixture can form one batch, and that all datasets have the same names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddpforge.data import RankShare, fetch_some, seed_all
from ddpforge.data.batch_assignment import AssignmentTerms
from ddpforge.data.collating import collate_of
from ddpforge.data.pytree import digest
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import ForgeError, UsageError
from ddpforge.features.shard_reader import ShardReader
from ddpforge.features.sources import BatchedSources, JoinedSources, ShardedSources, by_name
from ddpforge.interfaces import ShardedDataset, SourceSampler
from ddpforge.interfaces.forms import described
from ddpforge.training.data_names import DataNames
from ddpforge.training.stages import Built
from ddpforge.training.updates import batches_per_step

__all__ = ["check_names", "check_sources", "warn_of_late_weights"]

log = logging.getLogger("ddpforge")

_SHOWN = 10  # names in a message


def check_sources(built: Built) -> Iterator[ForgeError]:
    """Yields an error for each source whose samples have another structure, or that makes other batches, than the rest.

    Fetches the first, the middle and the last sample of each source, in a loader process if the recipe has some. Reads
    the first sample of data in parts, if there are no loader processes: it may open files that these must not share. A
    sample that cannot be fetched is left to training.
    """
    data, workers = built.data.get("train"), built.recipe.data.workers
    if not isinstance(data, JoinedSources) or (isinstance(data, ShardedSources) and workers not in (0, "auto")):
        return
    fetching = {"seed": built.recipe.train.seed, "workers": 0 if workers == "auto" else workers}
    first: tuple[str, Any] | None = None
    for name, source in by_name(data).items():
        try:
            with isolated_rng():
                alone, together = _batches(name, source, data, fetching)
        except Exception:
            return
        first = first or (name, alone[0])
        if _form(alone[0], data) != _form(first[1], data):
            yield UsageError(
                f"a sample of [data.train.{name}] is {described(alone[0])}, but one of [data.train.{first[0]}] is "
                f"{described(first[1])}, so they cannot be in one batch",
                hints=["give all sources samples of one structure, by their options or by a dataset around one"],
                key=f"data.train.{name}",
            )
        elif isinstance(together, Exception) or list(map(digest, alone)) != list(map(digest, together)):
            yield _other_batches(name, source, together)


def warn_of_late_weights(built: Built) -> None:
    """Logs a warning for weights of sources that would change after the end of the run."""
    order, end = built.sampler, built.plan.horizon.total
    if end is not None and isinstance(order, SourceSampler):
        last = order.last_change // batches_per_step(built.updates)
        if last >= end > 0 and last:
            log.warning("data.train: the run ends at step %d, before weights change at step %d", end, last)


def check_names(built: Built) -> Iterator[ForgeError]:
    """Yields an error for each dataset with a class number, or an input column, of another name in the training data.

    A dataset may have only the first classes, and names that are not known are not compared.
    """
    for key, data in built.data.items():
        for source, one in by_name(data).items():
            own, place = DataNames.of(one), f"data.{key}.{source}" if source else f"data.{key}"
            if built.names.classes and list(own.classes) != list(built.names.classes[: len(own.classes)]):
                yield UsageError(
                    f"[{place}] {_difference('class', own.classes, built.names.classes)}, so its class numbers mean "
                    "other classes",
                    hints=[
                        "use the same classes in all data",
                        "or give its dataset an option `class_names`, and number the classes by it",
                    ],
                    key=place,
                )
            if built.names.inputs and own.inputs and list(own.inputs) != list(built.names.inputs):
                yield UsageError(
                    f"[{place}] {_difference('column', own.inputs, built.names.inputs)}, so its values would go to "
                    "other inputs of the model",
                    hints=[f"set the same `inputs` for all data, e.g. {json.dumps(list(built.names.inputs[:_SHOWN]))}"],
                    key=place,
                )


def _difference(noun: str, own: Sequence[str], names: Sequence[str]) -> str:
    """Describes how the classes or columns of a dataset differ from those of the training data."""
    known, mine = set(names), set(own)
    if unknown := [name for name in own if name not in known]:
        return f"has the {noun} {_listed(unknown)}, which the training data lacks; this has {_listed(names)}"
    if missing := [name for name in names if name not in mine]:
        return f"lacks the {noun} {_listed(missing)} of the training data; it has {_listed(own)}"
    return f"has the order {_listed(own)}, and the training data the order {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def _batches(
    name: str, source: Any, data: JoinedSources, fetching: dict[str, Any]
) -> tuple[list[Any], list[Any] | Exception]:
    """Returns batches of single samples as the source makes them alone, and as the mixture makes them, or its error."""
    if isinstance(source, ShardedDataset):
        return _batch_of_part(source, data, fetching["seed"])
    places = sorted({0, len(source) // 2, len(source) - 1})
    alone = [batch for _, batch in fetch_some(source, places, **fetching)]
    try:
        return alone, [batch for _, batch in fetch_some(type(data)({name: source}, like=data), places, **fetching)]
    except Exception as error:
        return alone, error


def _batch_of_part(source: ShardedDataset, data: JoinedSources, seed: int) -> tuple[list[Any], list[Any] | Exception]:
    """Returns a batch of the first sample, as the source makes it alone, and as the mixture makes it, or its error."""
    terms = AssignmentTerms(global_batch=1, share=RankShare(0, 1, 1), seed=seed, drop_last=False)
    ((_, sample),) = ShardReader(source, terms).read(0, 0, range(1))
    seed_all(seed)
    alone = [collate_of(source)([sample])]
    seed_all(seed)
    try:
        return alone, [collate_of(data)([sample])]
    except Exception as error:
        return alone, error


def _other_batches(name: str, source: Any, together: list[Any] | Exception) -> UsageError:
    why = "their batch of a sample differs from the batch that this source makes alone"
    if isinstance(together, Exception):
        why = f"this fails with samples of this source: {type(together).__name__}: {together}"
    ways = ["do the work that differs in `__getitem__`, and pad in `collate`"]
    if isinstance(source, ShardedDataset):
        ways = ["do the work that differs in `prepare`, and pad in `collate`"]
    elif hasattr(source, "__getitems__"):
        ways.insert(0, "let `__getitem__` and `__getitems__` give the same samples")
    return UsageError(
        f"[data.train.{name}]: several sources share one `collate`, for samples fetched one by one, and {why}",
        hints=["give the sources the same options for batches", *ways],
        key=f"data.train.{name}",
    )


def _form(batch: Any, data: JoinedSources) -> Any:
    """Returns the structure of a batch with one sample; with the sizes of tensors if these must be equal."""
    if isinstance(batch, Tensor):
        pads = data.collate and not isinstance(data, BatchedSources)
        return batch.dtype, batch.ndim if pads else tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: _form(value, data) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_form(value, data) for value in batch]
    return type(batch)
