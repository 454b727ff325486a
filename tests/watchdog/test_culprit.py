"""Culprit: the rank that the others wait for, from the status rows of all ranks."""

from pathlib import Path
from typing import Any

import pytest

import ddpforge
from ddpforge.ranks.heartbeat import RankStatus
from ddpforge.watchdog.culprit import _WAITING, Culprit, find_culprit

ENGINE = "torch/autograd/graph.py:10 in _engine_run_backward"


def row(rank: int, phase: str = "backward", marks: int = 50, **more: Any) -> RankStatus:
    return RankStatus(rank, f"node{rank}", 100 + rank, phase, 15, marks, 9.0, **{"answers": True, "at": ENGINE, **more})


def found(*rows: RankStatus, size: int = 0) -> Culprit:
    return find_culprit({one.rank: one for one in rows}, size or len(rows))


def test_rank_with_the_fewest_heartbeats_is_the_culprit() -> None:
    assert found(row(0), row(1, "data", 48, at="faults.py:3 in load"), row(2)) == (
        [1],
        "made no progress in data of step 15 for 9 s at faults.py:3 in load; the others waited for it",
    )


def test_earlier_step_takes_precedence_over_fewer_heartbeats() -> None:
    assert found(row(0, marks=40), row(1, marks=41)._replace(step=14)).ranks == [1]


def test_rank_outside_a_collective_is_the_culprit_among_equal_heartbeats() -> None:
    """Under FSDP all ranks are in the same forward pass: one runs its own code, the others wait for its weights."""
    waits = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:300 in foreach_all_gather_copy_out"
    found_ = found(row(0, "forward", at=waits), row(1, "forward", at="model.py:7 in forward"))
    assert found_.ranks == [1]
    assert "the others waited for it" in found_.sentence


@pytest.mark.parametrize(
    "at",
    [
        *("ddpforge/training/nonfinite.py:42 in take", "ddpforge/ranks/metric_reduction.py:86 in _reduce"),
        *("ddpforge/checkpoint/staging.py:110 in finish", "torch/cuda/streams.py:110 in synchronize"),
        *("ddpforge/training/step.py:173 in _look", "ddpforge/strategies/torch_replica.py:155 in clip"),
    ],
)
def test_rank_that_waits_for_its_gpu_is_not_the_culprit(at: str) -> None:
    """With NCCL the host runs ahead, and first blocks when it reads the result of a collective."""
    assert found(row(0, at=at), row(1, at="model.py:7 in forward"), row(2, at=at)).ranks == [1]
    assert "none is behind" in found(row(0, at=at), row(1, at=at)).sentence


def test_files_in_waiting_exist() -> None:
    root = Path(ddpforge.__file__).parents[1]
    assert [path for path in _WAITING if path.startswith("ddpforge/") and not (root / path).exists()] == []


def test_rank_ahead_is_the_culprit_if_the_ranks_behind_only_wait() -> None:
    """In a pipeline the next rank cannot begin before it receives the output of the first."""
    waits = "torch/distributed/distributed_c10d.py:4000 in wait"
    assert found(row(0, "forward", 53, at="model.py:7 in forward"), row(1, marks=50, at=waits)).ranks == [0]


@pytest.mark.parametrize("at", [ENGINE, "callbacks.py:7 in on_step"])
def test_rank_whose_device_is_behind_is_the_culprit_if_the_hosts_are_not(at: str) -> None:
    """Covers hosts that have queued the same work and wait, also in a line of the user that reads a number."""
    rows = [row(rank, at=at, on_device=step) for rank, step in enumerate((15, 14, 15, 14))]
    assert found(*rows) == (
        [1, 3],
        f"made no progress in backward of step 15 for 9 s at {at}, as did rank 3: its device has finished the forward "
        "passes of step 14, others those of step 15, and wait for it",
    )


@pytest.mark.parametrize("steps", [(15, 15), (15, 0), (0, 0)])
def test_equal_or_unknown_progress_of_devices_names_no_rank(steps: tuple[int, int]) -> None:
    assert "none is behind" in found(*(row(rank, on_device=step) for rank, step in enumerate(steps))).sentence


def test_rank_that_runs_its_own_code_is_the_culprit_though_its_device_is_not_behind() -> None:
    rows = row(0, on_device=14), row(1, at="model.py:7 in forward", on_device=15)
    assert found(*rows).ranks == [1]


def test_rank_that_has_left_is_not_the_culprit() -> None:
    assert found(row(0, at="", left=True), row(1, at="model.py:7 in forward")).ranks == [1]


@pytest.mark.parametrize(
    ("rows", "ranks", "sentence"),
    [
        ([row(0)], [1], "did not answer and never reported: its host may be down"),
        (
            [row(0), row(1, "data", answers=False)],
            [1],
            "did not answer (process 101 on node1); its last report was from data of step 15",
        ),
        (
            [row(0, "data", 3), row(1, frozen=True, at="")],
            [1],
            "was frozen, as by SIGSTOP, in backward of step 15 for 9 s",
        ),
        (
            [row(0, "data", 3), row(1, cut_off=8.0)],
            [1],
            f"on node1 lost its connection to the first host 8 s ago, in backward of step 15 for 9 s at {ENGINE}",
        ),
    ],
    ids=["unknown", "silent", "frozen", "cut off"],
)
def test_silent_frozen_or_disconnected_rank_is_the_culprit_in_any_phase(
    rows: list[RankStatus], ranks: list[int], sentence: str
) -> None:
    assert found(*rows, size=2) == (ranks, sentence)


def test_short_loss_of_the_store_is_not_a_reason() -> None:
    assert found(row(0, "data", 3), row(1, cut_off=2.5)).ranks == [0]


def test_several_ranks_can_be_the_culprit() -> None:
    assert found(row(0), row(1, "data", 4, at="a.py:1 in x"), row(2, "data", 4, at="a.py:1 in x")) == (
        [1, 2],
        "made no progress in data of step 15 for 9 s at a.py:1 in x; as did rank 2; the others waited",
    )


def test_all_ranks_are_named_if_none_is_behind() -> None:
    assert found(row(0), row(1)) == (
        [0, 1],
        f"and all others made no progress in backward of step 15 for 9 s at {ENGINE}: none is behind",
    )


@pytest.mark.parametrize("broken", [{}, {"rank": 1}, [1], "x", {**row(1)._asdict(), "more": 1}])
def test_invalid_row_is_rejected(broken: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        RankStatus.read(broken)
    with pytest.raises(ValueError):
        RankStatus.read({**row(1)._asdict(), "seconds": "long"})


def test_as_of_adds_the_elapsed_seconds() -> None:
    shown = row(1)._replace(time=100.0)
    assert shown.as_of(103.0).seconds == 12.0
    assert shown.as_of(99.0).seconds == 9.0  # another host's clock
