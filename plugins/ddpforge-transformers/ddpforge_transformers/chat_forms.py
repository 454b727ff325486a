"""Forms of chat data: reads lines of .jsonl files as messages, or as a prompt with its completion."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from ddpforge_transformers.rows import Row

__all__ = ["IMAGE", "ROLES", "Chat", "Form", "Message", "Plain", "check_only_text", "parse_messages", "read_chats"]

Message = dict[str, Any]
Form = Literal["messages", "prompt_completion", "sharegpt", "alpaca"]

IMAGE = "\U000f8f00"  # character at the place of an image in a content
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS: Mapping[str, tuple[str, ...]] = {  # a line of the form has these keys
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
_FROM = {  # roles of ShareGPT
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_OF_MESSAGE = ("role", "content", "weight", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_IMAGES = ', no images or sounds; for images set use = "image_chat", with a processor'
_OF_TURN = ("from", "value", "weight")


@dataclass(frozen=True)
class Chat:
    """Messages in the form that chat templates take, and tools. `weight` of a message is 0 if it is not learnt."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    images: Sequence[Any] = ()  # in the order of the characters `IMAGE` in the messages


@dataclass(frozen=True)
class Plain:
    """Text that is given, and text after it that is learnt; without a chat template."""

    prompt: str
    completion: str


def read_chats(
    rows: Iterator[tuple[str, Row | ValueError]], form: Form | None
) -> Iterator[tuple[str, Chat | Plain | ValueError]]:
    """Yields the place ("FILE, line N") and the content of each row, or the error of an invalid row.

    `form` is the form of all rows; None: it is recognised by the keys of the first valid row.
    """
    for where, row in rows:
        if isinstance(row, ValueError):
            yield where, row
            continue
        try:
            found = _form(row, where, form)
            chat = _PARSERS[found](row)
        except ValueError as error:
            yield where, error
            continue
        form = form or found
        yield where, chat


def _form(row: dict[str, Any], where: str, form: Form | None) -> Form:
    """Returns the form of a line; raises ValueError if it has none or several, or another than `form`."""
    check_only_text(row, where)
    found: list[Form] = [one for one in get_args(Form) if all(key in row for key in _KEYS[one])]
    if len(found) == 1 and form in (None, found[0]):
        return found[0]
    needs = " or ".join(" with ".join(f'"{key}"' for key in _KEYS[one]) for one in ([form] if form else get_args(Form)))
    if not found:
        hint = ""
        if "chosen" in row and "rejected" in row:
            hint = "; this is a preference pair, which has no single answer to learn"
        raise ValueError(f"{where} has the keys {_listed(row)}: expected {needs}{hint}")
    if len(found) > 1:
        raise ValueError(
            f"{where} is ambiguous: its keys fit the forms {' and '.join(found)}; remove the keys of all but one"
        )
    raise ValueError(
        f"{where} has the form {found[0]}, but expected {form}, as `form` or the first line has it: {needs}; "
        "keep each form in files of its own, one dataset per form"
    )


def check_only_text(row: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a line with images or other media."""
    for key in _MEDIA:
        if row.get(key):
            raise ValueError(f'{where} has "{key}": this dataset has only text{_IMAGES}')


# ---------------------------------------------------------------------------------------------- forms
def _messages(row: dict[str, Any]) -> Chat:
    return Chat(parse_messages(row["messages"], "messages"), _tools(row))


def _prompt_completion(row: dict[str, Any]) -> Chat | Plain:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError('"completion" is empty')
        return Plain(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        given = [message | {"weight": 0} for message in parse_messages(prompt, "prompt")]
        return Chat([*given, *parse_messages(completion, "completion")], _tools(row))
    raise ValueError(
        f'"prompt" is {_kind(prompt)} and "completion" {_kind(completion)}: expected two texts, or two lists of '
        "messages"
    )


def _sharegpt(row: dict[str, Any]) -> Chat:
    turns = _list(row["conversations"], "conversations")
    messages = []
    for number, turn in enumerate(turns):
        name = f"conversations[{number}]"
        _known_keys(turn, _OF_TURN, name)
        role = _one_of(turn.get("from"), _FROM, f"{name}.from")
        kept = {"weight": turn["weight"]} if "weight" in turn else {}
        messages.append(_message({"role": _FROM[role], "content": turn.get("value"), **kept}, name, "value"))
    return Chat(_after_system(row, messages), _tools(row))


def _alpaca(row: dict[str, Any]) -> Chat:
    text = {key: _text(row.get(key, ""), key) for key in ("instruction", "output")}
    text["input"] = _text(row.get("input") or "", "input")
    if row.get("history"):
        raise ValueError('"history" is not supported: write all turns as "messages"')
    asked = f"{text['instruction']}\n{text['input']}" if text["input"] else text["instruction"]
    messages = [
        _message({"role": "user", "content": asked}, "instruction", ""),
        _message({"role": "assistant", "content": text["output"]}, "output", ""),
    ]
    return Chat(_after_system(row, messages))


_PARSERS: Mapping[str, Callable[[dict[str, Any]], Chat | Plain]] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
}


# ---------------------------------------------------------------------------------------------- messages
def parse_messages(value: Any, name: str) -> list[Message]:
    """Returns messages as chat templates take them; raises ValueError for an invalid one. `name` is their key."""
    return [_message(one, f"{name}[{number}]", "content") for number, one in enumerate(_list(value, name))]


def _message(value: Any, name: str, content_key: str) -> Message:
    _known_keys(value, _OF_MESSAGE, name)
    role = _one_of(value.get("role"), ROLES, f"{name}.role")
    weight = value.get("weight", 1)
    if type(weight) is not int or weight not in (0, 1):
        raise ValueError(f"{name}.weight is {json.dumps(weight)}: expected 0 (not learnt) or 1")
    calls = value.get("tool_calls")
    if calls is not None and (role != "assistant" or not isinstance(calls, list) or not calls):
        raise ValueError(f"{name}.tool_calls is {_kind(calls)} of the role {role}: expected a list, of an assistant")
    place = f"{name}.{content_key}" if content_key else name
    content = "" if value.get("content") is None and calls else _content(value.get("content"), place)
    if not content.strip() and not calls and role != "tool":
        raise ValueError(f"{place} is empty")
    return {key: one for key, one in value.items() if one is not None} | {"content": content, "weight": weight}


def _content(value: Any, name: str) -> str:
    """Returns the text of a content, which is a string or a list of parts of the type text."""
    if not isinstance(value, list):
        return _text(value, name)
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        if kind != "text" or not isinstance(part, dict):
            raise ValueError(f"{name}[{number}] is of the type {kind}: this dataset has only text{_IMAGES}")
        texts.append(_text(part.get("text"), f"{name}[{number}].text"))
    return "".join(texts)


def _after_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Returns the messages, after the text under "system" if the line has one."""
    if row.get("system") in (None, ""):
        return messages
    if messages[0]["role"] == "system":
        raise ValueError('the line has "system" and a first message of the role system: expected one of them')
    return [{"role": "system", "content": _text(row["system"], "system"), "weight": 1}, *messages]


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f'"tools" is {_kind(tools)}: expected a list of objects, the JSON schemas of the tools')
    return tools


# ---------------------------------------------------------------------------------------------- values
def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f'"{name}" is {_kind(value)}: expected a list of messages')
    if not value:
        raise ValueError(f'"{name}" is empty: expected at least one message')
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_kind(value)}: expected a text")
    return value


def _known_keys(value: Any, known: tuple[str, ...], name: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_kind(value)}: expected an object with {_listed(known[:2])}")
    for key in value:
        if key not in known and value[key] is not None:  # null is as if absent, e.g. "refusal" of the API of OpenAI
            near = get_close_matches(key, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"expected {_listed(known)}"
            raise ValueError(f'{name} has the unknown key "{key}"; {hint}')


def _one_of(value: Any, known: Any, name: str) -> str:
    if not isinstance(value, str) or value not in known:
        given = f'"{value}"' if isinstance(value, str) else _kind(value)
        raise ValueError(f"{name} is {given}: expected one of {', '.join(known)}")
    return value


def _listed(keys: Any) -> str:
    return ", ".join(f'"{key}"' for key in keys) or "(none)"


def _kind(value: Any) -> str:
    """Returns the name that a JSON value's type has in messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null or absent"}
    return names.get(type(value), "a number")
