"""Asks callbacks, before training, what they need of the run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ddpforge.errors import CheckpointError, PluginError, UsageError
from ddpforge.interfaces import Callback, Contract

__all__ = ["add_numbers", "check_callback", "may_end", "overriding", "reads_gradients", "refuse_state", "state_of"]


def overriding(callbacks: Mapping[str, Callback], method: str) -> list[str]:
    """Names the callbacks that have a `method` of their own."""
    return [
        name
        for name, one in callbacks.items()
        if method in vars(one) or getattr(type(one), method) is not getattr(Callback, method)
    ]


def may_end(callbacks: Mapping[str, Callback], method: str) -> list[str]:
    """Names the callbacks whose `method` may ask for the end: that have one which is not declared to return None."""
    found = {name: getattr(callbacks[name], method) for name in overriding(callbacks, method)}
    returns = {name: getattr(one, "__annotations__", {}).get("return", one) for name, one in found.items()}
    return [name for name, kind in returns.items() if kind not in (None, "None")]


def reads_gradients(callbacks: Mapping[str, Callback]) -> bool:
    """True if one of them is to be told of gradients."""
    return bool(overriding(callbacks, "on_gradient"))


def add_numbers(found: dict[str, float], name: str, method: str, returned: Any, prefix: str = "") -> None:
    """Adds what a `method` of the callback `name` returned; raises PluginError unless it is new numbers by name."""
    for key, value in _numbers(name, method, returned).items():
        if (full := prefix + key) in found:
            raise PluginError(
                f"callback `{name}` reports {full}, which is reported already",
                hints=[f"return it from `{method}` under another name"],
            )
        found[full] = value


def _numbers(name: str, method: str, returned: Any) -> dict[str, float]:
    try:
        return {key: value if isinstance(value, int) else float(value) for key, value in returned.items()}
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise PluginError(
            f"callback `{name}` returned {returned!r:.200} from `{method}`",
            hints=["return a mapping with one number for each name; `{}` where there is nothing to report"],
        ) from error


def state_of(name: str, callback: Callback) -> Mapping[str, Any]:
    """The state of the callback `name`, for a checkpoint; raises PluginError for what is none."""
    found: Any = callback.state()
    if not isinstance(found, Mapping):
        raise PluginError(
            f"callback `{name}`: {type(callback).__name__}.state returned {found!r:.200}",
            hints=["return a mapping of tensors, parts, numbers and text by name; `{}` where there is nothing to keep"],
        )
    return found


def refuse_state(callbacks: Mapping[str, Callback]) -> None:
    """Raises PluginError for a callback whose state no checkpoint can hold."""
    from ddpforge.checkpoint.contents import RankState, flatten

    for name, callback in callbacks.items():
        try:
            flatten(RankState(model={}, callbacks={name: state_of(name, callback)}), rank=0, ranks=1)
        except CheckpointError as error:
            raise PluginError(error.message, hints=error.hints) from error


def check_callback(
    name: str, callback: Callback, contract: Contract | None, others: Iterable[str], *, trains: bool
) -> None:
    """Raises PluginError for a callback of an older contract, UsageError for one that the strategy cannot serve.

    `contract` is that of the strategy, as far as it is known; `others` names strategies that can. Where nothing
    `trains`, there are no gradients to read.
    """
    try:
        inspect.signature(callback.on_start).bind(None)
    except TypeError as error:
        raise PluginError(
            f"callback `{name}`: {type(callback).__name__}.on_start takes other arguments than the run",
            hints=["write `def on_start(self, run: RunContext)`, and read run.model, run.world and run.weights"],
        ) from error
    if contract and callback.calls_model and not contract.callable:
        raise UsageError(
            f"callback `{name}` ({type(callback).__name__}) calls the model, and under this strategy no "
            "rank has all of it",
            hints=[f"set strategy.use to {', '.join(others)}, or leave the callback out"],
        )
    if trains and contract and not contract.reads_gradients and reads_gradients({name: callback}):
        raise UsageError(
            f"callback `{name}` ({type(callback).__name__}) reads gradients in `on_gradient`, and this strategy cannot "
            "show them",
            hints=[f"set strategy.use to {', '.join(others)}, or leave the callback out"],
        )
