"""Adapter for torchmetrics: exact results over ranks and incomplete batches, with states as totals or rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from threading import RLock
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from ddpforge.errors import PluginError, SetupError, UsageError, pip_install
from ddpforge.interfaces import Metric, SampleColumns, Total, device_kind, in_float64

__all__ = ["MetricStates", "TorchMetric", "adopted", "batch_value", "computing", "numbers_of", "separate"]

_ONE_AT_A_TIME = RLock()
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def adopted(metric: type[torchmetrics.Metric]) -> Callable[..., TorchMetric]:
    """Returns a component for a class of torchmetrics: its options, plus the `name` under which it is reported."""

    def build(*, name: str = "", **options: Any) -> TorchMetric:
        try:
            return TorchMetric(metric(**options), name)
        except ModuleNotFoundError as error:
            hints = [pip_install("detection")] if metric.__module__.startswith("torchmetrics.detection") else []
            raise SetupError(
                f"{metric.__name__} needs a library that is not installed: {error}", hints=hints
            ) from error

    named = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default="", annotation=str)
    *options, last = inspect.signature(metric).parameters.values()
    ends = [named, last] if last.kind is last.VAR_KEYWORD else [last, named]
    build.__signature__ = inspect.Signature([*options, *ends])  # type: ignore[attr-defined]
    build.__name__, build.__doc__, build.__module__ = metric.__name__, metric.__doc__, metric.__module__
    return build


class MetricStates:
    """States of a metric of torchmetrics, as totals or rows that ranks combine exactly. Resets the metric.

    States that are sums become a total. Lists of samples, minima and maxima become rows. A list that torchmetrics does
    not concatenate, e.g. the boxes of each image, has one entry per sample.

    Raises:
        UsageError: A state cannot be combined exactly over ranks.
    """

    def __init__(self, metric: torchmetrics.Metric, name: str) -> None:
        self._metric, self._name = metric, name
        self._reductions: Mapping[str, Any] = metric._reductions
        metric.reset()
        self._begun: Mapping[str, Any] = {
            name: x.clone() if isinstance(x, Tensor) else x for name, x in metric.metric_state.items()
        }
        lists = {name for name, default in self._begun.items() if isinstance(default, list)}
        self._adds = not lists and set(self._reductions.values()) == {dim_zero_sum}
        self._grows = bool(lists)
        takes = {dim_zero_cat, None} if lists else {dim_zero_sum, dim_zero_min, dim_zero_max, dim_zero_mean}
        odd = [name for name, how in self._reductions.items() if how not in takes or (lists and name not in lists)]
        if odd:
            raise UsageError(
                f"{type(metric).__name__} of torchmetrics has the states {', '.join(odd)}, which cannot be combined "
                "exactly over ranks",
                hints=["write a Metric that returns SampleColumns(outputs, targets), and compute it in `finish`"],
            )

    def taken(self) -> Mapping[str, Tensor | list[Tensor]]:
        """Returns the states of the metric, which keep their values if it is reset."""
        return {name: [*x] if isinstance(x, list) else x for name, x in self._metric.metric_state.items()}

    def quantity(self, taken: Mapping[str, Tensor | list[Tensor]]) -> Total | SampleColumns:
        """Returns the states after one batch: concatenated in a total, or one column per state."""
        states: list[Any] = [taken[name] for name in self._reductions]
        if self._adds:
            begun = [self._begun[name].to(x.device) for name, x in zip(self._reductions, states, strict=True)]
            added = [x - before for x, before in zip(states, begun, strict=True)]
            if len({x.dtype for x in added}) > 1:  # torch would make float32 of counts
                added = [*map(in_float64, added)]
            return Total(torch.cat([x.flatten() for x in added]), 1)
        if self._grows:
            kept = zip(self._reductions.items(), states, strict=True)
            return self._rows([self._column(name, state, how) for (name, how), state in kept])
        return SampleColumns(*(state.unsqueeze(0) for state in states))

    def put(self, parts: Sequence[Any]) -> None:
        """Sets the states of the metric to those of all samples: the sum of totals and its count, or the columns."""
        self._metric.reset()
        for name, state in self._together(parts):
            setattr(self._metric, name, state)
        self._metric._update_count = 1

    def _column(self, name: str, state: Any, reduction: Any) -> Tensor | list[Tensor] | None:
        """Returns a list of torchmetrics as a column; None for an empty list, which the metric does not use."""
        if reduction is dim_zero_cat:
            joined: Tensor = dim_zero_cat(state)
            return joined
        if not all(isinstance(one, Tensor) and one.ndim for one in state):
            raise UsageError(
                f"{self._name} of torchmetrics keeps {name} in a form that ranks cannot add up",
                hints=["write a Metric that returns SampleColumns(outputs, targets), and compute it in `finish`"],
            )
        return [*state] or None

    def _rows(self, found: Sequence[Tensor | list[Tensor] | None]) -> SampleColumns:
        samples = max((len(column) for column in found if column is not None), default=0)
        # Rows of no elements, for states that the metric does not use: `finish` may run on a rank without samples.
        columns = [[torch.zeros(0, 0)] * samples if column is None else column for column in found]
        if len({len(column) for column in columns}) > 1:
            raise PluginError(
                f"{self._name}: the states {', '.join(self._reductions)} of torchmetrics are lists of different "
                "lengths",
                hints=["write a Metric that returns SampleColumns(outputs, targets), and compute it in `finish`"],
            )
        return SampleColumns(*columns)

    def _together(self, parts: Sequence[Any]) -> Iterator[tuple[str, Tensor | list[Tensor]]]:
        """Yields the states of all samples."""
        if self._adds:
            begun = [self._begun[name] for name in self._reductions]
            pieces = torch.split(parts[0], [state.numel() for state in begun])
            for name, before, piece in zip(self._reductions, begun, pieces, strict=True):
                yield name, before.to(piece.device) + piece.view(before.shape)
            return
        for (name, reduction), column in zip(self._reductions.items(), parts, strict=True):
            if reduction is dim_zero_mean and not (column == column[0]).all():
                raise PluginError(
                    f"{self._name}: torchmetrics averages its state {name} over batches, which is not exact"
                )
            if isinstance(column, list):
                unused = column[0].shape[1:] == (0,)  # see `_rows`
                yield name, [] if unused else column
                continue
            yield name, [column] if self._grows else reduction(column)


class TorchMetric(Metric):
    """Adapter for a metric of torchmetrics; the default name of `MulticlassF1Score` is `multiclass_f1_score`.

    Inputs, states and the result are float64. If all states are sums, the metric is also in training rows; see
    `MetricStates`.

    Raises:
        UsageError: A state cannot be combined exactly over ranks.
    """

    def __init__(self, metric: torchmetrics.Metric, name: str = "") -> None:
        self.name = name or _WORDS.sub("_", type(metric).__name__).lower()
        self.lower_is_better = None if metric.higher_is_better is None else not metric.higher_is_better
        self._metric = metric.set_dtype(torch.float64)
        self._metric._to_sync = False
        self._states = MetricStates(self._metric, self.name)

    def __call__(self, outputs: Any, targets: Any) -> Total | SampleColumns:
        """Returns the states after this batch alone: concatenated in a total, or one column per state."""
        self._reject_classes(outputs, targets)
        if not all(device_kind(x.device).has_float64 for x in _tensors((outputs, targets))):
            outputs, targets = _on_host(outputs), _on_host(targets)  # waits for the device
        metric = self._metric
        device = next((x.device for x in _tensors((outputs, targets))), metric.device)
        if metric.device != device:
            metric.to(device)
        metric.reset()
        metric.update(_double(outputs), _double(targets))
        return self._states.quantity(self._states.taken())

    def finish(self, *parts: Any) -> float | Mapping[str, float]:
        """Computes the result of torchmetrics from the states of all samples."""
        metric = self._metric.to("cpu")
        self._states.put(parts)
        with computing():
            value = metric.compute()
        metric.reset()
        return numbers_of(self.name, value)

    def _reject_classes(self, outputs: Any, targets: Any) -> None:
        """Raises UsageError if a binary metric, which takes one score per sample, receives one score per class."""
        kind = type(self._metric).__name__
        if not (kind.startswith("Binary") and isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
            return
        if outputs.ndim == targets.ndim + 1 and (classes := outputs.shape[1]) > 1:
            raise UsageError(
                f"{self.name} is a binary metric and takes one score per sample; the model's outputs "
                f"{list(outputs.shape)} are scores of {classes} classes",
                hints=[f"use {kind.replace('Binary', 'Multiclass', 1)} with num_classes = {classes}"],
            )


def separate(metrics: torchmetrics.MetricCollection) -> None:
    """Gives each metric of a collection states of its own, and resets them."""
    # torchmetrics lets metrics share states if these are equal after the first batch, which may be a coincidence.
    metrics._enable_compute_groups, metrics._groups = False, {}
    for _, metric in metrics.items(keep_base=True, copy_state=False):
        for name, state in metric.metric_state.items():
            if isinstance(state, list):
                setattr(metric, name, [])
        metric.reset()


def batch_value(metric: torchmetrics.Metric) -> Any:
    """Returns the newest result of a call of the metric, its value of one batch; None if it was not called."""
    return metric._forward_cache


def numbers_of(name: str, value: Any) -> float | Mapping[str, float]:
    """Returns the result of torchmetrics as a number, or as numbers by key, or by index such as "0" or "2_1"."""
    if isinstance(value, Mapping):
        found = {str(key): numbers_of(name, one) for key, one in value.items()}
        numbers = {key: one for key, one in found.items() if isinstance(one, float)}
        for key, one in value.items():  # e.g. a precision of each class; larger tensors are not metrics
            if isinstance(one, Tensor) and one.ndim == 1:
                numbers |= {f"{key}/{place}": number for place, number in enumerate(one.tolist())}
        return numbers
    if not isinstance(value, Tensor | int | float):
        raise UsageError(
            f"{name} of torchmetrics returns a {type(value).__name__}, not numbers",
            hints=["choose a metric that summarizes the curve, such as an AUROC"],
        )
    tensor = torch.as_tensor(value)
    if tensor.ndim == 0:
        return float(tensor)
    return {"_".join(map(str, at)): float(tensor[at]) for at in product(*map(range, tensor.shape))}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _on_host(value: Any) -> Any:
    """Returns nested lists and dicts with their tensors on the host."""
    if isinstance(value, Mapping):
        return {key: _on_host(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_on_host(one) for one in value]
    return value.cpu() if isinstance(value, Tensor) else value


def _double(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def computing() -> Iterator[None]:
    """Makes float64 the default dtype of torch, so that quotients of counts are float64."""
    with _ONE_AT_A_TIME:  # all threads share the default dtype
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
