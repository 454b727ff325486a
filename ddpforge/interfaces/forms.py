"""Describes batches, outputs and losses for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["described", "holds_text"]

_MOST = 6  # parts of a batch that are described


def holds_text(batch: Any) -> bool:
    """True if a batch contains text."""
    if isinstance(batch, Mapping):
        return any(holds_text(part) for part in batch.values())
    return isinstance(batch, str) or (isinstance(batch, list | tuple) and any(map(holds_text, batch)))


def described(value: Any) -> str:
    """Describes a batch, outputs or a loss for error messages: dtype and shape of tensors, type of other values."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{name} {described(part)}" for name, part in list(value.items())[:_MOST]]
        return f"a dict with {', '.join(parts)}{' …' * (len(value) > _MOST)}" if parts else "an empty dict"
    if isinstance(value, list | tuple):
        if value and all(isinstance(part, str) for part in value):
            return f"a {type(value).__name__} of {len(value)} text{'s' * (len(value) > 1)}"
        if len(value) > _MOST:
            return f"a {type(value).__name__} of {len(value)}, the first {described(value[0])}"
        return f"a {type(value).__name__} ({', '.join(map(described, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"a {type(value).__name__} with {', '.join(field.name for field in fields(value))}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
