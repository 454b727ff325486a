"""Renders messages with a chat template to tokens, and finds the tokens that are learnt."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ddpforge_transformers.chat_forms import Message
from ddpforge_transformers.chat_parts import Kind, Part, Stamped, as_arguments, places, printed_as, stamped, unstamped
from ddpforge_transformers.chat_template import ChatTemplate, Span, chat_template

__all__ = ["ChatRenderer", "Rendered", "Span", "template_of", "tokens_of_text"]

_ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_TAGS = re.compile(r"</?[a-z_|]{1,30}>|\s")
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

    Each chat is also rendered with a stamp in place of each of its parts. What this rendering lacks, the template does
    not print: an error for a learnt part, and noted in `Rendered.lost` for a given one.

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
        """Raises ValueError for options that the template does not read, and for a template that is no Jinja."""
        texts = self._templates()
        known = set().union(*(self._compiled(text).variables for text in texts)) if texts else set()
        for key in self.options:
            if key in _ALWAYS_GIVEN:
                raise ValueError(f"template_options.{key} cannot be set: it comes from the data")
            if texts and key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known)) or 'none'}"
                raise ValueError(f"template_options: the chat template of {self._name} has no variable {key}; {hint}")

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
        chat = _Chat(self, messages, tools)
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
    def render(
        self, messages: Sequence[Message], tools: Any, *, answers: bool = False
    ) -> tuple[str, list[Span]]:
        """Returns the template's text of messages and its marked spans; `answers` adds the prompt for an answer."""
        template = self._compiled(self._template(tools))
        given = messages
        if self._in_parts(template):
            given = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        try:
            return template.render(
                given, tools, answers=answers, options=self.tokenizer.special_tokens_map | dict(self.options)
            )
        except ValueError as error:
            raise ValueError(f"the chat template of {self._name} refuses the messages: {error}") from error

    def has_marks(self, tools: Any) -> bool:
        """Returns whether the template marks what is learnt."""
        return self._compiled(self._template(tools)).has_marks

    def next_turns(self, tools: Any) -> tuple[str, ...]:
        """Returns the tokens of turns with which answers end, if the template prints no end of its own."""
        text = self._template(tools)
        found = next((turns for name, turns in _NEXT_TURNS.items() if name in text), ())
        return tuple(token for token in found if token in self.special)

    def end_token(self, tools: Any) -> str | None:
        """Returns the text of the special token with which the template ends an answer; None if it ends by text."""
        return self._once(("end", tools is None), lambda: self._end_token(tools))

    def _end_token(self, tools: Any) -> str | None:
        try:
            text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}], tools)[0]
        except ValueError:
            return None
        found = first_of(text.rpartition("ANSWER")[2], self.special)
        return None if found is None else found[1]

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts of the special tokens, longest first."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(sorted({token.content for token in added if token.special}, key=len, reverse=True))

    def argument_form(self, messages: Sequence[Message], tools: Any) -> Literal["object", "text"] | None:
        """Returns the form of arguments that the template prints once and as JSON; None for any, or if it prints none.

        The API of OpenAI has texts of JSON, which templates with `tojson` would encode twice.
        """
        return self._once(("arguments", tools is None), lambda: self._argument_form(messages, tools))

    def _argument_form(self, messages: Sequence[Message], tools: Any) -> Literal["object", "text"] | None:
        last = next(number for number, one in enumerate(messages) if one.get("tool_calls"))
        fits: list[Literal["object", "text"]] = []
        for form, arguments in (("object", {"zqkeyqz": "zqvalueqz"}), ("text", '{"zqkeyqz": "zqvalueqz"}')):
            given = [_with_same_arguments(one, arguments) for one in messages[: last + 1]]
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

        return bool(self._once(("parts", id(template)), find))

    def _template(self, tools: Any) -> str:
        if self.template is not None:
            return self.template
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer {self._name} has no chat template; set `template` to a file with one")
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
            raise ValueError(f"the chat template of {self._name} cannot be used: {place}{error}") from error

    def _once(self, key: Any, find: Any) -> Any:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    @cached_property
    def _name(self) -> str:
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


class _Chat:
    """One chat, rendered as it is and with stamps."""

    def __init__(self, renderer: ChatRenderer, messages: Sequence[Message], tools: Any) -> None:
        self.by, self.tools = renderer, tools
        given = [{key: value for key, value in one.items() if key != "weight"} for one in messages]
        given, self.control = renderer.without_control_tokens(given)
        if any(one.get("tool_calls") for one in given):
            given = as_arguments(given, renderer.argument_form(given, tools))
        self.messages: list[Message] = given
        self.text, self.marked = renderer.render(given, tools)
        self.stamps: Stamped = stamped(given, tools)
        try:
            self.model, self.model_marked = renderer.render(self.stamps.messages, self.stamps.tools)
        except ValueError:  # the template looks at the texts
            self.model, self.model_marked = "", []
        turns = renderer.next_turns(tools)
        if turns and given[-1]["role"] == "assistant" and self.text:
            self.text, self.model = self.text.rstrip() + turns[0], self.model and self.model.rstrip() + turns[0]
        self.turns = turns
        self.places = places(self.text, self.model, self.stamps.parts) if self.model else None

    # ------------------------------------------------------------------------------------------ spans
    def learnt_spans(self, learnt: Sequence[int]) -> dict[int, list[Span]]:
        """Returns the learnt spans of each of these messages; raises ValueError if they cannot be found."""
        if self.by.train_on == ("assistant",) and self.by.has_marks(self.tools):
            return self._by_marks(learnt)
        return {number: [self._span(number)] for number in learnt}

    def _by_marks(self, learnt: Sequence[int]) -> dict[int, list[Span]]:
        """Returns the marked spans of messages; a mark belongs to the message whose text is in it, or before it."""
        answers = [number for number, one in enumerate(self.messages) if one["role"] == "assistant"]
        owners = self._owners()
        if owners is None:
            if len(self.marked) != len(answers):
                raise ValueError(
                    f"the chat template has {len(self.marked)} generation marks for {len(answers)} messages of the"
                    " assistant, so that it is not known which mark is of which message; use a template with one mark"
                    " per message"
                )
            owners = answers
        found: dict[int, list[Span]] = {number: [] for number in learnt}
        for owner, span in zip(owners, self.marked, strict=True):
            if owner in found:
                found[owner].append(span)
        return found

    def _owners(self) -> list[int] | None:
        """Returns the message of each mark, by the stamps; None if the marks of the stamped chat differ."""
        if not self.model or len(self.model_marked) != len(self.marked):
            return None
        ordered = [
            (self.model.find(stamp), part.message)
            for stamp, part in self.stamps.parts.items()
            if part.message is not None and stamp in self.model
        ]
        owners = []
        for start, end in self.model_marked:
            inside = sorted({message for place, message in ordered if start <= place < end})
            wrong = [message for message in inside if self.messages[message]["role"] != "assistant"]
            if wrong:
                raise ValueError(
                    f"a generation mark of the chat template of {self.by._name} has the text of message {wrong[0]}, of"
                    f" the role {self.messages[wrong[0]]['role']}; use a template that marks only answers"
                )
            if len(inside) > 1:
                raise ValueError(
                    f"a generation mark of the chat template of {self.by._name} has the messages {inside[0]} and"
                    f" {inside[1]}; use a template with one mark per message"
                )
            before = [message for place, message in sorted(ordered) if place < start]
            if not inside and not before:
                return None
            owners.append(inside[0] if inside else before[-1])
        return owners

    def _span(self, number: int) -> Span:
        """Returns the span of a message, without white space at its end."""
        if self.messages[number]["role"] != "assistant":
            return self._span_of_given_role(number)
        before = until = None
        try:
            before = self.by.render(self.messages[:number], self.tools, answers=True)[0]
            until = self.by.render(self.messages[: number + 1], self.tools)[0].rstrip()
        except ValueError:
            if self.places is None:
                raise
        if before is not None and until is not None and until.startswith(before) and self.text.startswith(until):
            return len(before), self._next_turn(len(until))
        return self._span_in_whole(number)

    def _next_turn(self, end: int) -> int:
        """Returns the end of the next turn's token at this place, for families whose answers end with it."""
        rest = self.text[end:].lstrip()
        token = next((token for token in self.turns if rest.startswith(token)), None)
        return end if token is None else len(self.text) - len(rest) + len(token)

    def _span_in_whole(self, number: int) -> Span:
        """Returns the span of an answer in the whole text, by the begin of the prompt for it and by the end token."""
        fault = (
            f"the chat template of {self.by._name} prints message {number} in another way if other messages follow, or"
            " after its prompt for an answer, so that its learnt tokens cannot be found; use a `template` with"
            " {% generation %} marks, or last_turn_only = true"
        )
        header, mine = self._header(), self._spans_of(number)
        if not header or not mine:
            raise ValueError(fault)
        earlier = [span[1] for other in range(number) for span in self._spans_of(other)]
        gap_at = max((end for end in earlier if end <= mine[0][0]), default=0)
        gap = self.text[gap_at : mine[0][0]]
        sizes = [len(header), *(one.end() for one in reversed(list(re.finditer(r">|\n", header))))]
        length = next((size for size in sizes if header[:size] in gap), 0)
        begin = header[:length]
        if not length or _TAGS.sub("", header[length:]):  # only reasoning may differ, as `<think>` in the prompt
            raise ValueError(fault)
        start = gap_at + gap.rfind(begin) + length
        end = self._end_after(mine[-1][1], number)
        if end is None:
            raise ValueError(fault)
        return start, end

    def _header(self) -> str:
        """Returns what the template's prompt for an answer adds to a chat that ends with a user's message."""

        def find() -> str:
            last = [{"role": "user", "content": "x"}]
            try:
                with_it = self.by.render(last, None, answers=True)[0]
                without = self.by.render(last, None)[0]
            except ValueError:
                return ""
            same = next((n for n, (a, b) in enumerate(zip(with_it, without, strict=False)) if a != b), len(without))
            same = min(same, len(with_it))
            cut = with_it.rfind("x", 0, same) + 1  # a token that both have in part belongs to the header
            shared = with_it[cut:same]
            for token in self.by.special:
                for size in range(len(token) - 1, 0, -1):
                    if shared.endswith(token[:size]) and with_it.startswith(token, same - size):
                        return with_it[same - size :]
            return with_it[same:]

        found: str = self.by._once("header", find)
        return found

    def _spans_of(self, number: int) -> list[Span]:
        """Returns where the parts of a message are in the text, in order; empty if it is not known."""
        if self.places is None:
            return []
        stamps = [stamp for stamp, part in self.stamps.parts.items() if part.message == number]
        return sorted(span for stamp in stamps for span in self.places.get(stamp, ()))

    def _end_after(self, place: int, number: int) -> int | None:
        """Returns the end of the first end token after a message's last part, before the next message's text."""
        later = [span[0] for other in range(len(self.messages)) if other != number for span in self._spans_of(other)]
        gap = self.text[place : min((begin for begin in later if begin >= place), default=len(self.text))]
        end = self.by.end_token(self.tools)
        if end is not None and end in gap and (self.messages[number].get("tool_calls") or not self._another(gap, end)):
            return place + gap.index(end) + len(end)
        found = first_of(gap, self.turns or self.by.special)
        if found is not None and self.turns:
            return place + found[0] + len(found[1])
        if found is None or gap[: found[0]].strip() and not self.messages[number].get("tool_calls"):
            return None
        if found[1] in self._header() and end is None:  # the begin of the next message is no end
            return None
        return place + found[0] + len(found[1])

    def _another(self, gap: str, end: str) -> bool:
        """Returns whether another special token comes first, e.g. for an answer that is not the last."""
        found = first_of(gap, self.by.special)
        return found is not None and found[1] != end and not gap[: found[0]].strip()

    def _span_of_given_role(self, number: int) -> Span:
        """Returns the span of a message's text with its end token, without the header that the template prints."""
        mine = self._spans_of(number)
        role = self.messages[number]["role"]
        if not mine:
            raise ValueError(
                f"the chat template of {self.by._name} does not print the content of message {number}, of the role"
                f" {role}, as it is, so that its learnt tokens cannot be found"
            )
        try:
            until = self.by.render(self.messages[: number + 1], self.tools)[0].rstrip()
        except ValueError:
            until = ""
        if self.text.startswith(until) and len(until) >= mine[-1][1]:
            return mine[0][0], len(until)
        return mine[0][0], self._end_after(mine[-1][1], number) or mine[-1][1]

    # ------------------------------------------------------------------------------------------ what is lost
    def lost(self, spans: Mapping[int, Sequence[Span]]) -> dict[Kind, str]:
        """Returns the given parts of the chat that are not in its text, one example of each kind.

        Raises ValueError for a learnt part, and for an answer without its end token.
        """
        missing = unstamped(self.model, self.stamps.parts) if self.model else set()
        lost: dict[Kind, str] = {}
        for stamp, part in self.stamps.parts.items():
            own = spans.get(part.message) if part.message is not None else None
            inside = "".join(self.text[start:end] for start, end in own) if own is not None else self.text
            if own is not None and part.kind == "reasoning":
                inside = self.text  # the prompt for an answer may begin it
            elif own is not None and part.key.startswith("tool_calls"):
                inside = inside or ""
            if stamp not in missing and _is_in(part.value, inside):
                continue
            what = f"the {part.key} of message {part.message}" if part.message is not None else f"{part.key}"
            if own is not None:
                raise ValueError(self._fault(part, what))
            lost.setdefault(part.kind, what)
        for number, message in enumerate(self.messages):
            if self.tools is not None or message.get("tool_calls"):  # some templates look at these first
                continue
            if self._role_is_lost(message["role"], number):
                if number in spans:
                    raise ValueError(
                        f"the chat template of {self.by._name} prints message {number} as one of another role than"
                        f" {message['role']}; use a `template` that prints roles"
                    )
                lost.setdefault("role", f"the role {message['role']} of message {number}")
        for number, own in spans.items():
            if self.messages[number]["role"] == "assistant":
                self._check_end(number, "".join(self.text[start:end] for start, end in own))
        return lost

    def _fault(self, part: Part, what: str) -> str:
        if part.kind == "content":
            return (
                f"the chat template of {self.by._name} does not print the content of message {part.message} as it is"
                f"{' within its generation marks' if self.by.has_marks(self.tools) else ''}, so that its learnt tokens"
                " cannot be found; use a `template` with {% generation %} marks around it"
            )
        last = part.message == max(n for n, one in enumerate(self.messages) if one["role"] == "assistant")
        learns = "" if last else ", or set last_turn_only = true"
        return (
            f"the chat template of {self.by._name} does not print {what}, so that the model would learn an answer"
            f" without its {part.kind}; use a `template` that prints it, or remove it from the data{learns}"
        )

    def _role_is_lost(self, role: str, number: int) -> bool:
        """Returns whether the template prints a message of this role just as one of another role."""

        def find() -> bool:
            if not self.model:
                return False
            for other in {"assistant": ("user",), "user": ("assistant",)}.get(role, ("assistant", "user")):
                changed = [*self.stamps.messages]
                changed[number] = {**changed[number], "role": other}
                try:
                    if self.by.render(changed, self.stamps.tools)[0] == self.model:
                        return any(p.message == number and s in self.model for s, p in self.stamps.parts.items())
                except ValueError:
                    continue
            return False

        return bool(self.by._once(("role", role), find))

    def _check_end(self, number: int, learnt: str) -> None:
        """Raises ValueError if the learnt text of an answer ends with its last part, without an end token."""
        values = [part.value for part in self.stamps.parts.values() if part.message == number]
        last = max((learnt.rfind(form) + len(form) for value in values for form in printed_as(value) if form in learnt), default=0)
        after, end = learnt[last:], self.by.end_token(self.tools)
        if after.strip() and (end is None or first_of(after, self.by.special) is not None):
            return
        outside = " within its generation marks" if self.by.has_marks(self.tools) else ""
        raise ValueError(
            f"the chat template of {self.by._name} prints nothing after message {number}{outside}, so that the model"
            " would not learn to end its answers; use a `template` with {% generation %} marks around the answer and"
            " its end token"
        )


def first_of(text: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    """Returns the place and the text of the first of these tokens in a text; None if it has none."""
    found = [(text.index(token), -len(token), token) for token in tokens if token in text]
    return (min(found)[0], min(found)[2]) if found else None


def _is_in(value: Any, text: str) -> bool:
    if any(form in text for form in printed_as(value)):
        return True
    return isinstance(value, str) and "".join(value.split()) in "".join(text.split())


def _with_same_arguments(message: Message, arguments: Any) -> Message:
    """Returns a message whose calls have these arguments."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function") if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
        if not isinstance(inner, dict):
            calls.append(call)
        elif inner is call:
            calls.append({**call, "arguments": arguments})
        else:
            calls.append({**call, "function": {**inner, "arguments": arguments}})
    return {**message, "tool_calls": calls}


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
