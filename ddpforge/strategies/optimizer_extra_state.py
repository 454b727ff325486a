"""State that an optimizer keeps in addition to its state of each parameter: counters, changed entries of groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge import compat
from ddpforge.errors import CheckpointError

__all__ = ["OptimizerExtraState"]

_PREFIX = "optimizer."
# Not state: attributes that torch and gradient scaling set in an optimizer, and values that the recipe sets.
_NOT_STATE = {"defaults", "found_inf", "grad_scale", "_opt_called", "_warned_capturable_if_run_uncaptured"}
_TORCHS = ("_optimizer_", "_zero_grad_", "_patched_", "_need_device_dtype_check_")  # prefixes of torch's attributes
_RECIPES = {"params", "names", "lr", "initial_lr"}
_DEEPEST = 7  # levels of nesting below the optimizer

Number = bool | int | float | Tensor | None
_Leaves = dict[str, tuple[Any, Any, Any]]  # by name: the collection, the key, and `_kept(value)`


class OptimizerExtraState:
    """State of `optimizer` that belongs to no parameter: the numbers that changed since this object was made.

    It covers attributes, entries of groups, and entries of `optimizer.state` that belong to no parameter. Numbers,
    booleans and 0-d tensors can be saved. `capture` raises an error if a generator, a larger tensor or the length of a
    list changed. If there are several optimizers, `name` is a prefix of all keys, and `among` are the names of all.
    """

    def __init__(self, optimizer: Optimizer, name: str = "", among: Collection[str] = ()) -> None:
        self._optimizer, self._prefix = optimizer, _prefix(name)
        self._longer = tuple(_prefix(other) for other in among if len(other) > len(name))
        self._first = {name: value for name, (_, _, value) in self._leaves().items()}

    def capture(self) -> dict[str, Number]:
        """Returns the changed numbers by name; raises CheckpointError if anything else changed."""
        changed = self._changed(self._leaves())
        for name, value in changed.items():
            if isinstance(value, tuple):
                raise CheckpointError(
                    f"{type(self._optimizer).__name__} changes its `{name}`, which is neither a number nor state of a "
                    "parameter: a checkpoint cannot hold it, and a resumed run would continue without it",
                    hints=["keep it as tensors in `optimizer.state[parameter]`, or as numbers"],
                )
        return {self._prefix + name: value for name, value in changed.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the numbers from `capture`; all others get the values that they had when this object was made."""
        there = self._leaves()
        begun = {n: self._first.get(n, ()) for n, now in self._changed(there).items() if not isinstance(now, tuple)}
        found = {name.removeprefix(self._prefix): value for name, value in saved.items() if self._is_mine(name)}
        for name, value in (begun | found).items():
            try:
                holder, key, held = there.get(name) or self._place(name)
                if isinstance(value, tuple):
                    holder.pop(key, None)  # it did not exist; a list is not shortened
                elif isinstance(held, Tensor) and isinstance(value, Tensor):
                    holder[key].detach().copy_(value)  # in place: another object may hold it too
                else:
                    holder[key] = value
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"the checkpoint holds `{name}`, but {type(self._optimizer).__name__} has no place for it"
                ) from error

    def _is_mine(self, name: str) -> bool:
        """True if the value belongs to this optimizer."""
        # The prefix of another optimizer may begin with this one's.
        if not name.startswith(self._prefix) or name.startswith(self._longer):
            return False
        return name.removeprefix(self._prefix).partition(".")[0] in self._roots()

    def _changed(self, leaves: _Leaves) -> dict[str, Any]:
        """Returns the values that changed since this object was made; an empty tuple for a value that is gone."""
        now = {name: value for name, (_, _, value) in leaves.items()}
        now |= {name: () for name in self._first if name not in now}
        return {name: value for name, value in now.items() if not _same(self._first.get(name, ()), value)}

    def _roots(self) -> dict[str, Any]:
        optimizer = self._optimizer
        return {"groups": optimizer.param_groups, "state": optimizer.state, "attributes": vars(optimizer)}

    def _leaves(self) -> _Leaves:
        seen, found = {id(self._optimizer)}, _Leaves()
        for name, root in self._roots().items():
            seen.add(id(root))
            found.update(_walk(name, root, seen))
        return found

    def _place(self, name: str) -> tuple[Any, Any, None]:
        """Returns the collection and the key for a value that does not exist."""
        *steps, key = (int(step) if step.isdigit() else step for step in name.split("."))
        at: Any = self._roots()
        for step in steps:
            at = _inside(at[step])
        return at, key, None


def _prefix(name: str) -> str:
    return f"{_PREFIX}{name}:" if name else _PREFIX


def _walk(name: str, holder: Any, seen: set[int]) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """Yields the values in collections and objects by name, and the length of each list; skips weights and code."""
    pairs = list(holder.items() if isinstance(holder, Mapping) else enumerate(holder))
    if name == "state":
        pairs = [(owner, entry) for owner, entry in pairs if not isinstance(owner, Tensor)]
    elif name == "attributes":
        pairs = [(key, value) for key, value in pairs if key not in _NOT_STATE and not key.startswith(_TORCHS)]
    for number, (key, value) in enumerate(pairs):
        path = f"{name}.{key if isinstance(key, str | int) else number}"
        if (
            key in _RECIPES
            or f"initial_{key}" in holder
            or isinstance(value, nn.Parameter | nn.Module | type)
            or callable(value)
        ):
            continue  # weights are saved elsewhere, code does not change
        if (inside := _inside(value)) is None:
            if (kept := _kept(value)) != ():
                yield path, (holder, key, kept)
        elif id(value) not in seen and path.count(".") < _DEEPEST:
            seen.add(id(value))
            yield from _walk(path, inside, seen)
            if isinstance(value, list | tuple):
                yield f"{path}.length", (value, "length", (len(value),))


def _inside(value: Any) -> Any:
    """Returns a collection itself, and the attributes of an object; None for any other value."""
    if isinstance(value, Mapping | list | tuple):
        return value
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, Tensor) else None


def _kept(value: Any) -> Any:
    """Returns a copy of a number; for other data a tuple that differs once the data changes; () for anything else."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Tensor):
        is_number = not value.ndim and not value.is_complex()
        return value.detach().clone() if is_number else (id(value), compat.version(value))
    if isinstance(value, torch.Generator):
        return (value.get_state().numpy().tobytes(),)
    if isinstance(value, np.ndarray):
        return (value.tobytes(),)
    if isinstance(value, str | bytes | complex | set | torch.dtype):
        return (value,)
    return value if isinstance(value, bool | int | float | None) else ()


def _same(first: Any, now: Any) -> bool:
    """True if type, dtype and value are equal; NaN equals NaN."""
    alike = type(first) is type(now) and getattr(first, "dtype", None) == getattr(now, "dtype", None)
    return alike and bool(first == now or (first != first and now != now))
