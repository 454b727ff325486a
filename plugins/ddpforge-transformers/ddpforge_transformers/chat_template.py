"""Chat templates: renders them in a sandbox with bounds of time and memory, and finds the text that they mark."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["ChatTemplate", "Span", "chat_template"]

Span = tuple[int, int]
_BEGIN, _END = "\U0010fff0", "\U0010fff1"  # private characters around marked text
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")

_MOST_STEPS = 2_000_000  # loop passes and calls, in one rendering
_MOST_SECONDS = 30.0  # of processor time
_MOST_TEXT = 2**26  # characters that are printed, also into variables
_MOST_VALUE = 2**25  # characters of a text, or members of a list
_MOST_NUMBER = 10**6  # as an argument, e.g. a width
_SLOW = ("list", "wordwrap", "urlize", "striptags", "title", "sort", "unique")  # a step for each character or member
_WIDTH = re.compile(r"[%:.][^%}]{0,20}?\d{7}")  # of a format


class ChatTemplate:
    """Chat template, rendered as transformers does: the same sandbox, filters and block `generation`.

    A rendering that takes too many steps, or makes too long a text, is refused: templates come with models from the
    hub. Raises ValueError for a template that is not valid Jinja.
    """

    def __init__(self, text: str) -> None:
        environment = _Sandbox()
        try:
            tree = environment.parse(text)
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - {*_GIVEN, *environment.globals}
            self.has_marks = next(tree.find_all(nodes.CallBlock), None) is not None and "generation" in text
            _count(tree, environment)
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} is not valid Jinja: {error.message}") from error
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, TypeError) as error:
            raise ValueError(f"it is not valid Jinja: {error}") from error
        self._environment = environment
        self._template = environment.template_class.from_code(environment, code, environment.globals)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        answers: bool,
        options: Mapping[str, Any],
    ) -> tuple[str, list[Span]]:
        """Returns the text, and the spans of it that `{% generation %}` marks; raises ValueError if it is refused."""
        given = {"messages": [_with_reasoning(one) for one in messages], "tools": tools, "documents": None}
        with self._environment.bounded():
            try:
                return _without_marks(
                    "".join(self._template.generate(**{**options, **given, "add_generation_prompt": answers}))
                )
            except RecursionError as error:
                raise ValueError("it calls itself without end") from error
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
                raise ValueError(str(error)) from error
            except (AttributeError, RuntimeError, MemoryError, AssertionError) as error:
                raise ValueError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=64)
def chat_template(text: str) -> ChatTemplate:
    """Returns the compiled template of a text; raises ValueError if it is not valid Jinja."""
    return ChatTemplate(text)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with its reasoning under both names that templates read, as transformers gives it."""
    for key in ("reasoning_content", "thinking"):
        if message.get(key) is not None:
            return {"thinking": message[key], **message, "reasoning_content": message[key]}
    return dict(message)


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Returns the text without its marks, and the marked spans that are not empty; inner marks belong to outer ones."""
    parts, spans, length, depth, start = [], [], 0, 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            start = start if depth else length
            depth += 1
        elif part == _END:
            depth -= 1
            if not depth and start < length:
                spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


# ---------------------------------------------------------------------------------------------- sandbox
class _Marks(Extension):
    """Block `{% generation %}`: the text that a model learns."""

    tags = {"generation"}  # noqa: RUF012  # an attribute of Jinja's class

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _PublicNamespace(Namespace):
    """Namespace of templates without names that begin with an underscore."""

    def __init__(*arguments: Any, **names: Any) -> None:
        for name in {**dict(*arguments[1:]), **names}:
            _check_public(name)
        Namespace.__init__(*arguments, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox that counts the steps and the text of a rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
        self._steps = self._printed = 0
        self._until = float("inf")
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "namespace": _PublicNamespace}
        self.filters = {name: self._checked(name, one) for name, one in self.filters.items()}
        self.filters["tojson"] = self._checked("tojson", _json)

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Begins the counts of one rendering."""
        self._steps = self._printed = 0
        self._until = time.thread_time() + _MOST_SECONDS
        try:
            yield
        finally:
            self._until = float("inf")

    def step(self, text: int = 0, cost: int = 1) -> bool:
        """Counts a pass of a loop or a call, and the text that it prints by itself."""
        before, self._steps, self._printed = self._steps, self._steps + cost, self._printed + text
        if self._steps > _MOST_STEPS:
            raise ValueError(f"it takes more than {_MOST_STEPS:,} steps for one chat")
        if self._printed > _MOST_TEXT:
            raise ValueError(f"it prints more than {_MOST_TEXT:,} characters for one chat")
        if self._steps // 1000 > before // 1000 and time.thread_time() > self._until:
            raise ValueError(f"it takes more than {_MOST_SECONDS:g} seconds for one chat")
        return True

    def printed(self, value: Any) -> Any:
        """Counts the text of a value that is printed; returns the value."""
        if isinstance(value, str):
            self.step(len(value), 0)
        elif isinstance(value, list | dict | tuple):
            value = str(value)
            self.step(len(value), 1 + len(value) // 100)
        return value

    def built(self, value: Any) -> Any:
        """Counts all members of a new list or table, also of those in it: twice itself in itself grows fast."""
        waits = [value]
        while waits:
            one = waits.pop()
            if isinstance(one, dict | list | tuple):
                self.step(0, 1 + len(one))
                waits += one.values() if isinstance(one, dict) else one
        return value

    def joined(self, *values: Any) -> str:
        """Returns the texts of all values in a row."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes left OPERATOR right, if the result is of a size that chats have."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int) and isinstance(one, str | list | tuple):
                    _check_size(len(one) * max(other, 0))
            if isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(right, 0) * 1000)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
            self.step(0, 1 + (len(left) + len(right)) // 1000)
        elif operator == "%":
            _check_arguments(left, (right,), {})
        found = super().call_binop(context, operator, left, right)
        return self.built(found) if operator == "*" and isinstance(found, list | tuple) else found

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or a method of a value, if its arguments are of a size that chats have."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, _Sandbox | _Marks):
            return super().call(__context, __obj, *args, **kwargs)
        if name in ("format", "format_map"):  # the sandbox replaces the method of a text
            owner = getattr(getattr(__obj, "__wrapped__", None), "__self__", owner)
        __self._check_call(name, owner, args, kwargs)
        found = __self._sized(super().call(__context, __obj, *args, **kwargs))
        return __self.built(found) if __obj is dict else found

    def _checked(self, name: str, function: Any) -> Any:
        """Returns a filter that checks its arguments before, and the size of its result after a call."""
        passes = getattr(function, "jinja_pass_arg", None)
        skipped = 0 if passes is None else 1

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check_call(name, args[skipped] if len(args) > skipped else None, args[skipped + 1 :], kwargs)
            return self._sized(function(*args, **kwargs))

        if passes is not None:
            checked.jinja_pass_arg = passes  # type: ignore[attr-defined]
        if getattr(function, "jinja_async_variant", False):
            checked.jinja_async_variant = True  # type: ignore[attr-defined]
        return checked

    def _check_call(self, name: str, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        size = len(owner) if isinstance(owner, str | list | tuple | dict | range) else 0
        if name not in ("length", "count", "first", "last", "get", "items", "startswith", "endswith"):
            by = 1 if name in _SLOW else 1000 if isinstance(owner, str) else 10
            self.step(0, 1 + size // by)
        _check_arguments(owner, args, kwargs)
        if name == "replace" and isinstance(owner, str) and len(args) > 1:
            _check_size(size + owner.count(str(args[0])) * len(str(args[1])))
        elif name == "join":
            members, between = (owner, args[0] if args else "") if not isinstance(owner, str) else (args[0], owner)
            if isinstance(members, str | list | tuple):
                total = sum(len(one) for one in members if isinstance(one, str))
                _check_size(total + len(members) * len(str(between)))
        elif name == "indent" and isinstance(owner, str):
            width = args[0] if args else kwargs.get("width", 4)
            _check_size(size + owner.count("\n") * (len(width) if isinstance(width, str) else width))

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict):
            _check_size(len(value))
        return value


def _check_arguments(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for a number that would be a huge width, and for a format with one."""
    for one in (*args, *kwargs.values()):
        for number in one if isinstance(one, tuple) else (one,):
            if isinstance(number, int) and abs(number) > _MOST_NUMBER and isinstance(owner, str):
                raise ValueError(f"it makes a text by the number {number}")
    for text in (owner, *args) if isinstance(owner, str) and args else ():
        if isinstance(text, str) and len(text) < 10_000 and _WIDTH.search(text) and ("%" in text or "{" in text):
            raise ValueError("it formats a text with a width of more than 6 digits")


def _check_size(size: int) -> None:
    if size > _MOST_VALUE:
        raise ValueError(f"it makes a value of more than {_MOST_VALUE:,} characters or members")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{3}", form):
        raise ValueError(f"it prints the time by the format {form[:100]!r}")
    return datetime.now().strftime(form)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 100:
        raise ValueError(f"tojson: the indent {indent} is too large")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# ---------------------------------------------------------------------------------------------- counting
def _count(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Inserts calls that count: each pass of a loop, each call of a macro, each printed value and joined text."""
    loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    for one in loops:
        text = sum(len(data.data) for data in _own_text(one.body))
        one.body.insert(0, nodes.ExprStmt(_call("step", nodes.Const(text))).set_lineno(one.lineno))
        if isinstance(one, nodes.For) and one.test is not None:
            one.test = nodes.And(_call("step"), one.test).set_lineno(one.lineno)
    _replace(tree)
    tree.set_environment(environment)


def _own_text(body: Sequence[nodes.Node]) -> Iterator[nodes.TemplateData]:
    """Yields the fixed text in nodes, without that of loops and macros in them."""
    for one in body:
        if isinstance(one, nodes.TemplateData):
            yield one
        elif not isinstance(one, nodes.For | nodes.Macro | nodes.CallBlock):
            yield from _own_text(list(one.iter_child_nodes()))


def _replace(node: Any) -> None:
    """Counts printed values, and makes `a ~ b` a call."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace(value)
            setattr(node, name, _counted(value))
        elif isinstance(value, list):
            for one in value:
                if isinstance(one, nodes.Node):
                    _replace(one)
            value[:] = [_counted(one) for one in value]
    if isinstance(node, nodes.Output):
        output: Any = node
        output.nodes = [
            one if isinstance(one, nodes.TemplateData) else _call("printed", one).set_lineno(node.lineno)
            for one in output.nodes
        ]


def _counted(node: Any) -> Any:
    if isinstance(node, nodes.Concat):
        return _call("joined", *node.nodes).set_lineno(node.lineno)
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _call("built", node).set_lineno(node.lineno)
    return node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
