"""Trains a few steps of a recipe, evaluates a little, and measures both; keeps nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddpforge.api import Batches, Dealt, restored_backend_flags
from ddpforge.errors import StoppedBeforeStart
from ddpforge.interfaces import StepInfo, device_kind
from ddpforge.machine import peak_memory
from ddpforge.ranks import heartbeat, process_exit
from ddpforge.tools.trials.ephemeral_run import EphemeralRun, FirstBatches, open_ephemeral

__all__ = ["Measured", "dry_run"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Cost of steps, measured on the main rank; `memory` is the largest of all ranks, in bytes.

    `seconds` is the mean time of a step after the first, which may include compilation; None if there was only one.
    """

    steps: int
    total_steps: int | None
    first_seconds: float
    seconds: float | None
    samples_per_second: float | None
    time: Mapping[str, float]  # the share of each phase, after the first step
    memory: int
    evaluated: int  # batches
    to_evaluate: int | None  # batches of a whole evaluation
    evaluation_seconds: float | None
    loss: tuple[float | None, float | None]  # in the first and the last logged row: see track.every
    is_rank_zero: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        found = asdict(self)
        del found["is_rank_zero"]
        return found

    def lines(self) -> Iterator[str]:
        """Yields the result as lines of text."""
        yield f"{self.steps} {'step' if self.steps == 1 else 'steps'} on trial; nothing was kept"
        yield f"  first step   {_seconds(self.first_seconds)}"
        if self.seconds is not None and self.samples_per_second is not None:
            yield f"  step         {_seconds(self.seconds)}, {self.samples_per_second:,.0f} samples/s"
            yield f"  time         {', '.join(f'{name} {share:.0%}' for name, share in self.time.items())}"
        if self.evaluation_seconds is not None:
            of = f" of {self.to_evaluate:,}" if self.to_evaluate else ""
            yield f"  evaluation   {_seconds(self.evaluation_seconds)} for {self.evaluated}{of} batches"
        yield f"  memory       {self.memory / 2**30:.2f} GiB at most on a rank"
        yield f"  loss         {_loss(self.loss[0])} → {_loss(self.loss[1])}"
        if self.seconds is not None and self.total_steps is not None:
            whole = _seconds(self.total_steps * self.seconds)
            yield f"  whole run    {self.total_steps:,} steps in about {whole}, without evaluations and checkpoints"


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def dry_run(source: str | Path, steps: int, *, sets: Sequence[str] = ()) -> Measured:
    """Trains `steps` steps of a recipe, and evaluates on `steps` batches of each set; called on every rank.

    Everything is as in a run of the recipe, its callbacks too, but nothing is kept: there is no folder, no tracker and
    no checkpoint. Raises ForgeError as a run does.
    """
    with open_ephemeral(source, sets=sets, change=lambda dealt: _evaluate_little(dealt, steps)) as trial:
        clock = _Clock(trial)
        infos = [clock.after(info) for info in trial.steps(steps)]
        if not infos:
            raise StoppedBeforeStart("a stop was requested before the first step", hints=["a trial keeps nothing"])
        clock.stop()
        return _measured(trial, clock, infos)


def _evaluate_little(dealt: Dealt, most: int) -> Dealt:
    few = {name: cast(Batches, FirstBatches(one, most)) for name, one in dealt.evaluation.items()}
    return replace(dealt, evaluation=few)


class _Clock:
    """Measures the first step, and the later steps together; synchronizes with a GPU only at their begin and end."""

    def __init__(self, trial: EphemeralRun) -> None:
        self._device = trial.world.device
        self._steps = 0
        self.first = self.others = 0.0
        self.samples = 0  # after the first step
        device_kind(self._device).reset_peak_memory(self._device)
        self._since, self._spent = self._now(), heartbeat.seconds_by_phase()

    def after(self, info: StepInfo) -> StepInfo:
        """Records that a step was trained."""
        self._steps += 1
        if self._steps == 1:
            self.first, self.samples = self._now() - self._since, info.samples
            self._since, self._spent = self._now(), heartbeat.seconds_by_phase()
        return info

    def stop(self) -> None:
        """Ends the measurement after the last step."""
        self.others = self._now() - self._since
        self.spent = [now - before for now, before in zip(heartbeat.seconds_by_phase(), self._spent, strict=True)]

    def _now(self) -> float:
        device_kind(self._device).synchronize(self._device)
        return time.perf_counter()

    def memory(self) -> int:
        """Returns the peak bytes of this process: of the GPU, if it uses one."""
        found = device_kind(self._device).peak_memory(self._device, reserved=True)
        return peak_memory() if found is None else found


def _measured(trial: EphemeralRun, clock: _Clock, infos: Sequence[StepInfo]) -> Measured:
    more = len(infos) - 1
    whole = sum(clock.spent)
    sets = cast(Mapping[str, FirstBatches], trial.dealt.evaluation)
    began = time.perf_counter()
    if sets:
        trial.trainer.evaluator.evaluate(infos[-1].step)
    seconds = time.perf_counter() - began
    rows = [info for info in infos if info.metrics]
    lengths = [one.steps_per_epoch for one in sets.values()]
    return Measured(
        steps=len(infos),
        total_steps=trial.dealt.plan.horizon.total,
        first_seconds=clock.first,
        seconds=clock.others / more if more else None,
        samples_per_second=(infos[-1].samples - clock.samples) / clock.others if more else None,
        time={name: one / whole for name, one in zip(heartbeat.NAMES, clock.spent, strict=True) if more and one},
        memory=max(trial.world.global_ranks.all_gather_object(clock.memory())),
        evaluated=sum(one.seen for one in sets.values()),
        to_evaluate=None if not sets or None in lengths else sum(lengths),
        evaluation_seconds=seconds if sets else None,
        loss=(_finite(rows[0]), _finite(rows[-1])),
        is_rank_zero=trial.world.is_rank_zero,
    )


def _finite(info: StepInfo) -> float | None:
    loss = info.metrics.get("train/loss", math.nan)
    return loss if math.isfinite(loss) else None


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4g}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:,.3g} min"
