"""State of a task: saves it in checkpoints, and reports tensors that no optimizer trains or no checkpoint holds."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpforge import compat
from ddpforge.components.local_code import component_name
from ddpforge.data.pytree import digest
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import AuxiliaryModule, Callback, Metric, Ranks, Replica, Task, TensorShard
from ddpforge.training.features import Assembled, Feature, OwnedState

__all__ = ["NAME", "TaskState", "TaskStates", "Unsaved", "check_no_parameters", "has_state"]

log = logging.getLogger("ddpforge")

NAME = "task"  # name of a task's state in checkpoints, which store it like a callback's
_FRAMEWORKS = {
    "batch_samples",
    "step_of_run",
    "log_media",
    "rng",
    "reports",
}  # attributes of a task that the framework sets, or that hold metrics
_LIBRARIES = (
    *("torch.", "deepspeed.", "accelerate.", "builtins.", "typing.", "abc."),
    *("ddpforge.interfaces.", "ddpforge.ranks.", "ddpforge.strategies."),
)
_DEEPEST, _ITEMS, _MOST = 5, 1000, 50_000  # limits: depth of nested values, items of a collection, values in all
_SMALL = 1 << 16  # elements up to which a tensor is compared by its values


# ---------------------------------------------------------------------------------------------- in checkpoints
def has_state(task: Task) -> bool:
    """True for a task with a state; raises PluginError if it has only one of `state` and `load_state`."""
    keeps, takes = type(task).state is not Task.state, type(task).load_state is not Task.load_state
    if keeps != takes:
        missing = "load_state" if keeps else "state"
        raise PluginError(
            f"{component_name(task)} has `{'state' if keeps else 'load_state'}`, but no `{missing}`",
            hints=["`state()` returns the values for a checkpoint, and `load_state(state)` restores them"],
        )
    return keeps


class TaskStates(Feature):
    """State of the task in checkpoints, and the search for values that no checkpoint holds."""

    def __init__(self, run: Assembled, state: TaskState | None) -> None:
        self._run, self._state = run, state
        if run.trains:
            parts, is_rank_zero = run.parts, run.world.is_rank_zero
            self._unsaved = Unsaved(
                parts.task, run.replica.unwrapped, parts.auxiliary, state, is_rank_zero=is_rank_zero
            )

    @classmethod
    def of(cls, run: Assembled) -> Self:
        """Returns the feature."""
        task, ranks = run.parts.task, run.world.global_ranks
        return cls(run, TaskState(task, run.replica, ranks) if has_state(task) else None)

    @override
    def callbacks(self) -> Mapping[str, Callback]:
        return {NAME: self._state} if self._state else {}

    @override
    def start(self, stateful: nn.Module) -> None:
        parts = self._run.parts
        check_no_parameters(parts.task, self._run.replica.unwrapped, parts.auxiliary.values())

    @override
    def after_step(self) -> bool:
        return self._unsaved.look()

    @override
    def before_save(self) -> None:
        self._unsaved.compare()


class TaskState(OwnedState):
    """Task's own state as a callback, so that checkpoints store it."""

    def __init__(self, task: Task, replica: Replica, ranks: Ranks) -> None:
        self._task, self._replica, self._ranks = task, replica, ranks

    def state(self) -> Mapping[str, Any]:
        """Returns a copy of the state, which the next forward pass may change. Collective.

        Raises PluginError if ranks that compute the loss have different states: only one could be restored.
        """
        found: Any = self._task.state()
        if not isinstance(found, Mapping) or any(isinstance(value, TensorShard) for value in found.values()):
            raise PluginError(
                f"{component_name(self._task)}.state returned {found!r:.200}",
                hints=["return a mapping of tensors, numbers and text by name, the same on every rank"],
            )
        mine = {key: x.detach().clone() if isinstance(x, Tensor) else x for key, x in found.items()}
        if self._ranks.size == 1:
            return mine
        digests = {key: digest(value) for key, value in mine.items()}
        everyones = self._ranks.all_gather_object((self._replica.computes_loss, digests))
        computing = [rank for rank, (computes, _) in enumerate(everyones) if computes]
        first = everyones[computing[0]][1]
        for rank in computing[1:]:
            if everyones[rank][1] != first:
                self._reject(sorted({*first, *everyones[rank][1]}), first, everyones[rank][1], (computing[0], rank))
        if len(computing) == self._ranks.size:
            return mine
        # The other ranks compute no loss: they take the state of a rank that does.
        sends = self._ranks.rank == computing[0]
        given = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in mine.items()} if sends else None
        return self._ranks.all_gather_object(given)[computing[0]] or {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of the task; tensors are on the CPU."""
        self._task.load_state({key: x.read() if hasattr(x, "read") else x for key, x in state.items()})

    def restore(self, state: Mapping[str, Any] | None, is_another: Callable[[], bool]) -> None:
        """Restores the state, unless it is of another task."""
        if state is not None:
            if not is_another():
                self.load_state(state)
        elif self._ranks.rank == 0:
            log.warning("the checkpoint has no state of the task, which starts with the state of its constructor")

    def _reject(
        self, names: Sequence[str], one: Mapping[str, str], other: Mapping[str, str], ranks: tuple[int, int]
    ) -> None:
        name = next(name for name in names if one.get(name) != other.get(name))
        raise PluginError(
            f"{component_name(self._task)}.state: `{name}` has different values on rank {ranks[0]} and on rank "
            f"{ranks[1]}, "
            "and a resumed run would have one of them on all ranks",
            hints=[
                "make it the same on every rank: keep the `world` that `start` receives, and add up counts with "
                "`world.dp_ranks.all_reduce_sum(tensor)`"
            ],
        )


# ---------------------------------------------------------------------------------------------- parameters
def check_no_parameters(task: Task, model: nn.Module, beside: Collection[AuxiliaryModule]) -> None:
    """Raises UsageError for trainable tensors in a task: optimizers have only the parameters of the model."""
    known = {id(tensor) for module in (model, *(one.module for one in beside)) for tensor in module.parameters()}
    for name, value in _inside(task, "", {id(model), *(id(one.module) for one in beside)}):
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf and id(value) not in known:
            kind = "parameter" if isinstance(value, nn.Parameter) else "tensor that requires gradients"
            raise UsageError(
                f"{component_name(task)} keeps a {kind} `{name}` {list(value.shape)}, which no optimizer trains: "
                "optimizers "
                "have the parameters of the model",
                hints=[
                    "to train it, make it a parameter of the model, and let forward return it, or a value computed "
                    "with it",
                    "to keep it fixed: `.requires_grad_(False)`",
                    "to move and save a module: return it in `auxiliary_modules`",
                ],
            )


def _reject_hidden(model: nn.Module) -> None:
    """Raises UsageError for weights with a gradient in plain attributes of a model, which torch does not register."""
    known = {id(tensor) for tensor in model.parameters()}
    seen = {id(module) for module in model.modules()}
    for owner, module in model.named_modules():
        for name, value in _plain(owner, module, seen):
            if isinstance(value, Tensor) and value.grad is not None and id(value) not in known:
                raise UsageError(
                    f"the model keeps weights in a plain attribute, `{name}` {list(value.shape)}: they get gradients, "
                    "but no optimizer trains them",
                    hints=["keep modules in nn.ModuleList or nn.ModuleDict, and tensors in nn.Parameter"],
                )


# ---------------------------------------------------------------------------------------------- lost by a resume
class Unsaved:
    """Search for values that training changes and no checkpoint holds.

    It compares them after a process's first step with those after the second one, and at every save.

    It compares tensors, numbers, collections and generators in attributes of the task, and of modules that do not
    belong to a library; and the non-persistent buffers of all modules. Values that the first step creates (a cache) do
    not count.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        beside: Mapping[str, AuxiliaryModule],
        state: Callback | None,
        *,
        is_rank_zero: bool,
    ) -> None:
        self._task, self._model, self._beside, self._state = task, model, beside, state
        self._is_rank_zero = is_rank_zero
        self._before: dict[str, Any] = {}  # after the first step
        self._begun = False

    def look(self) -> bool:
        """Compares the values after a step, on every rank; returns True until the second step.

        Raises UsageError for weights that have a gradient and no optimizer.
        """
        if not self._begun:
            self._begun = True
            check_no_parameters(self._task, self._model, self._beside.values())
            _reject_hidden(self._model)
            self._before = dict(islice(self._values(), _MOST))
            return True
        self.compare()
        return False

    def compare(self) -> None:
        """Logs a warning for values that differ from those after the first step, once for each. Collective."""
        if not self._begun:  # before the first step
            return
        before = self._before
        kept = self._state.state() if self._state else {}
        found = islice(self._values(), _MOST)
        changed = [name for name, value in found if name in before and before[name] != value]
        for name in changed:
            del before[name]
        if lost := [name for name in changed if not self._is_kept(name, kept)]:
            few = ", ".join(f"`{name}`" for name in lost[:8]) + (" …" if len(lost) > 8 else "")
            log.log(
                logging.WARNING if self._is_rank_zero else logging.INFO,
                "training changes %s, which no checkpoint holds: a resumed run begins without it. If it matters, "
                "return it from the task's `state()`, or make it a persistent buffer of the model",
                few,
            )

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yields the values by name: "task.mean", "model.blocks.0.calls"."""
        placed = [one.module for one in self._beside.values()]
        seen = {id(module) for root in (self._model, *placed) for module in root.modules()}
        roots = {"model": self._model, **{f"beside.{name}": one.module for name, one in self._beside.items()}}
        for root, module in roots.items():
            kept = {id(value) for value in module.state_dict(keep_vars=True).values()}
            for owner, each in module.named_modules():
                name = f"{root}.{owner}".rstrip(".")
                for key, buffer in each.named_buffers(recurse=False, remove_duplicate=False):
                    if id(buffer) not in kept:
                        yield f"{name}.{key}", _mark(buffer)
                for path, value in _plain(name, each, seen):
                    yield path, _mark(value)
        for name, value in _inside(self._task, "task", seen):
            yield name, _mark(value)

    def _is_kept(self, name: str, kept: Mapping[str, Any]) -> bool:
        """True if the task's state has the value: under a part of its name, or as an equal value."""
        if not name.startswith("task.") or not kept:
            return False
        now = dict(_inside(self._task, "task", set())).get(name)
        return any(part in kept for part in name.split(".")) or any(_same(now, value) for value in kept.values())


def _mark(value: Any) -> Any:
    """Returns a mark that changes with the value: a digest or, for a large tensor, its identity and version counter."""
    if not isinstance(value, Tensor | np.ndarray):
        return "NaN" if value != value else value
    form = (str(value.dtype), tuple(value.shape))
    if isinstance(value, np.ndarray):
        return (*form, digest(value) if value.size <= _SMALL else id(value))
    if value.numel() <= _SMALL and not value.is_meta:
        return (*form, digest(value))
    return (*form, id(value), compat.version(value))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        other = other.to(one.device)
    elif type(one) is not type(other) or not isinstance(one, np.ndarray):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())


# ---------------------------------------------------------------------------------------------- finding values
_MODULES_OWN = frozenset(vars(nn.Module()))  # attributes that every module has
_SHARDINGS = ("ds_", "applied_", "_forward_", "_fsdp")  # prefixes of attributes that sharding adds to modules


def _plain(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the values in a module's plain attributes, unless its class belongs to a library."""
    if all(map(_is_library, type(module).__mro__)):  # a sharded module has a class of torch in addition to its own
        return
    for key, value in vars(module).items():
        if key not in _MODULES_OWN and not key.startswith(_SHARDINGS):
            yield from _within(f"{name}.{key}".lstrip("."), value, seen, 0)


def _inside(task: Task, name: str, known: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Yields the values in a task's attributes, by path."""
    seen = {id(task), *known}
    for key, value in vars(task).items():
        if key not in _FRAMEWORKS:
            yield from _within(f"{name}.{key}".lstrip("."), value, seen, 0)


def _within(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and numbers that a value is, or holds; also the length of collections, the state of RNGs."""
    if isinstance(value, Tensor):
        if value.is_leaf or not value.requires_grad:  # otherwise it belongs to the graph of one step
            yield name, value
    elif isinstance(value, bool | int | float | complex | str | np.generic | np.ndarray):
        yield name, value
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, random.Random):
        yield name, value.getstate()
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif value is not None and id(value) not in seen and depth < _DEEPEST:
        seen.add(id(value))
        yield from _members(name, value, seen, depth + 1)


def _members(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{key}", tensor
    elif isinstance(value, Mapping):
        yield f"{name}.length", len(value)
        for key, item in list(value.items())[:_ITEMS]:
            yield from _within(f"{name}.{key}", item, seen, depth)
    elif isinstance(value, list | tuple | deque):
        yield f"{name}.length", len(value)
        for number, item in enumerate(list(value)[-_ITEMS:]):
            yield from _within(f"{name}.{number}", item, seen, depth)
    elif isinstance(value, set | frozenset):
        yield f"{name}.length", len(value)
    elif not isinstance(value, Metric | type) and hasattr(value, "__dict__") and not _is_library(type(value)):
        for key, item in vars(value).items():
            yield from _within(f"{name}.{key}", item, seen, depth)


def _is_library(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_LIBRARIES)
