"""Threads of ranks that talk over gloo do not interrupt each other, unless others hold the cores."""

import os
import threading
from collections.abc import Iterator

import pytest

from ddpforge.ranks import scheduling
from ddpforge.ranks.scheduling import look_for_others, may_run_as_batch, policy_restored, run_as_batch

OTHER, BATCH, IDLE = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE


@pytest.fixture
def second() -> Iterator["Second"]:
    thread = Second()
    yield thread
    thread.ends.set()


class Second:
    """A thread beside that of the test."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self.ends.wait, daemon=True)
        self.thread.start()

    def policies(self) -> tuple[int, int]:
        """That of the test's own thread, and of this one."""
        assert self.thread
        assert self.thread.native_id
        return os.sched_getscheduler(0), os.sched_getscheduler(self.thread.native_id)


class Machine:
    """The clock, and how long each thread has run and waited, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran, self.waited = 0.0, 0, 0
        monkeypatch.setattr(scheduling.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(
            scheduling,
            "_spent",
            lambda: {int(thread): (self.ran, self.waited) for thread in os.listdir("/proc/self/task")},
        )

    def passes(self, seconds: float, *, ran: int = 0, waited: int = 0) -> None:
        self.now += seconds
        self.ran, self.waited = self.ran + ran, self.waited + waited
        look_for_others()


def test_a_thread_and_those_it_starts_run_in_batches_until_the_run_ends(second: Second) -> None:
    with policy_restored():
        run_as_batch()
        second.start()
        assert second.policies() == (BATCH, BATCH)
    assert second.policies() == (OTHER, OTHER)


def test_where_threads_wait_longer_than_they_run_they_are_as_by_default_for_a_minute(
    second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    with policy_restored():
        run_as_batch()
        second.start()
        machine.passes(0.5, ran=1, waited=9)  # too short to tell
        assert second.policies() == (BATCH, BATCH)
        machine.passes(0.5, ran=9)
        assert second.policies() == (BATCH, BATCH)
        machine.passes(1, ran=1, waited=2)
        assert second.policies() == (OTHER, OTHER)
        machine.passes(60, ran=9)
        assert second.policies() == (OTHER, OTHER)
        machine.passes(1)
        assert second.policies() == (BATCH, BATCH)
        machine.passes(1, ran=2, waited=1)
        assert second.policies() == (BATCH, BATCH)
        machine.passes(1, ran=2, waited=3)
        assert second.policies() == (OTHER, OTHER)


def test_a_policy_that_somebody_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for chosen in (IDLE, BATCH):
        with policy_restored():
            os.sched_setscheduler(0, chosen, os.sched_param(0))
            run_as_batch()
            machine.passes(100, ran=1, waited=2)
            assert os.sched_getscheduler(0) == chosen


def test_nothing_is_changed_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    with policy_restored():
        run_as_batch()
    machine.passes(100, ran=1, waited=2)
    assert os.sched_getscheduler(0) == OTHER


def test_where_nobody_may_choose_a_run_goes_on_and_looks_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    machine = Machine(monkeypatch)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not may_run_as_batch()
    with policy_restored():
        run_as_batch()
        monkeypatch.setattr(scheduling, "_spent", lambda: pytest.fail("looks at its threads"))
        machine.passes(2, ran=1, waited=2)
    assert os.sched_getscheduler(0) == OTHER


def test_whether_it_may_be_chosen_is_tried_and_leaves_nothing() -> None:
    assert may_run_as_batch()
    assert os.sched_getscheduler(0) == OTHER


def test_the_kernel_tells_how_long_each_thread_has_run() -> None:
    before = scheduling._spent()[os.getpid()]
    sum(range(1_000_000))
    after = scheduling._spent()[os.getpid()]
    assert after[0] > before[0]
    assert after[1] >= before[1]
