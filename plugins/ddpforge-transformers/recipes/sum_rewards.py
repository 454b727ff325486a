"""Reward of grpo.toml."""

from collections.abc import Sequence
from typing import Any


def is_right(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Returns 1 for a completion that is the answer, and nothing else; else 0."""
    return [float(one == right) for one, right in zip(completions, answer, strict=True)]
