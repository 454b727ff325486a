"""Checks callbacks before training, and the values that they return."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ddpforge.errors import CheckpointError, PluginError, UsageError
from ddpforge.interfaces import Callback, Contract

__all__ = ["add_numbers", "check_callback", "check_no_state", "may_end", "overriding", "reads_gradients", "state_of"]


def overriding(callbacks: Mapping[str, Callback], method: str) -> list[str]:
    """Returns the names of the callbacks that override `method`."""
    return [
        name
        for name, one in callbacks.items()
        if method in vars(one) or getattr(type(one), method) is not getattr(Callback, method)
    ]


def may_end(callbacks: Mapping[str, Callback], method: str) -> list[str]:
    """Returns the names of the callbacks that override `method`, if it may return something.

    Such a method may request the end of the run. It may not if it is declared to return None, or has no declaration and
    no `return` with a value.
    """
    found = {name: getattr(callbacks[name], method) for name in overriding(callbacks, method)}
    return [name for name, one in found.items() if not _returns_nothing(one)]


def _returns_nothing(method: Any) -> bool:
    declared = getattr(method, "__annotations__", {})
    if "return" in declared:
        return declared["return"] in (None, "None")
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    if code is None or inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        return False
    before = None
    for one in dis.get_instructions(code):
        if one.opname == "RETURN_CONST" and one.argval is not None:
            return False
        if one.opname == "RETURN_VALUE":
            constant = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            if not constant or one.is_jump_target:  # another value may come from elsewhere: `return x or None`
                return False
        before = one
    return True


def reads_gradients(callbacks: Mapping[str, Callback]) -> bool:
    """True if a callback overrides `on_gradient`."""
    return bool(overriding(callbacks, "on_gradient"))


def add_numbers(found: dict[str, float], name: str, method: str, returned: Any, prefix: str = "") -> None:
    """Adds the numbers that `method` of the callback `name` returned to `found`, each under `prefix` + its name.

    Raises PluginError if they are not numbers by name, or if `found` has the name already.
    """
    try:
        numbers = {key: value if isinstance(value, int) else float(value) for key, value in returned.items()}
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise PluginError(
            f"callback `{name}` returned {returned!r:.200} from `{method}`",
            hints=["return a mapping from names to numbers; `{}` if there is nothing to report"],
        ) from error
    for key, value in numbers.items():
        if (full := prefix + key) in found:
            raise PluginError(
                f"callback `{name}` reports {full}, which the run reports already",
                hints=[f"return it from `{method}` under another name"],
            )
        found[full] = value


def state_of(name: str, callback: Callback) -> Mapping[str, Any]:
    """Returns the state of the callback `name`, for a checkpoint; raises PluginError if it is not a mapping."""
    found: Any = callback.state()
    if not isinstance(found, Mapping):
        raise PluginError(
            f"callback `{name}`: {type(callback).__name__}.state returned {found!r:.200}",
            hints=["return a mapping from names to tensors, parts, numbers and text; `{}` if there is nothing to keep"],
        )
    return found


def check_no_state(callbacks: Mapping[str, Callback]) -> None:
    """Raises PluginError if a checkpoint cannot hold the state of a callback."""
    from ddpforge.checkpoint.state import RankState, flatten

    for name, callback in callbacks.items():
        try:
            flatten(RankState(model={}, callbacks={name: state_of(name, callback)}), rank=0, ranks=1)
        except CheckpointError as error:
            raise PluginError(error.message, hints=error.hints) from error


def check_callback(
    name: str, callback: Callback, contract: Contract | None, others: Iterable[str], *, trains: bool
) -> None:
    """Raises PluginError for a callback of an older contract, UsageError for one that the strategy cannot serve.

    Args:
        contract: the contract of the strategy; None if it is not known.
        others: names of the strategies that can serve all callbacks, for the hint.
        trains: False if the run only evaluates, and has no gradients.
    """
    try:
        inspect.signature(callback.on_start).bind(None)
    except TypeError as error:
        raise PluginError(
            f"callback `{name}`: {type(callback).__name__}.on_start must take one argument, the run",
            hints=["write `def on_start(self, run: RunContext)`, and read run.model, run.world and run.weights"],
        ) from error
    if contract and callback.calls_model and not contract.callable:
        raise UsageError(
            f"callback `{name}` ({type(callback).__name__}) calls the model, but under this strategy no "
            "rank has the whole model",
            hints=[f"set strategy.use to {', '.join(others)}, or remove the callback"],
        )
    if trains and contract and not contract.reads_gradients and reads_gradients({name: callback}):
        raise UsageError(
            f"callback `{name}` ({type(callback).__name__}) reads gradients in `on_gradient`, but this strategy cannot "
            "provide them",
            hints=[f"set strategy.use to {', '.join(others)}, or remove the callback"],
        )
