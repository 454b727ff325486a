"""Dataset of prompts for `grpo` and `rloo`: the model answers them itself, and functions reward the answers."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ddpforge_transformers.chat_forms import Message, check_only_text, parse_messages
from ddpforge_transformers.chat_rendering import ChatRenderer, template_of
from ddpforge_transformers.data import (
    Length,
    NewTokens,
    Tokenized,
    TokenizerName,
    add_tokens,
    load_tokenizer,
    padding_of,
)
from ddpforge_transformers.rows import Invalid, OnInvalid, Row, Split, is_dataset, read_rows

__all__ = ["Prompt", "PromptData"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")
_GIVEN = ("prompts", "completions", "completion_ids")  # arguments of rewards that no column may replace


class Prompt(NamedTuple):
    """Tokens of a prompt, the prompt as the file has it, and the other columns of its line."""

    tokens: list[int]
    prompt: str | list[Message]
    columns: Row


class _TooLongError(ValueError):
    """Error of a prompt that `truncation` refuses, although it is valid."""


class PromptData(Tokenized):
    """Dataset with a prompt per line, for tasks that generate the answers: `grpo` and `rloo`.

    A line has `prompt`, a text or a list of messages {role, content}, and any other columns, which the rewards receive.
    A text is used without a chat template. Messages are rendered by the template with its prompt for an answer; they
    may have `tools`. All lines have the same columns.

    A sample is a prompt with all its generations. It has a seed for them, which depends on the recipe's seed, the epoch
    and the place in the file, so that generations do not depend on ranks and batches. A batch is {prompt_ids,
    attention_mask}, int64 [B, T], padded on the left, `seed`, int64 [B], and `prompts`, a list of B objects {prompt,
    columns}.

    Raises ValueError for invalid lines, with file and line.
    """

    forkable = True

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="A file (.jsonl, .json, .parquet), or a dataset of Hugging Face.")],
        tokenizer: TokenizerName,
        template: Annotated[
            Path | None, Field(description="File with a chat template (Jinja); absent: that of the tokenizer.")
        ] = None,
        template_options: Annotated[
            Mapping[str, Any], Field(description="Variables for the template, e.g. { enable_thinking = false }.")
        ] = {},
        max_length: Annotated[Length, Field(description="Maximum number of tokens of a prompt.")] = 512,
        truncation: Annotated[
            Literal["drop", "error"], Field(description='Longer prompts: "drop" leaves them out, "error" refuses them.')
        ] = "drop",
        on_invalid: OnInvalid = "error",
        new_tokens: NewTokens = (),
        split: Split = None,
    ) -> None:
        self.tokenizer, self.max_length, self._truncation = load_tokenizer(tokenizer), max_length, truncation
        add_tokens(self.tokenizer, new_tokens)
        self.vocab_size, self.pad_token = len(self.tokenizer), padding_of(self.tokenizer)
        text = template_of(template) if template else None
        if text is not None:  # exports and `ddpforge generate --chat` use it, too
            self.tokenizer.chat_template = text
        self._render = ChatRenderer(self.tokenizer, text, options=template_options)
        self._samples: list[Prompt] = []
        self._first: tuple[str, Row] | None = None  # the place and the columns of the first valid line
        invalid, long = Invalid(on_invalid), 0
        for where, row in read_rows(path, [] if is_dataset(path, split) else [path], split):
            try:
                if isinstance(row, ValueError):
                    raise row
                found = self._prompt(where, row)
            except _TooLongError:
                raise
            except ValueError as error:
                invalid.take(where, error)
                continue
            long += found is None
            self._samples += [] if found is None else [found]
        self._report(path, invalid, long)

    def _report(self, path: Path, invalid: Invalid, long: int) -> None:
        """Logs how many prompts were left out; raises ValueError if none is left."""
        reasons = f"{invalid.number} are invalid: {invalid.reasons()}" if invalid.number else ""
        too_long = f"{long} have more than max_length = {self.max_length} tokens" if long else ""
        if not self._samples:
            raise ValueError(f"{path}: no prompt is left; {'; '.join(filter(None, (too_long, reasons)))}")
        for what in filter(None, (reasons, too_long)):
            log.warning("%s: of its prompts, %s; they are left out", path, what)

    @property
    def _chat_renderer(self) -> ChatRenderer:
        return self._render

    @property
    def columns(self) -> list[str]:
        """Names of the columns that rewards receive."""
        return list(self._samples[0].columns)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer: that of the chat template for messages, and the end-of-text token."""
        end = self.tokenizer.eos_token_id
        return self.end_tokens if isinstance(self._samples[0].prompt, list) else [] if end is None else [end]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Prompt, int]:
        return self._samples[index], int(torch.randint(2**62, ()))

    def __deepcopy__(self, memo: object) -> "PromptData":
        """Returns self: nothing changes a dataset, and a task that is copied holds it."""
        return self

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each prompt."""
        return np.array([len(sample.tokens) for sample in self._samples])

    def collate(self, samples: Sequence[tuple[Prompt, int]]) -> dict[str, Any]:
        """Returns a batch, see the class."""
        longest = max(len(one.tokens) for one, _ in samples)
        rows = [([0] * (longest - len(one.tokens)), one.tokens) for one, _ in samples]
        return {
            "prompt_ids": torch.tensor([[self.pad_token] * len(free) + tokens for free, tokens in rows]),
            "attention_mask": torch.tensor([free + [1] * len(tokens) for free, tokens in rows]),
            "seed": torch.tensor([seed for _, seed in samples]),
            "prompts": [{"prompt": one.prompt, "columns": one.columns} for one, _ in samples],
        }

    def text_parts(self, batch: Mapping[str, Tensor]) -> list[list[tuple[str, str]]]:
        """Returns the text of each prompt, for `ddpforge data show`."""
        rows = zip(batch["prompt_ids"], batch["attention_mask"].bool(), strict=True)
        return [[("given", self.tokenizer.decode(ids[mask], skip_special_tokens=False))] for ids, mask in rows]

    # ------------------------------------------------------------------------------------------ while it is built
    def _prompt(self, where: str, row: Row) -> Prompt | None:
        """Returns a line's prompt; None if it is too long. Raises ValueError with the place."""
        try:
            self._check(where, row)
            prompt = row["prompt"]
            if isinstance(prompt, str):
                tokens = self.encode(prompt)
            else:
                messages = parse_messages(prompt, "prompt")
                if messages[-1]["role"] == "assistant":
                    raise ValueError("the prompt ends with a message of the assistant: the model writes the answer")
                text = self._render.prompt(messages, row.get("tools"))
                tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if not tokens:
                raise ValueError("the prompt has no tokens: the model needs a text to continue")
        except ValueError as error:
            raise ValueError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
        if len(tokens) > self.max_length:
            if self._truncation == "error":
                raise _TooLongError(
                    f"{where} has {len(tokens)} tokens, more than max_length = {self.max_length}; raise it, or set"
                    ' truncation = "drop"'
                )
            return None
        return Prompt(tokens, prompt, {key: value for key, value in row.items() if key != "prompt"})

    def _check(self, where: str, row: Row) -> None:
        """Raises ValueError for a line without a prompt, with a reserved column, or of another form than the first."""
        if "prompt" not in row:
            has = ", ".join(f'"{key}"' for key in row) or "none"
            near = next((key for key in ("messages", "question", "instruction", "text") if key in row), None)
            raise ValueError(f'lacks "prompt"; it has the keys {has}{f"; rename {near} to prompt" if near else ""}')
        check_only_text(row, where)
        if taken := [key for key in _GIVEN if key in row]:
            raise ValueError(f'"{taken[0]}" is an argument of rewards; give this column another name')
        if not isinstance(row["prompt"], str | list):
            raise ValueError(f'"prompt" is a {type(row["prompt"]).__name__}: expected a text or a list of messages')
        place, first = self._first = self._first or (where, row)
        if type(first["prompt"]) is not type(row["prompt"]):
            raise ValueError(f"its prompt is {_form(row)}, but that of {place} is {_form(first)}; expected one form")
        if other := sorted(first.keys() ^ row.keys()):
            has, lacks = (place, "it") if other[0] in first else ("it", place)
            raise ValueError(f'{has} has "{other[0]}", and {lacks} lacks it: expected the same columns in all lines')


def _form(row: Row) -> str:
    return "a text" if isinstance(row["prompt"], str) else "a list of messages"
