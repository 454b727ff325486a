"""Totals of all ranks become numbers: in one all-reduce, whatever each rank names and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
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
    def of(cls, quantity: Total | Rows) -> _Form:
        if isinstance(quantity, Total):
            count = quantity.count
            return cls((tuple(quantity.sum.shape), tuple(count.shape) if isinstance(count, Tensor) else ()))
        return cls(columns=tuple((tuple(x.shape[1:]), not x.is_floating_point()) for x in quantity.columns))

    def __str__(self) -> str:
        return " and ".join(str(list(shape)) for shape in self.added) or f"rows of {len(self.columns)} columns"


class Means:
    """Divides sums by counts, both over all ranks; what is reduced is laid out by forms that ranks agreed on.

    Ranks may name different quantities, or the same ones in another order: a metric of a class that only some batches
    hold, say. A rank fills in nothing for a name that it lacks. One more number says whether a rank has a name or a
    form that is not agreed on yet; if so, all ranks learn of each other's and reduce again, once for each that is new.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._forms: dict[str, _Form] = {}

    def __call__(self, totals: Mapping[str, Total | Rows], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """The number of everything that any rank named, from its metric where there is one. Collective.

        NaN where nothing was counted. Raises PluginError where ranks have quantities of one name that do not go
        together, and where a metric makes no numbers of its own.
        """
        forms = {name: _Form.of(total) for name, total in totals.items()}
        summed = self._reduce(totals, forms)
        if summed[0]:
            self._learn(forms)
            summed = self._reduce(totals, forms)

        numbers, found = summed.tolist(), dict[str, dict[str, float]]()
        for (name, form), (begin, end) in zip(self._forms.items(), pairwise(self._ends()), strict=True):
            if not numbers[end - 1]:
                continue  # nobody named it this time
            metric = metrics.get(name)
            if form.added == ((), ()) and _divides(metric):
                found[name] = {name: numbers[begin] / numbers[begin + 1] if numbers[begin + 1] else math.nan}
            elif form.columns:
                columns = self._gather(totals.get(name), form)
                found[name] = _finished(name, columns, metric, counted=len(columns[0]) > 0)
            else:
                parts = _shaped(summed[begin : end - 1], form.added)
                found[name] = _finished(name, parts, metric, counted=bool(parts[1].any()))
        return {name: x for one in dict.fromkeys([*totals, *found]) for name, x in found.get(one, {}).items()}

    def _ends(self) -> list[int]:
        """The positions at which the numbers of each agreed name end, behind the one of the news."""
        sizes = (sum(math.prod(shape) for shape in form.added) + 1 for form in self._forms.values())
        return [*accumulate(sizes, initial=1)]

    def _reduce(self, totals: Mapping[str, Total | Rows], forms: Mapping[str, _Form]) -> Tensor:
        """Adds up over ranks; returns the sums on the CPU."""
        values = [torch.as_tensor(x, dtype=torch.float64).reshape(-1) for x in self._row(totals, forms)]
        return self._ranks.sum(_joined(values).detach()).cpu()

    def _row(self, totals: Mapping[str, Total | Rows], forms: Mapping[str, _Form]) -> Iterator[Tensor | float]:
        """Yields 1 if there is news, and of each agreed name its sum, its count, and 1 if this rank has it."""
        yield float(not forms.items() <= self._forms.items())
        for name, form in self._forms.items():
            total = totals.get(name) if forms.get(name) == form else None
            if isinstance(total, Total):
                yield from (total.sum, total.count)
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

    def _gather(self, rows: Total | Rows | None, form: _Form) -> list[Tensor]:
        """Each column with the rows of all ranks, of which this one may have none."""
        mine = rows.columns if isinstance(rows, Rows) else [torch.zeros(0, *shape) for shape, _ in form.columns]
        dtypes = [torch.int64 if whole else torch.float64 for _, whole in form.columns]
        return [self._ranks.gather(x.detach().to(kind))[0].cpu() for x, kind in zip(mine, dtypes, strict=True)]


def _joined(values: Sequence[Tensor]) -> Tensor:
    """One row of numbers, on the device if any is there: what the host has goes to it in one copy."""
    device = next((x.device for x in values if x.device.type != "cpu"), None)
    if device is None:
        return torch.cat([*values])
    mine = [x for x in values if x.device.type == "cpu"]
    row = torch.cat(mine)
    sent = (row.pin_memory() if device.type == "cuda" else row).to(device, non_blocking=True)
    pieces = iter(torch.split(sent, [len(x) for x in mine]))
    return torch.cat([next(pieces) if x.device.type == "cpu" else x for x in values])


def _shaped(values: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The sum and the count, out of their numbers one after the other."""
    pieces = torch.split(values, [math.prod(shape) for shape in shapes])
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
