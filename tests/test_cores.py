"""Processes of one machine share its cores."""

import os

import pytest

from ddpforge.local_world import cores_per_rank, local_world_size


def test_processes_share_the_cores_that_this_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert [cores_per_rank(processes) for processes in (1, 2, 7, 8, 1000)] == [7, 3, 1, 1, 1]


def test_a_launcher_tells_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_world_size() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_world_size() == 1
