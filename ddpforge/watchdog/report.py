"""Tells of a rank that stood still, froze or died: in the run's folder, and on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddpforge import disk
from ddpforge.errors import ExitCode, ForgeError
from ddpforge.launchers.verdict import is_launched, record_verdict
from ddpforge.ranks.failures import Failures, Report
from ddpforge.ranks.logs import keep_output
from ddpforge.runs.folder import RunFolder, Status
from ddpforge.watchdog.blame import Blame
from ddpforge.watchdog.board import Row, described

__all__ = ["Told"]


class Told:
    """Writes for one rank of an attempt; what a disk refuses is told on the screen all the same."""

    def __init__(self, folder: RunFolder, failures: Failures, status: Status) -> None:
        self._folder, self._failures, self._status = folder, failures, status

    def keep_stacks(self, stacks: str) -> None:
        """Into a file in `logs`."""
        with suppress(OSError):
            if stacks:
                disk.replace(self._folder.logs / f"stacks-rank-{self._failures.rank}.txt", stacks.encode(), waits=False)

    def tell(self, found: Blame, rows: Mapping[int, Row]) -> None:
        """Writes failure.json and status.json, and says where all ranks stand; nothing where another one has."""
        cause = Report(self._failures.token, found.ranks[0], found.sentence, ExitCode.FAILED, symptom=False, told=False)
        try:
            if not self._failures.is_first(cause):
                return
        except ForgeError as error:
            print(f"warning: {error}", file=sys.stderr)
        silent, table = not self._failures.told(), [rows[rank] for rank in sorted(rows)]
        with suppress(ForgeError):
            self._folder.write_failure(described(cause, table, found.ranks))
        with suppress(ForgeError):
            self._write_status(cause, min(row.step for row in table) - 1)
        with suppress(OSError):
            self._failures.tell_of(cause)  # at last: rank 0 may know more about the run, and writes that then
        if silent and len(rows) > 1:  # else ranks say it, or a launcher
            self._say(cause, found, rows)

    def tell_end(self, why: str) -> None:
        """Records the exit code, and says why where nobody else does."""
        code = next((report.exit_code for report in self._failures.told().values() if not report.symptom), 1)
        record_verdict(code, spoke=False)
        with suppress(OSError), disk.open_plain(self._folder.logs / f"rank-{self._failures.rank}.log", "ab") as file:
            file.write(f"ended, for a rank has failed: {why}\n".encode())

    def someone_failed(self) -> bool:
        """True when a rank is known that failed first."""
        return self._failures.someone_failed()

    def _write_status(self, cause: Report, step: int) -> None:
        status = self._folder.status() or self._status
        step = max(step, status["step"])
        self._folder.write_status(
            {**status, "state": "failed", "exit_code": cause.exit_code, "step": step, "error": str(cause)}
        )

    def _say(self, cause: Report, found: Blame, rows: Mapping[int, Row]) -> None:
        lines = [f"  {row}{'  <-' if rank in found.ranks else ''}" for rank, row in sorted(rows.items())]
        lines += [f"  stacks of all threads: {self._folder.logs / 'stacks-rank-N.txt'}"]
        lines += [] if is_launched() else [f"error: {cause}"]
        print("\n".join(lines), file=sys.stderr, flush=True)


def told_by(settings: Mapping[str, str], rank: int, size: int) -> Told:
    """The one for a rank, from what the process beside it was told."""
    folder = RunFolder(Path(settings["folder"]))
    status = Status(
        state="failed",
        exit_code=ExitCode.FAILED,
        step=0,
        samples=0,
        world_size=size,
        strategy=settings["strategy"],
        metrics={},
        error=None,
    )
    os.environ["RANK"] = str(rank)
    keep_output()
    return Told(folder, Failures(folder.logs, settings["attempt"], rank, size), status)
