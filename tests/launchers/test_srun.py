"""A world from Slurm's variables; tests/launchers/test_slurm.py, where there is one, has a real Slurm."""

import pytest

from ddpforge.errors import EnvironmentProblem
from ddpforge.launchers import srun
from ddpforge.launchers.srun import adopt_slurm

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[01-03],m7",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "64",
}


@pytest.fixture(autouse=True)
def _names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun.socket, "getaddrinfo", lambda *_: [])


def test_each_task_of_a_step_becomes_a_rank() -> None:
    environ = dict(STEP)
    assert adopt_slurm(environ)
    assert {name: environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"},
    }
    assert environ["MASTER_ADDR"] == "n01"
    assert 20_000 <= int(environ["MASTER_PORT"]) < 32_000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2,5],m3", "n1"),
        ("n[007,9]", "n007"),
        ("a,b", "a"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("g[1-2]-ib", "g1-ib"),
    ],
)
def test_ranks_meet_on_the_first_node(nodes: str, first: str) -> None:
    environ = STEP | {"SLURM_STEP_NODELIST": nodes}
    adopt_slurm(environ)
    assert environ["MASTER_ADDR"] == first


@pytest.mark.parametrize("other", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}, {"SLURM_RESTART_COUNT": "1"}])
def test_steps_side_by_side_meet_at_ports_of_their_own(other: dict[str, str]) -> None:
    one, another = dict(STEP), STEP | other
    adopt_slurm(one)
    adopt_slurm(another)
    assert one["MASTER_PORT"] != another["MASTER_PORT"]


@pytest.mark.parametrize(
    "environ",
    [
        STEP | {"RANK": "0"},  # of torchrun, started by srun
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # one launcher on each node, or one process alone
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # a batch script
        {},
    ],
)
def test_other_launchers_and_lone_tasks_are_left_as_they_are(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert not adopt_slurm(environ)
    assert environ == before


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
def test_one_of_several_tasks_never_trains_alone(missing: str) -> None:
    environ = {name: value for name, value in STEP.items() if name != missing}
    with pytest.raises(EnvironmentProblem, match="one of 7 tasks of a Slurm step"):
        adopt_slurm(environ)


def test_a_node_whose_name_is_an_alias_is_found_by_the_address_that_slurm_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError("not known")

    class Shown:
        stdout = "NodeName=n01 NodeAddr=10.0.0.7 State=IDLE"

    monkeypatch.setattr(srun.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(srun.subprocess, "run", lambda *_, **__: Shown)
    environ = dict(STEP)
    adopt_slurm(environ)
    assert environ["MASTER_ADDR"] == "10.0.0.7"
