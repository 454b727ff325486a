"""Reads the number in an answer: the reward of grpo.toml, and the measure of score.py."""

import re
from collections.abc import Sequence
from typing import Any


def last_number(text: str) -> int | None:
    """Returns the last whole number in a text, or None."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def is_right(completions: Sequence[Any], answer: Sequence[int], **columns: Any) -> list[float]:
    """Returns 1 for a completion whose last number is the answer, else 0."""
    said = [last_number(one[0]["content"]) for one in completions]
    return [float(number == right) for number, right in zip(said, answer, strict=True)]
