"""Datasets of answers that people compared or judged: pairs for `dpo`, `orpo` and `reward`, single ones for `kto`."""

import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from ddpforge import disk
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ddpforge_transformers.chat_forms import Message, check_only_text, parse_messages
from ddpforge_transformers.chat_rendering import ChatRenderer, Rendered, template_of, tokens_of_text
from ddpforge_transformers.data import (
    IGNORED,
    Length,
    NewTokens,
    Tokenized,
    TokenizerName,
    add_tokens,
    load_tokenizer,
    padded,
    padding_of,
)
from ddpforge_transformers.rows import Invalid, OnInvalid, Row, Split, is_dataset, read_rows

__all__ = ["FeedbackData", "PreferenceData", "reference_lines"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

Batch = dict[str, Tensor]

_REFERENCE = 2  # format of reference files

_Path = Annotated[Path, Field(description="A file (.jsonl, .json, .parquet), or a dataset of Hugging Face.")]
_Template = Annotated[
    Path | None, Field(description="File with a chat template (Jinja); absent: that of the tokenizer.")
]
_TemplateOptions = Annotated[
    Mapping[str, Any], Field(description="Variables for the template, e.g. { enable_thinking = false }.")
]
_PlainContent = Annotated[
    bool, Field(description="Control tokens inside content, e.g. <|im_end|>, are encoded as plain text.")
]
_MaxLength = Annotated[Length, Field(description="Maximum number of tokens of a prompt with an answer.")]
_Truncation = Annotated[
    Literal["drop", "right", "error"],
    Field(
        description='Longer samples: "drop" leaves them out, "right" cuts the end of the answer, "error" refuses them.'
    ),
]
_Reference = Annotated[
    Path | None,
    Field(
        description="File of log-probabilities under the reference model, which `python -m"
        " ddpforge_transformers.reference` writes; absent: the task computes them."
    ),
]


class Answer(NamedTuple):
    """Tokens of a prompt with an answer, and labels: -100 for the prompt, the tokens of the answer."""

    tokens: list[int]
    labels: list[int]


class _TooLongError(ValueError):
    """Error of a sample that `truncation` refuses, although it is valid."""


class _Answers(Tokenized):
    """Two answers per sample: [chosen, rejected], or for feedback [answer, another sample's answer]."""

    random = False
    forkable = True
    _columns: Mapping[str, torch.dtype] = {}  # further columns of a batch

    def __init__(
        self,
        *,
        path: _Path,
        tokenizer: TokenizerName,
        template: _Template = None,
        template_options: _TemplateOptions = {},
        max_length: _MaxLength = 2048,
        truncation: _Truncation = "drop",
        reference: _Reference = None,
        on_invalid: OnInvalid = "error",
        plain_content: _PlainContent = False,
        new_tokens: NewTokens = (),
        split: Split = None,
    ) -> None:
        self.tokenizer, self.max_length, self._truncation = load_tokenizer(tokenizer), max_length, truncation
        add_tokens(self.tokenizer, new_tokens)
        self.vocab_size = len(self.tokenizer)
        self.pad_token = padding_of(self.tokenizer)
        text = template_of(template) if template else None
        self._render = ChatRenderer(self.tokenizer, text, options=template_options, plain_content=plain_content)
        self._samples: list[tuple[Answer, Answer]] = []
        self._more: dict[str, list[Any]] = {name: [] for name in self._columns}
        self._invalid, self._lost = Invalid(on_invalid), Counter[str]()
        rows = []
        for where, row in read_rows(path, [] if is_dataset(path, split) else [path], split):
            if isinstance(row, ValueError):
                self._invalid.take(where, row)
            else:
                rows.append((where, row))
        unread = self._invalid.number
        if rows:
            self._take(rows)
        self._report(path, len(rows), unread)
        self._reference = None if reference is None else _reference_of(reference, self.marks())
        self.has_reference = reference is not None

    def _report(self, path: Path, rows: int, unread: int) -> None:
        """Logs how many samples were left out, and what templates do not print; raises ValueError if none is left."""
        invalid = f"{self._invalid.number} are invalid: {self._invalid.reasons()}" if self._invalid.number else ""
        if not rows and not unread:
            raise ValueError(f"{path} is empty: expected one JSON object per line")
        if not self._samples:
            raise ValueError(
                f"{path}: no sample is left: all {rows + unread} are longer than max_length = {self.max_length}, or the"
                f" template marks no answer as learnt{f'; {invalid}' if invalid else ''}"
            )
        if invalid:
            log.warning("%s: of %d samples, %s", path, rows + unread, invalid)
        if left := rows + unread - len(self._samples) - self._invalid.number:
            log.warning("%s: %d of %d samples are longer than max_length = %d", path, left, rows, self.max_length)
        for what, number in self._lost.items():
            log.warning("%s: %d answers %s", path, number, what)

    @property
    def _chat_renderer(self) -> ChatRenderer:
        return self._render

    def _take(self, rows: Sequence[tuple[str, Row]]) -> None:
        """Fills `_samples` and `_more`; raises ValueError with the place for an invalid row."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = {"answers": self._samples[index]}
        found |= {name: values[index] for name, values in self._more.items()}
        if self._reference is not None:
            found["reference_logps"] = self._reference[index]
        return found

    def marks(self) -> list[int]:
        """Returns a checksum of the tokens and labels of each sample; reference files have it."""
        return [zlib.crc32(json.dumps(sample).encode()) for sample in self._samples]

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of the longer answer of each sample, for `train.max_tokens`."""
        return np.array([max(len(one.tokens) for one in answers) for answers in self._samples])

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Returns {input_ids, attention_mask, labels}, int64 [B, 2, T], padded on the right, and further columns [B].

        Labels of the prompt and of padding are -100. With a reference file, `reference_logps` is float32 [B, 2].
        """
        answers = [answer for sample in samples for answer in sample["answers"]]
        columns = {
            "input_ids": padded([one.tokens for one in answers], self.pad_token),
            "attention_mask": padded([[1] * len(one.tokens) for one in answers], 0),
            "labels": padded([one.labels for one in answers], IGNORED),
        }
        batch = {name: tensor.view(len(samples), 2, -1) for name, tensor in columns.items()}
        for name, dtype in self._columns.items():
            batch[name] = torch.tensor([sample[name] for sample in samples], dtype=dtype)
        if self._reference is not None:
            batch["reference_logps"] = torch.tensor([sample["reference_logps"] for sample in samples])
        return batch

    # ------------------------------------------------------------------------------------------ while it is built
    def _encode(self, where: str, prompt: str | list[Message], answer: str | list[Message]) -> Answer | None:
        """Returns the tokens of a prompt with an answer; None if it is left out.

        Raises ValueError with the place for an answer that is too long and must not be.
        """
        try:
            if isinstance(prompt, str):
                assert isinstance(answer, str)
                text = prompt + answer
                tokens, learnt = tokens_of_text(
                    self.tokenizer, [Rendered(text, [(len(prompt), len(text))])], special=True
                )[0]
                if self.tokenizer.eos_token_id is not None and tokens[-1:] != [self.tokenizer.eos_token_id]:
                    tokens, learnt = [*tokens, self.tokenizer.eos_token_id], [*learnt, True]
            else:
                given = [message | {"weight": 0} for message in prompt]
                rendered = self._render([*given, *answer])
                self._lost.update(f"have {one} that the chat template does not print" for one in rendered.lost)
                if rendered.control is not None:
                    how = "are encoded as plain text" if self._render.plain_content else "act as such"
                    self._lost["have control tokens in their content, which " + how] += 1
                tokens, learnt = tokens_of_text(self.tokenizer, [rendered])[0]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        first = learnt.index(True) if True in learnt else len(tokens)
        if first == 0:
            raise ValueError(f"{where}: there is no token before the answer to predict it")
        labels = [token if mine else IGNORED for token, mine in zip(tokens, learnt, strict=True)]
        if len(tokens) <= self.max_length and first < len(tokens):
            return Answer(tokens, labels)
        if self._truncation == "error":
            raise _TooLongError(
                f"{where} has {len(tokens)} tokens, more than max_length = {self.max_length}; raise it, or set"
                ' truncation = "right" or "drop"'
            )
        if self._truncation == "right" and first < self.max_length:
            return Answer(tokens[: self.max_length], labels[: self.max_length])
        return None


class PreferenceData(_Answers):
    """Dataset with a chosen and a rejected answer per line.

    A line has `chosen` and `rejected`, and usually `prompt`. All are texts, which are used without a chat template and
    end with an end-of-text token; or all are lists of messages {role, content}, as in the dataset `chat`. Without
    `prompt`, the messages at the begin of both lists that are equal are the prompt. A number `margin` is kept for the
    task `reward`, if all lines have it.

    A sample is left out if one of its two answers is. Raises ValueError for invalid lines, with file and line.
    """

    def _take(self, rows: Sequence[tuple[str, Row]]) -> None:
        if has_margin := "margin" in rows[0][1]:
            self._columns, self._more = {"margin": torch.float32}, {"margin": []}
        for where, row in rows:
            try:
                pair = self._pair(where, row, has_margin)
            except _TooLongError:
                raise
            except ValueError as error:
                self._invalid.take(where, error)
                continue
            if pair is None:
                continue
            self._samples.append(pair)
            if has_margin:
                self._more["margin"].append(float(row["margin"]))

    def _pair(self, where: str, row: Row, has_margin: bool) -> tuple[Answer, Answer] | None:
        """Returns both answers of a row; None if one is left out."""
        _check_keys(row, where, ("chosen", "rejected"))
        margin = row.get("margin", 0)
        if ("margin" in row) != has_margin or type(margin) not in (int, float) or not math.isfinite(margin):
            raise ValueError(f'{where}: expected a finite number "margin" in all lines or in none')
        prompt, chosen, rejected = _pair(row, where)
        if chosen == rejected:
            self._lost["are both the chosen and the rejected one of their pair, which teaches nothing"] += 1
        better, worse = (self._encode(where, prompt, answer) for answer in (chosen, rejected))
        return None if better is None or worse is None else (better, worse)


class FeedbackData(_Answers):
    """Dataset with one answer per line, and whether it is desirable; for the task `kto`.

    A line has `prompt`, `completion` and `label` (true or false). Prompt and completion are two texts or two lists of
    messages, as in the dataset `preferences`. The task also needs answers that do not belong to their prompts: the
    second answer of a sample is its prompt with the completion of the sample before it.
    """

    _columns: Mapping[str, torch.dtype] = {"desirable": torch.bool}

    def _take(self, rows: Sequence[tuple[str, Row]]) -> None:
        if len(rows) < 2:
            raise ValueError(f"{rows[0][0]} is the only one: expected at least two samples")
        parsed: list[tuple[str, Any, Any, bool]] = []
        for where, row in rows:
            try:
                _check_keys(row, where, ("prompt", "completion", "label"))
                if not isinstance(row["label"], bool):
                    raise ValueError(f'{where}: "label" is {row["label"]!r}: expected true or false')
                both = {**row, "chosen": row["completion"], "rejected": row["completion"]}
                prompt, completion, _ = _pair(both, where)
                if parsed and type(prompt) is not type(parsed[0][1]):
                    raise ValueError(
                        f"{where}: it has {_form_of(prompt)}, but {parsed[0][0]} has {_form_of(parsed[0][1])}; expected"
                        " one form"
                    )
            except ValueError as error:
                self._invalid.take(where, error)
                continue
            parsed.append((where, prompt, completion, row["label"]))
        for number, (where, prompt, completion, label) in enumerate(parsed):
            try:
                answers = [self._encode(where, prompt, one) for one in (completion, parsed[number - 1][2])]
            except _TooLongError:
                raise
            except ValueError as error:
                self._invalid.take(where, error)
                continue
            if answers[0] is None or answers[1] is None:
                continue
            self._samples.append((answers[0], answers[1]))
            self._more["desirable"].append(label)


def _form_of(value: Any) -> str:
    return "a text" if isinstance(value, str) else "messages"


# ---------------------------------------------------------------------------------------------- lines
def _check_keys(row: Row, where: str, needed: tuple[str, ...]) -> None:
    missing = [key for key in needed if key not in row]
    if missing:
        has = ", ".join(f'"{key}"' for key in row) or "none"
        other = (
            "preferences" if "chosen" in row else "feedback" if "label" in row else "chat" if "messages" in row else ""
        )
        own = "preferences" if "chosen" in needed else "feedback"
        hint = f"; such lines are for the dataset {other}" if other not in ("", own) else ""
        raise ValueError(f'{where} lacks "{missing[0]}"; it has the keys {has}{hint}')
    check_only_text(row, where)


def _pair(row: Row, where: str) -> tuple[Any, Any, Any]:
    """Returns prompt, chosen and rejected, all texts or all messages."""
    chosen, rejected = row["chosen"], row["rejected"]
    try:
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(row.get("prompt"), str):
            for key, text in (("chosen", chosen), ("rejected", rejected)):
                if not text:
                    raise ValueError(f'"{key}" is empty')
            return row["prompt"], chosen, rejected
        if isinstance(chosen, list) and isinstance(rejected, list) and isinstance(row.get("prompt", []), list):
            return _messages(row, chosen, rejected)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    kinds = ", ".join(f'"{key}" is a {type(row.get(key)).__name__}' for key in ("prompt", "chosen", "rejected"))
    raise ValueError(f"{where}: {kinds}; expected three texts, or lists of messages")


def _messages(row: Row, chosen: list[Any], rejected: list[Any]) -> tuple[Any, Any, Any]:
    better, worse = parse_messages(chosen, "chosen"), parse_messages(rejected, "rejected")
    if "prompt" in row:
        prompt = parse_messages(row["prompt"], "prompt")
    else:
        alike = 0
        while alike < min(len(better), len(worse)) - 1 and better[alike] == worse[alike]:
            alike += 1
        if not alike:
            raise ValueError('"chosen" and "rejected" begin with different messages, and there is no "prompt"')
        prompt, better, worse = better[:alike], better[alike:], worse[alike:]
    for key, answer in (("chosen", better), ("rejected", worse)):
        if not any(message["role"] == "assistant" for message in answer):
            raise ValueError(f'"{key}" has no message of the role assistant')
    return prompt, better, worse


def reference_lines(logps: Iterable[list[float]], marks: Sequence[int]) -> Iterator[str]:
    """Yields the lines of a reference file: a head with a checksum, and one for each sample."""
    rows = [json.dumps({"logps": pair, "sample": mark}) + "\n" for pair, mark in zip(logps, marks, strict=True)]
    yield json.dumps({"reference": _REFERENCE, "checksum": _checksum("".join(rows))}) + "\n"
    yield from rows


def _checksum(text: str) -> str:
    return disk.xxh3(text.encode()).hexdigest()


def _reference_of(file: Path, marks: Sequence[int]) -> list[list[float]]:
    """Returns the log-probabilities [samples, 2] of a file.

    Raises ValueError for a file that is damaged, of an older version, of samples with other marks, or not finite.
    """
    again = "write it again with `python -m ddpforge_transformers.reference`"
    try:
        head, _, text = file.read_bytes().decode().partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; {again}") from error
    about = _object_of(head)
    if about.get("reference") != _REFERENCE:
        old = "logps" in about
        what = "of an older version, without a checksum" if old else "no reference file of this version, or damaged"
        raise ValueError(f"{file} is {what}; {again}")
    if about.get("checksum") != _checksum(text):
        raise ValueError(f"{file} is damaged: its lines are not as they were written; {again}")
    lines = text.splitlines()
    if len(lines) != len(marks):
        raise ValueError(f"{file} has {len(lines)} rows, but the data has {len(marks)} samples; {again}")
    found = []
    for number, (line, mine) in enumerate(zip(lines, marks, strict=True), 2):
        row = _object_of(line)
        if row.get("sample") != mine:
            raise ValueError(
                f"{file}, line {number} is of another sample: the data, the tokenizer, the template or max_length"
                f" changed; {again}"
            )
        if not all(map(math.isfinite, row["logps"])):
            raise ValueError(
                f"{file}, line {number}: the log-probabilities {row['logps']} are not finite: the reference model"
                " computes infinite or undefined values for this sample"
            )
        found.append(row["logps"])
    return found


def _object_of(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
