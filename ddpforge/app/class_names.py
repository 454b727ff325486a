"""Class numbers of a run: every dataset numbers its classes by the names of the training data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpforge.components.options import Nested
from ddpforge.components.registry import NamedComponent, Registry
from ddpforge.interfaces import class_names_of

__all__ = ["numbered_alike", "with_class_names"]

_OPTION = "class_names"


def with_class_names(registry: Registry, component: Any, names: Sequence[str]) -> Any:
    """Returns a dataset's component with the option `class_names`, and so each dataset in its options.

    A dataset without such an option, or whose recipe sets it, stays as it is.
    """
    if not names:
        return component
    options = {name: _inside(registry, value, names) for name, value in component.options.items()}
    if options.get(_OPTION) is None and _has_option(registry, component):
        options[_OPTION] = list(names)
    return component.model_copy(update={"options": options})


def _inside(registry: Registry, value: Any, names: Sequence[str]) -> Any:
    """Returns the value of an option, with the names in each dataset in it."""
    match value:
        case Nested(kind="data"):
            return with_class_names(registry, value, names)
        case list() | tuple() if type(value) in (list, tuple):  # not a NamedTuple
            return type(value)(_inside(registry, item, names) for item in value)
        case dict():
            return {key: _inside(registry, item, names) for key, item in value.items()}
        case _:
            return value


def _has_option(registry: Registry, component: NamedComponent) -> bool:
    if not registry.imports("data", component.use):
        return False
    found = inspect.signature(registry.load("data", component.use, component.base)).parameters.get(_OPTION)
    return found is not None and found.kind not in (found.VAR_KEYWORD, found.VAR_POSITIONAL)


def numbered_alike(datasets: Mapping[str, Any], build: Callable[[str, Sequence[str]], None]) -> None:
    """Builds again each of several datasets that does not have the names of all, with all names in one order.

    The order is that of the first dataset, then that of further classes of the others. `build` replaces the dataset
    of a key by one with these names.
    """
    own = {key: class_names_of(data) for key, data in datasets.items()}
    names = list(dict.fromkeys(name for found in own.values() for name in found))
    for key, found in own.items():
        if found and found != names:
            build(key, names)
