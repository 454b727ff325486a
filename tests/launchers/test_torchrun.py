"""torchrun's agent in a launch: the exit codes of ranks after which it restarts them."""

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
    """Returns an agent whose ranks are in `state`, and their worker group."""
    ended = RunResult(state, failures=failures)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: ended)
    agent = object.__new__(torchrun._extended(LocalElasticAgent))
    return agent, SimpleNamespace(**group)


def answer(monkeypatch: pytest.MonkeyPatch, *codes: int, fewest: int = 2, most: int = 2) -> tuple[str, int]:
    """Returns the state that the agent reports for ranks that ended with `codes`, and the number of its restarts."""
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
        ((1,), "FAILED"),  # torchrun restarts the ranks
        ((3, 3), "FAILED"),  # environment errors: a disk, for example, may be available again
        ((-9,), "FAILED"),
        ((2, 2), "the end"),  # the recipe is wrong, also for restarted ranks
        ((4,), "the end"),
        ((75, 75), "the end"),  # stopped on request
        ((-15, 75), "the end"),
    ],
)
def test_ranks_are_restarted_only_after_exit_codes_that_a_restart_can_fix(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], learned: str
) -> None:
    assert answer(monkeypatch, *codes) == (learned, 0)


def test_node_that_leaves_an_elastic_run_does_not_use_up_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarts ranks in the agent itself, so that torchrun counts no failure; after a halt record the run ends."""
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


def test_ranks_that_have_not_begun_are_killed_when_the_rendezvous_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed launchers close the rendezvous; ranks that still join would wait ten minutes for the other nodes."""
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
    record_begun()  # ranks that train notice it themselves, and may be saving
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY


# ---------------------------------------------------------------------------------------------- another torch
@pytest.mark.parametrize("name", torchrun._HOOKS)
def test_agent_of_torch_is_kept_if_it_lacks_a_hooked_method(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    own = type("Agent", (), {other: None for other in torchrun._HOOKS if other != name})
    monkeypatch.setattr(api, "LocalElasticAgent", own)
    assert not torchrun.use_agent()
    assert api.LocalElasticAgent is own


def test_use_agent_replaces_the_agent_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LocalElasticAgent", LocalElasticAgent)  # restored afterwards
    assert torchrun.use_agent()
    assert issubclass(api.LocalElasticAgent, LocalElasticAgent)
    assert api.LocalElasticAgent is not LocalElasticAgent


@pytest.mark.slow
def test_ranks_start_and_restart_if_the_agent_of_torch_cannot_be_replaced(tmp_path: Path) -> None:
    """Deletes the name from the module in which ddpforge replaces the agent; torchrun itself still finds it."""
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
