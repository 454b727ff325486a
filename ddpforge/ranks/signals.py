"""Requests to stop, made by signals and carried out between two steps."""

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

from ddpforge.errors import Postponed
from ddpforge.launchers.requests import insists, listen, listened
from ddpforge.launchers.verdict import is_launched

__all__ = ["StopRequests", "asked_to_stop", "leave_stopping_to_the_rank", "stopping_early"]
__all__ += ["NoData", "training_begins", "waiting_for_data"]

log = logging.getLogger("ddpforge")

_EARLY = 3.0  # seconds in which ranks that are asked to stop while they start come to agree on it by themselves
_NO_DATA = 5.0  # seconds that a process which was asked to stop waits for data
_began = threading.Event()  # set once there may be something to be saved
_began.set()


class NoData(Postponed):
    """This process was asked to stop, and waits for data that does not come."""

    def __init__(self) -> None:
        super().__init__(
            "asked to stop while no data came",
            hints=["see what the dataset waits for", "the same command continues from the last checkpoint"],
        )


class _WaitingForData:
    """While entered, the main thread waits for data; a request to stop then ends that where nothing else would.

    Raises NoData in there some seconds after the request. Only in a process that is the only rank: several ranks agree
    on how they stop, and those beside them see one stand still.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._over = False

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.since = None

    def ends(self) -> bool:
        """Called by the handler of signals: raises NoData where `watch` has sent one; True where that came too late."""
        if not self._over:
            return False
        self._over = False
        if self.since is not None:
            raise NoData
        return True

    def watch(self, asked: StopRequests, number: int, patience: float) -> None:
        """Starts to watch the main thread, which was asked to stop by the signal `number`, while `asked` is entered."""
        main = threading.main_thread().ident
        if main is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            threading.Thread(target=self._watch, args=(asked, main, number, patience), daemon=True).start()

    def _watch(self, asked: StopRequests, main: int, number: int, patience: float) -> None:
        begin = time.monotonic()
        while asked in StopRequests._entered:
            time.sleep(patience / 10)
            since = self.since
            if since is not None and time.monotonic() - max(since, begin) > patience:
                self._over, begin = True, time.monotonic()
                signal.pthread_kill(main, number)


waiting_for_data = _WaitingForData()


class StopRequests:
    """While entered, SIGTERM, SIGINT, SIGUSR1 and SIGHUP raise a flag; a second one of the same interrupts at once.

    Signals that the process was started to ignore, as nohup does, stay ignored. One that is entered within another
    hears of what that was asked before. A flag on one rank is enough: the trainer agrees on it with the others before
    anybody stops.
    """

    _entered: ClassVar[list[StopRequests]] = []  # in this process, the innermost last

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self._clock = clock
        self._depth = 0
        self._over = False
        self._heard: dict[int, float] = {}
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            if self._entered:
                self.requested, self._heard = self._entered[-1].requested, dict(self._entered[-1]._heard)
            self._entered.append(self)
            self._before = listen(self._on_signal)
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
        """Training has ended, and what is left takes a moment: nothing interrupts it any more."""
        self._over = True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if waiting_for_data.ends():
            return
        now, before = self._clock(), self._heard.get(number)
        self._heard.setdefault(number, now)
        if insists(number, since=None if before is None else now - before) and not self._over:
            raise KeyboardInterrupt
        is_first, self.requested = not self.requested, True
        if is_first:
            waiting_for_data.watch(self, number, _NO_DATA)
        if is_first and _began.is_set():  # before that, the end says it
            # A launcher passes every request on as SIGTERM, whatever it was.
            asked = "asked to stop" if number == signal.SIGTERM and is_launched() else signal.Signals(number).name
            words = "%s: finishing this step, then saving a checkpoint", asked
            try:
                log.info(*words)
            except RuntimeError:  # the signal came within a write to the same stream, which a thread waits for
                threading.Thread(target=log.info, args=words).start()


def asked_to_stop() -> bool:
    """True once a signal has asked this process to stop."""
    return any(one.requested for one in StopRequests._entered)


@contextmanager
def stopping_early(leave: Callable[[], None], patience: float = _EARLY) -> Iterator[None]:
    """Until `training_begins`, calls `leave` where this process still starts `patience` seconds after it was asked to.

    A thread calls it, which hears of signals through a pipe: in the main thread, handlers do not run while it waits in
    C++, as for other ranks, and where it hangs in somebody's code nothing looks at a flag.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _began.clear()
    heard, said = os.pipe()
    os.set_blocking(said, False)
    before = signal.set_wakeup_fd(said, warn_on_full_buffer=False)
    threading.Thread(target=_leave_early, args=(heard, leave, patience), name="early stop", daemon=True).start()
    try:
        yield
    finally:
        training_begins()
        signal.set_wakeup_fd(before)
        os.close(said)


def training_begins() -> None:
    """From now on a request to stop waits for a checkpoint, see `StopRequests`."""
    _began.set()


def _leave_early(heard: int, leave: Callable[[], None], patience: float) -> None:
    with os.fdopen(heard, "rb", buffering=0) as file:
        while number := file.read(1):
            if number[0] in listened() and not _began.wait(patience):
                leave()
                return


# A forked process would write what it is sent into its parent's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def leave_stopping_to_the_rank() -> Callable[[int], None]:
    """A `worker_init_fn` for loader processes: launchers and schedulers signal them along with their rank.

    The rank needs them for its last steps, so they let the first signal of each kind pass; the second one ends a
    process that is stuck in its work. Once the rank's interpreter ends, which sends one and waits, so does the first.
    """
    return partial(_leave_stopping, _ending())


@cache
def _ending() -> Any:
    """A byte that other processes see; it is 1 when this one's interpreter ends."""
    byte = multiprocessing.RawValue("b", 0)  # after which comes what multiprocessing does at the end
    atexit.register(setattr, byte, "value", 1)
    return byte


def _leave_stopping(ending: Any, _: int) -> None:
    for number in listened():
        signal.signal(number, partial(_ignore_once, ending))


def _ignore_once(ending: Any, number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if ending.value:
        os.kill(os.getpid(), number)
