"""Suggests changes of the recipe when memory is full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpforge.errors import OutOfMemory, says_memory_is_full

if TYPE_CHECKING:
    from ddpforge.interfaces import Contract, Weights
    from ddpforge.recipe import Recipe
    from ddpforge.training.contract import ParameterCount

__all__ = ["explain_oom", "state_bytes"]

_FP32 = 4


def explain_oom(error: BaseException, recipe: Recipe, data_ranks: int) -> BaseException:
    """Returns `error`; if it means that memory is full, an OutOfMemory with changes of the recipe that need less."""
    if not says_memory_is_full(error):
        return error
    words = str(error).partition(" See documentation")[0].strip().splitlines()
    said = words[0] if words else "there is none left"
    problem = OutOfMemory(f"memory is full: {said}", hints=list(_hints(recipe, data_ranks)))
    problem.__cause__ = error
    return problem


def state_bytes(contract: Contract, weights: Weights, size: ParameterCount) -> dict[str, int]:
    """Returns the bytes of weights and gradients that a rank always holds, by the strategy's contract.

    Trained weights and gradients have the dtype of the master weights, and frozen weights their own. Optimizer state is
    not included: it comes with the first step.
    """
    trained, frozen = (
        sum(part.tensor.numel() * part.tensor.element_size() for part in parts.values())
        for parts in (weights.shards(), weights.frozen())
    )
    mine = {"weights": trained + frozen, "gradients": trained}
    whole = {"weights": size.trainable * _FP32 + size.frozen_bytes, "gradients": size.trainable * _FP32}
    return {kind: mine[kind] if kind in contract.shards else bytes for kind, bytes in whole.items()}


def _hints(recipe: Recipe, data_ranks: int) -> Iterator[str]:
    """Yields ways to need less memory, the one with the best ratio of saving to cost first."""
    train, strategy = recipe.train, recipe.strategy
    micro, unit = train.per_pass(data_ranks), train.global_batch // (train.virtual_ranks or data_ranks)
    if smaller := next((size for size in range(micro // 2, 0, -1) if unit % size == 0), 0):
        yield f"set train.micro_batch = {smaller}: the global batch, and so the result, stays the same"
    if train.max_tokens and train.max_tokens > 1:
        yield f"set train.max_tokens = {train.max_tokens // 2}, if no sample is longer: the result stays the same"
    if train.eval_batch and train.eval_batch > 1:
        yield f"if memory was full in an evaluation, set train.eval_batch = {train.eval_batch // 2}"
    if train.activation_checkpointing is not True:
        yield "set train.activation_checkpointing = true: the same results, about a third more time"
    if train.compile == "off" and not train.activation_offload:
        yield "on a GPU, set train.activation_offload = true: activations wait in host memory"
    if strategy.use not in ("fsdp", "pipeline", "deepspeed"):
        yield 'set strategy.use = "fsdp": each rank holds its part of weights, gradients and optimizer state'
    if strategy.use == "fsdp" and not strategy.options.get("cpu_offload"):
        yield "use more ranks, or set strategy.cpu_offload = true, which is slow"
    if strategy.use == "deepspeed" and strategy.options.get("stage", 2) != 3:
        yield "set strategy.stage = 3: weights and gradients are sharded, too"
    if strategy.use == "deepspeed" and strategy.options.get("offload_optimizer", "none") == "none":
        yield 'use more ranks, or set strategy.offload_optimizer = "cpu", which is slow'
    if train.precision == "fp32":
        yield 'set train.precision = "bf16": activations take half'
