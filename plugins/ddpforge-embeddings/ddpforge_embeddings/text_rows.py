"""Rows of texts from .jsonl, .json, .csv, .tsv and .parquet files, and their tokens."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import torch
from ddpforge.builtin.datasets.csv_rows import Rows
from ddpforge_transformers.data import Length, load_tokenizer, padded, padding_of
from ddpforge_transformers.rows import Row, read_rows
from pydantic import Field
from torch import Tensor

from ddpforge_embeddings.refusals import refused

__all__ = ["MaxLength", "Prompt", "TextTokens", "checked_text", "key_of_text", "rows_of"]

MaxLength = Annotated[Length, Field(description="Longer texts are cut, together with their prompt.")]
Prompt = Annotated[str, Field(description='Text before each of these texts, e.g. "query: ".')]
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def rows_of(path: Path) -> Iterator[tuple[str, Row | ValueError]]:
    """Yields the place, e.g. "FILE, line N", and the row, or its error; of a .csv, only texts.

    Raises ValueError or UsageError for a file that cannot be read or has no rows.
    """
    if path.is_dir():
        raise ValueError(f"path: {path} is a folder; name a file (.jsonl, .json, .csv, .tsv or .parquet)")
    if path.suffix.lower() not in _DELIMITERS:
        with refused():
            yield from read_rows(path, [path])
        return
    table = Rows.of(path, _DELIMITERS[path.suffix.lower()])
    number = 0
    for number, (line, cells) in enumerate(table.read([]), 1):  # noqa: B007  # 0 without rows
        yield f"{path}, line {line}", dict(zip(table.names, cells, strict=True))
    if not number:
        raise ValueError(f"{path} has no rows: expected a header with the names of columns, and a line per sample")


def checked_text(row: Row, key: str, where: str, value: Any = None) -> str:
    """Returns the text under `key`, or `value`; raises ValueError if it is absent, no text, or blank."""
    if value is None:
        if key not in row:
            raise ValueError(f'{where} lacks "{key}"; it has the keys {", ".join(map(repr, row)) or "none"}')
        value = row[key]
    if not isinstance(value, str):
        raise ValueError(f'{where}: "{key}" is {value!r:.60}, not a text')
    if not value.strip():
        raise ValueError(f'{where}: "{key}" is empty, and nothing can be learnt from it')
    return value


def key_of_text(text: str) -> int:
    """Returns a checksum of 64 bits, the same on every rank; equal texts have equal keys."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class TextTokens:
    """Tokens of texts with a prompt, as the model `text_encoder` takes them."""

    def __init__(self, tokenizer: str, max_length: int) -> None:
        with refused():
            self.tokenizer = load_tokenizer(tokenizer)
            self.pad_token = padding_of(self.tokenizer)
        self.max_length, self.vocab_size = max_length, len(self.tokenizer)
        self._prompts: dict[str, int] = {}

    def prompt_length(self, prompt: str) -> int:
        """Returns the number of tokens of a prompt with the special tokens before it, as in sentence-transformers.

        Raises ValueError if no token would be left for a text.
        """
        if not prompt:
            return 0
        if prompt not in self._prompts:
            tokens = self.tokenizer(prompt)["input_ids"]
            length = len(tokens) - (tokens[-1] in self.tokenizer.all_special_ids)
            if length + 2 > self.max_length:
                raise ValueError(
                    f"the prompt {prompt!r:.60} has {length} tokens, which leaves no place for a text in max_length ="
                    f" {self.max_length}"
                )
            self._prompts[prompt] = length
        return self._prompts[prompt]

    def __call__(self, texts: Sequence[str], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Returns `input_ids`, `attention_mask` [N, T], padded on the right, and `prompt_length` [N], all int64."""
        whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        tokens = self.tokenizer(whole, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        for text, mine in zip(whole, tokens, strict=True):
            if not mine:
                raise ValueError(f"the tokenizer makes no token of the text {text!r:.60}")
        return {
            "input_ids": padded(tokens, self.pad_token),
            "attention_mask": padded([[1] * len(mine) for mine in tokens], 0),
            "prompt_length": torch.tensor([self.prompt_length(prompt) for prompt in prompts]),
        }
