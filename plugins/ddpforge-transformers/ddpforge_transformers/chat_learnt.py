"""Finds the learnt text of a rendered chat, and the parts of the chat that its text lacks."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpforge_transformers.chat_forms import Message
from ddpforge_transformers.chat_parts import Kind, Part, Stamped, as_arguments, places, printed_as, stamped, unstamped
from ddpforge_transformers.chat_template import Span

if TYPE_CHECKING:
    from ddpforge_transformers.chat_rendering import ChatRenderer

__all__ = ["RenderedChat", "first_of"]

_TAGS = re.compile(r"</?[a-z_|]{1,30}>|\s")


class RenderedChat:
    """One chat, rendered as it is and with stamps: finds its learnt text, and the parts that are not printed."""

    def __init__(self, renderer: "ChatRenderer", messages: Sequence[Message], tools: Any) -> None:
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
                    " assistant, so that a mark has no certain message; use a template with one mark"
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
                    f"a generation mark of the chat template of {self.by.name} has the text of message {wrong[0]}, of"
                    f" the role {self.messages[wrong[0]]['role']}; use a template that marks only answers"
                )
            if len(inside) > 1:
                raise ValueError(
                    f"a generation mark of the chat template of {self.by.name} has the messages {inside[0]} and"
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
            f"the chat template of {self.by.name} prints message {number} in another way if other messages follow, or"
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
        """Returns the text that the template's prompt for an answer adds to a chat that ends with a user's message."""

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

        found: str = self.by.once("header", find)
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
        if found is None or (gap[: found[0]].strip() and not self.messages[number].get("tool_calls")):
            return None
        if found[1] in self._header() and end is None:  # the begin of the next message is not an end
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
                f"the chat template of {self.by.name} does not print the content of message {number}, of the role"
                f" {role}, as it is, so that its learnt tokens cannot be found"
            )
        try:
            until = self.by.render(self.messages[: number + 1], self.tools)[0].rstrip()
        except ValueError:
            until = ""
        if self.text.startswith(until) and len(until) >= mine[-1][1]:
            return mine[0][0], len(until)
        return mine[0][0], self._end_after(mine[-1][1], number) or mine[-1][1]

    # ------------------------------------------------------------------------------------------ lost parts
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
            elif own is not None and self.places is not None and stamp not in missing:
                if any(a <= start and end <= b for start, end in self.places[stamp] for a, b in own):
                    continue
                inside = ""
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
                        f"the chat template of {self.by.name} prints message {number} as one of another role than"
                        f" {message['role']}; use a `template` that prints roles"
                    )
                lost.setdefault("role", f"the role {message['role']} of message {number}")
        for number, own in spans.items():
            if self.messages[number]["role"] == "assistant":
                self._check_end(number, own)
        return lost

    def _fault(self, part: Part, what: str) -> str:
        if part.kind == "content":
            return (
                f"the chat template of {self.by.name} does not print the content of message {part.message} as it is"
                f"{' within its generation marks' if self.by.has_marks(self.tools) else ''}, so that its learnt tokens"
                " cannot be found; use a `template` with {% generation %} marks around it"
            )
        last = part.message == max(n for n, one in enumerate(self.messages) if one["role"] == "assistant")
        learns = "" if last else ", or set last_turn_only = true"
        return (
            f"the chat template of {self.by.name} does not print {what}, so that the model would learn an answer"
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

        return bool(self.by.once(("role", role), find))

    def _check_end(self, number: int, own: Sequence[Span]) -> None:
        """Raises ValueError if the learnt text of an answer ends with its last part, without an end token."""
        learnt = "".join(self.text[start:end] for start, end in own)
        if mine := [span for span in self._spans_of(number) if own and span[1] <= own[-1][1]]:
            after = self.text[max(mine[-1][1], own[-1][0]) : own[-1][1]]
        else:
            values = [part.value for part in self.stamps.parts.values() if part.message == number]
            forms = [form for value in values for form in printed_as(value) if form in learnt]
            after = learnt[max((learnt.find(form) + len(form) for form in forms), default=0) :]
        end = self.by.end_token(self.tools)
        if after.strip() and (end is None or first_of(after, self.by.special) is not None):
            return
        outside = " within its generation marks" if self.by.has_marks(self.tools) else ""
        raise ValueError(
            f"the chat template of {self.by.name} prints nothing after message {number}{outside}, so that the model"
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
