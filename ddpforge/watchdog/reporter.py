"""Reports a rank that hung, froze or died, in the run's folder and on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddpforge import disk
from ddpforge.errors import ExitCode, ForgeError
from ddpforge.launchers.exit_record import record_exit
from ddpforge.local_world import is_launched
from ddpforge.ranks.failures import FailureRecord, Failures
from ddpforge.ranks.heartbeat import RankStatus
from ddpforge.ranks.logs import keep_output
from ddpforge.runs.folder import RunFolder, Status
from ddpforge.watchdog.culprit import Culprit

__all__ = ["RunFolderReporter"]


class RunFolderReporter:
    """Reporter of one rank of an attempt. It prints to stderr even if the disk fails."""

    def __init__(self, folder: RunFolder, failures: Failures, status: Status) -> None:
        self._folder, self._failures, self._status = folder, failures, status

    def keep_stacks(self, stacks: str) -> None:
        """Writes stacks into a file in `logs`."""
        with suppress(OSError):
            if stacks:
                disk.replace(self._folder.logs / f"stacks-rank-{self._failures.rank}.txt", stacks.encode(), waits=False)

    def report_hang(self, found: Culprit, rows: Mapping[int, RankStatus]) -> None:
        """Writes failure.json and status.json, and prints the status of all ranks. Only the first reporter does so."""
        cause = FailureRecord(
            self._failures.token, found.ranks[0], found.sentence, ExitCode.FAILED, symptom=False, self_reported=False
        )
        try:
            if not self._failures.claim_first(cause):
                return
        except ForgeError as error:
            print(f"warning: {error}", file=sys.stderr)
        silent, table = not self._failures.recorded(), [rows[rank] for rank in sorted(rows)]
        with suppress(ForgeError):
            self._folder.write_failure(cause.with_ranks(table, found.ranks))
        with suppress(ForgeError):
            self._write_status(cause, min(row.step for row in table) - 1)
        with suppress(OSError):
            self._failures.record_for(cause)  # last: rank 0 may then replace the status with a more complete one
        if silent and len(rows) > 1:  # otherwise the ranks or the launcher print it
            self._say(cause, found, rows)

    def report_end(self, why: str) -> None:
        """Records the exit code for the launcher, and the reason `why` in the rank's log file."""
        code = next((report.exit_code for report in self._failures.recorded().values() if not report.symptom), 1)
        record_exit(code, by_rank=False)
        with suppress(OSError), disk.open_plain(self._folder.logs / f"rank-{self._failures.rank}.log", "ab") as file:
            file.write(f"ended because a rank has failed: {why}\n".encode())

    def any_failed(self) -> bool:
        """True if the first failure is known."""
        return self._failures.any_failed()

    def _write_status(self, cause: FailureRecord, step: int) -> None:
        status = self._folder.status() or self._status
        step = max(step, status["step"])
        self._folder.write_status(
            {**status, "state": "failed", "exit_code": cause.exit_code, "step": step, "error": str(cause)}
        )

    def _say(self, cause: FailureRecord, found: Culprit, rows: Mapping[int, RankStatus]) -> None:
        lines = [f"  {row}{'  <-' if rank in found.ranks else ''}" for rank, row in sorted(rows.items())]
        lines += [f"  stacks of all threads: {self._folder.logs / 'stacks-rank-N.txt'}"]
        lines += [] if is_launched() else [f"error: {cause}"]
        print("\n".join(lines), file=sys.stderr, flush=True)


def reporter_for(settings: Mapping[str, str], rank: int, size: int) -> RunFolderReporter:
    """Returns the reporter of a rank, from the settings of its watchdog."""
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
    return RunFolderReporter(folder, Failures(folder.logs, settings["attempt"], rank, size), status)
