"""Finds the rank that failed first, in files by which ranks report when they can no longer talk."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ddpforge import disk
from ddpforge.confidential import redact
from ddpforge.errors import EnvironmentProblem, ExitCode, ForgeError

__all__ = ["Failures", "Report", "is_symptom", "phrase", "told_causes"]

_CAUSE = "failure-cause"
_IN_NAME = "failure-name"
_LONGEST = 180  # bytes of an error in the name of a file, which may have 255
_PATIENCE = 1.5  # seconds in which the rank that failed first tells why
_ANSWER = 12.0  # seconds in which those that were called say who is at fault
_MOST = 1 << 20  # bytes of a report
_LOST = re.compile(r"connect|clos|reset|tim(ed|e)[ -]?out|broken pipe|abort|remote|unreachable|read error|EOF", re.I)
_LIBRARY = re.compile(r"gloo[/\\]|nccl|TCPStore|monitoredBarrier", re.I)


@dataclass(frozen=True)
class Report:
    """A report of a rank's failure; a `symptom` is that it lost touch with others, which may have a cause there.

    `error` is what the rank tells; where it cannot (not `told`), what it did or what befell it: "was killed by …".
    """

    token: str
    rank: int
    error: str
    exit_code: int
    symptom: bool
    told: bool = True

    def __str__(self) -> str:
        return f"rank {self.rank}{':' * self.told} {self.error}"

    def facts(self) -> dict[str, Any]:
        """For people and other programs."""
        return {"rank": self.rank, "error": str(self), "exit_code": int(self.exit_code)}


def is_symptom(error: BaseException) -> bool:
    """True where `error`, or what caused it, says no more than that other ranks did not answer."""
    lost = type(error).__name__ in ("OutOfTouch", "PeerFailed") or (
        isinstance(error, RuntimeError) and _is_about_a_connection(error)
    )
    return lost or (error.__cause__ is not None and is_symptom(error.__cause__))


def phrase(error: BaseException) -> str:
    """The error in one sentence."""
    return redact(f"{type(error).__name__}: {error}".removesuffix(": "))


def _is_about_a_connection(error: BaseException) -> bool:
    """True if torch.distributed lost a connection; its RuntimeErrors about wrong use are no such errors."""
    text = str(error)
    library = type(error).__name__.startswith("Dist") or _LIBRARY.search(text)
    return bool(isinstance(error, RuntimeError) and library and _LOST.search(text))


def told_causes(logs: Path) -> list[Report]:
    """The reports of the last attempt's ranks about failures that they met by themselves."""
    return [report for report in _reports(logs) if not report.symptom]


def _reports(logs: Path) -> Iterator[Report]:
    for path in sorted(logs.glob("failure-rank-*.json")):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            yield _report(json.loads(disk.read_plain(path, _MOST)))
    for path in sorted(logs.glob(f"{_IN_NAME}-*")):
        with suppress(ValueError):
            token, rank, code, symptom, told, error = path.name.removeprefix(f"{_IN_NAME}-").split("-", 5)
            yield Report(token, int(rank), unquote(error), int(code), symptom == "1", told == "1")


def _as_name(report: Report) -> str:
    """The report as the name of a file, with the beginning of the error."""
    facts = (report.token, report.rank, int(report.exit_code), int(report.symptom), int(report.told))
    return "-".join([_IN_NAME, *map(str, facts), quote(report.error, safe=" :")[:_LONGEST]])


def _report(found: dict[str, Any]) -> Report:
    """The report in what JSON has made of it; raises TypeError, or ValueError, for anything else."""
    report = Report(**found)
    texts, numbers = (report.token, report.error), (report.rank, report.exit_code)
    if not all(isinstance(one, str) for one in texts) or not all(isinstance(one, int) for one in numbers):
        raise ValueError("not a report")
    return report


class Failures:
    """The failures of one attempt, a file for each rank in the run's `logs`, which all ranks see.

    `token` is the attempt's own: what a rank of an earlier attempt left there does not count.
    """

    def __init__(self, logs: Path, token: str, rank: int, size: int) -> None:
        self._logs, self.token, self.rank, self._size = logs, token, rank, size

    @staticmethod
    def clear(logs: Path) -> None:
        """Removes those of earlier attempts."""
        for path in (*logs.glob("failure-*"), *logs.glob("phase-rank-*"), *logs.glob("stacks-rank-*")):
            disk.remove(path)

    def tell(self, error: BaseException, code: int) -> Report:
        """Writes this rank's failure down for the others; a disk that refuses is no further failure."""
        report = Report(self.token, self.rank, phrase(error), code, is_symptom(error))
        self.tell_of(report)
        return report

    def tell_of(self, report: Report) -> None:
        """Writes down what befell a rank that cannot say it; on a full disk, into the name of an empty file."""
        try:
            disk.replace(self._logs / f"failure-rank-{report.rank}.json", json.dumps(asdict(report)).encode())
        except OSError:
            with suppress(OSError):
                (self._logs / _as_name(report)).touch()

    def is_first(self, report: Report) -> bool:
        """True once: for the first rank that knows a cause; and for the first that has a symptom, before that.

        Raises EnvironmentProblem where the run's folder cannot be written.
        """
        word = self._logs / ("failure-symptom" if report.symptom else _CAUSE)
        try:
            word.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise EnvironmentProblem(f"{self._logs} cannot be written: {error.strerror or error}") from error
        return True

    def someone_failed(self) -> bool:
        """True when a cause is known; costs next to nothing."""
        return (self._logs / _CAUSE).exists()

    def told(self) -> dict[int, Report]:
        """Every rank's report so far."""
        return {report.rank: report for report in _reports(self._logs) if report.token == self.token}

    def cause(self) -> Report | None:
        """The failure of another rank, if that is known."""
        others = [report for rank, report in sorted(self.told().items()) if rank != self.rank]
        return next((report for report in others if not report.symptom), None)

    def explain(self, call: Callable[[], None], sleep: Callable[[float], None] = time.sleep) -> Report | None:
        """The cause behind a symptom of this rank's, as far as it can be found out by waiting a moment.

        Another rank tells it, or the process beside one that cannot. If none does, `call` has those find out who does
        not answer, or is behind. None where every rank has told of a symptom.
        """
        for patience in (_PATIENCE, _ANSWER):
            deadline = time.monotonic() + patience
            while (found := self.cause()) is None and time.monotonic() < deadline:
                if len(self.told()) >= self._size:
                    return self.cause()  # the last one may have told it just now
                sleep(0.05)
            if found:
                return found
            if patience == _PATIENCE:
                call()
        return None


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a process that this error ends."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED
