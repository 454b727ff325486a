"""Environments of ranks: an installed launcher, scheduler or watchdog takes part in each run, on each rank."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_distributions import install
from support.forked import in_ranks, refused
from test_docs import write_files

from ddpforge.app.run import run
from ddpforge.errors import ForgeError, PeerFailed, SetupError
from ddpforge.interfaces import Environment, RankWatch, RunAttempt
from ddpforge.ranks.environment import Environments, environment, raising_peer_failures

DOCS = Path(__file__).parents[2] / "docs"
PLUGIN = """
from contextlib import contextmanager

from ddpforge.interfaces import Environment, RankWatch

calls = []


class Watch(RankWatch):
    def __enter__(self):
        calls.append("attempt begins")

    def __exit__(self, kind, error, trace):
        calls.append(f"attempt ends: {error!r}")


class Cluster(Environment):
    def export_variables(self):
        calls.append("export_variables")

    @contextmanager
    def running(self):
        calls.append("run begins")
        yield
        calls.append("run ends")

    def before_join(self, device):
        calls.append(f"before_join on {device}")

    def is_restart(self):
        calls.append("is_restart")
        return True

    def on_begin(self):
        calls.append("on_begin")

    def watch(self, attempt):
        calls.append(f"watch of rank {attempt.rank} of {attempt.size}, {attempt.strategy}, {attempt.hang_timeout}")
        return Watch()
"""


def test_environment_of_a_plugin_takes_part_in_a_run(tmp_path: Path) -> None:
    """As the plugin reports a restart, the second `fresh` run resumes the first one."""
    install(
        tmp_path, "my-cluster", {"ddpforge.environment": {"mine": "cluster:Cluster"}}, modules={"cluster.py": PLUGIN}
    )

    def rank(_: int) -> Any:
        sys.path.insert(0, str(tmp_path))
        from cluster import calls  # type: ignore[import-not-found]

        found = []
        for length in ("1st", "2st"):
            sets = [f"train.length={length}", 'schedule={use="constant"}', "~checkpoint.keep"]
            run("digits", sets=sets, out=tmp_path / "runs/one", fresh=True)
            found.append([*calls])
            calls.clear()
        return found, sorted(path.name for path in (tmp_path / "runs").iterdir())

    ((found, folders),) = in_ranks(1, rank)
    assert (
        found
        == [
            [
                "run begins",
                "export_variables",
                "is_restart",
                "before_join on cpu",
                "on_begin",
                "watch of rank 0 of 1, ddp, 600.0",
                "attempt begins",
                "attempt ends: None",
                "run ends",
            ]
        ]
        * 2
    )
    assert folders == ["one"]


class Recorded(Environment):
    """Environment that records its calls under a name."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    @contextmanager
    def running(self) -> Iterator[None]:
        self.calls.append(f"{self.name} begins")
        yield
        self.calls.append(f"{self.name} ends")

    def watch(self, attempt: RunAttempt) -> RankWatch:
        calls, name = self.calls, self.name

        class Watch(RankWatch):
            def __enter__(self) -> Any:
                calls.append(f"{name} watches")
                return self

            def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
                calls.append(f"{name} ends: {error!r}")

            def call(self) -> None:
                calls.append(f"{name} is called")

        return Watch()

    def on_halt(self) -> None:
        self.calls.append(f"{self.name} halts")


ATTEMPT = RunAttempt(
    folder=Path(),
    token="t",
    rank=0,
    size=2,
    device=torch.device("cpu"),
    strategy="ddp",
    hang_timeout=0.0,
    compiles=False,
)


def test_environments_end_in_reverse_order_also_after_a_failure() -> None:
    calls: list[str] = []
    both = Environments([Recorded("a", calls), Recorded("b", calls)])
    both.watch(ATTEMPT).call()
    with pytest.raises(KeyError), both.watch(ATTEMPT):
        raise KeyError(1)
    with both.running():
        both.on_halt()
    assert calls == [
        *("a is called", "b is called", "a watches", "b watches", "b ends: KeyError(1)", "a ends: KeyError(1)"),
        *("a begins", "b begins", "a halts", "b halts", "b ends", "a ends"),
    ]


def test_base_class_does_nothing() -> None:
    alone = Environments([Environment()])
    assert not alone.is_restart()
    assert alone.peer_failure() is None
    with alone.running(), alone.watch(ATTEMPT) as watch:
        alone.before_join(ATTEMPT.device)
        alone.on_begin()
        alone.on_halt()
        watch.call()


def lost_connection() -> None:
    with raising_peer_failures():
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def test_lost_connection_is_replaced_by_the_failure_that_an_environment_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(environment()), "peer_failure", lambda _: PeerFailed(3, "rank 1 failed first: no data"))
    assert "rank 1 failed first: no data" in refused(PeerFailed, lost_connection)


def test_lost_connection_without_a_known_cause_is_named() -> None:
    assert "another rank did not answer before training began" in refused(ForgeError, lost_connection)


# ---------------------------------------------------------------------------------------------- launcher's variables
MPI = {"RANK": "5", "LOCAL_RANK": "1", "SIZE": "8", "LOCAL_SIZE": "4"}
OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environments:
    """Returns the environment of the page, on a rank of mpirun."""
    write_files(DOCS / "extend/environment.md", tmp_path)
    for name in OURS:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in MPI.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    found: dict[str, Any] = {}
    exec((tmp_path / "openmpi.py").read_text(), found)
    return Environments([found["OpenMPI"]()])


def test_example_of_the_page_exports_the_variables_of_a_launcher(
    example: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    example.export_variables()
    example.export_variables()
    assert [os.environ[name] for name in OURS] == ["5", "1", "8", "4", "node1", "29500"]


def test_variables_that_a_plugin_leaves_incomplete_are_refused(example: Environments) -> None:
    assert "but not MASTER_ADDR, MASTER_PORT" in refused(SetupError, example.export_variables)
