"""The state that an optimizer keeps beside that of each parameter: counters, changed entries of its groups."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError

__all__ = ["OwnState"]

_PREFIX = "optimizer."
# What torch itself and gradient scaling note in an optimizer, and what the recipe decides at every step.
_NOT_STATE = {"state", "param_groups", "defaults", "step", "found_inf", "grad_scale"} | {
    *("_need_device_dtype_check_for_unscale", "_need_device_dtype_check_for_fused"),
    *("_warned_capturable_if_run_uncaptured", "_opt_called"),
}
_RECIPES = {"params", "names", "lr", "initial_lr"}
_KINDS = ("groups", "state", "attributes")  # what the path of a value begins with
_DEEPEST = 8

Plain = bool | int | float | Tensor | None
Path = tuple[Any, ...]


class _Leaf(NamedTuple):
    """A value as it was when it was looked at; `plain` where a checkpoint can hold it."""

    value: Any
    plain: bool


class OwnState:
    """The state of `optimizer` that belongs to no parameter: what has changed since this was made.

    Attributes, entries of its groups, and entries of `optimizer.state` that are not a parameter's count. Numbers,
    truth values and 0-d tensors can be saved; everything else that changes is refused. Where there are several
    optimizers, of the names in `among`, the `name` of each begins the names of its values.
    """

    def __init__(self, optimizer: Optimizer, name: str = "", among: Collection[str] = ()) -> None:
        self._optimizer, self._prefix = optimizer, _prefix(name)
        self._longer = tuple(_prefix(other) for other in among if len(other) > len(name))
        self._built = dict(_leaves(optimizer))

    def capture(self) -> dict[str, Plain]:
        """Captures the values that have changed, by name; raises CheckpointError for more than a number."""
        now = dict(_leaves(self._optimizer))
        changed = {path: leaf for path, leaf in now.items() if not _same(self._built.get(path), leaf)}
        gone = [path for path in self._built if path not in now]
        for path in [*gone, *(path for path, leaf in changed.items() if not leaf.plain)]:
            raise CheckpointError(
                f"{type(self._optimizer).__name__} changes its `{_spelled(path)}`, which is no number and no "
                "parameter's state: a checkpoint cannot hold it, and a resumed run would continue without",
                hints=["keep it as tensors in `optimizer.state[parameter]`, or as numbers"],
            )
        return {self._prefix + _spelled(path): leaf.value for path, leaf in changed.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes back what `capture` gave; what is not in there becomes what it was when this was made."""
        found = {name.removeprefix(self._prefix): value for name, value in saved.items() if self._is_mine(name)}
        for path, leaf in dict(_leaves(self._optimizer)).items():
            before = self._built.get(path)
            if _spelled(path) in found or not leaf.plain or _same(before, leaf):
                continue
            if before is None:
                _remove(self._optimizer, path)
            elif before.plain:
                _set(self._optimizer, path, before.value)
        known = {_spelled(path): path for path, _ in _leaves(self._optimizer)}
        for name, value in found.items():
            _set(self._optimizer, known.get(name) or _path(name), value)

    def _is_mine(self, name: str) -> bool:
        """True for a value of this optimizer: its prefix may begin that of another, as "" begins all."""
        if not name.startswith(self._prefix) or name.startswith(self._longer):
            return False
        return name.removeprefix(self._prefix).partition(".")[0] in _KINDS

    def reset(self) -> None:
        """Makes the optimizer what it was when this was made."""
        self.restore({})


def _prefix(name: str) -> str:
    return f"{_PREFIX}{name}:" if name else _PREFIX


# ---------------------------------------------------------------------------------------------- finding it
def _leaves(optimizer: Optimizer) -> Iterator[tuple[Path, _Leaf]]:
    seen = {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        seen.add(id(group))
        for key, value in group.items():
            if key not in _RECIPES:
                yield from _within(("groups", number, key), value, seen)
    state: Mapping[Any, Any] = optimizer.state
    for owner, value in state.items():
        if not isinstance(owner, Tensor):
            yield from _within(("state", owner), value, seen)
    for name, value in vars(optimizer).items():
        if name not in _NOT_STATE and not name.startswith(("_optimizer_", "_zero_grad_", "_patched_")):
            yield from _within(("attributes", name), value, seen)


def _within(path: Path, value: Any, seen: set[int]) -> Iterator[tuple[Path, _Leaf]]:
    """The leaves of a value: numbers, tensors, and of collections and objects what is in them."""
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        yield path, _Leaf(value.item(), plain=True)
    elif isinstance(value, bool | int | float | None):
        yield path, _Leaf(value, plain=True)
    elif isinstance(value, nn.Parameter | nn.Module | type) or callable(value):
        return  # weights are saved elsewhere, code does not change
    elif isinstance(value, Tensor):
        plain = not value.ndim and not value.is_complex()
        held: Any = value.detach().clone() if plain else (value, value._version)
        yield path, _Leaf(held, plain)
    elif id(value) not in seen and len(path) < _DEEPEST:
        seen.add(id(value))
        yield from _inside(path, value, seen)


def _inside(path: Path, value: Any, seen: set[int]) -> Iterator[tuple[Path, _Leaf]]:
    if isinstance(value, Mapping):
        for number, (key, item) in enumerate(value.items()):
            if key not in _RECIPES if isinstance(key, str) else True:
                yield from _within((*path, key if isinstance(key, str | int) else number), item, seen)
    elif isinstance(value, list | tuple):
        yield (*path, "length"), _Leaf((len(value),), plain=False)
        for number, item in enumerate(value):
            yield from _within((*path, number), item, seen)
    elif isinstance(value, torch.Generator):
        yield path, _Leaf(value.get_state().numpy().tobytes(), plain=False)
    elif hasattr(value, "__dict__"):
        yield from _inside(path, vars(value), seen)
    else:
        try:
            yield path, _Leaf(pickle.dumps(value), plain=False)
        except Exception:  # a lock, a file: not what is computed with
            return


def _same(before: _Leaf | None, now: _Leaf) -> bool:
    if before is None or before.plain != now.plain:
        return False
    a: Any = before.value
    b: Any = now.value
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and bool(((a == b) | (a != a) & (b != b)).item())
    if isinstance(a, tuple) and isinstance(b, tuple) and isinstance(a[0], Tensor):
        return a[0] is b[0] and a[1] == b[1]
    return type(a) is type(b) and (a == b or (a != a and b != b))


# ---------------------------------------------------------------------------------------------- putting it back
def _spelled(path: Path) -> str:
    return ".".join(map(str, path))


def _path(name: str) -> Path:
    """The path of a value that the optimizer does not have yet: of a number that it only makes when it steps."""
    kind, *rest = name.split(".")
    return (kind, int(rest[0]), *rest[1:]) if kind == "groups" else (kind, *rest)


def _holder(optimizer: Optimizer, path: Path) -> Any:
    """The group, mapping, sequence or object that the last name of a path is in."""
    kind, *steps, _ = path
    at: Any = {"groups": optimizer.param_groups, "state": optimizer.state, "attributes": optimizer}[kind]
    for step in steps:
        at = at[step] if isinstance(at, Mapping | Sequence) else getattr(at, str(step))
    return at


def _remove(optimizer: Optimizer, path: Path) -> None:
    at, last = _holder(optimizer, path), path[-1]
    if isinstance(at, MutableMapping):
        del at[last]
    elif hasattr(at, str(last)):
        delattr(at, str(last))


def _set(optimizer: Optimizer, path: Path, value: Any) -> None:
    try:
        at, last = _holder(optimizer, path), path[-1]
        held = at.get(last) if isinstance(at, Mapping) else getattr(at, str(last), None)
        if isinstance(held, Tensor) and isinstance(value, Tensor):
            held.detach().copy_(value)  # in place: somebody else may hold it too
        elif isinstance(at, Mapping | Sequence):
            at[last] = value  # type: ignore[index]
        else:
            setattr(at, str(last), value)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint holds `{_spelled(path)}`, for which {type(optimizer).__name__} has no place"
        ) from error
