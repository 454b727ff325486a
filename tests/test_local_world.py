"""Ranks on this host: their number, and their share of its cores."""

import os

import pytest

from ddpforge.errors import SetupError
from ddpforge.local_world import check_launcher_env, cores_per_rank, local_world_size, use_launcher_env


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
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=n MASTER_PORT=70000", "MASTER_PORT=70000 is not a port"),
    ],
)
def test_an_incomplete_launcher_is_an_error_of_the_environment(environ: str, said: str) -> None:
    with pytest.raises(SetupError, match=said) as caught:
        check_launcher_env(dict(pair.split("=") for pair in environ.split()))
    assert "ddpforge launch RECIPE --nproc N" in caught.value.hints[0]


@pytest.mark.parametrize("number", ["abc", "0", "-1", "4;2", "2.5"])
def test_a_wrong_number_of_threads_is_named(number: str) -> None:
    with pytest.raises(SetupError, match="OMP_NUM_THREADS must be a number of 1 or more"):
        use_launcher_env({"OMP_NUM_THREADS": number})


@pytest.mark.parametrize(("said", "used"), [("4,2", "4"), (" 3 ", "3"), ("", None), ("8", "8")])
def test_a_list_of_threads_is_its_first_number_and_an_empty_one_is_unset(said: str, used: str | None) -> None:
    environ = {"OMP_NUM_THREADS": said}
    use_launcher_env(environ)
    assert environ.get("OMP_NUM_THREADS") == used


def test_variables_of_one_process_without_an_address_are_left_over_and_removed() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "HOME": "x"}
    use_launcher_env(environ)
    assert environ == {"HOME": "x"}
    whole = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "n", "MASTER_PORT": "1"}
    use_launcher_env(kept := dict(whole))
    assert kept == whole


def test_a_complete_launcher_and_none_are_accepted() -> None:
    check_launcher_env({})
    check_launcher_env({"RANK": "0", "WORLD_SIZE": "1"})
    check_launcher_env({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n", "MASTER_PORT": "1"})
