"""Describes the first batches of a recipe's data, as training or an evaluation receives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ddpforge.api import Chosen, MicroBatch, Problems, SingleRank, build, check_built, deal
from ddpforge.data.pytree import is_object
from ddpforge.errors import UsageError
from ddpforge.features.sources import JoinedSources
from ddpforge.interfaces import World, class_names_of

__all__ = ["BatchImages", "BatchSummary", "Leaf", "SplitBatches", "describe", "first_batches", "pictures_of"]

_LABELS = 20  # labels are counted if they have at most this number of different values
_TEXTS = 3  # samples that are shown as text
_PICTURES = 64  # pictures in a sheet
_SMALLEST = 4  # a picture has at least this width and height in pixels

Read = Callable[[Sequence[int]], str]
TextParts = Sequence[tuple[str, str]]  # kind ("learnt", "given" or "special") and text of each part of a sample


@dataclass(frozen=True)
class Leaf:
    """Tensor of a batch, or another leaf; statistics are None if they cannot be computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    nonfinite: int = 0
    counts: Mapping[int, int] = field(default_factory=dict)  # of labels
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class BatchSummary:
    """One batch: the input of a forward pass."""

    samples: int
    step_samples: int  # of the whole step
    leaves: Sequence[Leaf]
    sources: Mapping[str, int] = field(default_factory=dict)  # samples of each source, if there are several
    texts: Sequence[TextParts] = ()  # of the first samples, if the dataset has `text_parts`


@dataclass(frozen=True)
class SplitBatches:
    """The first batches of a set, and the functions of its dataset that read them, each None if it has none."""

    micros: Sequence[MicroBatch]
    read: Read | None  # text of tokens
    text_parts: Callable[[Any], Sequence[TextParts]] | None  # of each sample of a batch
    batch_images: Callable[[Any], tuple[Tensor, Sequence[str]]] | None  # of a batch, with labels
    mixture: JoinedSources | None  # the dataset, if it has several sources
    class_names: Sequence[str] = ()  # in the order of their numbers


@dataclass(frozen=True)
class BatchImages:
    """Images [N, 1 or 3, height, width] of a batch with unchanged values, and their labels if there are any."""

    images: Tensor
    labels: Sequence[str]


def first_batches(chosen: Chosen, problems: Problems, split: str, most: int) -> SplitBatches:
    """Returns the first batches of training, or of an evaluation set ("eval", "eval.NAME"), in one process.

    The model is not built. Raises UsageError for a set that the recipe lacks, and every error of the data.
    """
    known = ["train", *(f"eval.{name}" if name else "eval" for name in chosen.recipe.data.evaluations)]
    if split not in known:
        raise UsageError(f"the recipe has no [data.{split}]", hints=[f"it has {', '.join(known)}"])
    built = build(chosen, problems, with_model=False)
    check_built(built, problems)
    problems.raise_if_any()
    dealt = deal(
        built, World(global_ranks=SingleRank(), dp_ranks=SingleRank(), device=torch.device("cpu"), local_rank=0)
    )
    name = split.removeprefix("eval").removeprefix(".")
    source = dealt.training.training(0) if split == "train" else dealt.evaluation[name].evaluation()
    data = dealt.data[split]
    mixture = data if isinstance(data, JoinedSources) else None
    decode, text_parts, batch_images = (getattr(data, name, None) for name in ("decode", "text_parts", "batch_images"))
    classes = class_names_of(data) or dealt.names.classes
    return SplitBatches(list(islice(source, most)), decode, text_parts, batch_images, mixture, classes)


def describe(micro: MicroBatch, found: SplitBatches) -> BatchSummary:
    """Returns the shapes, values and texts of a batch, and how many of its samples come from each source."""
    texts = found.text_parts(micro.data)[:_TEXTS] if found.text_parts else ()
    leaves = [_leaf(name, leaf, None if texts else found.read) for name, leaf in _named(micro.data)]
    sources = {}
    if found.mixture:
        assert micro.places is not None
        numbers = found.mixture.source_of(micro.places).tolist()
        sources = {name: numbers.count(number) for number, name in enumerate(found.mixture.names)}
    return BatchSummary(micro.samples, micro.step_samples, leaves, sources, texts)


def _named(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its path of keys, fields and positions."""
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        items = zip(tree._fields, tree, strict=True)
    elif is_object(tree) and getattr(tree, "__dict__", None):
        items = [(key, value) for key, value in vars(tree).items() if not isinstance(value, type)]
    elif isinstance(tree, list | tuple) and any(isinstance(item, Tensor | Mapping | list | tuple) for item in tree):
        items = enumerate(tree)
    else:
        yield path or "batch", tree
        return
    for key, value in items:
        yield from _named(value, f"{path}.{key}" if path else f"{key}")


def _leaf(name: str, leaf: Any, read: Read | None) -> Leaf:
    if not isinstance(leaf, Tensor):
        texts = [str(item) for item in leaf[:_TEXTS]] if isinstance(leaf, list | tuple) else [str(leaf)]
        return Leaf(name, type(leaf).__name__, (len(leaf),) if hasattr(leaf, "__len__") else (), texts=texts)
    form = (name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
    if not leaf.numel() or leaf.is_complex():
        return Leaf(*form)
    values = leaf.double()
    finite = values[values.isfinite()]
    if not finite.numel():
        return Leaf(*form, nonfinite=leaf.numel())
    numbers = finite.min().item(), finite.max().item(), finite.mean().item()
    texts = _texts(leaf, read) if read is not None else []
    return Leaf(*form, *numbers, leaf.numel() - finite.numel(), {} if texts else _counts(leaf), texts)


def _counts(leaf: Tensor) -> dict[int, int]:
    """Counts each value if these are labels: integers with few different values. Otherwise returns an empty table."""
    if leaf.is_floating_point():
        return {}
    values, counts = torch.unique(leaf, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True)) if len(values) <= _LABELS else {}


def _texts(leaf: Tensor, read: Read) -> list[str]:
    """Returns the first sequences of tokens as text, without negative numbers, which are not tokens."""
    if leaf.is_floating_point() or leaf.dtype == torch.bool or leaf.ndim != 2:
        return []
    try:
        return [read([token for token in row if token >= 0]) for row in leaf[:_TEXTS].tolist()]
    except (IndexError, KeyError, OverflowError, ValueError):
        return []  # integers that are not tokens


# ---------------------------------------------------------------------------------------------- pictures
def pictures_of(micro: MicroBatch, found: SplitBatches) -> BatchImages | None:
    """Returns the first pictures in a batch, with labels or the names of their classes; None without any."""
    if found.batch_images is not None:
        drawn, names = found.batch_images(micro.data)
        return BatchImages(drawn[:_PICTURES], names[:_PICTURES]) if len(drawn) else None
    leaves = [leaf for _, leaf in _named(micro.data) if isinstance(leaf, Tensor)]
    images = next((leaf for leaf in leaves if _is_pictures(leaf)), None)
    if images is None:
        return None
    labels = next((one for one in leaves if one.ndim == 1 and len(one) == len(images)), torch.tensor([]))
    named = dict(enumerate(found.class_names)) if not labels.is_floating_point() else {}
    return BatchImages(images[:_PICTURES], [named.get(x, f"{x:g}") for x in labels[:_PICTURES].tolist()])


def _is_pictures(leaf: Tensor) -> bool:
    return leaf.ndim == 4 and leaf.shape[1] in (1, 3) and min(leaf.shape[2:]) >= _SMALLEST and len(leaf) > 0
