"""Helpers for tasks on sequences of tokens: reads batches and outputs of models, checks sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpforge.builtin.tasks.forms import one_tensor
from ddpforge.errors import UsageError, described

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["check_sizes", "lengths_of", "logits_of", "tokens_of"]


def tokens_of(batch: Any, task: str) -> tuple[Tensor, Tensor | None]:
    """Returns the tokens [B, T] of a batch, and the attention mask, which is None if there is no padding.

    A batch is tokens, a pair that begins with them, or a mapping with `input_ids` and optionally `attention_mask`, as
    models of transformers take it. Raises UsageError for any other batch.
    """
    from torch import Tensor

    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"], batch.get("attention_mask")
    tokens = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point():
        return tokens, None
    raise UsageError(
        f"task {task} takes tokens [B, T], a pair that begins with them, or {{input_ids, …}}; the data gives "
        f"{described(batch)}",
        hints=["return samples that begin with their tokens, int64 [T]"],
    )


def logits_of(model: nn.Module, tokens: Tensor, mask: Tensor | None, task: str) -> Tensor:
    """Calls the model on tokens; returns its output, or the `logits` of the output of a model of transformers."""
    outputs = model(tokens) if mask is None else model(input_ids=tokens, attention_mask=mask)
    return one_tensor(getattr(outputs, "logits", outputs), task)


def check_sizes(model: nn.Module, data: Any) -> None:
    """Raises ValueError if the data has more tokens or longer samples than the model takes (if both are known)."""
    config = getattr(model, "config", None)  # of a model of transformers
    for noun, has, names in (
        ("different tokens", getattr(data, "vocab_size", None), ("vocab_size", "vocab_size")),
        (
            "tokens per sample",
            getattr(data, "block_size", None) or getattr(data, "max_length", None),
            ("block_size", "max_position_embeddings"),
        ),
    ):
        mine, theirs = names
        takes = getattr(model, mine, None) if config is None else getattr(config, theirs, None)
        if has is not None and isinstance(takes, int) and has > takes:
            where = f"model.{mine}" if config is None else f"model.options.{theirs}"
            raise ValueError(f"the data has {has} {noun}, but the model takes {takes}; set {where} = {has}")


def lengths_of(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the number of tokens of each sample without padding, int64 [B]."""
    import torch

    if mask is not None:
        return mask.sum(dim=1)
    return torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
