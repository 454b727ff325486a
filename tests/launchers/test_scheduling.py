"""Scheduling policy: threads of gloo do not preempt each other, unless other programs use the cores."""

import os
import threading
from collections.abc import Iterator

import pytest

from ddpforge.launchers import scheduling
from ddpforge.launchers.scheduling import Contention, policy_restored, runs_as_batch, set_batch_policy

if not hasattr(os, "SCHED_BATCH"):
    pytest.skip("only Linux has SCHED_BATCH", allow_module_level=True)

OTHER, BATCH, IDLE = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE


class Second:
    """Second thread of the test's process."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.ends.wait, daemon=True)

    def policies(self) -> tuple[int, int]:
        """Returns the policies of the test's thread and of this thread."""
        assert self.thread.native_id
        return os.sched_getscheduler(0), os.sched_getscheduler(self.thread.native_id)


@pytest.fixture
def second() -> Iterator[Second]:
    thread = Second()
    with policy_restored():
        yield thread
    thread.ends.set()


class Machine:
    """Fake clock, and the seconds that each thread has run and waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran, self.waited = 0.0, 0, 0
        monkeypatch.setattr(
            scheduling, "_spent", lambda pid: dict.fromkeys(scheduling._threads(pid), (self.ran, self.waited))
        )
        self.contention = Contention(os.getpid(), lambda: self.now)

    def passes(self, seconds: float, *, ran: int = 0, waited: int = 0) -> None:
        self.now += seconds
        self.ran, self.waited = self.ran + ran, self.waited + waited
        self.contention.look()


def test_batch_policy_applies_to_new_threads_and_is_restored(second: Second) -> None:
    with policy_restored():
        set_batch_policy()
        assert runs_as_batch()
        second.thread.start()
        assert second.policies() == (BATCH, BATCH)
    assert second.policies() == (OTHER, OTHER)
    assert not runs_as_batch()


def test_contention_restores_the_default_policy_for_a_minute(second: Second, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    set_batch_policy()
    second.thread.start()
    machine.passes(0.5, ran=1, waited=9)  # too short for a decision
    assert second.policies() == (BATCH, BATCH)
    machine.passes(0.5, ran=9)
    assert second.policies() == (BATCH, BATCH)
    machine.passes(1, ran=1, waited=2)
    assert second.policies() == (OTHER, OTHER)
    machine.passes(59, ran=9)
    assert second.policies() == (OTHER, OTHER)
    machine.passes(1)
    assert second.policies() == (BATCH, BATCH)
    machine.passes(1, ran=2, waited=1)
    assert second.policies() == (BATCH, BATCH)
    machine.passes(1, ran=2, waited=3)
    assert second.policies() == (OTHER, OTHER)


@pytest.mark.parametrize("chosen", [IDLE, BATCH])
def test_policy_chosen_by_the_caller_is_kept(chosen: int) -> None:
    os.sched_setscheduler(0, chosen, os.sched_param(0))
    try:
        with policy_restored():
            set_batch_policy()
            assert not runs_as_batch()
            assert os.sched_getscheduler(0) == chosen
        assert os.sched_getscheduler(0) == chosen
    finally:
        os.sched_setscheduler(0, OTHER, os.sched_param(0))


def test_forbidden_policy_change_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with policy_restored():
        set_batch_policy()
        assert not runs_as_batch()
    assert os.sched_getscheduler(0) == OTHER


def test_contention_of_an_ended_process_is_not_an_error() -> None:
    times = iter([0.0, 9.0, 9.0])
    Contention(2**22 + 1, lambda: next(times)).look()
    assert next(times, None) is None


def test_spent_reads_the_run_time_of_threads_from_the_kernel() -> None:
    before = scheduling._spent(os.getpid())[os.getpid()]
    sum(range(1_000_000))
    after = scheduling._spent(os.getpid())[os.getpid()]
    assert after[0] > before[0]
    assert after[1] >= before[1]
