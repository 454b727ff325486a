"""Renders messages with a chat template to tokens, and finds the tokens that are learnt."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from ddpforge_transformers.chat_forms import Message

__all__ = ["ChatRenderer", "Rendered", "Span", "template_of", "tokens_of_text"]

Span = tuple[int, int]
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """Text of a chat, and the spans of its characters that are learnt, in order."""

    text: str
    learnt: Sequence[Span]


@dataclass(frozen=True)
class ChatRenderer:
    """Renders chats with a template, and finds the characters that a model learns.

    A template with generation marks (`{% generation %}`) marks the text of assistants itself. For other templates, and
    for other roles than `assistant`, the span of a message is the difference of two renderings: of the messages before
    it, with the prompt for an answer if it is an assistant's, and of the messages up to it. Both must be a beginning of
    the whole text, otherwise the chat is refused. White space at the end of a span is not learnt.

    Args:
        tokenizer: Tokenizer of transformers.
        template: Text of the template; None: that of the tokenizer.
        train_on: Roles that are learnt.
        last_turn_only: Only the last message of these roles is learnt.
        options: Further variables of the template.
    """

    tokenizer: Any
    template: str | None = None
    train_on: tuple[str, ...] = ("assistant",)
    last_turn_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> Rendered:
        """Returns the text and its learnt spans; none of a message with `weight` 0 is learnt.

        Raises ValueError if the template refuses the messages, if no message has a role of `train_on`, and if the spans
        cannot be found.
        """
        mine = [number for number, message in enumerate(messages) if message["role"] in self.train_on]
        if not mine:
            raise ValueError(f"no message has a role that is learnt ({', '.join(self.train_on)})")
        given = [{key: value for key, value in one.items() if key != "weight"} for one in messages]
        learnt = [number for number in mine[-1:] if messages[number].get("weight", 1)]
        if not self.last_turn_only:
            learnt = [number for number in mine if messages[number].get("weight", 1)]
        if self.train_on == ("assistant",) and self._has_marks(tools):
            return self._by_marks(given, tools, mine, learnt)
        text, _ = self._render(given, tools)
        return Rendered(text, [self._span(given, tools, text, number) for number in learnt])

    def encode(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a chat, and True for each token that is learnt; raises ValueError as a call does."""
        return tokens_of_text(self.tokenizer, [self(messages, tools)])[0]

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Returns the text of messages and of the template's prompt for an answer; raises ValueError as a call does."""
        return self._render(list(messages), tools, answers=True)[0]

    def ends(self) -> list[int]:
        """Returns the special token with which the template ends an answer; none if it ends answers by text."""
        content = "ANSWER"
        text, _ = self._render([{"role": "user", "content": "x"}, {"role": "assistant", "content": content}], None)
        after = self.tokenizer(text.rpartition(content)[2], add_special_tokens=False)["input_ids"]
        return [token for token in after if token in self.tokenizer.added_tokens_decoder][:1]

    def _by_marks(self, messages: list[Message], tools: Any, mine: list[int], learnt: list[int]) -> Rendered:
        """Takes the spans from the template's generation marks, one for each message of an assistant."""
        text, spans = self._render(messages, tools, marks=True)
        if learnt == mine:
            return Rendered(text, spans)
        if len(spans) != len(mine):
            raise ValueError(
                f"the chat template has {len(spans)} generation marks for {len(mine)} messages of the assistant, so"
                " that `weight` and `last_turn_only` cannot select messages; use a template with one mark per message"
            )
        return Rendered(text, [spans[mine.index(number)] for number in learnt])

    def _span(self, messages: list[Message], tools: Any, text: str, number: int) -> Span:
        """Returns the span of a message, without white space at its end."""
        answers = messages[number]["role"] == "assistant"
        before = self._render(messages[:number], tools, answers=answers)[0] if number or answers else ""
        until = self._render(messages[: number + 1], tools)[0].rstrip()
        if not (until.startswith(before) and text.startswith(until)):
            raise ValueError(
                f"the chat template of {self._name} prints message {number} in another way if other messages follow, or"
                " after its prompt for an answer, so that its learnt tokens cannot be found; use a `template` with"
                " {% generation %} marks, or last_turn_only = true"
            )
        self._check_content(messages[number], until[len(before) :], number)
        return len(before), len(until)

    def _check_content(self, message: Message, printed: str, number: int) -> None:
        """Raises ValueError if the text printed for a message lacks its content, or the end of an assistant's turn."""
        content = message["content"].rpartition("</think>")[2].strip()  # templates omit or move reasoning
        if content not in printed:
            fault = "does not print the content of message {} as it is, so that its learnt tokens cannot be found"
        elif message["role"] == "assistant" and content and printed.endswith(content):
            fault = "prints nothing after message {}, so that the model would not learn to end its answers"
        else:
            return
        raise ValueError(
            f"the chat template of {self._name} {fault.format(number)}; use a `template` with {{% generation %}} marks"
        )

    def _render(
        self, messages: list[Message], tools: Any, *, answers: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Returns the template's text of messages and its marked spans; `answers` adds the prompt for an answer."""
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=answers,
                **(self.tokenizer.special_tokens_map | dict(self.options)),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise ValueError(f"the chat template of {self._name} refuses the messages: {error}") from error
        return texts[0], [span for span in spans[0] if span[0] < span[1]] if marks else []

    def _template(self, tools: Any) -> str:
        if self.template is not None:
            return self.template
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer {self._name} has no chat template; set `template` to a file with one")
        found: str = self.tokenizer.get_chat_template(tools=tools)
        return found

    def _has_marks(self, tools: Any) -> bool:
        return _MARK.search(self._template(tools)) is not None

    @cached_property
    def _name(self) -> str:
        return str(self.tokenizer.name_or_path)


def template_of(file: Path) -> str:
    """Returns the text of a file with a chat template; raises ValueError if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"template: {file} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"template: {file} is empty")
    return text


def tokens_of_text(
    tokenizer: Any, texts: Sequence[Rendered], *, special: bool = False
) -> list[tuple[list[int], list[bool]]]:
    """Returns for each text its tokens, and True for each learnt token.

    `special`: with the tokens that the tokenizer adds at the begin and the end of a text, which are not learnt.

    A token is learnt if one of its characters is in a learnt span. Raises ValueError for a token that is only partly in
    a span, apart from white space, e.g. the space before a word.
    """
    found = tokenizer(
        [one.text for one in texts], add_special_tokens=special, return_offsets_mapping=True, verbose=False
    )
    return [
        (tokens, _learnt(one, offsets))
        for one, tokens, offsets in zip(texts, found["input_ids"], found["offset_mapping"], strict=True)
    ]


def _learnt(one: Rendered, offsets: Sequence[Span]) -> list[bool]:
    learnt = [False] * len(offsets)
    place = 0
    for start, end in one.learnt:
        while place and offsets[place - 1][1] > start:
            place -= 1
        while place < len(offsets) and offsets[place][1] <= start:
            place += 1
        while place < len(offsets) and offsets[place][0] < end:
            first, last = offsets[place]
            if first == last:  # added by the tokenizer
                place += 1
                continue
            outside = one.text[first:start] + one.text[max(end, first) : last]
            if outside.strip():
                raise ValueError(
                    f"the token {one.text[first:last]!r} is partly in learnt text and partly before or after it; "
                    "use a `template` with a special token or white space around the learnt text"
                )
            learnt[place] = True
            place += 1
    return learnt
