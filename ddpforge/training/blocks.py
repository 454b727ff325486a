"""Repeated blocks of a model: the units of sharding, activation checkpointing and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from torch import nn

from ddpforge.recipe.schema import TrainSection

__all__ = ["check_blocks", "find_blocks"]


def find_blocks(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    """Returns the outermost modules of the named `classes` within the model, in its order.

    Without `classes`, it returns the members of the lists that the model's `repeated` attribute names. Without that
    attribute, it returns the members of `nn.ModuleList` and `nn.Sequential` that have children and share their class
    with another member; a model may have none. Raises ValueError for a class without such a module.
    """
    if classes:
        return _named(model, classes)
    lists = getattr(model, "repeated", None)
    if lists is None:
        return list(_alike(model))
    return [block for path in lists for block in model.get_submodule(path).children()]


def check_blocks(blocks: Sequence[nn.Module], train: TrainSection) -> None:
    """Raises ValueError if the recipe has settings for blocks, but there are no blocks."""
    for key in ("activation_checkpointing", "activation_offload", "compile_blocks"):
        if getattr(train, key) and not blocks:
            raise ValueError(f"train.{key} needs repeated blocks, and the model has none; name classes in train.blocks")


def _named(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    found = [block for child in model.children() for block in _outermost(child, set(classes))]
    names = {base.__name__ for block in found for base in type(block).__mro__}
    for wanted in classes:
        if wanted not in names:
            there = sorted({type(module).__name__ for child in model.children() for module in child.modules()})
            near = ", ".join(get_close_matches(wanted, there, n=3, cutoff=0))
            inside = " outside of the other blocks" if wanted in there else ""
            raise ValueError(f"train.blocks: the model has no {wanted}{inside}; similar names: {near}")
    return found


def _outermost(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    if classes & {base.__name__ for base in type(module).__mro__}:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, classes)


def _alike(module: nn.Module) -> Iterator[nn.Module]:
    """Yields list members that have children and share their class with another member."""
    for child in module.children():
        classes = Counter(type(member) for member in module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and classes[type(child)] > 1 and any(child.children()):
            yield child
        else:
            yield from _alike(child)
