"""Dataset of chats: messages rendered with a chat template; only the messages of chosen roles are learnt."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import transformers
from ddpforge.builtin.datasets.files import keep
from ddpforge.builtin.datasets.listing import LeftOut, files_below
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ddpforge_transformers.chat_forms import Chat, Form, Plain, read_chats
from ddpforge_transformers.chat_parts import Kind
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
from ddpforge_transformers.rows import Invalid, OnInvalid, Split, is_dataset, read_rows

__all__ = ["ChatData"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

Batch = dict[str, Tensor]
Encoded = tuple[list[int], list[bool]]  # tokens, and True for each that is learnt
_AT_ONCE = 1000  # chats per call of the tokenizer
_FORMAT = 2  # of the cache; raise it if tokens or learnt tokens of the same data change


class ChatData(Tokenized):
    """Dataset of chats in a .jsonl file, or in the .jsonl files of a folder: one chat per line.

    Also in a .json file with an array, in parquet files with one kind of file per folder, and in a dataset of Hugging
    Face: a folder of `save_to_disk`, or a name on the hub with `split`.

    A line has one of these forms; its keys show which, and all lines have the same:

    - `messages`: a list of {role, content}, with the roles system, developer, user, assistant and tool. Content is a
      text, or a list of parts {type = "text", text}. A message may have `weight` (0: not learnt), `tool_calls`,
      `tool_call_id`, `name` and `reasoning_content`. The line may have `tools`, a list of JSON schemas.
    - `prompt` and `completion`: two texts, which are used without a chat template, or two lists of messages. Only the
      completion is learnt.
    - ShareGPT: `conversations`, a list of {from, value}; optionally `system` and `tools`.
    - Alpaca: `instruction`, `output`, and optionally `input`, on a line of its own after the instruction, and `system`.

    All chats are rendered and tokenized when the dataset is built. A sample is {input_ids, labels}, int64 [T]; the
    labels of tokens that are not learnt are -100. A batch also has attention_mask, and is padded to its longest sample
    on the right. Chats without a learnt token are left out; their number is logged.

    If a template does not print the text, a tool call, the reasoning or the role of a learnt message, this is an error.
    Those of other messages, and tools, are counted in a warning.

    Raises ValueError for invalid lines, with file and line; for a template that refuses a chat, that does not print a
    learnt part of it, or in which the learnt tokens cannot be found; and if no token of any chat is learnt.
    """

    random = False
    forkable = True

    def __init__(
        self,
        *,
        path: Annotated[
            Path,
            Field(description="A file (.jsonl, .json, .parquet), a folder of them, or a dataset of Hugging Face."),
        ],
        tokenizer: TokenizerName,
        template: Annotated[
            Path | None, Field(description="File with a chat template (Jinja); absent: that of the tokenizer.")
        ] = None,
        template_options: Annotated[
            Mapping[str, Any], Field(description="Variables for the template, e.g. { enable_thinking = false }.")
        ] = {},
        form: Annotated[Form | None, Field(description="Form of all lines; absent: that of the first line.")] = None,
        train_on: Annotated[
            Sequence[Literal["system", "developer", "user", "assistant", "tool"]],
            Field(min_length=1, description="Roles of the learnt messages."),
        ] = ("assistant",),
        last_turn_only: Annotated[bool, Field(description="Only the last message of these roles is learnt.")] = False,
        max_length: Annotated[Length, Field(description="Maximum number of tokens of a sample.")] = 2048,
        truncation: Annotated[
            Literal["right", "left", "drop", "error"],
            Field(
                description='Longer chats: "right" cuts their end, "left" their begin, "drop" leaves them out, "error" '
                "refuses them."
            ),
        ] = "right",
        on_invalid: OnInvalid = "error",
        plain_content: Annotated[
            bool, Field(description="Control tokens inside content, e.g. <|im_end|>, are encoded as plain text.")
        ] = False,
        new_tokens: NewTokens = (),
        split: Split = None,
        index: Annotated[
            str | None, Field(description="Folder that caches the tokens; absent: tokenizes at every start.")
        ] = None,
    ) -> None:
        self.tokenizer, self.max_length = self._loaded(tokenizer), max_length
        add_tokens(self.tokenizer, new_tokens)
        self.vocab_size = len(self.tokenizer)
        self._pad = padding_of(self.tokenizer)
        if not self.tokenizer.is_fast:
            raise ValueError(f"the tokenizer {tokenizer} does not return the places of its tokens in the text")
        text = template_of(template) if template else None
        if len(set(train_on)) < len(train_on):
            raise ValueError(f"train_on names a role twice: {', '.join(train_on)}")
        if text is not None:  # exports and `ddpforge generate --chat` use it, too
            self.tokenizer.chat_template = text
        how = tuple(train_on), last_turn_only, template_options, plain_content
        self._render = ChatRenderer(self.tokenizer, text, *how)
        self._form, self._truncation, self._on_invalid = form, truncation, on_invalid
        self._notes: dict[str, str] = {}  # an example of each outcome
        self._warn_of_dates(text)
        files = [] if is_dataset(path, split) else _files(path)
        if index and not files:
            raise ValueError("index: the tokens of a dataset of Hugging Face are not cached; remove `index`")
        stored = keep(
            index, "chat", self._facts(files) if index else [], lambda: _stored(self._encoded(path, files, split))
        )
        self._counts, lengths, self._coded = _restored(stored)
        self._ends = np.cumsum(lengths)
        self._report(path)

    @property
    def _chat_renderer(self) -> ChatRenderer:
        return self._render

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Batch:
        end = self._ends[index]
        start = self._ends[index - 1] if index % len(self) else 0
        coded = torch.from_numpy(self._coded[start:end].astype(np.int64))
        tokens = coded >> 1
        return {"input_ids": tokens, "labels": tokens.where(coded & 1 == 1, IGNORED)}

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each sample, for `train.max_tokens`, samplers and packing."""
        return np.diff(self._ends, prepend=0)

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Returns {input_ids, attention_mask, labels}, int64 [B, T], padded on the right."""
        tokens = [sample["input_ids"].tolist() for sample in samples]
        return {
            "input_ids": padded(tokens, self._pad),
            "attention_mask": padded([[1] * len(one) for one in tokens], 0),
            "labels": padded([sample["labels"].tolist() for sample in samples], IGNORED),
        }

    # ------------------------------------------------------------------------------------------ while it is built
    def _loaded(self, name: str) -> Any:
        """Returns the tokenizer; raises UsageError or ValueError if there is none."""
        return load_tokenizer(name)

    def _chats(
        self, path: Path, files: list[Path], split: str | None
    ) -> Iterator[tuple[str, Chat | Plain | ValueError]]:
        """Yields the place and the content of each row, or the error of an invalid row."""
        return read_chats(read_rows(path, files, split), self._form)

    def _encoded(self, path: Path, files: list[Path], split: str | None) -> Iterator[Encoded | str]:
        """Yields tokens and learnt tokens of each sample, and each outcome of `_OUTCOMES` that a chat has."""
        lines, invalid = self._chats(path, files, split), Invalid(self._on_invalid)
        while rows := list(islice(lines, _AT_ONCE)):
            valid = []
            for where, one in rows:
                rendered = one if isinstance(one, ValueError) else self._rendered(one)
                if isinstance(rendered, ValueError):
                    invalid.take(where, rendered)
                    yield "invalid"
                else:
                    valid.append((where, one, rendered))
            for (where, _, rendered), encoded in zip(valid, self._tokens(valid), strict=True):
                if isinstance(encoded, ValueError):
                    invalid.take(where, encoded)
                    yield "invalid"
                    continue
                for kind, what in rendered.lost.items():
                    self._notes.setdefault(kind, f"{what}, {where}")
                    yield kind
                if rendered.control is not None:
                    self._notes.setdefault("control", f"{rendered.control}, {where}")
                    yield "control"
                yield from self._cut(where, encoded, rendered)
        self._notes["invalid"] = invalid.reasons()

    def _cut(self, where: str, encoded: Encoded, rendered: Rendered) -> Iterator[Encoded | str]:
        """Yields the sample, cut to `max_length`, or what became of it."""
        tokens, learnt = encoded
        if len(tokens) > self.max_length:
            if self._truncation == "error":
                raise ValueError(
                    f"{where} has {len(tokens)} tokens, more than max_length = {self.max_length}; raise it, or"
                    ' set truncation to "right", "left" or "drop"'
                )
            yield "long" if self._truncation == "drop" else "cut"
            if self._truncation == "drop":
                return
            kept = slice(self.max_length) if self._truncation == "right" else slice(-self.max_length, None)
            tokens, learnt = tokens[kept], learnt[kept]
        if any(learnt[1:]):  # nothing predicts the first token
            yield tokens, learnt
        else:
            yield "empty"

    def _tokens(self, rows: Sequence[tuple[str, Any, Rendered]]) -> list[Encoded | ValueError]:
        """Returns the tokens of chats, which a template rendered, and of plain texts, all in their order."""
        found: dict[int, Encoded | ValueError] = {}
        for kind in (Chat, Plain):
            mine = [number for number, (_, one, _) in enumerate(rows) if isinstance(one, kind)]
            if not mine:
                continue
            texts = [rows[number][2] for number in mine]
            try:
                encoded: list[Any] = list(tokens_of_text(self.tokenizer, texts, special=kind is Plain))
            except ValueError:  # again one by one, for the place
                encoded = [self._alone(one, kind is Plain) for one in texts]
            found |= dict(zip(mine, encoded, strict=True))
        return [
            self._ended(one) if isinstance(rows[number][1], Plain) and not isinstance(one, ValueError) else one
            for number, one in sorted(found.items())
        ]

    def _rendered(self, one: Chat | Plain) -> Rendered | ValueError:
        if isinstance(one, Plain):
            text = one.prompt + one.completion
            return Rendered(text, [(len(one.prompt), len(text))])
        try:
            return self._render(one.messages, one.tools)
        except ValueError as error:
            return error

    def _alone(self, text: Rendered, special: bool) -> Encoded | ValueError:
        try:
            return tokens_of_text(self.tokenizer, [text], special=special)[0]
        except ValueError as error:
            return error

    def _ended(self, encoded: Encoded) -> Encoded:
        """Returns a plain sample with an end-of-text token, which is learnt."""
        (tokens, learnt), end = encoded, self.tokenizer.eos_token_id
        if end is None:
            return encoded
        if tokens[-1:] == [end]:
            return tokens, [*learnt[:-1], True]
        return [*tokens, end], [*learnt, True]

    def _report(self, path: Path) -> None:
        """Logs how many chats were cut or left out; raises ValueError if no sample is left."""
        counts = dict(zip(_OUTCOMES, self._counts, strict=True))
        chats = len(self) + counts["long"] + counts["empty"] + counts["invalid"]
        if not len(self):
            invalid = f", {counts['invalid']} are invalid: {self._note('invalid')}" if counts["invalid"] else ""
            raise ValueError(
                f"{path}: no token of its {chats} chats is learnt; {counts['long']} are longer than max_length ="
                f" {self.max_length}, {counts['empty']} have no learnt token within it{invalid}; learnt roles:"
                f" {', '.join(self._render.train_on)}"
            )
        side = "end" if self._truncation == "right" else "begin"
        acts = "act as such; plain_content = true encodes them as plain text"
        outcomes: dict[str, str] = {
            "invalid": "were left out, because they are invalid: {}",
            "cut": f"were cut at the {side}, to max_length = {self.max_length}",
            "long": f"were left out: they are longer than max_length = {self.max_length}",
            "empty": "were left out: none of their tokens is learnt",
            **{kind: f"have {name} that the chat template does not print ({{}})" for kind, name in _LOST.items()},
            "control": "have control tokens in their content ({}), which "
            + ("are encoded as plain text" if self._render.plain_content else acts),
        }
        for outcome, what in outcomes.items():
            if counts[outcome]:
                log.warning("%s: %d of %d chats %s", path, counts[outcome], chats, what.format(self._note(outcome)))

    def _note(self, outcome: str) -> str:
        found = self._notes.get(outcome)
        return found if found and outcome == "invalid" else f"e.g. {found}" if found else "from the cache"

    def _warn_of_dates(self, text: str | None) -> None:
        """Logs a warning if the template may print the date: on another day, a resumed run would see other tokens."""
        template = text if text is not None else self.tokenizer.chat_template
        if "strftime_now" in str(template) and "date_string" not in self._render.options:
            log.warning(
                "the chat template may print today's date; for the same tokens on every day set template_options ="
                ' { date_string = "26 Jul 2024" }'
            )

    def _facts(self, files: list[Path]) -> list[Any]:
        """Returns all that the tokens depend on, for the name of the cache."""
        one = self._render
        return [
            _FORMAT,
            [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
            hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            json.dumps([self.tokenizer.chat_template, self.tokenizer.special_tokens_map], default=str),
            [one.template, dict(one.options), one.train_on, one.last_turn_only, one.plain_content],
            [self._form, self.max_length, self._truncation, self._on_invalid, transformers.__version__],
        ]


_LOST: dict[Kind, str] = {  # of messages that are not learnt
    "content": "texts",
    "tool_calls": "tool calls",
    "tools": "tools",
    "reasoning": "reasoning",
    "role": "roles",
}
_OUTCOMES = ("cut", "long", "empty", "invalid", *_LOST, "control")


def _stored(encoded: Iterator[Encoded | str]) -> NDArray[np.int64]:
    """Returns all samples as one array: counts, number of samples, their lengths, and 2 * token + learnt of each."""
    counts, lengths, coded = dict.fromkeys(_OUTCOMES, 0), [], []
    for one in encoded:
        if isinstance(one, str):
            counts[one] += 1
            continue
        tokens, learnt = one
        lengths.append(len(tokens))
        coded.append(np.array(tokens, dtype=np.int32) * 2 + np.array(learnt, dtype=np.int32))
    head = np.array([*counts.values(), len(lengths), *lengths], dtype=np.int32)
    return np.concatenate([head, *coded])  # int32: tokens are below 2**24


def _restored(stored: NDArray[Any]) -> tuple[list[int], NDArray[np.int64], NDArray[Any]]:
    first = len(_OUTCOMES)
    begin = first + 1 + int(stored[first])
    return stored[:first].tolist(), stored[first + 1 : begin].astype(np.int64), stored[begin:]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for suffix in (".jsonl", ".json", ".parquet"):
        left = LeftOut(path)
        if files := files_below(path, (suffix,), left=left):
            left.warn()
            return files
    raise ValueError(f"the folder {path} contains no .jsonl files, nor .json or .parquet")
