"""Checks of trackers: an error or a slow target of a tracker must not affect training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ddpforge.interfaces import Histogram, MediaKind, Tracker
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable, place_of

_SLOWEST = 1.0  # seconds for the fastest of some rows: slower rows may be due to a busy machine
_CONFIG = {
    "name": "case",
    "model": {"use": "mlp"},
    "train": {"global_batch": 8, "length": "6st"},
    "run": {
        "strategy": "ddp",
        "total_steps": 6,
        "steps_per_epoch": 3,
        "world_size": 2,
        "micro_batch": 4,
        "accumulation": 1,
        "device": "cpu",
        "parameters": 100,
    },
}


_SHOWN: dict[MediaKind, Any] = {
    "image": np.zeros((4, 6, 3), np.uint8),
    "histogram": Histogram((1, 0), (0.0, 0.5, 1.0), nonfinite=1),
    "text": "once | upon\n*a* <time>",
    "table": [{"id": 1, "loss": math.nan}, {"id": 2, "loss": None}],
}


@check("never-raises", "tracker")
def never_raises(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that no method raises: for rows, NaN, images and texts, a rewind, a resume and the end."""
    with TemporaryDirectory(prefix="ddpforge-testing-") as folder:
        _life(case, case.build(), Path(folder), resumed_at=None)
        _life(case, case.build(), Path(folder), resumed_at=4)


@check("survives-a-broken-target", "tracker")
def survives_a_broken_target(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that no method raises if the run's folder cannot be written."""
    if case.settings.get("raises"):
        raise NotApplicable("declared: raises = true")
    with TemporaryDirectory(prefix="ddpforge-testing-") as folder:
        gone = Path(folder) / "gone"
        gone.write_text("a file where the run's folder should be")
        _life(case, case.build(), gone, resumed_at=None, broken=True)


def _life(case: Case, tracker: Tracker, folder: Path, *, resumed_at: int | None, broken: bool = False) -> None:
    if not isinstance(tracker, Tracker):
        raise Breach("a ddpforge.interfaces.Tracker", f"a {type(tracker).__name__}")

    took: list[float] = []

    def call(what: str, action: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            action()
        except BaseException as error:
            when = " if its folder cannot be written" if broken else ""
            raise Breach(
                f"`{what}` not to raise{when}: training would continue without the tracker",
                f"{type(error).__name__}: {error}",
                where=place_of(error, type(tracker)),
                hints=["catch the exceptions of the tracker's target, warn once and continue"],
            ) from error
        if what == "log":
            took.append(time.monotonic() - began)

    call("start", lambda: tracker.start(name="case", folder=folder, config=_CONFIG, resumed_at=resumed_at))
    rows: list[dict[str, float]] = [
        {
            "samples": 8,
            "lr": 0.1,
            "epoch": 0.3,
            "train/loss": 2.0,
            "train/grad_norm": 1.0,
            "train/samples_per_second": 9.0,
        },
        {
            "samples": 16,
            "lr": 0.1,
            "train/loss": math.nan,
            "train/grad_norm": math.inf,
            "train/samples_per_second": 9.0,
        },
        {"eval/loss": 1.5, "eval/accuracy": 0.5},
    ]
    for step, row in enumerate(rows, start=1):
        call("log", lambda step=step, row=row: tracker.log(step, row))  # type: ignore[misc]
    for kind, value in _SHOWN.items():
        call("show", lambda kind=kind, value=value: tracker.log_media(3, f"shown/{kind}", value, kind))  # type: ignore[misc]
    call("checkpoint", lambda: tracker.checkpoint(3, folder / "checkpoints" / "step-000000003"))
    call("rewind", lambda: tracker.rewind(1))
    call("log", lambda: tracker.log(2, rows[0]))
    if min(took) > _SLOWEST:
        raise Breach(f"a row in less than {_SLOWEST:g} s", f"`log` took {min(took):.1f} s or more, every time")
    call("finish", lambda: tracker.finish(state="done", summary={"train/loss": 2.0, "eval/loss": math.nan}))
