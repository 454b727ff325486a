"""Datasets of texts: pairs and triplets for training, single texts for predictions."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from ddpforge_transformers.data import TokenizerName
from ddpforge_transformers.rows import Invalid, OnInvalid, Row
from numpy.typing import NDArray
from pydantic import Field

from ddpforge_embeddings.refusals import refused
from ddpforge_embeddings.text_rows import MaxLength, Prompt, TextTokens, checked_text, key_of_text, rows_of

__all__ = ["Pairs", "Texts", "Triplets"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

_Path = Annotated[Path, Field(description="A file: .jsonl, .json, .csv, .tsv or .parquet.")]
_Key = Annotated[str, Field(min_length=1)]


class _Encoded:
    """Texts with the tokens that the model `text_encoder` takes."""

    random = False
    forkable = True

    def __init__(self, tokenizer: str, max_length: int, prompts: Mapping[str, str]) -> None:
        self.tokens = TextTokens(tokenizer, max_length)
        self.tokenizer, self.vocab_size = self.tokens.tokenizer, self.tokens.vocab_size
        self.max_length = max_length
        self.prompts = {name: text for name, text in prompts.items() if text}
        for text in self.prompts.values():
            self.tokens.prompt_length(text)


class Pairs(_Encoded):
    """Dataset of an anchor (query) and a positive (document) per row, perhaps with hard negatives or a score.

    A batch is {query, documents, keys}: tokens of B anchors, and of B (1 + K) documents (the positive of each row, then
    its K negatives), and checksums of all texts, int64 [B, 2 + K]; with `score` also {score}, float32 [B].

    Raises ValueError for rows without these texts, or with different numbers of negatives, with file and line.
    """

    default_negatives: Sequence[str] = ()

    def __init__(
        self,
        *,
        path: _Path,
        tokenizer: TokenizerName,
        anchor: Annotated[_Key, Field(description="Key of the anchor.")] = "anchor",
        positive: Annotated[_Key, Field(description="Key of the positive.")] = "positive",
        negatives: Annotated[
            Sequence[_Key] | None, Field(description="Keys of hard negatives: texts or lists of texts; [] for none.")
        ] = None,
        max_negatives: Annotated[
            int | None, Field(ge=0, le=1000, description="Use only the first ones of each row; absent: all.")
        ] = None,
        score: Annotated[_Key | None, Field(description="Key of a similarity; absent: none.")] = None,
        max_score: Annotated[
            float, Field(gt=0, allow_inf_nan=False, description="Largest score; the divisor of scores.")
        ] = 1.0,
        query_prompt: Prompt = "",
        document_prompt: Prompt = "",
        max_length: MaxLength = 256,
        on_invalid: OnInvalid = "error",
    ) -> None:
        super().__init__(tokenizer, max_length, {"query": query_prompt, "document": document_prompt})
        self._prompts = (query_prompt, document_prompt)
        self._keys = (anchor, positive, *(self.default_negatives if negatives is None else negatives))
        if twice := [key for key in self._keys if self._keys.count(key) > 1]:
            raise ValueError(f"the key {twice[0]!r} is named twice: anchor, positive and negatives are different texts")
        self._most, self._score, self._max_score = max_negatives, score, max_score
        self.has_scores = score is not None
        self._texts: list[tuple[str, ...]] = []
        self._scores: list[float] = []
        self._read(path, Invalid(on_invalid))
        self.negatives = len(self._texts[0]) - 2

    def _read(self, path: Path, invalid: Invalid) -> None:
        first = ""
        for where, row in rows_of(path):
            try:
                if isinstance(row, ValueError):
                    raise row
                texts = self._row(where, row)
                score = self._score_of(where, row) if self._score else 0.0
                if self._texts and len(texts) != len(self._texts[0]):
                    raise ValueError(
                        f"{where} has {len(texts) - 2} negatives, but {first} has {len(self._texts[0]) - 2}; set"
                        " max_negatives to the smallest number"
                    )
            except ValueError as error:
                with refused():
                    invalid.take(where, error)
                continue
            first = first or where
            self._texts.append(texts)
            self._scores.append(score)
        if not self._texts:
            raise ValueError(f"{path}: no row is left: {invalid.reasons()}")
        if invalid.number:
            log.warning("%s: %d rows are invalid: %s", path, invalid.number, invalid.reasons())

    def _row(self, where: str, row: Row) -> tuple[str, ...]:
        """Returns the anchor, the positive and the negatives of a row."""
        anchor, positive, *others = self._keys
        texts = [checked_text(row, key, where) for key in (anchor, positive)]
        negatives = []
        for key in others:
            values = row.get(key) if isinstance(row.get(key), list) else [None]
            negatives += [checked_text(row, key, where, value) for value in values or []]
        if self._most is not None and len(negatives) < self._most:
            raise ValueError(f"{where} has {len(negatives)} negatives, fewer than max_negatives = {self._most}")
        if not self.has_scores and texts[1] in negatives[: self._most]:
            raise ValueError(f"{where}: the positive is also a negative")
        return (*texts, *negatives[: self._most])

    def _score_of(self, where: str, row: Row) -> float:
        value = row.get(str(self._score))
        try:
            score = math.nan if isinstance(value, bool) or value is None else float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise ValueError(f'{where}: "{self._score}" is {value!r:.40}: expected a number')
        if abs(score) > self._max_score:
            raise ValueError(
                f"{where}: the score {score:g} is not within ±{self._max_score:g}; a cosine is compared with score /"
                " max_score: set max_score to the largest score, e.g. 5"
            )
        return score / self._max_score

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[tuple[str, ...], float]:
        return self._texts[index], self._scores[index]

    def text_keys(self) -> NDArray[np.int64]:
        """Returns checksums of the texts of each sample, [samples, 2 + K], for the sampler `no_duplicates`."""
        return np.array([[key_of_text(text) for text in texts] for texts in self._texts], dtype=np.int64)

    def collate(self, samples: Sequence[tuple[tuple[str, ...], float]]) -> dict[str, Any]:
        """Returns the batch of samples; see the class."""
        rows = [texts for texts, _ in samples]
        documents = [text for texts in rows for text in texts[1:]]
        batch: dict[str, Any] = {
            "query": self.tokens([texts[0] for texts in rows], [self._prompts[0]] * len(rows)),
            "documents": self.tokens(documents, [self._prompts[1]] * len(documents)),
            "keys": torch.tensor([[key_of_text(text) for text in texts] for texts in rows]),
        }
        if self.has_scores:
            batch["score"] = torch.tensor([score for _, score in samples], dtype=torch.float32)
        return batch


class Triplets(Pairs):
    """Dataset of an anchor, a positive and a `negative` per row; `pairs` with `negatives = ["negative"]`."""

    default_negatives = ("negative",)


class Texts(_Encoded):
    """Dataset of single texts, for `ddpforge predict`: a batch is {texts}, tokens of B texts."""

    def __init__(
        self,
        *,
        path: _Path,
        tokenizer: TokenizerName,
        text: Annotated[_Key, Field(description="Key of the text.")] = "text",
        prompt: Prompt = "",
        max_length: MaxLength = 256,
    ) -> None:
        super().__init__(tokenizer, max_length, {"document": prompt})
        self._prompt, self._texts = prompt, []
        for where, row in rows_of(path):
            if isinstance(row, ValueError):
                raise row
            self._texts.append(checked_text(row, text, where))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        return self._texts[index]

    def collate(self, samples: Sequence[str]) -> dict[str, Any]:
        """Returns the tokens of the texts."""
        return {"texts": self.tokens(samples, [self._prompt] * len(samples))}
