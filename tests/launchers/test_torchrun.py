"""torchrun's agent as a launch has it: which ends of ranks it answers with a restart."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher import api

from ddpforge.launchers import torchrun
from ddpforge.launchers.exit_record import record_begun, record_halt, record_start


def agent_of(monkeypatch: pytest.MonkeyPatch, state: WorkerState, failures: Any, **group: Any) -> tuple[Any, Any]:
    """An agent whose ranks are in this state, and their group."""
    ended = RunResult(state, failures=failures)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: ended)
    agent = object.__new__(torchrun._extended(LocalElasticAgent))
    return agent, SimpleNamespace(**group)


def answer(monkeypatch: pytest.MonkeyPatch, *codes: int, fewest: int = 2, most: int = 2) -> tuple[str, int]:
    """What torchrun learns of ranks that have ended with `codes`, and how often the agent has restarted them itself."""
    failures = {rank: ProcessFailure(rank, 0, code, error_file="") for rank, code in enumerate(codes)}
    handler = SimpleNamespace(settings=SimpleNamespace(min_nodes=fewest, max_nodes=most))
    spec = SimpleNamespace(rdzv_handler=handler, get_entrypoint_name=lambda: "python")
    state = WorkerState.FAILED if codes else WorkerState.HEALTHY
    agent, group = agent_of(monkeypatch, state, failures, spec=spec, group_world_size=1)
    restarted: list[Any] = []
    agent._restart_workers = restarted.append
    try:
        learned = agent._monitor_workers(group).state.name
    except ChildFailedError as error:
        learned = "the end" if error.failures is failures else "an end without its failures"
    assert all(one is group for one in restarted)
    return learned, len(restarted)


@pytest.mark.parametrize(
    ("codes", "learned"),
    [
        ((), "HEALTHY"),
        ((1,), "FAILED"),  # which torchrun answers with a restart
        ((3, 3), "FAILED"),  # a disk, say, which may be there again
        ((-9,), "FAILED"),
        ((2, 2), "the end"),  # the recipe is wrong, also for the ranks that would be started next
        ((4,), "the end"),
        ((75, 75), "the end"),  # stopped as asked
        ((-15, 75), "the end"),
    ],
)
def test_ranks_are_started_again_where_that_can_help(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], learned: str
) -> None:
    assert answer(monkeypatch, *codes) == (learned, 0)


def test_a_machine_that_leaves_an_elastic_run_costs_the_others_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent restarts ranks itself, so torchrun counts no failure; a run that is to stop for good ends."""
    monkeypatch.setenv("DDPFORGE_VERDICT", str(tmp_path / "verdict"))
    (tmp_path / "verdict").touch()
    assert answer(monkeypatch, 75, 75, fewest=1, most=3) == ("HEALTHY", 1)
    record_halt()
    assert answer(monkeypatch, 75, 75, fewest=1, most=3) == ("the end", 0)


def test_a_second_signal_does_not_end_ranks_that_are_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    told: list[Any] = []

    def shut_down(_: Any, *signals: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        told.append((signals, options))

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", shut_down)
    try:
        object.__new__(torchrun._extended(LocalElasticAgent))._shutdown(signal.SIGTERM, timeout=600)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert told == [((signal.SIGTERM,), {"timeout": 600})]


def test_ranks_that_wait_for_a_node_whose_launcher_has_ended_are_ended_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that fails closes the rendezvous; ranks that still join would wait for the others ten minutes."""
    monkeypatch.setenv("DDPFORGE_VERDICT", str(tmp_path / "verdict"))
    (tmp_path / "verdict").touch()
    monkeypatch.setattr(torchrun, "_GRACE", -1.0)
    shut: list[Any] = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda _, *signals: shut.extend(signals))
    closed = SimpleNamespace(is_closed=lambda: True)
    spec = SimpleNamespace(local_world_size=1, rdzv_handler=closed)
    agent, group = agent_of(monkeypatch, WorkerState.HEALTHY, {}, group_world_size=2, spec=spec)
    with pytest.raises(RendezvousClosedError):
        agent._monitor_workers(group)
    assert shut == [signal.SIGKILL]
    closed.is_closed = lambda: False
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY
    closed.is_closed = lambda: True
    record_start()
    record_begun()  # they notice by themselves, and may be saving
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY


# ---------------------------------------------------------------------------------------------- another torch
@pytest.mark.parametrize("name", torchrun._HOOKS)
def test_a_torch_whose_agent_has_no_such_method_keeps_its_own_agent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    own = type("Agent", (), {other: None for other in torchrun._HOOKS if other != name})
    monkeypatch.setattr(api, "LocalElasticAgent", own)
    assert not torchrun.use_agent()
    assert api.LocalElasticAgent is own


def test_the_agent_takes_the_place_of_torchrun_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LocalElasticAgent", LocalElasticAgent)  # restored afterwards
    assert torchrun.use_agent()
    assert issubclass(api.LocalElasticAgent, LocalElasticAgent)
    assert api.LocalElasticAgent is not LocalElasticAgent


@pytest.mark.slow
def test_a_torch_that_keeps_its_agent_elsewhere_still_starts_ranks_and_restarts_them(tmp_path: Path) -> None:
    """The name is taken away from the module in which the agent is replaced; torchrun itself still finds it."""
    (tmp_path / "rank.py").write_text("""
import os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"rank-{os.environ['RANK']}-{count}", "w").close()
sys.exit(2 if count == "0" else 0)
""")
    script = """
from types import FunctionType
import torch.distributed.launcher.api as api
import torch.distributed.run
api.launch_agent = FunctionType(api.launch_agent.__code__, dict(vars(api)), "launch_agent", (None,))
del api.LocalElasticAgent
from ddpforge.launchers import torchrun
torchrun.main()
"""
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "rank.py"]
    ended = subprocess.run([sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0-0", "rank-1-0", "rank-0-1", "rank-1-1"}
