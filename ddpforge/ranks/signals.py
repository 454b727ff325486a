"""Stop requests by signals, which take effect between two steps."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any, ClassVar

from ddpforge.errors import StoppedBeforeStart
from ddpforge.local_world import is_launched
from ddpforge.ranks.signal_policy import handle_signals, handling_signals, is_second_request

__all__ = ["StopRequests", "leave_stopping_to_the_rank", "stop_requested", "stopping_early"]
__all__ += ["NoData", "training_begins", "waiting_for_data"]

log = logging.getLogger("ddpforge")

_EARLY = 3.0  # seconds after a stop request during the start in which ranks usually agree to stop by themselves
_NO_DATA = 5.0  # maximum seconds to wait for data after a stop request
_began = threading.Event()  # set as soon as there may be progress to save
_began.set()


class NoData(StoppedBeforeStart):
    """Stop was requested while the process waits for data that does not come."""

    def __init__(self) -> None:
        super().__init__(
            "stop requested while waiting for data, and no data came",
            hints=["find out why the dataset waits", "the same command continues from the last checkpoint"],
        )


class _WaitingForData:
    """Context in which the main thread waits for data; raises NoData in it some seconds after a stop request.

    Only in a single process. Several ranks agree on how they stop, and their watchdogs notice a rank without progress.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._over = False

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.since = None

    def ends(self) -> bool:
        """Handles a signal that `watch` has sent: raises NoData while data is awaited, else returns True.

        Called by the signal handler. Returns False for any other signal.
        """
        if not self._over:
            return False
        self._over = False
        if self.since is not None:
            raise NoData
        return True

    def watch(self, requests: StopRequests, number: int, patience: float) -> None:
        """Starts a thread that ends the main thread's wait for data after `patience` seconds, by the signal `number`.

        The thread ends when `requests`, which received the stop signal `number`, is exited.
        """
        main = threading.main_thread().ident
        if main is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            threading.Thread(target=self._watch, args=(requests, main, number, patience), daemon=True).start()

    def _watch(self, requests: StopRequests, main: int, number: int, patience: float) -> None:
        begin = time.monotonic()
        while requests in StopRequests._entered:
            time.sleep(patience / 10)
            since = self.since
            if since is not None and time.monotonic() - max(since, begin) > patience:
                self._over, begin = True, time.monotonic()
                signal.pthread_kill(main, number)


waiting_for_data = _WaitingForData()


class StopRequests:
    """Context in which SIGTERM, SIGINT, SIGUSR1 and SIGHUP set the flag `requested`.

    A second signal of the same kind raises KeyboardInterrupt at once, see `signal_policy.is_second_request`. Signals
    that were ignored at the start of the process, as under nohup, stay ignored. A nested context takes over earlier
    requests of the outer one. A flag on one rank is enough: all ranks agree on a stop before any rank stops.
    """

    _entered: ClassVar[list[StopRequests]] = []  # in this process, the innermost last

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self._clock = clock
        self._depth = 0
        self._over = False
        self._received: dict[int, float] = {}
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            if self._entered:
                self.requested, self._received = self._entered[-1].requested, dict(self._entered[-1]._received)
            self._entered.append(self)
            self._before = handle_signals(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            if self in self._entered:
                self._entered.remove(self)

    def over(self) -> None:
        """Disables interrupts by a second signal: training has ended and only short work is left."""
        self._over = True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if waiting_for_data.ends():
            return
        now, before = self._clock(), self._received.get(number)
        self._received.setdefault(number, now)
        if is_second_request(number, since=None if before is None else now - before) and not self._over:
            raise KeyboardInterrupt
        is_first, self.requested = not self.requested, True
        if is_first:
            waiting_for_data.watch(self, number, _NO_DATA)
        if is_first and _began.is_set():  # before that, the final message reports the stop
            # A launcher passes every request on as SIGTERM: the name of the original signal is not known.
            reason = "stop requested" if number == signal.SIGTERM and is_launched() else signal.Signals(number).name
            words = "%s: finishing this step, then saving a checkpoint", reason
            try:
                log.info(*words)
            except RuntimeError:  # the signal came during a write to the same stream: a thread waits for its end
                threading.Thread(target=log.info, args=words).start()


def stop_requested() -> bool:
    """True if a signal has requested this process to stop."""
    return any(one.requested for one in StopRequests._entered)


@contextmanager
def stopping_early(leave: Callable[[], None], patience: float = _EARLY) -> Iterator[None]:
    """Calls `leave` if this process is still starting `patience` seconds after a stop request.

    Has no effect after `training_begins`.
    """
    # A thread calls `leave`, and receives signals through a pipe. In the main thread, signal handlers do not run while
    # it waits in C++, e.g. for other ranks, and code of a plugin that hangs does not check a flag.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _began.clear()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_leave_early, args=(reader, leave, patience), name="early stop", daemon=True).start()
    try:
        yield
    finally:
        training_begins()
        signal.set_wakeup_fd(before)
        os.close(writer)


def training_begins() -> None:
    """Ends the start of a run: from now on a stop request first saves a checkpoint, see `StopRequests`."""
    _began.set()


def _leave_early(reader: int, leave: Callable[[], None], patience: float) -> None:
    with os.fdopen(reader, "rb", buffering=0) as file:
        while number := file.read(1):
            if number[0] in handling_signals() and not _began.wait(patience):
                leave()
                return


# A forked process would write its own signals into the pipe of its parent.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def leave_stopping_to_the_rank() -> Callable[[int], None]:
    """Returns a `worker_init_fn` for loader processes: they ignore the first signal of each kind.

    The second signal of a kind ends the process. When the rank's interpreter ends, the first one does.
    """
    # Launchers and schedulers signal loader processes along with their rank, which needs them for its last steps.
    # At its end, the rank's interpreter sends them a signal and waits.
    return partial(_leave_stopping, _ending())


@cache
def _ending() -> Any:
    """Returns a byte in shared memory, which becomes 1 when this process's interpreter ends."""
    byte = multiprocessing.RawValue("b", 0)  # multiprocessing's exit function is then registered first, and runs last
    atexit.register(setattr, byte, "value", 1)
    return byte


def _leave_stopping(ending: Any, _: int) -> None:
    for number in handling_signals():
        signal.signal(number, partial(_ignore_once, ending))


def _ignore_once(ending: Any, number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if ending.value:
        os.kill(os.getpid(), number)
