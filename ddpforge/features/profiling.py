"""Profiles some steps: a trace for a timeline viewer, and a table of the time of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from ddpforge import disk
from ddpforge.interfaces import World, device_kind
from ddpforge.ranks import heartbeat
from ddpforge.recipe.run_plan import StepWindow
from ddpforge.runs.observers import ObservedRun, RunObserver

__all__ = ["Profile", "ProfiledRun"]

log = logging.getLogger("ddpforge")

_MOST = 15  # operators in the table, at most
_SPAN = "phase: "  # prefix of phases in the trace


class ProfiledRun(RunObserver):
    """Profile of the steps of `--profile`."""

    def __init__(self, run: ObservedRun, window: StepWindow) -> None:
        self._run, self._window = run, window

    @classmethod
    @override
    def of(cls, run: ObservedRun) -> Self | None:
        return cls(run, run.window) if run.window else None

    @override
    def check(self, total: int | None) -> None:
        self._window.reject_after(total)

    @override
    def around(self, parameters: int) -> Profile:
        return Profile(self._window, self._run.folder.path / "profile", self._run.world)


class Profile:
    """Recorder of the steps of a window on this rank; writes a trace and a table into `folder`.

    It costs nothing after the window. If a run ends within the window, it writes the steps until then.
    """

    def __init__(self, window: StepWindow, folder: Path, world: World) -> None:
        self._window, self._folder, self._world = window, folder, world
        self._recorder: profile | None = None
        self._over = not (world.is_rank_zero or window.all)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops a recording that an error interrupted, and writes nothing."""
        if self._recorder is not None:
            heartbeat.follow(None)
            self._spans.leave()
            self._recorder.stop()
            self._recorder = None

    def before(self, step: int) -> None:
        """Begins or ends the recording, if the next step, `step`, is in the window or after it."""
        if self._over:
            return
        if self._recorder is None and self._window.first <= step <= self._window.last:
            self._begin(step)
        elif step > self._window.last:
            self._end(step)

    def close(self, step: int) -> None:
        """Ends the recording: no step follows; the next one would have been `step`."""
        if not self._over:
            self._end(step)

    def _begin(self, step: int) -> None:
        self._first, self._spans = step, _Spans()
        kinds = [ProfilerActivity.CPU]
        if activity := device_kind(self._world.device).profiler_activity:
            kinds.append(getattr(ProfilerActivity, activity))
        self._recorder = profile(activities=kinds)
        self._recorder.start()
        heartbeat.follow(self._spans.enter)
        self._spent = heartbeat.seconds_by_phase()

    def _end(self, step: int) -> None:
        self._over = True
        if self._recorder is None:
            log.warning("profile: this attempt trained none of the steps %d..%d", *_bounds(self._window))
            return
        kind = device_kind(self._world.device)
        kind.synchronize(self._world.device)
        passed = [now - before for now, before in zip(heartbeat.seconds_by_phase(), self._spent, strict=True)]
        heartbeat.follow(None)
        self._spans.leave()
        self._recorder.stop()
        self._write(self._recorder, step - self._first, passed, on_device=kind.profiler_activity is not None)
        self._recorder = None

    def _write(self, recorder: profile, steps: int, passed: Sequence[float], *, on_device: bool) -> None:
        rank, last = self._world.global_ranks.rank, self._first + steps - 1
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._folder}/steps-{self._first}-{last}-rank-{rank}"
        disk.remove(Path(f"{stem}.json.gz"))  # export would follow a link there
        recorder.export_chrome_trace(f"{stem}.json.gz")
        title = f"steps {self._first}..{last} on rank {rank}"
        table = "\n".join(_table(title, steps, passed, recorder.key_averages(), on_device=on_device))
        disk.replace(Path(f"{stem}.txt"), f"{table}\n".encode())
        if self._world.is_rank_zero:
            log.info("%s\ntimeline: %s.json.gz, for https://ui.perfetto.dev or chrome://tracing", table, stem)


class _Spans:
    """Spans in the trace that show the phases, one after the other."""

    def __init__(self) -> None:
        self._open: Any = None

    def enter(self, phase: int) -> None:
        self.leave()
        self._open = record_function(f"{_SPAN}{heartbeat.NAMES[phase]}")
        self._open.__enter__()

    def leave(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


def _bounds(window: StepWindow) -> tuple[int, int]:
    return window.first, window.last


def _table(title: str, steps: int, passed: Sequence[float], events: Any, *, on_device: bool) -> Iterator[str]:
    """Yields the lines of the table, in milliseconds a step: phases on the host, then operators by their own time."""
    whole = sum(passed) or 1.0
    yield f"{title}: {1000 * whole / steps:.2f} ms a step"
    yield f"  {'phase, on the host':<48}  {'':>8}  {'ms':>9}  share"
    for name, seconds in zip(heartbeat.NAMES, passed, strict=True):
        if seconds:
            yield f"  {name:<48}  {'':>8}  {1000 * seconds / steps:>9.3f}  {seconds / whole:>5.0%}"
    timed = [(event, event.self_device_time_total if on_device else event.self_cpu_time_total) for event in events]
    timed = sorted(((one, time) for one, time in timed if not one.key.startswith(_SPAN)), key=lambda pair: -pair[1])
    kind = "operator, by its own time on the " + ("GPU" if on_device else "CPU")
    yield f"  {kind:<48}  {'calls':>8}  {'ms':>9}  share"
    for event, time in [pair for pair in timed[:_MOST] if pair[1]]:
        spent = f"{time / 1000 / steps:>9.3f}  {time / 1e6 / whole:>5.0%}"
        yield f"  {event.key[:48]:<48}  {event.count / steps:>8.4g}  {spent}"
