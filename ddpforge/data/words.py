"""Reads tokens as text, where the dataset that they come from can tell how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["reader_of"]


def reader_of(data: Any) -> Callable[[Sequence[int]], str] | None:
    """Finds what makes text of a dataset's tokens: `decode`, a tokenizer, an alphabet, or that they are bytes."""
    if callable(decode := getattr(data, "decode", None) or getattr(getattr(data, "tokenizer", None), "decode", None)):
        return lambda tokens: str(decode(list(tokens)))
    if alphabet := getattr(data, "alphabet", ""):
        return lambda tokens: "".join(alphabet[token] for token in tokens)
    if getattr(data, "level", None) == "bytes":
        return lambda tokens: bytes(tokens).decode("utf-8", errors="replace")
    return None
