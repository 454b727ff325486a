"""Process of a rank as its watchdog observes it: its heartbeats, its stacks, its end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from ddpforge import machine
from ddpforge.ranks.heartbeat import Heartbeat

__all__ = ["Process"]

_DUMP = 1.5  # seconds in which a process and its forked processes write their stacks
_LOOK = 0.03  # seconds between two checks of the stacks written so far
_FATAL = "Fatal Python error: "  # the beginning of faulthandler's output after a crash
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


class Process:
    """Process of a rank; the watchdog, which uses this class, is its child.

    Args:
        pid: the rank's process.
        words: shared memory into which it writes its heartbeats.
        stacks: the descriptor of a file into which it writes its stacks at the signal STACKS.
        main: the identity of the thread that trains.
    """

    def __init__(self, pid: int, words: memoryview[int], stacks: int, main: int) -> None:
        self.pid, self._words, self._stacks, self._main = pid, words, stacks, main
        self._end = machine.end_poll(pid)

    def ended(self, wait: float) -> bool:
        """True if the process has ended; waits for that at most `wait` seconds."""
        return machine.wait_for_end(self.pid, self._end, wait)

    def place(self) -> Heartbeat:
        """Returns its last heartbeat."""
        return Heartbeat.of(self._words)

    def frozen(self) -> bool:
        """True while the process is stopped, as by SIGSTOP or a debugger."""
        return machine.process_state(self.pid) in "Tt"

    def death(self) -> str:
        """Returns how the process ended. That is unknown if its parent has already read the exit status."""
        status = machine.wait_status(self.pid) or 0
        if number := status & 127:
            name = signal.Signals(number).name if number in signal.Signals.__members__.values() else ""
            memory = ", as for lack of memory," if number == signal.SIGKILL else ""
            return f"was killed by signal {number}{f' ({name})' if name else ''}{memory}"
        return f"ended by itself with code {status >> 8}" if status else "ended without a report: killed, or crashed,"

    def stacks(self) -> str:
        """Returns the stacks of all threads of the process and of its loader processes; "" if it is frozen."""
        # The process is not stopped (SIGSTOP) for this: a program that wraps it, as nsenter and sudo do, would stop
        # with it for ever. A frozen process would have to be continued to write its stacks.
        if self.frozen():
            return ""
        begin = os.fstat(self._stacks).st_size  # after the stacks of earlier requests
        deadline = time.monotonic() + _DUMP
        for pid in [self.pid, *self._children()]:  # one after the other, because all write to the same file
            if self._listens(pid) and time.monotonic() < deadline:
                if pid != self.pid:
                    os.write(self._stacks, f"\nprocess {pid}, forked by the rank:\n".encode())
                self._written(pid, deadline)
        return os.pread(self._stacks, 1 << 24, begin).decode(errors="replace")

    def _written(self, pid: int, deadline: float) -> None:
        """Makes a process write its stacks, and waits for the end of the output."""
        before = size = os.fstat(self._stacks).st_size
        _send(pid, machine.STACKS)
        while time.monotonic() < deadline and (size == before or size != os.fstat(self._stacks).st_size):
            size = os.fstat(self._stacks).st_size
            time.sleep(_LOOK)

    def last_stacks(self) -> str:
        """Returns the stacks that the process wrote when it aborted or crashed; "" if it did neither."""
        found = os.pread(self._stacks, 1 << 24, 0).decode(errors="replace")
        return found[found.rfind(_FATAL) :] if _FATAL in found else ""

    def line(self, stacks: str) -> str:
        """Returns the current line of the main thread in `stacks`, e.g. "faults.py:12 in load"."""
        _, _, mine = stacks.partition(f"{self._main:#018x} ")
        found = _FRAME.search(mine.partition("\n\n")[0])
        return f"{'/'.join(found[1].split('/')[-3:])}:{found[2]} in {found[3]}" if found else ""

    def _children(self) -> Iterator[int]:
        """Yields the rank's loader processes, and others that it has started in its group; not this process."""
        return machine.descendants(self.pid, without=[os.getpid()])

    def _listens(self, pid: int) -> bool:
        """True if a process has a handler for STACKS. Without one, the signal might end it."""
        found = machine.catches(pid, machine.STACKS)
        return pid == self.pid if found is None else found

    def end(self) -> None:
        """Kills the process and its loader processes."""
        children = list(self._children())
        for pid in [self.pid, *children]:
            _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)
