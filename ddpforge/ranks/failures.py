"""Finds the rank that failed first, in files by which ranks report when they can no longer talk."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpforge import disk
from ddpforge.confidential import redact
from ddpforge.errors import EnvironmentProblem, ExitCode

__all__ = ["Failures", "Local", "Peer", "Report", "is_symptom", "phrase", "told_causes"]

_CAUSE = "failure-cause"
_PATIENCE = 3.0  # seconds in which the rank that failed first tells why
_LOST = re.compile(r"connect|clos|reset|tim(ed|e)[ -]?out|broken pipe|abort|remote|unreachable|read error|EOF", re.I)
_LIBRARY = re.compile(r"gloo[/\\]|nccl|TCPStore|monitoredBarrier", re.I)


@dataclass(frozen=True)
class Peer:
    """A rank's process, as the others know it: `place` is the same for those that can see each other's processes."""

    rank: int
    host: str
    place: str
    pid: int

    @classmethod
    def me(cls, rank: int) -> Peer:
        """This process."""
        host = socket.gethostname()
        with suppress(OSError):
            return cls(rank, host, f"{host} {os.stat('/proc/self/ns/pid').st_ino}", os.getpid())
        return cls(rank, host, f"{host} {os.getpid()}", os.getpid())  # where nobody sees anybody


@dataclass(frozen=True)
class Report:
    """A rank's report of its failure; a `symptom` is that it lost touch with others, which may have a cause there."""

    token: str
    rank: int
    error: str
    exit_code: int
    symptom: bool


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
        with suppress(OSError, ValueError, TypeError):
            yield Report(**json.loads(path.read_bytes()))


class Local:
    """The processes of other ranks that this one can watch, because they run beside it."""

    def __init__(self, me: Peer, peers: Sequence[Peer]) -> None:
        self._peers: dict[int, Peer] = {}  # by file descriptor; one of a process that has ended is readable
        self._gone: dict[int, Peer] = {}
        for peer in peers:
            if peer.rank != me.rank and peer.place == me.place:
                with suppress(OSError):  # the process is gone, or this kernel knows no such descriptors
                    self._peers[os.pidfd_open(peer.pid)] = peer

    def gone(self) -> Collection[int]:
        """The ranks whose processes have ended."""
        waiting = select.poll()
        for descriptor in self._peers.keys() - self._gone.keys():
            waiting.register(descriptor, select.POLLIN)
        self._gone |= {descriptor: self._peers[descriptor] for descriptor, _ in waiting.poll(0)}
        return {peer.rank for peer in self._gone.values()}

    def frozen(self) -> dict[int, Peer]:
        """The ranks whose processes are stopped, as by SIGSTOP or a debugger."""
        return {peer.rank: peer for peer in self._peers.values() if _state(peer.pid) in ("T", "t")}

    def close(self) -> None:
        """Lets go of the processes."""
        for descriptor in self._peers:
            os.close(descriptor)
        self._peers.clear()
        self._gone.clear()


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


class Failures:
    """The failures of one attempt, a file for each rank in the run's `logs`, which all ranks see.

    `token` is the attempt's own: what a rank of an earlier attempt left there does not count.
    """

    def __init__(self, logs: Path, token: str, me: Peer, peers: Sequence[Peer] = ()) -> None:
        self._logs, self._token, self.me, self.peers = logs, token, me, peers
        self.local = Local(me, peers)

    @staticmethod
    def clear(logs: Path) -> None:
        """Removes those of earlier attempts."""
        for path in logs.glob("failure-*"):
            disk.remove(path)

    def tell(self, error: BaseException, code: int) -> Report:
        """Writes this rank's failure down for the others; a disk that refuses is no further failure."""
        report = Report(self._token, self.me.rank, phrase(error), code, is_symptom(error))
        with suppress(OSError):
            disk.replace(self._path(self.me.rank), json.dumps(asdict(report)).encode())
        return report

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
        """True when a rank has told of a cause, or one beside this one has ended; costs next to nothing."""
        return (self._logs / _CAUSE).exists() or bool(self.local.gone())

    def told(self) -> dict[int, Report]:
        """Every rank's report so far."""
        return {report.rank: report for report in _reports(self._logs) if report.token == self._token}

    def cause(self) -> Report | None:
        """The failure that another rank met by itself, if one has told of it."""
        others = [report for rank, report in sorted(self.told().items()) if rank != self.me.rank]
        return next((report for report in others if not report.symptom), None)

    def explain(self, sleep: Callable[[float], None] = time.sleep, patience: float = _PATIENCE) -> Report | None:
        """The cause behind a symptom of this rank's, as far as it can be found out by waiting a moment.

        That is what another rank tells; else, of the ranks that are silent, one whose process is gone, is stopped, or
        does not answer. None where every rank has told of a symptom.
        """
        deadline = time.monotonic() + patience
        while (found := self.cause()) is None and not self._mute() and time.monotonic() < deadline:
            if len(self.told()) >= len(self.peers):
                return None
            sleep(0.05)
        return found or self._silent()

    def _mute(self) -> bool:
        """True if a rank has reported nothing, and never will."""
        silent = {peer.rank for peer in self.peers} - self.told().keys()
        return not silent.isdisjoint({*self.local.gone(), *self.local.frozen()})

    def mine(self) -> Report:
        """The report of the others about this rank, when it waits for something else than they do."""
        return Report(self._token, self.me.rank, "did not answer", ExitCode.FAILED, symptom=False)

    def _silent(self) -> Report | None:
        told = self.told()
        silent = {peer.rank: peer for peer in self.peers if peer.rank not in told and peer.rank != self.me.rank}
        gone, frozen = self.local.gone(), self.local.frozen()
        for rank in sorted(silent, key=lambda rank: (rank not in gone, rank not in frozen, rank)):
            return Report(self._token, rank, self._how(silent[rank], gone, frozen), ExitCode.FAILED, symptom=False)
        return None

    def _how(self, peer: Peer, gone: Collection[int], frozen: Mapping[int, Peer]) -> str:
        who = f"process {peer.pid} on {peer.host}"
        if peer.rank in gone:
            return f"{who} ended without a word: it was killed, or crashed"
        if peer.rank in frozen:
            return f"{who} is stopped, as by SIGSTOP"
        return f"{who} does not answer"

    def end_frozen(self) -> None:
        """Ends ranks beside this one that are stopped: they would keep a launcher waiting, which can only kill them."""
        for peer in self.local.frozen().values():
            with suppress(OSError):
                os.kill(peer.pid, signal.SIGKILL)

    def _path(self, rank: int) -> Path:
        return self._logs / f"failure-rank-{rank}.json"
