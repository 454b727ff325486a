"""Ranks on this host: their number, and their share of its cores."""

import os

import pytest

from ddpforge.errors import SetupError
from ddpforge.local_world import check_launcher_env, cores_per_rank, local_world_size


def test_cores_per_rank_divides_the_available_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    assert [cores_per_rank(processes) for processes in (1, 2, 7, 8, 1000)] == [7, 3, 1, 1, 1]


def test_local_world_size_is_read_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_world_size() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_world_size() == 1


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ("RANK=0 WORLD_SIZE=2", "not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ("WORLD_SIZE=2", "has set WORLD_SIZE=2, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ("RANK=1", "has set RANK=1, but not LOCAL_RANK, WORLD_SIZE"),
        ("RANK=abc", "RANK must be a number, not 'abc'"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=n MASTER_PORT=1", "RANK=2, but WORLD_SIZE=2"),
    ],
)
def test_an_incomplete_launcher_is_an_error_of_the_environment(environ: str, said: str) -> None:
    with pytest.raises(SetupError, match=said) as caught:
        check_launcher_env(dict(pair.split("=") for pair in environ.split()))
    assert "ddpforge launch RECIPE --nproc N" in caught.value.hints[0]


def test_a_complete_launcher_and_none_are_accepted() -> None:
    check_launcher_env({})
    check_launcher_env({"RANK": "0", "WORLD_SIZE": "1"})
    check_launcher_env({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n", "MASTER_PORT": "1"})
