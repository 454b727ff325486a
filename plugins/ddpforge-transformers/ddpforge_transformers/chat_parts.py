"""Parts of a chat: the texts of a line, and their places in a rendering."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpforge_transformers.chat_forms import IMAGE, Message

__all__ = [
    "Kind",
    "Part",
    "Stamped",
    "as_arguments",
    "in_parts",
    "places",
    "printed_as",
    "stamped",
    "unstamped",
    "with_same_arguments",
]

Kind = Literal["content", "tool_calls", "tools", "reasoning", "role"]
Span = tuple[int, int]

_TAG = re.compile(r"(</?(?:think|thinking|thought|reasoning|tool_call|tool_calls|tool_response|tools)>|" + IMAGE + ")")
_STAMP = re.compile(r"zq\d{6}qz")


@dataclass(frozen=True)
class Part:
    """One text of a line: `message` is None for tools, `key` its name in messages of errors."""

    message: int | None
    key: str
    kind: Kind
    value: Any


@dataclass(frozen=True)
class Stamped:
    """A chat in which each part is replaced by a text of its own, and the part of each of these texts."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    parts: Mapping[str, Part] = field(default_factory=dict)


def stamped(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Stamped:
    """Returns the chat with stamps instead of its parts; tags of reasoning and tools around a text stay."""
    parts: dict[str, Part] = {}

    def stamp(message: int | None, key: str, kind: Kind, value: Any) -> str:
        name = f"zq{len(parts):06d}qz"
        parts[name] = Part(message, key, kind, value)
        return name

    found = [_stamped_message(number, one, stamp) for number, one in enumerate(messages)]
    if tools is None:
        return Stamped(found, None, parts)
    return Stamped(found, [_stamped_tool(number, one, stamp) for number, one in enumerate(tools)], parts)


def _stamped_tool(number: int, tool: Mapping[str, Any], stamp: Any) -> dict[str, Any]:
    inner = tool.get("function") if isinstance(tool.get("function"), dict) else tool
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        return dict(tool)
    named = {**inner, "name": stamp(None, f"tools[{number}].name", "tools", inner["name"])}
    return {**tool, "function": named} if inner is not tool else named


def _stamped_message(number: int, message: Message, stamp: Any) -> Message:
    found = dict(message)
    for key in ("reasoning_content", "thinking"):
        if isinstance(message.get(key), str) and message[key].strip():
            found[key] = stamp(number, key, "reasoning", message[key])
    pieces = _TAG.split(message["content"])
    for place, piece in enumerate(pieces):
        if piece.strip() and not _TAG.fullmatch(piece):
            after = pieces[place + 1] if place + 1 < len(pieces) else ""
            kind = "reasoning" if after in ("</think>", "</thinking>", "</thought>", "</reasoning>") else "content"
            around = re.fullmatch(r"(\s*)(.*?)(\s*)", piece, re.DOTALL)
            assert around is not None
            key = "content" if kind == "content" else "reasoning in the content"
            pieces[place] = around[1] + stamp(number, key, kind, around[2]) + around[3]
    found["content"] = "".join(pieces)
    if message.get("tool_calls"):
        found["tool_calls"] = [_stamped_call(number, n, call, stamp) for n, call in enumerate(message["tool_calls"])]
    return found


def _stamped_call(number: int, place: int, call: Any, stamp: Any) -> Any:
    if not isinstance(call, dict):
        return call
    inner = call.get("function") if isinstance(call.get("function"), dict) else call
    assert isinstance(inner, dict)
    key, found = f"tool_calls[{place}]", dict(inner)
    if isinstance(inner.get("name"), str):
        found["name"] = stamp(number, f"{key}.name", "tool_calls", inner["name"])
    if "arguments" in inner:
        found["arguments"] = _stamped_value(number, f"{key}.arguments", inner["arguments"], stamp)
    return {**call, "function": found} if inner is not call else found


def _stamped_value(number: int, key: str, value: Any, stamp: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stamped_value(number, f"{key}.{name}", one, stamp) for name, one in value.items()}
    if isinstance(value, list):
        return [_stamped_value(number, f"{key}[{place}]", one, stamp) for place, one in enumerate(value)]
    return stamp(number, key, "tool_calls", value) if isinstance(value, str) and value.strip() else value


def places(text: str, model: str, parts: Mapping[str, Part]) -> dict[str, list[Span]] | None:
    """Returns where the parts are in `text`, by the rendering `model` of the same chat with stamps.

    None if `text` is not `model` with the parts in place of their stamps: the template looks at the texts.
    """
    stamps, between = _STAMP.findall(model), _STAMP.split(model)
    if not text.startswith(between[0]):
        return None
    found: dict[str, list[Span]] = {}
    at = len(between[0])
    for stamp, piece in zip(stamps, between[1:], strict=True):
        forms = [one for one in printed_as(parts[stamp].value) if text.startswith(one, at)] if stamp in parts else []
        fits = [one for one in forms if text.startswith(piece, at + len(one))]
        if not fits:
            return None
        end = at + len(fits[0])
        found.setdefault(stamp, []).append((at, end))
        at = end + len(piece)
    return found if at == len(text) else None


def printed_as(value: Any) -> list[str]:
    """Returns the forms in which templates print a value: as it is, without white space around it, and as JSON."""
    if isinstance(value, str):
        texts = [value, value.lstrip(), value.rstrip(), value.strip()]
        texts += [json.dumps(one, ensure_ascii=ascii_only)[1:-1] for one in texts[:4] for ascii_only in (False, True)]
        return list(dict.fromkeys(texts))
    return list(dict.fromkeys([json.dumps(value, ensure_ascii=False), json.dumps(value), str(value)]))


def unstamped(model: str, parts: Mapping[str, Part]) -> set[str]:
    """Returns the stamps that a rendering lacks."""
    return set(parts) - set(_STAMP.findall(model))


def as_arguments(messages: Sequence[Message], form: Literal["object", "text"] | None) -> list[Message]:
    """Returns messages whose calls have their arguments as objects, or as JSON texts; None: as they are.

    Raises ValueError for a text that is not a JSON object, if objects are needed.
    """
    if form is None:
        return list(messages)
    found = []
    for number, one in enumerate(messages):
        calls = [
            _with_arguments(call, form, f"messages[{number}].tool_calls[{place}]")
            for place, call in enumerate(one.get("tool_calls") or ())
        ]
        found.append({**one, "tool_calls": calls} if calls else one)
    return found


def _with_arguments(call: Any, form: str, name: str) -> Any:
    inner = call.get("function") if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
    if not isinstance(inner, dict) or "arguments" not in inner:
        return call
    value = inner["arguments"]
    if form == "text" and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    elif form == "object" and isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{name}: the arguments are not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{name}: the arguments are the JSON text of {type(value).__name__}: expected an object")
    changed = {**inner, "arguments": value}
    return {**call, "function": changed} if inner is not call else changed


def with_same_arguments(message: Message, arguments: Any) -> Message:
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


def in_parts(message: Message) -> Message:
    """Returns a message whose content is a list of parts, as chat templates of vision models take it."""
    pieces = message["content"].split(IMAGE)
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(pieces):
        if number:
            parts.append({"type": "image"})
        if piece or len(pieces) == 1:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}
