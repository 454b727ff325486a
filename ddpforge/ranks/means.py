"""Totals of all ranks become numbers: in one all-reduce, whatever each rank names and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddpforge.errors import PluginError
from ddpforge.interfaces import Metric, Ranks, Rows, Total

__all__ = ["Means"]


class _Form(NamedTuple):
    """The form of a quantity: the shapes of sum and count, or of a row in each column, and if that holds integers."""

    added: tuple[tuple[int, ...], ...] = ()
    columns: tuple[tuple[tuple[int, ...], bool], ...] = ()

    @classmethod
    def of(cls, quantity: Total | Rows | float) -> _Form:
        if isinstance(quantity, float | int):
            return _NUMBERS
        if isinstance(quantity, Total):
            count = quantity.count
            if not quantity.sum.ndim and not isinstance(count, Tensor):
                return _NUMBERS
            return cls((tuple(quantity.sum.shape), tuple(count.shape) if isinstance(count, Tensor) else ()))
        return cls(columns=tuple((tuple(x.shape[1:]), not x.is_floating_point()) for x in quantity.columns))

    def __str__(self) -> str:
        return " and ".join(str(list(shape)) for shape in self.added) or f"rows of {len(self.columns)} columns"


_NUMBERS = _Form(((), ()))


class Means:
    """Divides sums by counts, both over all ranks; what is reduced is laid out by forms that ranks agreed on.

    Ranks may name different quantities, or the same ones in another order: a metric of a class that only some batches
    hold, say. A rank fills in nothing for a name that it lacks. One more number says whether a rank has a name or a
    form that is not agreed on yet; if so, all ranks learn of each other's and reduce again, once for each that is new.
    """

    def __init__(self, ranks: Ranks, add_up: Callable[[Tensor], Tensor]) -> None:
        """`add_up` returns the sum over ranks of a row that nobody else needs."""
        self._ranks, self._add_up = ranks, add_up
        self._forms: dict[str, _Form] = {}
        self._ends = [1]  # the positions at which the numbers of each agreed name end, behind the one of the news

    def __call__(self, totals: Mapping[str, Total | Rows | float], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """The number of everything that any rank named, from its metric where there is one. Collective.

        NaN where nothing was counted. Raises PluginError where ranks have quantities of one name that do not go
        together, and where a metric makes no numbers of its own.
        """
        forms = {name: _Form.of(total) for name, total in totals.items()}
        numbers = self._reduce(totals, forms)
        if numbers[0]:
            self._learn(forms)
            numbers = self._reduce(totals, forms)

        found: dict[str, dict[str, float]] = {}
        for (name, form), (begin, end) in zip(self._forms.items(), pairwise(self._ends), strict=True):
            if not numbers[end - 1]:
                continue  # nobody named it this time
            metric = metrics.get(name)
            if form == _NUMBERS and _divides(metric):
                found[name] = {name: numbers[begin] / numbers[begin + 1] if numbers[begin + 1] else math.nan}
            elif form.columns:
                columns = self._gather(totals.get(name), form)
                found[name] = _finished(name, columns, metric, counted=len(columns[0]) > 0)
            else:
                parts = _shaped(numbers[begin : end - 1], form.added)
                found[name] = _finished(name, parts, metric, counted=bool(parts[1].any()))
        return {name: x for one in dict.fromkeys([*totals, *found]) for name, x in found.get(one, {}).items()}

    def _reduce(self, totals: Mapping[str, Total | Rows | float], forms: Mapping[str, _Form]) -> list[float]:
        """Adds up over ranks."""
        numbers: list[float] = self._add_up(_joined(self._row(totals, forms))).tolist()
        return numbers

    def _row(self, totals: Mapping[str, Total | Rows | float], forms: Mapping[str, _Form]) -> Iterator[Tensor | float]:
        """Yields 1 if there is news, and of each agreed name its sum, its count, and 1 if this rank has it."""
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
        """Agrees on the names and forms of all ranks; a form that has changed counts from now on."""
        said: dict[str, _Form] = {}
        for theirs in self._ranks.everyone(dict(forms)):
            for name, form in theirs.items():
                if said.setdefault(name, form) != form:
                    raise PluginError(
                        f"ranks have `{name}` in two forms, which cannot be added up: {said[name]}, and {form}",
                        hints=["give a total the same shape whatever is in the batch"],
                    )
        self._forms = dict(sorted({**self._forms, **said}.items()))
        sizes = (sum(math.prod(shape) for shape in form.added) + 1 for form in self._forms.values())
        self._ends = [*accumulate(sizes, initial=1)]

    def _gather(self, rows: Total | Rows | float | None, form: _Form) -> list[Tensor]:
        """Each column with the rows of all ranks, of which this one may have none."""
        mine = rows.columns if isinstance(rows, Rows) else [torch.zeros(0, *shape) for shape, _ in form.columns]
        dtypes = [torch.int64 if whole else torch.float64 for _, whole in form.columns]
        return [self._ranks.gather(x.detach().to(kind))[0].cpu() for x, kind in zip(mine, dtypes, strict=True)]


def _joined(values: Iterable[Tensor | float]) -> Tensor:
    """One row of float64, on the device if any value is there: what the host has goes to it in one copy."""
    host: list[float] = []
    there: list[tuple[int, Tensor]] = []  # how many of the host's numbers come before, and what is on a device
    for value in values:
        if not isinstance(value, Tensor):
            host.append(value)
        elif value.device.type != "cpu":
            there.append((len(host), value.detach().double().reshape(-1)))
        elif value.ndim:
            host += value.detach().double().reshape(-1).tolist()
        else:
            host.append(value.item())
    row = torch.tensor(host, dtype=torch.float64)
    if not there:
        return row
    device = there[0][1].device
    sent = (row.pin_memory() if device.type == "cuda" else row).to(device, non_blocking=True)
    ends = [*(place for place, _ in there[1:]), len(row)]
    behind = ((mine, sent[place:end]) for (place, mine), end in zip(there, ends, strict=True))
    return torch.cat([sent[: there[0][0]], *chain.from_iterable(behind)])


def _shaped(numbers: Sequence[float], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The sum and the count (float64), out of their numbers one after the other."""
    pieces = torch.split(torch.tensor(numbers, dtype=torch.float64), [math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _divides(metric: Metric | None) -> bool:
    return metric is None or type(metric).finish is Metric.finish


def _finished(name: str, parts: Sequence[Tensor], metric: Metric | None, *, counted: bool) -> dict[str, float]:
    """The numbers that a metric makes of sum and count, or of columns, by the names they are reported under."""
    if metric is None or _divides(metric):
        raise PluginError(
            f"metric `{name}` is no single number: it is of shape {', '.join(str(list(x.shape)) for x in parts)}",
            hints=[
                "let a Metric with a `finish` compute it, and the task say so: self.reports = {metric.name: metric}"
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
            f"{type(metric).__qualname__}.finish returns {made!r} for `{name}`: neither a number, nor numbers by name"
        ) from error
