"""Processes of one machine share its cores."""

import os

import pytest

from ddpforge.cores import ranks_here, share_of_cores


def test_processes_share_the_cores_that_this_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert [share_of_cores(processes) for processes in (1, 2, 7, 8, 1000)] == [7, 3, 1, 1, 1]


def test_a_launcher_tells_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert ranks_here() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks_here() == 1
