"""Threads of ranks that talk over gloo do not interrupt each other, and a run leaves its thread as it was."""

import os
import threading

import pytest

from ddpforge.ranks.scheduling import policy_restored, run_as_batch


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_and_those_it_starts_run_in_batches_until_the_run_ends() -> None:
    with policy_restored():
        run_as_batch()
        assert (os.sched_getscheduler(0), policy_of_a_new_thread()) == (os.SCHED_BATCH, os.SCHED_BATCH)
    assert (os.sched_getscheduler(0), policy_of_a_new_thread()) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_a_policy_that_somebody_has_chosen_stays() -> None:
    with policy_restored():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        run_as_batch()
        assert os.sched_getscheduler(0) == os.SCHED_IDLE


def test_where_nobody_may_choose_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with policy_restored():
        run_as_batch()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
