"""Names of other libraries that people look for in ddpforge and in its results, each with a hint."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Never

__all__ = ["missing_attribute", "missing_name", "place_of"]

_MODULES = ("ddpforge.interfaces", "ddpforge.errors", "ddpforge.api", "ddpforge.testing")


@cache
def _ways(owner: str) -> dict[str, str]:
    """Returns what to write, by name, instead of an attribute of ddpforge or of a class of results."""
    table = tomllib.loads((files("ddpforge.components") / "attributes.toml").read_text(encoding="utf-8"))
    return {name: way for way, names in table.get(owner, {}).items() for name in names.split()}


def place_of(name: str) -> str:
    """Returns how to import a public name of another module of ddpforge, or what to write instead; "" if unknown."""
    if way := _ways("ddpforge").get(name):
        return way
    for module in _MODULES:
        found = import_module(module)
        if name in getattr(found, "__all__", ()) or getattr(vars(found).get(name), "__module__", "") == module:
            return f"from {module} import {name}"
    return ""


def missing_name(module: str, name: str) -> ImportError | AttributeError:
    """Returns the error for a name that a module does not have, with its place or what to write instead."""
    hint = "" if name.startswith("_") else place_of(name)
    if hint:  # `from MODULE import NAME` replaces the message of an AttributeError by its own
        return ImportError(f"{module} has no {name!r}: {hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def missing_attribute(owner: Any, name: str) -> Never:
    """Raises AttributeError for an attribute that a result does not have, with what to write instead.

    Classes use it as their `__getattr__`, which Python calls only for attributes that it does not find.
    """
    kind = type(owner).__name__
    hint = f": {way}" if (way := _ways(kind).get(name)) else ""
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=owner)
