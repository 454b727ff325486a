"""Forward passes of repeated blocks: recomputed in the backward pass, or compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from ddpforge.features.activation_checkpointing import checkpointed
from ddpforge.features.activation_offload import PassesOnHost, offloaded
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.blocks import check_blocks
from ddpforge.training.features import Feature
from ddpforge.training.stages import Built

__all__ = ["BlockForwards", "rework_blocks"]


class BlockForwards(Feature):
    """Activation checkpointing and compilation of blocks."""

    @staticmethod
    @override
    def rework(parts: Built, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        rework_blocks(blocks, parts.recipe.train)
        return model


def rework_blocks(blocks: Sequence[nn.Module], train: TrainSection) -> None:
    """Applies activation checkpointing and compilation to the blocks, as the recipe sets them.

    Replaces `forward` of each block in place: names and hooks do not change. Raises ValueError if there are no blocks,
    or if the settings exclude each other.
    """
    check_blocks(blocks, train)
    passes = PassesOnHost() if train.activation_offload else None
    for block in blocks:
        if train.activation_checkpointing:
            _recompute(block, train, passes)
            continue
        if train.compile_blocks:
            block.forward = torch.compile(block.forward, mode=train.compile)
        if passes:
            block.forward = torch.compiler.disable(offloaded(block, block.forward, passes))  # type: ignore[no-untyped-call]


def _recompute(block: nn.Module, train: TrainSection, passes: PassesOnHost | None) -> None:
    """Applies activation checkpointing and, if set, compilation to a block; raises ValueError if they conflict."""
    # Recomputing compiled code does not repeat its side effects, unless a graph break makes a part run in Python.
    # Buffers must not change twice: a block with buffers is compiled on its own, and recomputed from outside.
    names = [name for name, _ in block.named_buffers()]
    selective = train.activation_checkpointing == "selective"
    if train.compile == "off" or not (names or passes):
        block.forward = checkpointed(block, block.forward, selective=selective, passes=passes)
        if train.compile_blocks:
            block.forward = torch.compile(block.forward, mode=train.compile)
        return
    if names and train.compile != "default":
        raise ValueError(
            f'train.compile = "{train.compile}" replays CUDA graphs, in which train.activation_checkpointing cannot '
            f"restore buffers that forward changes, such as `{names[0]}` of {type(block).__name__}; set "
            'train.compile = "default", or remove train.activation_checkpointing'
        )
    if names and selective:
        raise ValueError(
            f'train.activation_checkpointing = "selective" cannot choose operations here: train.compile compiles '
            f"a {type(block).__name__} as a whole, because it has buffers such as `{names[0]}`; set "
            "train.activation_checkpointing = true, or remove train.compile"
        )
    inner = torch.compile(block.forward, mode=train.compile)
    block.forward = torch.compiler.disable(checkpointed(block, inner, passes=passes))  # type: ignore[no-untyped-call]
