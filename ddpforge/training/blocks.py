"""Repeated blocks of a model: the units of sharding, activation checkpointing and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import torch
from torch import nn

from ddpforge.recipe.schema import TrainSection
from ddpforge.training.activation_checkpointing import checkpointed

__all__ = ["check_blocks", "find_blocks", "rework_blocks"]


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
    for key in ("activation_checkpointing", "compile_blocks"):
        if getattr(train, key) and not blocks:
            raise ValueError(f"train.{key} needs repeated blocks, and the model has none; name classes in train.blocks")


def rework_blocks(blocks: Sequence[nn.Module], train: TrainSection) -> None:
    """Applies activation checkpointing and compilation to the blocks, as the recipe sets them.

    Replaces `forward` of each block in place: names and hooks do not change. Raises ValueError if there are no blocks,
    or if the settings exclude each other.
    """
    check_blocks(blocks, train)
    for block in blocks:
        if train.activation_checkpointing:
            _recompute(block, train)
        elif train.compile_blocks:
            block.forward = torch.compile(block.forward, mode=train.compile)


def _recompute(block: nn.Module, train: TrainSection) -> None:
    """Applies activation checkpointing and, if set, compilation to a block; raises ValueError if they conflict."""
    # Recomputing compiled code does not repeat its side effects, unless a graph break makes a part run in Python.
    # Buffers must not change twice: a block with buffers is compiled on its own, and recomputed from outside.
    names = [name for name, _ in block.named_buffers()]
    selective = train.activation_checkpointing == "selective"
    if train.compile == "off" or not names:
        block.forward = checkpointed(block, block.forward, selective=selective)
        if train.compile_blocks:
            block.forward = torch.compile(block.forward, mode=train.compile)
        return
    if train.compile != "default":
        raise ValueError(
            f'train.compile = "{train.compile}" replays CUDA graphs, in which train.activation_checkpointing cannot '
            f"restore buffers that forward changes, such as `{names[0]}` of {type(block).__name__}; set "
            'train.compile = "default", or remove train.activation_checkpointing'
        )
    if selective:
        raise ValueError(
            f'train.activation_checkpointing = "selective" cannot choose operations here: train.compile compiles '
            f"a {type(block).__name__} as a whole, because it has buffers such as `{names[0]}`; set "
            "train.activation_checkpointing = true, or remove train.compile"
        )
    inner = torch.compile(block.forward, mode=train.compile)
    block.forward = torch.compiler.disable(checkpointed(block, inner))  # type: ignore[no-untyped-call]


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
