"""The process of a rank, seen from the one beside it: where it stands, its stacks, its end."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from ddpforge.ranks.phases import Place

__all__ = ["STACKS", "Process"]

STACKS = signal.SIGRTMIN + 7  # has faulthandler write stacks; one that nobody else uses
_DUMP = 1.5  # seconds in which a process, and what it has forked, write their stacks
_LOOK = 0.03  # seconds between two looks at what they have written
_FATAL = "Fatal Python error: "  # with which faulthandler begins
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


class Process:
    """A rank's process. It writes its place into `words`, and its stacks, at the signal STACKS, to the file `stacks`.

    `main` is the identity of the thread that trains; this process is its child.
    """

    def __init__(self, pid: int, words: memoryview[int], stacks: int, main: int) -> None:
        self.pid, self._words, self._stacks, self._main = pid, words, stacks, main
        self._end = select.poll()
        with suppress(OSError):  # a kernel that knows no such descriptors
            self._end.register(os.pidfd_open(pid), select.POLLIN)  # readable when the process has ended

    def ended(self, wait: float) -> bool:
        """Waits for its end, for as many seconds at most."""
        return bool(self._end.poll(wait * 1000)) or os.getppid() != self.pid

    def place(self) -> Place:
        """The place where it stands."""
        return Place.of(self._words)

    def frozen(self) -> bool:
        """True while it is stopped, as by SIGSTOP or a debugger."""
        return (_stat(self.pid) or ["?"])[0] in "Tt"

    def death(self) -> str:
        """The way it ended, as far as the kernel still tells: whoever started it may have asked first."""
        found = _stat(self.pid) or []
        status = int(found[49]) if len(found) > 49 and found[0] == "Z" else 0
        if number := status & 127:
            name = signal.Signals(number).name if number in signal.Signals.__members__.values() else ""
            memory = ", as for lack of memory," if number == signal.SIGKILL else ""
            return f"was killed by signal {number}{f' ({name})' if name else ''}{memory}"
        return f"ended by itself with code {status >> 8}" if status else "ended without a word: killed, or crashed,"

    def stacks(self) -> str:
        """The stacks of its threads, and of those of its loader processes; a frozen one must be woken for that.

        It is not stopped for them: a program that wraps it, as nsenter and sudo do, would stop with it, for ever.
        """
        if self.frozen():
            return ""
        begin = os.fstat(self._stacks).st_size  # what it wrote when it was asked before
        deadline = time.monotonic() + _DUMP
        for pid in [self.pid, *_children(self.pid)]:  # one after the other: all of them write to one file
            if _listens(pid) and time.monotonic() < deadline:
                if pid != self.pid:
                    os.write(self._stacks, f"\nprocess {pid}, which it has forked:\n".encode())
                self._written(pid, deadline)
        return os.pread(self._stacks, 1 << 24, begin).decode(errors="replace")

    def _written(self, pid: int, deadline: float) -> None:
        """Has a process write its stacks, and waits until it has."""
        before = size = os.fstat(self._stacks).st_size
        _send(pid, STACKS)
        while time.monotonic() < deadline and (size == before or size != os.fstat(self._stacks).st_size):
            size = os.fstat(self._stacks).st_size
            time.sleep(_LOOK)

    def last_stacks(self) -> str:
        """The stacks that it wrote when it aborted or crashed; empty where it did neither."""
        found = os.pread(self._stacks, 1 << 24, 0).decode(errors="replace")
        return found[found.rfind(_FATAL) :] if _FATAL in found else ""

    def line(self, stacks: str) -> str:
        """The line on which the main thread stands, e.g. "faults.py:12 in load"."""
        _, _, mine = stacks.partition(f"{self._main:#018x} ")
        found = _FRAME.search(mine.partition("\n\n")[0])
        return f"{'/'.join(found[1].split('/')[-3:])}:{found[2]} in {found[3]}" if found else ""

    def end(self) -> None:
        """Ends it, with the loader processes that it has forked."""
        children = list(_children(self.pid))
        for pid in [self.pid, *children]:
            _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return None


def _listens(pid: int) -> bool:
    """True if a process has somebody to answer STACKS, which else ends it."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS - 1) & 1)
    return False


def _children(parent: int) -> Iterator[int]:
    """The processes that a rank has forked, and theirs; what went a way of its own (another process group) is not."""
    group = (_stat(parent) or [])[2:3]
    found: dict[int, list[str]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _stat(int(name))) and stat[2:3] == group and int(name) != os.getpid():
            found[int(name)] = stat
    reached = {parent}
    while new := {pid for pid, stat in found.items() if int(stat[1]) in reached} - reached:
        reached |= new
        yield from new
