"""torchrun's agent as a launch has it: which ends of ranks it answers with a restart."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from ddpforge.launchers import torchrun
from ddpforge.launchers.verdict import record_begun, record_halt, record_start


def agent_of(monkeypatch: pytest.MonkeyPatch, state: WorkerState, failures: Any, **group: Any) -> tuple[Any, Any]:
    """An agent of two restarts whose ranks are in this state, and their group."""
    ended = RunResult(state, failures=failures)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: ended)
    agent = object.__new__(torchrun._agent())
    agent._remaining_restarts = 2
    return agent, SimpleNamespace(**group)


def remaining(monkeypatch: pytest.MonkeyPatch, *codes: int, fewest: int = 2, most: int = 2) -> int:
    """The restarts that are left of two when ranks have ended with `codes`."""
    failures: Any = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
    handler = SimpleNamespace(settings=SimpleNamespace(min_nodes=fewest, max_nodes=most))
    state = WorkerState.FAILED if codes else WorkerState.HEALTHY
    agent, group = agent_of(
        monkeypatch, state, failures, spec=SimpleNamespace(rdzv_handler=handler), group_world_size=1
    )
    agent._monitor_workers(group)
    return int(agent._remaining_restarts)


@pytest.mark.parametrize(
    ("codes", "left"),
    [
        ((), 2),
        ((1,), 2),
        ((3, 3), 2),  # a disk, say, which may be there again
        ((-9,), 2),
        ((2, 2), 0),  # the recipe is wrong, also for the ranks that would be started next
        ((4,), 0),
        ((75, 75), 0),  # stopped as asked
        ((-15, 75), 0),
    ],
)
def test_ranks_are_started_again_where_that_can_help(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], left: int
) -> None:
    assert remaining(monkeypatch, *codes) == left


def test_a_machine_that_leaves_an_elastic_run_costs_the_others_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is left, of which torchrun takes the one that it counts; a run that is to stop for good has none."""
    monkeypatch.setenv("DDPFORGE_VERDICT", str(tmp_path / "verdict"))
    (tmp_path / "verdict").touch()
    assert remaining(monkeypatch, 75, 75, fewest=1, most=3) == 3
    record_halt()
    assert remaining(monkeypatch, 75, 75, fewest=1, most=3) == 0


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
        object.__new__(torchrun._agent())._shutdown(signal.SIGTERM, timeout=600)
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
