"""Reduces the totals of all ranks to numbers in one all-reduce; each rank may have other names in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpforge.errors import PluginError
from ddpforge.interfaces import Metric, Ranks, SampleColumns, Total, device_kind, in_float64

__all__ = ["MetricReduction"]


class _Column(NamedTuple):
    """Form of a column: the shape of a row, True for integers, and True for a list with several rows per sample."""

    shape: tuple[int, ...]
    whole: bool
    ragged: bool

    @classmethod
    def of(cls, column: Tensor | list[Tensor]) -> _Column:
        one = column[0] if isinstance(column, list) else column
        return cls(tuple(one.shape[1:]), not one.is_floating_point(), isinstance(column, list))

    def empty(self) -> Tensor | list[Tensor]:
        """Returns the column of a rank without samples."""
        return [] if self.ragged else torch.zeros(0, *self.shape)


class _Form(NamedTuple):
    """Form of a quantity: `added` has the shapes of sum and count; `columns` has the form of each column."""

    added: tuple[tuple[int, ...], ...] = ()
    columns: tuple[_Column, ...] = ()

    @classmethod
    def of(cls, quantity: Total | SampleColumns | float) -> _Form:
        if isinstance(quantity, float | int):
            return _NUMBERS
        if isinstance(quantity, Total):
            count = quantity.count
            if not quantity.sum.ndim and not isinstance(count, Tensor):
                return _NUMBERS
            counts = tuple(count.shape) if isinstance(count, Tensor) else ()
            return cls((tuple(quantity.sum.shape), counts))
        return cls(columns=tuple(map(_Column.of, quantity.columns)))

    def __str__(self) -> str:
        return " and ".join(str(list(shape)) for shape in self.added) or f"rows of {len(self.columns)} columns"


_NUMBERS = _Form(((), ()))


class MetricReduction:
    """Divides sums by counts, both over all ranks.

    Ranks may have different names, or the same names in another order, e.g. metrics of a class that is in only some
    batches. All ranks keep the same list of known names and forms, which defines the row of numbers to reduce. A rank
    without a name adds zeros for it. The first number of the row counts the ranks with an unknown name or form. If it
    is not 0, the ranks exchange their names and forms and reduce again.
    """

    def __init__(self, ranks: Ranks, add_up: Callable[[Tensor], Tensor]) -> None:
        """`add_up` returns the sum over ranks of a row, and may overwrite the row."""
        self._ranks, self._add_up = ranks, add_up
        self._forms: dict[str, _Form] = {}
        self._ends = [1]  # end positions of the numbers of each known name; the first number counts ranks with news

    def __call__(
        self, totals: Mapping[str, Total | SampleColumns | float], metrics: Mapping[str, Metric]
    ) -> dict[str, float]:
        """Returns the numbers for every name on any rank, computed by its metric if there is one. Collective.

        The number is NaN if the count is 0. Raises PluginError if ranks have different forms for one name, or if
        a metric does not return numbers.
        """
        forms = {name: _Form.of(total) for name, total in totals.items()}
        numbers = self._reduce(totals, forms)
        if numbers[0]:
            self._learn(forms)
            numbers = self._reduce(totals, forms)

        found: dict[str, dict[str, float]] = {}
        for (name, form), (begin, end) in zip(self._forms.items(), pairwise(self._ends), strict=True):
            if not numbers[end - 1]:
                continue  # no rank has this name in this call
            metric = metrics.get(name)
            if form == _NUMBERS and _divides(metric):
                found[name] = {name: numbers[begin] / numbers[begin + 1] if numbers[begin + 1] else math.nan}
            elif form.columns:
                rows = totals.get(name)
                mine = rows.columns if isinstance(rows, SampleColumns) else [one.empty() for one in form.columns]
                columns = [self._gather_column(x, one) for x, one in zip(mine, form.columns, strict=True)]
                found[name] = _finished(name, columns, metric, counted=len(columns[0]) > 0)
            else:
                row = torch.tensor(numbers[begin : end - 1], dtype=torch.float64)
                pieces = torch.split(row, [math.prod(shape) for shape in form.added])  # the sum and the count
                parts = [piece.view(shape) for piece, shape in zip(pieces, form.added, strict=True)]
                found[name] = _finished(name, parts, metric, counted=bool(parts[1].any()))
        return {name: x for one in dict.fromkeys([*totals, *found]) for name, x in found.get(one, {}).items()}

    def _reduce(self, totals: Mapping[str, Total | SampleColumns | float], forms: Mapping[str, _Form]) -> list[float]:
        """Returns the row of numbers, summed over ranks."""
        numbers: list[float] = self._add_up(_joined(self._row(totals, forms))).tolist()
        return numbers

    def _row(
        self, totals: Mapping[str, Total | SampleColumns | float], forms: Mapping[str, _Form]
    ) -> Iterator[Tensor | float]:
        """Yields 1 if this rank has an unknown name or form; then of each known name sum, count, and 1 if it has it."""
        yield float(forms != self._forms and not forms.items() <= self._forms.items())
        for name, form in self._forms.items():
            total = totals.get(name) if forms.get(name) == form else None
            if isinstance(total, Total):
                yield from (total.sum, total.count)
            elif isinstance(total, float | int):
                yield from (total, 1.0)
            else:
                yield from (torch.zeros(shape) if shape else 0.0 for shape in form.added)
            yield float(total is not None)

    def _learn(self, forms: Mapping[str, _Form]) -> None:
        """Adds the names and forms of all ranks to the known ones; a changed form replaces the old one."""
        said: dict[str, _Form] = {}
        for theirs in self._ranks.all_gather_object(dict(forms)):
            for name, form in theirs.items():
                if said.setdefault(name, form) != form:
                    raise PluginError(
                        f"ranks have `{name}` in two forms, which cannot be added: {said[name]}, and {form}",
                        hints=["give a total the same shape for every batch"],
                    )
        self._forms = dict(sorted({**self._forms, **said}.items()))
        sizes = (sum(math.prod(shape) for shape in form.added) + 1 for form in self._forms.values())
        self._ends = [*accumulate(sizes, initial=1)]

    def _gather_column(self, column: Tensor | list[Tensor], form: _Column) -> Tensor | list[Tensor]:
        """Returns a column with the rows of all ranks. A list costs two all-gathers: of lengths, and of its rows."""
        dtype = torch.int64 if form.whole else torch.float64
        if isinstance(column, Tensor):
            return self._ranks.all_gather(_converted(column, dtype))[0].cpu()
        device = column[0].device if column else torch.device("cpu")
        lengths = torch.tensor([len(one) for one in column], dtype=torch.int64, device=device)
        every: list[int] = self._ranks.all_gather(lengths)[0].tolist()
        empty = _converted(torch.zeros(0, *form.shape, device=device), dtype)
        if not sum(every) * math.prod(form.shape):  # there is nothing to send
            return [empty.cpu().new_zeros(length, *form.shape) for length in every]
        joined = torch.cat([empty, *(_converted(one, dtype) for one in column)])
        return [*torch.split(self._ranks.all_gather(joined)[0].cpu(), every)]


def _converted(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows in another dtype; float64 is on the host if the device lacks it."""
    return in_float64(rows) if dtype == torch.float64 else rows.detach().to(dtype)


def _joined(values: Iterable[Tensor | float]) -> Tensor:
    """Returns the values as one row of float64, on the device if any value is there. Host values need one copy.

    Values of a device without float64 are copied to the host, which waits for it.
    """
    host: list[float] = []
    there: list[tuple[int, Tensor]] = []  # number of host values before it, and the values on a device
    for given in values:
        value = in_float64(given) if isinstance(given, Tensor) else given
        if not isinstance(value, Tensor):
            host.append(value)
        elif value.device.type != "cpu":
            there.append((len(host), value.reshape(-1)))
        elif value.ndim:
            host += value.reshape(-1).tolist()
        else:
            host.append(value.item())
    row = torch.tensor(host, dtype=torch.float64)
    if not there:
        return row
    device = there[0][1].device
    sent = (row.pin_memory() if device_kind(device).pins else row).to(device, non_blocking=True)
    ends = [*(place for place, _ in there[1:]), len(row)]
    behind = ((mine, sent[place:end]) for (place, mine), end in zip(there, ends, strict=True))
    return torch.cat([sent[: there[0][0]], *chain.from_iterable(behind)])


def _shape(part: Tensor | list[Tensor]) -> str:
    return f"{len(part)} × {_shape(part[0])}" if isinstance(part, list) else str(list(part.shape))


def _divides(metric: Metric | None) -> bool:
    return metric is None or type(metric).finish is Metric.finish


def _finished(name: str, parts: Sequence[Any], metric: Metric | None, *, counted: bool) -> dict[str, float]:
    """Returns a metric's numbers, computed from sum and count or from columns, by their reported names."""
    if metric is None or _divides(metric):
        raise PluginError(
            f"metric `{name}` is not a single number: it has the shape {', '.join(map(_shape, parts))}",
            hints=[
                "compute it by a Metric with a `finish`, and declare that in the task: "
                "self.reports = {metric.name: metric}"
            ],
        )
    if not counted:
        return {name: math.nan}
    made = metric.finish(*parts)
    try:
        if isinstance(made, Mapping):
            return {f"{name}/{key}": float(value) for key, value in made.items()}
        return {name: float(made)}
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(
            f"{type(metric).__qualname__}.finish returns {made!r} for `{name}`; expected a number, or numbers by name"
        ) from error
