"""Finds the rank that failed first, by report files: after a failure, ranks may be unable to communicate."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ddpforge import disk
from ddpforge.errors import ExitCode, ForgeError, SetupError
from ddpforge.ranks.heartbeat import RankStatus
from ddpforge.secret_redaction import redact

__all__ = ["FailureRecord", "Failures", "is_symptom", "phrase", "recorded_causes"]

_CAUSE = "failure-cause"
_IN_NAME = "failure-name"
_LONGEST = 180  # maximum bytes of an error in a file name, which may have 255 in all
_PATIENCE = 1.5  # seconds to wait for the report of the rank that failed first
_ANSWER = 12.0  # seconds to wait for the watchdogs' report on the rank at fault
_MOST = 1 << 20  # maximum bytes of a report
_LOST = re.compile(r"connect|clos|reset|tim(ed|e)[ -]?out|broken pipe|abort|remote|unreachable|read error|EOF", re.I)
_LIBRARY = re.compile(r"gloo[/\\]|nccl|TCPStore|monitoredBarrier", re.I)


@dataclass(frozen=True)
class FailureRecord:
    """Report of a rank's failure.

    Args:
        error: the rank's error; without `self_reported`, another process describes the rank: "was killed by …"
        symptom: True if the rank only lost its connection to other ranks; the cause may be on one of them
        self_reported: True if the rank itself reported the error
    """

    token: str
    rank: int
    error: str
    exit_code: int
    symptom: bool
    self_reported: bool = True

    def __str__(self) -> str:
        return f"rank {self.rank}{':' * self.self_reported} {self.error}"

    def facts(self) -> dict[str, Any]:
        """Returns rank, error and exit code as a JSON object."""
        return {"rank": self.rank, "error": str(self), "exit_code": int(self.exit_code)}

    def with_ranks(self, rows: Sequence[RankStatus], waited_for: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the contents of `failure.json`: this cause, and the status of the ranks."""
        mine = next((row for row in rows if row.rank == self.rank), None)
        return {
            **self.facts(),
            "told_by": "rank" if self.self_reported else "watch",
            "phase": mine and mine.phase,
            "step": mine and mine.step,
            "seconds": mine and mine.seconds,
            "waited_for": [*(waited_for or [self.rank])],
            "ranks": [row._asdict() for row in rows],
        }


def is_symptom(error: BaseException, seen: tuple[BaseException, ...] = ()) -> bool:
    """True if `error`, or an error that caused it, only means that other ranks did not answer."""
    lost = type(error).__name__ in ("PeerUnreachable", "PeerFailed")
    lost = lost or (isinstance(error, RuntimeError) and _is_about_a_connection(error))
    cause, seen = error.__cause__, (*seen, error)  # code may set causes in a circle
    return lost or (cause is not None and cause not in seen and is_symptom(cause, seen))


def phrase(error: BaseException) -> str:
    """Returns the error's type and message, without secrets."""
    return redact(f"{type(error).__name__}: {error}".removesuffix(": "))


def _is_about_a_connection(error: BaseException) -> bool:
    """True if torch.distributed lost a connection; False for its errors about wrong use."""
    text = str(error)
    library = type(error).__name__.startswith("Dist") or _LIBRARY.search(text)
    return bool(isinstance(error, RuntimeError) and library and _LOST.search(text))


def recorded_causes(logs: Path) -> list[FailureRecord]:
    """Returns the reports of the last attempt's ranks that are causes, not symptoms."""
    return [report for report in _reports(logs) if not report.symptom]


def _reports(logs: Path) -> Iterator[FailureRecord]:
    for path in sorted(logs.glob("failure-rank-*.json")):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            report = FailureRecord(**json.loads(disk.read_plain(path, _MOST)))
            texts, numbers = (report.token, report.error), (report.rank, report.exit_code)
            if all(isinstance(one, str) for one in texts) and all(isinstance(one, int) for one in numbers):
                yield report
    for path in sorted(logs.glob(f"{_IN_NAME}-*")):
        with suppress(ValueError):
            token, rank, code, symptom, self_reported, error = path.name.removeprefix(f"{_IN_NAME}-").split("-", 5)
            yield FailureRecord(token, int(rank), unquote(error), int(code), symptom == "1", self_reported == "1")


def _as_name(report: FailureRecord) -> str:
    """Returns the report as a file name, with the beginning of the error."""
    facts = (report.token, report.rank, int(report.exit_code), int(report.symptom), int(report.self_reported))
    return "-".join([_IN_NAME, *map(str, facts), quote(report.error, safe=" :")[:_LONGEST]])


class Failures:
    """Failures of one attempt: one file for each rank, in the run's folder `logs` that all ranks see.

    `token` identifies the attempt: reports of earlier attempts are ignored.
    """

    def __init__(self, logs: Path, token: str, rank: int, size: int) -> None:
        self._logs, self.token, self.rank, self._size = logs, token, rank, size

    @staticmethod
    def clear(logs: Path) -> None:
        """Removes the reports and other rank files of earlier attempts."""
        for path in (*logs.glob("failure-*"), *logs.glob("phase-rank-*"), *logs.glob("stacks-rank-*")):
            disk.remove(path)

    def record(self, error: BaseException, code: int) -> FailureRecord:
        """Writes a report of this rank's failure for the other ranks, and returns it; ignores errors of the disk."""
        report = FailureRecord(self.token, self.rank, phrase(error), code, is_symptom(error))
        self.record_for(report)
        return report

    def record_for(self, report: FailureRecord) -> None:
        """Writes a report; on a full disk, into the name of an empty file."""
        try:
            disk.replace(self._logs / f"failure-rank-{report.rank}.json", json.dumps(asdict(report)).encode())
        except OSError:
            with suppress(OSError):
                (self._logs / _as_name(report)).touch()

    def claim_first(self, report: FailureRecord) -> bool:
        """True for the first report of a cause, and for the first report of a symptom; then False.

        Raises SetupError if the run's folder is not writable.
        """
        word = self._logs / ("failure-symptom" if report.symptom else _CAUSE)
        try:
            word.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise SetupError(f"{self._logs} cannot be written: {error.strerror or error}") from error
        return True

    def any_failed(self) -> bool:
        """True if a rank has reported a cause; cheap."""
        return (self._logs / _CAUSE).exists()

    def recorded(self) -> dict[int, FailureRecord]:
        """Returns the reports so far, by rank."""
        return {report.rank: report for report in _reports(self._logs) if report.token == self.token}

    def cause(self) -> FailureRecord | None:
        """Returns a failure of another rank that is a cause; None if none is known."""
        others = [report for rank, report in sorted(self.recorded().items()) if rank != self.rank]
        return next((report for report in others if not report.symptom), None)

    def explain(self, call: Callable[[], None], sleep: Callable[[float], None] = time.sleep) -> FailureRecord | None:
        """Waits some seconds for the cause of this rank's symptom; returns None if it stays unknown.

        Another rank reports the cause, or the watchdog of a rank that cannot. If none reports within 1.5 s, this calls
        `call`, which makes the watchdogs find the rank that does not answer or is behind, and waits for 12 s more.
        Returns early if every rank has reported.
        """
        for patience in (_PATIENCE, _ANSWER):
            deadline = time.monotonic() + patience
            while (found := self.cause()) is None and time.monotonic() < deadline:
                if len(self.recorded()) >= self._size:
                    return self.cause()  # the last report may just have come
                sleep(0.05)
            if found:
                return found
            if patience == _PATIENCE:
                call()
        return None


def exit_code_of(error: BaseException) -> ExitCode:
    """Returns the exit code of a process that ends by this error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED
