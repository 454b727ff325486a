"""Replaces `${vars.x}` and `${env:NAME}` in the strings of a recipe; keeps `${secret:NAME}`."""

from __future__ import annotations

import os
import re

from ddpforge.components.errors import nearest
from ddpforge.errors import Diagnostic
from ddpforge.recipe.layers import Layers, framework_keys, kind_at, map_strings, strings
from ddpforge.recipe.report import KeyPath, did_you_mean, dotted, kind_of
from ddpforge.recipe.toml import Origin, Table, Value
from ddpforge.secret_redaction import SECRET

_MOST = 4 << 20  # maximum characters of a value
_REFERENCE = re.compile(r"(?P<escaped>\$)?\$\{(?:(?P<body>[^{}]*)\})?")
_ENV = re.compile(r"env:(?P<name>\w+)(?::-(?P<default>.*))?", re.DOTALL)
_FORMS = (
    "a reference is `${vars.name}`, `${env:NAME}`, `${env:NAME:-default}` or `${secret:NAME}`; write a literal `${` as"
    " `$${`"
)


def escape(text: str) -> str:
    """Escapes `${` in `text`, so that loading does not replace it; keeps references to secrets."""
    return re.sub(rf"(?!{SECRET.pattern})\$\{{", "$${", text)


def interpolate(layers: Layers) -> tuple[list[Diagnostic], set[str]]:
    """Replaces all references and removes [vars] from the tables; returns the problems, and the keys with a problem.

    A string that consists of one `${vars.x}` gets the variable's type.
    """
    filling = _Filling(layers)
    filling.read_variables()
    layers.tables = map_strings(layers.tables, filling.fill)
    filling.reject_misplaced_secrets()
    filling.report_unused()
    return filling.problems, filling.spoilt


_Used = list[tuple[str, Origin | None]]


class _Filling:
    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.problems: list[Diagnostic] = []
        self.spoilt: set[str] = set()
        self.variables: Table = {}

    def read_variables(self) -> None:
        table = self.layers.tables.pop("vars", {})
        if not isinstance(table, dict):
            self.report(("vars",), f"[vars] must be a table, not {kind_of(table)}")
            return
        for name, value in table.items():
            if isinstance(value, dict | list):
                message = f"`{dotted(('vars', name))}` must be a single value, not {kind_of(value)}"
                self.report(("vars", name), message)
        self.variables = map_strings(table, self.fill, ("vars",))

    def fill(self, path: KeyPath, text: str) -> Value:
        """Returns the value of the string at `path` with its references replaced."""
        if "${" not in text:
            return text
        used: _Used = []
        whole = _REFERENCE.fullmatch(text)
        if whole and not whole["escaped"]:
            value = self.value(path, whole, used)
        else:
            longest = max((len(_written(one)) for one in self.variables.values()), default=0)
            if text.count("${") * longest > _MOST:
                self.report(path, f"`{dotted(path)}` would be longer than {_MOST:,} characters", "shorten a variable")
                return text
            value = _REFERENCE.sub(lambda match: _written(self.value(path, match, used)), text)

        origin = self.layers.origin(path)
        self.layers.origins[path] = Origin(origin.source, origin.path, tuple(used))
        return value

    def value(self, path: KeyPath, match: re.Match[str], used: _Used) -> Value:
        """Returns the value of one reference; if it is invalid, reports a problem and returns the reference itself."""
        body = match["body"]
        if match["escaped"]:
            if SECRET.fullmatch(match[0][1:]):
                self.report(path, f"`{dotted(path)}`: `{match[0][1:]}` cannot be written as text", "it is a reference")
            return match[0][1:]
        if body is None:
            self.report(path, f"`{dotted(path)}`: `${{` without its `}}`", _FORMS)
        elif body.startswith("vars.") and path[0] != "vars":
            name = body.removeprefix("vars.")
            if name in self.variables:
                if dotted(("vars", name)) in self.spoilt:
                    self.spoilt.add(dotted(path))
                used.append((f"vars.{name}", self.layers.origin(("vars", name))))
                return self.variables[name]
            known = f"variables: {', '.join(self.variables)}" if self.variables else f"add [vars] and `{name} = …`"
            near = did_you_mean(name, self.variables)
            self.layers.variables.add(nearest(name, self.variables) or name)  # so that a typo is reported once
            self.report(path, f"`{dotted(path)}`: no variable named `{name}`", *near, known)
        elif env := _ENV.fullmatch(body):
            return self.environment(path, match[0], env, used)
        elif secret := SECRET.fullmatch(match[0]):
            if secret[1] not in os.environ:
                message = f"`{dotted(path)}`: the environment variable {secret[1]} is not set"
                self.report(path, message, "set it: a secret has no default")
            used.append((f"secret:{secret[1]}", None))
        elif body.startswith("vars."):
            self.report(path, f"`{dotted(path)}`: a variable cannot refer to a variable")
        else:
            near = [f"for the environment variable, write ${{env:{body}}}"] if body.isidentifier() else []
            self.report(path, f"`{dotted(path)}`: `{match[0]}` is not a reference", *near, _FORMS)
        return match[0]

    def environment(self, path: KeyPath, reference: str, env: re.Match[str], used: _Used) -> str:
        name, default = env["name"], env["default"]
        value = os.environ.get(name)
        if default is not None and not value:  # as in the shell, `:-` also replaces an empty variable
            used.append((f"env:{name} unset", None))
            return default
        if value is None:
            hint = f"set it, or give a default: ${{env:{name}:-value}}"
            self.report(path, f"`{dotted(path)}`: the environment variable {name} is not set", hint)
            return reference
        if not value.isprintable():
            self.report(path, f"`{dotted(path)}`: the environment variable {name} is not plain text")
            return reference
        used.append((f"env:{name}", None))
        return value

    def reject_misplaced_secrets(self) -> None:
        """Reports secrets in keys that are not options of components."""
        # ddpforge writes its own settings to many places.
        for path, text in strings(self.layers.tables):
            owner = next((path[:end] for end in (1, 2, 3) if kind_at(path[:end], self.layers.tables)), None)
            key = path[len(owner)] if owner and len(path) > len(owner) else "use"
            is_option = key != "use" and key not in framework_keys(owner or ()) and path[-1] != "use"
            if SECRET.search(text) and not is_option:
                hint = "use ${env:NAME} for values that need not be secret"
                self.report(path, f"`{dotted(path)}` cannot be a secret: only options of components can", hint)

    def report_unused(self) -> None:
        for name in self.variables:
            if name not in self.layers.variables and dotted(("vars", name)) not in self.spoilt:
                hint = f"refer to it as ${{vars.{name}}}, or remove it"
                self.report(("vars", name), f"`{dotted(('vars', name))}` is never used", hint, on_key=True)

    def report(self, path: KeyPath, message: str, *hints: str, on_key: bool = False) -> None:
        place = self.layers.origin(path).place(key=on_key)
        self.problems.append(Diagnostic(message, dotted(path), place, hints))
        self.spoilt.add(dotted(path))


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
