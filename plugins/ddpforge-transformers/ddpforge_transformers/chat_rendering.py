"""Renders messages with a chat template to tokens, and finds the tokens that are learnt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ddpforge_transformers.chat_forms import IMAGE, Message
from ddpforge_transformers.chat_learnt import RenderedChat, first_of
from ddpforge_transformers.chat_parts import Kind, in_parts, with_same_arguments
from ddpforge_transformers.chat_template import ChatTemplate, Span, chat_template

__all__ = ["ChatRenderer", "Rendered", "Span", "template_of", "tokens_of_text"]

_ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
# Families whose answers end where the next turn begins: a text in the template, and the tokens of these turns.
_NEXT_TURNS = {"[gMASK]": ("<|user|>", "<|observation|>")}
_PRIVATE = 0xF0000  # characters that stand for control tokens in content while a template is rendered


@dataclass(frozen=True)
class Rendered:
    """Text of a chat, and the spans of its characters that are learnt, in order.

    Control tokens in the spans `plain` are encoded as text. `lost` has the kinds of given parts that are not in the
    text, each with an example; `control` is a control token in content, None if there is none.
    """

    text: str
    learnt: Sequence[Span]
    plain: Sequence[Span] = ()
    lost: Mapping[Kind, str] = field(default_factory=dict)
    control: str | None = None


@dataclass(frozen=True)
class ChatRenderer:
    """Renders chats with a template, and finds the characters that a model learns.

    A template with generation marks (`{% generation %}`) marks the text of assistants itself. For other templates, and
    for other roles than `assistant`, the span of an answer is the difference of two renderings: of the messages before
    it with the prompt for an answer, and of the messages up to it. If the template prints an answer in another way when
    messages follow, the span is found in the whole text: after the begin of that prompt, up to the end token. Of other
    roles the message's text with its end token is learnt. White space at the end of a span is not learnt.

    Each chat is also rendered with a stamp in place of each of its parts. A part whose stamp is
    not in this rendering is not printed: an error for a learnt part, and noted in `Rendered.lost` for a given one.

    Args:
        tokenizer: Tokenizer of transformers.
        template: Text of the template; None: that of the tokenizer.
        train_on: Roles that are learnt.
        last_turn_only: Only the last message of these roles is learnt.
        options: Further variables of the template.
        plain_content: Control tokens in content are encoded as text.
    """

    tokenizer: Any
    template: str | None = None
    train_on: tuple[str, ...] = ("assistant",)
    last_turn_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    plain_content: bool = False
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for options that the template does not read, and for a template that is not Jinja."""
        texts = self._templates()
        known = set().union(*(self._compiled(text).variables for text in texts)) if texts else set()
        for key in self.options:
            if key in _ALWAYS_GIVEN:
                raise ValueError(f"template_options.{key} cannot be set: it comes from the data")
            if texts and key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known)) or 'none'}"
                raise ValueError(f"template_options: the chat template of {self.name} has no variable {key}; {hint}")

    def __call__(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> Rendered:
        """Returns the text and its learnt spans; none of a message with `weight` 0 is learnt.

        Raises ValueError if the template refuses the messages, if no message has a role of `train_on`, if the spans
        cannot be found, and if the template does not print a learnt part of the messages.
        """
        mine = [number for number, message in enumerate(messages) if message["role"] in self.train_on]
        if not mine:
            raise ValueError(f"no message has a role that is learnt ({', '.join(self.train_on)})")
        learnt = [
            number for number in (mine[-1:] if self.last_turn_only else mine) if messages[number].get("weight", 1)
        ]
        chat = RenderedChat(self, messages, tools)
        spans = chat.learnt_spans(learnt)
        lost = chat.lost(spans)
        text, plain, moved = self._with_control_tokens(chat.text, [one for each in spans.values() for one in each])
        return Rendered(text, moved, plain, lost, chat.control)

    def encode(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a chat, and True for each token that is learnt; raises ValueError as a call does."""
        return tokens_of_text(self.tokenizer, [self(messages, tools)])[0]

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Returns the text of messages and of the template's prompt for an answer; raises ValueError as a call does."""
        return self.render(list(messages), tools, answers=True)[0]

    def ends(self) -> list[int]:
        """Returns the special token with which the template ends an answer; none if it ends answers by text."""
        if turns := self.next_turns(None):
            return [int(self.tokenizer.convert_tokens_to_ids(token)) for token in turns]
        content = "ANSWER"
        text, _ = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": content}], None)
        after = self.tokenizer(text.rpartition(content)[2], add_special_tokens=False)["input_ids"]
        return [token for token in after if token in self.tokenizer.added_tokens_decoder][:1]

    # ------------------------------------------------------------------------------------------ the template
    def render(self, messages: Sequence[Message], tools: Any, *, answers: bool = False) -> tuple[str, list[Span]]:
        """Returns the template's text of messages and its marked spans; `answers` adds the prompt for an answer."""
        template = self._compiled(self._template(tools))
        given = messages
        if any(IMAGE in one["content"] for one in messages) or self._in_parts(template):
            given = [in_parts(one) for one in messages]
        try:
            return template.render(
                given, tools, answers=answers, options=self.tokenizer.special_tokens_map | dict(self.options)
            )
        except ValueError as error:
            raise ValueError(f"the chat template of {self.name} refuses the messages: {error}") from error

    def has_marks(self, tools: Any) -> bool:
        """Returns whether the template marks learnt text."""
        return self._compiled(self._template(tools)).has_marks

    def next_turns(self, tools: Any) -> tuple[str, ...]:
        """Returns the tokens of turns with which answers end, if the template prints no end of its own."""
        text = self._template(tools)
        found = next((turns for name, turns in _NEXT_TURNS.items() if name in text), ())
        return tuple(token for token in found if token in self.special)

    def end_token(self, tools: Any) -> str | None:
        """Returns the text of the special token with which the template ends an answer; None if it ends by text."""
        found: str | None = self.once(("end", tools is None), lambda: self._end_token(tools))
        return found

    def _end_token(self, tools: Any) -> str | None:
        try:
            text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}], tools)[0]
        except ValueError:
            return None
        found = first_of(text.rpartition("ANSWER")[2], self.special)
        return None if found is None else found[1]

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Returns the texts of the special tokens, longest first."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(sorted({token.content for token in added if token.special}, key=len, reverse=True))

    def argument_form(self, messages: Sequence[Message], tools: Any) -> Literal["object", "text"] | None:
        """Returns the form of arguments that the template prints once and as JSON; None for any, or if it prints none.

        The API of OpenAI has texts of JSON, which templates with `tojson` would encode twice.
        """
        found: Literal["object", "text"] | None = self.once(
            ("arguments", tools is None), lambda: self._argument_form(messages, tools)
        )
        return found

    def _argument_form(self, messages: Sequence[Message], tools: Any) -> Literal["object", "text"] | None:
        last = next(number for number, one in enumerate(messages) if one.get("tool_calls"))
        fits: list[Literal["object", "text"]] = []
        for form, arguments in (("object", {"zqkeyqz": "zqvalueqz"}), ("text", '{"zqkeyqz": "zqvalueqz"}')):
            given = [with_same_arguments(one, arguments) for one in messages[: last + 1]]
            try:
                text = self.render(given, tools)[0]
            except ValueError:
                continue
            whole = "zqkeyqz" in text and "zqvalueqz" in text
            if whole and '\\"zqkeyqz' not in text and "'zqkeyqz'" not in text:
                fits.append(form)  # type: ignore[arg-type]
        return fits[0] if len(fits) == 1 else None

    def _in_parts(self, template: ChatTemplate) -> bool:
        """Returns whether the template reads content only as a list of parts, as those of vision models do."""

        def find() -> bool:
            found = []
            for content in ("zqtextqz", [{"type": "text", "text": "zqtextqz"}]):
                try:
                    text, _ = template.render(
                        [{"role": "user", "content": content}],
                        None,
                        answers=False,
                        options=self.tokenizer.special_tokens_map | dict(self.options),
                    )
                except ValueError:
                    text = ""
                found.append("zqtextqz" in text and "'zqtextqz'" not in text)
            return found == [False, True]

        return bool(self.once(("parts", id(template)), find))

    def _template(self, tools: Any) -> str:
        if self.template is not None:
            return self.template
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer {self.name} has no chat template; set `template` to a file with one")
        found: str = self.tokenizer.get_chat_template(tools=tools)
        return found

    def _templates(self) -> list[str]:
        if self.template is not None:
            return [self.template]
        found = self.tokenizer.chat_template
        return list(found.values()) if isinstance(found, dict) else [found] if found else []

    def _compiled(self, text: str) -> ChatTemplate:
        try:
            return chat_template(text)
        except ValueError as error:
            place = "" if self.template is None else "`template`, "
            raise ValueError(f"the chat template of {self.name} cannot be used: {place}{error}") from error

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """Returns what `find` returned the first time for this key: facts of the template."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    @cached_property
    def name(self) -> str:
        """Name or folder of the tokenizer."""
        return str(self.tokenizer.name_or_path)

    # ------------------------------------------------------------------------------------------ control tokens
    def without_control_tokens(self, messages: Sequence[Message]) -> tuple[list[Message], str | None]:
        """Returns messages with a private character for each control token in content, and one of these tokens.

        Without `plain_content` the messages do not change.
        """
        found = next((one for one in self.special for message in messages if one in message["content"]), None)
        if found is None or not self.plain_content:
            return list(messages), found
        changed = []
        for message in messages:
            content = message["content"]
            for number, token in enumerate(self.special):
                content = content.replace(token, chr(_PRIVATE + number))
            changed.append({**message, "content": content})
        return changed, found

    def _with_control_tokens(self, text: str, spans: Sequence[Span]) -> tuple[str, list[Span], list[Span]]:
        """Returns the text with control tokens for private characters, their spans, and the moved `spans`."""
        if not self.plain_content:
            return text, [], list(spans)
        parts, plain, begins, length = [], [], [], 0
        for letter in text:
            begins.append(length)
            number = ord(letter) - _PRIVATE
            if 0 <= number < len(self.special):
                plain.append((length, length + len(self.special[number])))
                letter = self.special[number]
            parts.append(letter)
            length += len(letter)
        begins.append(length)
        return "".join(parts), plain, [(begins[start], begins[end]) for start, end in spans]


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
    rows = []
    for one, tokens, offsets in zip(texts, found["input_ids"], found["offset_mapping"], strict=True):
        if one.plain:
            tokens, offsets = _as_text(tokenizer, one, tokens, offsets)
        rows.append((tokens, _learnt(one, offsets)))
    return rows


def _as_text(
    tokenizer: Any, one: Rendered, tokens: Sequence[int], offsets: Sequence[Span]
) -> tuple[list[int], list[Span]]:
    """Returns the tokens of a text and their places, with those of plain text for control tokens in `one.plain`."""
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    begins = {start for start, _ in one.plain}
    ids: list[int] = []
    places: list[Span] = []
    for token, (first, last) in zip(tokens, offsets, strict=True):
        if token not in control or not any(first <= begin < last for begin in begins):
            ids.append(token)
            places.append((first, last))
            continue
        found = tokenizer(
            one.text[first:last], add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True
        )
        ids += found["input_ids"]
        places += [(first + start, first + end) for start, end in found["offset_mapping"]]
    return ids, places


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
