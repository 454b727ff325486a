"""The state that an optimizer keeps beside that of each parameter: counters, changed entries of its groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge import compat
from ddpforge.errors import CheckpointError

__all__ = ["OwnState"]

_PREFIX = "optimizer."
# What torch itself and gradient scaling note in an optimizer, and what the recipe decides at every step.
_NOT_STATE = {"state", "param_groups", "defaults", "step", "found_inf", "grad_scale"} | {
    *("_need_device_dtype_check_for_unscale", "_need_device_dtype_check_for_fused"),
    *("_warned_capturable_if_run_uncaptured", "_opt_called"),
}
_TORCHS = ("_optimizer_", "_zero_grad_", "_patched_")  # begin other attributes that torch notes
_RECIPES = {"params", "names", "lr", "initial_lr"}
_DEEPEST = 8

Number = bool | int | float | Tensor | None
Path = tuple[str | int, ...]


class OwnState:
    """The state of `optimizer` that belongs to no parameter: the numbers that have changed since this was made.

    Attributes, entries of its groups, and entries of `optimizer.state` that are not a parameter's count. Numbers,
    truth values and 0-d tensors can be saved; a list, a generator or a tensor that changes is refused. Where there are
    several optimizers, of the names in `among`, the `name` of each begins the names of its values.
    """

    def __init__(self, optimizer: Optimizer, name: str = "", among: Collection[str] = ()) -> None:
        self._optimizer, self._prefix = optimizer, _prefix(name)
        self._longer = tuple(_prefix(other) for other in among if len(other) > len(name))
        self._numbers, self._others = self._values()

    def capture(self) -> dict[str, Number]:
        """Captures the numbers that have changed, by name; raises CheckpointError if anything else has."""
        numbers, others = self._values()
        changed = {path for path in {*others, *self._others} if others.get(path) != self._others.get(path)}
        for path in sorted((changed - numbers.keys()) | (self._numbers.keys() - numbers.keys()), key=str):
            raise CheckpointError(
                f"{type(self._optimizer).__name__} changes its `{_spelled(path)}`, which is no number and no "
                "parameter's state: a checkpoint cannot hold it, and a resumed run would continue without",
                hints=["keep it as tensors in `optimizer.state[parameter]`, or as numbers"],
            )
        return {self._prefix + _spelled(path): value for path, value in numbers.items() if self._is_new(path, value)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes back what `capture` gave; what is not in there becomes what it was when this was made."""
        found = {name.removeprefix(self._prefix): value for name, value in saved.items() if self._is_mine(name)}
        for path, value in self._values()[0].items():
            if _spelled(path) not in found and self._is_new(path, value):
                self._put(path, self._numbers.get(path), removes=path not in self._numbers)
        known = {_spelled(path): path for path in self._values()[0]}
        for name, value in found.items():
            kind, *rest = name.split(".")
            self._put(known.get(name) or (kind, *(int(key) if key.isdigit() else key for key in rest)), value)

    def _is_mine(self, name: str) -> bool:
        """True for a value of this optimizer: its prefix may begin that of another, as "" begins all."""
        if not name.startswith(self._prefix) or name.startswith(self._longer):
            return False
        return name.removeprefix(self._prefix).partition(".")[0] in ("groups", "state", "attributes")

    def _is_new(self, path: Path, value: Number) -> bool:
        return path not in self._numbers or not _same(self._numbers[path], value)

    def _values(self) -> tuple[dict[Path, Number], dict[Path, Any]]:
        """The numbers, and of all else what tells a change."""
        numbers: dict[Path, Number] = {}
        others: dict[Path, Any] = {}
        seen = {id(self._optimizer)}
        for kind, held in self._roots().items():
            for path, value in _leaves((kind,), held, seen):
                if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
                    numbers[path] = value.item()
                elif isinstance(value, Tensor) and not value.ndim and not value.is_complex():
                    numbers[path] = value.detach().clone()
                elif isinstance(value, bool | int | float | None):
                    numbers[path] = value
                else:
                    others[path] = _mark(value)
        return numbers, others

    def _roots(self) -> dict[str, Any]:
        state: Mapping[Any, Any] = self._optimizer.state
        names = (name for name in vars(self._optimizer) if name not in _NOT_STATE and not name.startswith(_TORCHS))
        return {
            "groups": self._optimizer.param_groups,
            "state": {owner: value for owner, value in state.items() if not isinstance(owner, Tensor)},
            "attributes": {name: getattr(self._optimizer, name) for name in names},
        }

    def _put(self, path: Path, value: Any, *, removes: bool = False) -> None:
        """Gives the number at a path a value, or removes it."""
        kind, *steps, last = path
        at: Any = {"groups": self._optimizer.param_groups, "state": self._optimizer.state}.get(
            str(kind), self._optimizer
        )
        try:
            for step in steps:
                at = at[step] if isinstance(at, Mapping | Sequence) else getattr(at, str(step))  # type: ignore[index]
            if removes:
                at.pop(last) if isinstance(at, MutableMapping) else delattr(at, str(last))
                return
            held = at.get(last) if isinstance(at, Mapping) else getattr(at, str(last), None)
            if isinstance(held, Tensor) and isinstance(value, Tensor):
                held.detach().copy_(value)  # in place: another object may hold it too
            elif isinstance(at, Mapping | Sequence):
                at[last] = value  # type: ignore[index]
            else:
                setattr(at, str(last), value)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint holds `{_spelled(path)}`, for which {type(self._optimizer).__name__} has no place"
            ) from error


def _prefix(name: str) -> str:
    return f"{_PREFIX}{name}:" if name else _PREFIX


def _spelled(path: Path) -> str:
    return ".".join(map(str, path))


def _leaves(path: Path, value: Any, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """The values in collections and objects, each with its path; of a list also the length."""
    if isinstance(value, nn.Parameter | nn.Module | type) or callable(value):
        return  # weights are saved elsewhere, code does not change
    inside: Any = None
    if isinstance(value, Mapping):
        inside = [
            (key if isinstance(key, str | int) else number, one) for number, (key, one) in enumerate(value.items())
        ]
    elif isinstance(value, list | tuple):
        inside = [*enumerate(value), *([("length", str(len(value)))] if len(path) > 1 else [])]
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor):
        inside = vars(value).items()
    if inside is None:
        yield path, value
    elif id(value) not in seen and len(path) < _DEEPEST:
        seen.add(id(value))
        for key, one in inside:
            if key not in _RECIPES:
                yield from _leaves((*path, key), one, seen)


def _mark(value: Any) -> Any:
    """Returns what differs after a value that is no number has changed; None for one that is not computed with."""
    if isinstance(value, Tensor):
        return id(value), compat.version(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value if isinstance(value, str | bytes | complex | set | torch.dtype) else None


def _same(before: Number, now: Number) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.dtype == now.dtype and bool(((before == now) | (before != before) & (now != now)).item())
    return type(before) is type(now) and bool(before == now or (before != before and now != now))
