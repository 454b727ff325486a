"""Measures what the time between two rows goes into: the share of each phase, and items per second."""

from __future__ import annotations

from collections.abc import Mapping

from ddpforge.interfaces import Total
from ddpforge.ranks import phases

__all__ = ["Spending"]

_ITEMS = "?items"  # of a step
_TIME = "?time/"  # and the name of a phase
_BETWEEN = (phases.EVAL, phases.SAVE)  # what does not happen between all rows
_WAITS, _LONG = 0.25, 5.0  # the share of the time, and seconds, of which waiting for data is worth a word


class Spending:
    """The shares of wall time that a rank has spent in each phase since the last row, for one reduction over ranks.

    It is the time of the host: one that waits for a GPU waits where it reads a number, in `step` or `reduce`.
    """

    def __init__(self) -> None:
        self._advised = False
        self.restart()

    def restart(self) -> None:
        """Begins a new window."""
        self._began = phases.spent()

    def totals(self, totals: Mapping[str, Total], *, counts: bool) -> dict[str, float]:
        """Returns this rank's shares, and restarts.

        `counts` says that the task counts items which are not samples: then also those in the step of these `totals`.
        """
        passed = [now - before for now, before in zip(phases.spent(), self._began, strict=True)]
        self.restart()
        whole = sum(passed) or 1.0
        found = {
            f"{_TIME}{name}": passed[phase] / whole
            for phase, name in enumerate(phases.NAMES)
            if phases.DATA <= phase < phases.END and (passed[phase] or phase not in _BETWEEN)
        }
        if counts and "loss" in totals:
            found[_ITEMS] = float(totals["loss"].count)
        return found

    def advice(self, waited: float, seconds: float, *, workers: int) -> str:
        """Says, once, what to do where a share of so many seconds went into waiting for data; empty otherwise."""
        if self._advised or waited < _WAITS or seconds < _LONG:
            return ""
        self._advised = True
        more = "more loader processes" if workers else "loader processes"
        return (
            f"{waited:.0%} of the time goes into waiting for data: set data.workers = {2 * workers or 2} ({more}, a "
            "core each), or have the dataset fetch a batch at once (`__getitems__`)"
        )

    @staticmethod
    def taken(means: dict[str, float]) -> tuple[dict[str, float], float | None]:
        """Takes the shares by phase, and the items of a step on one rank, out of the means over all ranks."""
        names = [name for name in means if name.startswith(_TIME)]
        return {name.removeprefix(_TIME): round(means.pop(name), 4) for name in names}, means.pop(_ITEMS, None)
