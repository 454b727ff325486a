"""Ranks on this host: their number, and their share of its cores."""

import os

import pytest

from ddpforge.local_world import cores_per_rank, local_world_size


def test_cores_per_rank_divides_the_available_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert [cores_per_rank(processes) for processes in (1, 2, 7, 8, 1000)] == [7, 3, 1, 1, 1]


def test_local_world_size_is_read_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_world_size() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_world_size() == 1
