"""Metric objects of a module: their states of each batch, and their results over all samples of all ranks.

A metric is reset before and after every step, so its states are those of one batch. ddpforge adds up or gathers the
states of all batches, each once, as it does for its own metrics; then the object computes its result from them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from ddpforge.errors import UsageError
from ddpforge.interfaces import Metric, SampleColumns, Total

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MetricObjects"]

log = logging.getLogger("ddpforge")

_STATE = "?torchmetrics/"  # begins the names of states, which are not reported
_ACROSS_BATCHES = ("MinMaxMetric", "BootStrapper", "MetricTracker", "Running", "RunningMean", "RunningSum")
_CAT = (
    "write a torchmetrics.Metric that keeps outputs and targets in lists, "
    'add_state("outputs", [], dist_reduce_fx="cat"), and computes from them: ddpforge gathers those of all ranks'
)


@dataclass
class _Keeper:
    """Metric with states of its own, as every one is except for wrappers."""

    path: str
    metric: Any
    states: Any  # None if they cannot be combined over ranks: `wrong` has the reason
    wrong: str = ""


@dataclass
class _Object:
    """Metric that a module can log: a member of a collection, a wrapper with all its metrics, or a single one."""

    path: str
    metric: Any
    keepers: list[int] = field(default_factory=list)  # of its states


class _Parts(Metric):
    """Keeps the states of one metric over all ranks; reports nothing."""

    def __init__(self, kept: dict[int, tuple[Any, ...]], number: int) -> None:
        self._kept, self._number = kept, number

    def __call__(self, outputs: Any, targets: Any) -> Total:
        raise NotImplementedError

    def finish(self, *parts: Any) -> Mapping[str, float]:
        self._kept[self._number] = parts
        return {}


class MetricObjects:
    """Metrics of torchmetrics that are attributes of a module, or of its parts."""

    # Without a `__dict__`: the search for values that no checkpoint holds does not look into it.
    __slots__ = ("_evaluated", "_keepers", "_logged", "_means", "_objects", "_reduced", "_warned", "reports")

    def __init__(self) -> None:
        self.reports: dict[str, Metric] = {}  # for `Task.reports`
        self._objects: list[_Object] = []
        self._keepers: list[_Keeper] = []
        self._reduced: dict[int, tuple[Any, ...]] = {}  # states over all samples of the newest rows or evaluation set
        self._evaluated: dict[int, tuple[Any, ...]] = {}  # states over all evaluation sets
        self._logged: dict[tuple[bool, str], int] = {}  # names under which evaluations (True) or training log objects
        self._means: dict[str, int] = {}  # names of logged values that calls of a metric returned
        self._warned: set[str] = set()

    @property
    def paths(self) -> list[str]:
        """Returns the names of the metrics in the module."""
        return [one.path for one in self._objects]

    def start(self, module: nn.Module) -> None:
        """Finds the metrics of `module`, resets them, and keeps them from communicating between ranks."""
        self._objects, self._keepers = [], []
        for name in ("reports", "_reduced", "_evaluated", "_logged", "_means", "_warned"):
            getattr(self, name).clear()
        library = sys.modules.get("torchmetrics")  # a module with metrics has imported it
        if library is None:
            return
        numbers: dict[int, int] = {}
        for path, metric in _found(module, library, ""):
            own = _Object(path, metric)
            self._objects.append(own)
            for inner in metric.modules():
                if isinstance(inner, library.Metric):
                    _separate_ranks(inner)
                    if id(inner) not in numbers and inner.metric_state:
                        numbers[id(inner)] = len(self._keepers)
                        self._keepers.append(_keeper(path, inner, metric))
                    if inner.metric_state:
                        own.keepers.append(numbers[id(inner)])
        self.reports.update(
            {f"{_STATE}{number}": _Parts(self._reduced, number) for number in range(len(self._keepers))}
        )

    # -- within a step
    def reset(self) -> None:
        """Resets the metrics that have seen a batch."""
        for one in self._objects:
            for inner in one.metric.modules():
                if getattr(inner, "update_called", False):
                    inner.reset()

    def taken(self) -> dict[str, Any]:
        """Returns the states of this batch by name, for `quantities`."""
        found = [(number, one) for number, one in enumerate(self._keepers) if one.states and one.metric.update_called]
        return {f"{_STATE}{number}": one.states.taken() for number, one in found}

    def quantities(self, outputs: Mapping[str, Any]) -> dict[str, Total | SampleColumns]:
        """Returns the states in `outputs` in the form in which ranks add them up or gather them."""
        states = {name: taken for name, taken in outputs.items() if name.startswith(_STATE)}
        return {name: self._keepers[_number(name)].states.quantity(taken) for name, taken in states.items()}

    def log(self, name: str, metric: Any, *, evaluates: bool) -> None:
        """Keeps that evaluations, or training rows, report `metric` as `name`.

        Raises UsageError for a metric that is not an attribute of the module, or cannot be combined over ranks.
        """
        number = next((number for number, one in enumerate(self._objects) if one.metric is metric), None)
        if number is None:
            raise UsageError(
                f'self.log("{name}", …) receives a {type(metric).__name__}, which is not an attribute of the module',
                hints=[
                    "assign it in __init__: self.acc = …; several in nn.ModuleDict, nn.ModuleList or MetricCollection",
                    'of a MetricCollection: self.log_dict(self.metrics), or self.log("acc", self.metrics["acc"])',
                ],
                key="model.use",
            )
        self._reject_inexact(self._objects[number])
        self._logged[evaluates, name] = number

    def value_of_batch(self, metric: Any) -> Any:
        """Returns the value of a metric that has seen this batch, as a number; None if it has seen none."""
        from ddpforge.builtin.metrics.torchmetrics import batch_value

        value = batch_value(metric)
        if value is None and metric.update_called:
            value = metric.compute()
        return value.detach().float() if hasattr(value, "detach") else None

    def note_value(self, name: str, value: Any) -> None:
        """Keeps that `name` is the mean over batches of a metric, if a call of the metric returned `value`."""
        from ddpforge.builtin.metrics.torchmetrics import batch_value

        for number, one in enumerate(self._objects):
            if value is batch_value(one.metric):
                self._means.setdefault(name, number)

    def _reject_inexact(self, one: _Object) -> None:
        wrong = next((self._keepers[number].wrong for number in one.keepers if self._keepers[number].wrong), "")
        if wrong:
            raise UsageError(f"self.{one.path}: {wrong}", hints=[_CAT], key="model.use")

    # -- after the reduction over ranks
    def finish(self, metrics: Mapping[str, float], *, evaluates: bool) -> dict[str, float]:
        """Returns `metrics` without states, and with the results of the logged metrics over all samples."""
        found = {name: value for name, value in metrics.items() if not name.startswith(_STATE)}
        reduced = {**self._reduced}
        self._reduced.clear()
        if evaluates:
            for number, parts in reduced.items():
                before = self._evaluated.get(number)
                self._evaluated[number] = parts if before is None else _together(before, parts)
        with self._holding(reduced):
            for (use, name), number in self._logged.items():
                if use == evaluates and reduced.keys() & self._objects[number].keepers:
                    found |= _named(name, _result(self._objects[number].metric.compute))
            for name, number in self._means.items():
                if (
                    evaluates
                    and name in found
                    and name not in self._warned
                    and reduced.keys() & self._objects[number].keepers
                ):
                    self._warn_of_mean(name, found[name], number)
        return found

    def begin(self) -> None:
        """Forgets the states of evaluations before."""
        self._evaluated.clear()

    @contextmanager
    def evaluated(self) -> Iterator[Callable[[str, Any], dict[str, float]]]:
        """Gives the metrics the states over all evaluation sets, inside; yields a function for values that are logged.

        It returns the numbers to report for a name and a metric, or a value computed from results of metrics. It
        raises UsageError for any other value.
        """
        results: list[Any] = []
        with self._holding(self._evaluated), self._recorded(results):
            yield lambda name, value: self._exact(name, value, results)
        self.begin()

    def _exact(self, name: str, value: Any, results: Sequence[Any]) -> dict[str, float]:
        number = next((number for number, one in enumerate(self._objects) if one.metric is value), None)
        if number is not None:
            self._reject_inexact(self._objects[number])
            return _named(name, _result(self._objects[number].metric.compute))
        if isinstance(value, _computed()) or any(value is one for one in results):
            return _named(name, value)
        if isinstance(value, float | int) and any(_is_number(one) and float(one) == value for one in results):
            return {name: float(value)}
        raise UsageError(
            f'self.log("{name}", …) at the end of an evaluation receives a value that no metric object of the module '
            "computes: it is of this rank's batches alone",
            hints=[
                "log it in validation_step: ddpforge reports the mean over all samples of all ranks",
                'or log the result of a metric: self.log("acc", self.acc.compute())',
            ],
            key="model.use",
        )

    @contextmanager
    def _holding(self, parts: Mapping[int, tuple[Any, ...]]) -> Iterator[None]:
        """Gives the metrics these states, inside."""
        if not self._keepers:
            yield
            return
        self.reset()
        try:
            for number, columns in parts.items():
                keeper = self._keepers[number]
                before = {name: x for name, x in keeper.metric.metric_state.items() if not isinstance(x, list)}
                device = keeper.metric.device
                keeper.states.put(columns)
                for name, state in keeper.metric.metric_state.items():
                    setattr(keeper.metric, name, _placed(state, before.get(name), device))
            yield
        finally:
            self.reset()

    @contextmanager
    def _recorded(self, results: list[Any]) -> Iterator[None]:
        """Adds the results of the metrics' `compute` to `results`, inside; refuses metrics without states."""
        own = [(one, one.metric.compute) for one in self._objects]

        def recorder(one: _Object, original: Callable[[], Any]) -> Callable[[], Any]:
            def compute() -> Any:
                self._reject_inexact(one)
                if not self._evaluated.keys() & {*one.keepers}:
                    raise UsageError(
                        f"self.{one.path} is computed at the end of an evaluation, and no step of the evaluation "
                        "has updated it",
                        hints=[
                            f"call self.{one.path} in validation_step",
                            "the best value of a run: `ddpforge runs`, or [checkpoint.keep] best",
                        ],
                        key="model.use",
                    )
                value = _as(_computed(), _result(original))
                results.extend(_flat(value))
                return value

            return compute

        for one, compute in own:
            one.metric.compute = recorder(one, compute)
        try:
            yield
        finally:
            for one, compute in own:
                if hasattr(compute, "__self__"):  # the method of the class
                    del one.metric.compute
                else:
                    one.metric.compute = compute

    def _warn_of_mean(self, name: str, mean: float, number: int) -> None:
        """Logs a warning if the mean of a metric over batches is not its result over all samples."""
        one = self._objects[number]
        exact = _named(name, _result(self._objects[number].metric.compute)).get(name)
        if exact is not None and abs(exact - mean) > 1e-6 * max(1.0, abs(exact)):
            self._warned.add(name)
            log.log(
                logging.INFO if int(os.environ.get("RANK", "0")) else logging.WARNING,
                "%s is a mean of the values of batches, %.6g, which depends on their size; self.%s of all samples is "
                '%.6g: write self.log("%s", self.%s) to report it',
                name,
                mean,
                one.path,
                exact,
                name,
                one.path,
            )


def _result(compute: Callable[[], Any]) -> Any:
    from ddpforge.builtin.metrics.torchmetrics import computing

    with computing():
        return compute()


def _found(module: Any, library: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the metrics in `module` by path: members of collections, wrappers as a whole."""
    from ddpforge.builtin.metrics.torchmetrics import separate

    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, library.Metric):
            yield path, child
        elif isinstance(child, library.MetricCollection):
            separate(child)
            for key, metric in child.items(keep_base=True, copy_state=False):
                yield f"{path}.{key}", metric
        else:
            yield from _found(child, library, f"{path}.")


def _keeper(path: str, metric: Any, whole: Any) -> _Keeper:
    from ddpforge.builtin.metrics.torchmetrics import MetricStates

    if type(whole).__name__ in _ACROSS_BATCHES:
        kind = type(whole).__name__
        return _Keeper(path, metric, None, f"{kind} of torchmetrics depends on the order and the size of batches")
    try:
        return _Keeper(path, metric, MetricStates(metric, path))
    except UsageError as error:
        return _Keeper(path, metric, None, error.message)


def _separate_ranks(metric: Any) -> None:
    """Lets a metric see only the samples of its own rank: ddpforge combines the ranks; and saves none of its states."""
    metric.distributed_available_fn = _never
    metric.persistent(False)


def _never() -> bool:
    return False


def _placed(state: Any, before: Any, device: Any) -> Any:
    """Returns the state on the device of the metric; counts are whole numbers again."""
    from ddpforge.interfaces import device_kind

    if isinstance(state, list):
        return [_placed(one, None, device) for one in state]
    if before is not None and not before.is_floating_point():
        return state.round().to(device, before.dtype)
    if not device_kind(device).has_float64 and state.is_floating_point():
        state = state.float()
    return state.to(device)


def _together(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the states of two evaluation sets together: rows of both, or the sums of totals."""
    import torch

    def joined(first: Any, second: Any) -> Any:
        return [*first, *second] if isinstance(first, list) else torch.cat([first, second])

    is_total = len(one) == 2 and not isinstance(one[1], list) and one[1].ndim == 0
    return tuple(a + b if is_total else joined(a, b) for a, b in zip(one, other, strict=True))


def _number(name: str) -> int:
    return int(name.removeprefix(_STATE))


def _named(name: str, value: Any) -> dict[str, float]:
    """Returns the numbers of a result: one, or several by key, as "name/0" of the class 0."""
    from ddpforge.builtin.metrics.torchmetrics import numbers_of

    found = numbers_of(name, value)
    return {name: found} if isinstance(found, float) else {f"{name}/{key}": one for key, one in found.items()}


# ---------------------------------------------------------------------------------------------- results of metrics
@cache
def _computed() -> type[Any]:
    """Returns the class of tensors that are results of metrics, or are computed from these alone."""
    import torch

    class Computed(torch.Tensor):
        """Result of a metric. An operation with another tensor returns a plain tensor."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            returned = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            given = [one for one in _flat((args, kwargs or {})) if isinstance(one, torch.Tensor)]
            return returned if all(isinstance(one, cls) for one in given) else _as(torch.Tensor, returned)

    return Computed


def _as(kind: type[Any], value: Any) -> Any:
    """Returns nested tensors as tensors of the class `kind`."""
    import torch

    if isinstance(value, Mapping):
        return {key: _as(kind, one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as(kind, one) for one in value)
    return value.as_subclass(kind) if isinstance(value, torch.Tensor) else value


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(one)
    else:
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) or (hasattr(value, "numel") and value.numel() == 1)
