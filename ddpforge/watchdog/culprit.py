"""Finds the rank that the others wait for, from the newest status row of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpforge.ranks.heartbeat import RankStatus

__all__ = ["Culprit", "find_culprit"]

# Innermost Python lines of a rank that only waits for other ranks: in collectives; in autograd's engine, which calls
# those of DDP and FSDP; in the schedules and evaluations of pipelines. Also lines that wait for a GPU in a collective:
# they read norms, means and losses, and copy the tensors of a checkpoint.
_WAITING = (
    *("torch/distributed/", "torch/autograd/", "deepspeed/comm/", "torch/_ops.py"),
    *("distributed/pipelining/schedules.py", "strategies/pipeline/replica.py"),
    *(
        "ddpforge/training/nonfinite.py",
        "ddpforge/training/step.py",
        "ddpforge/ranks/metric_reduction.py",
        "torch/cuda/",
    ),
    *("ddpforge/ranks/collectives.py", "ddpforge/checkpoint/staging.py", "ddpforge/checkpoint/state.py"),
    *("ddpforge/strategies/torch_replica.py", "ddpforge/strategies/precision.py"),
)


class Culprit(NamedTuple):
    """Ranks that the others wait for, all for the same reason, and a sentence about the first of them."""

    ranks: Sequence[int]
    sentence: str


def find_culprit(rows: Mapping[int, RankStatus], size: int) -> Culprit:
    """Returns ranks that do not answer; else frozen ones; else those without a connection; else those behind.

    `rows` has the newest row of each rank, `size` is the number of ranks. All ranks make the same heartbeats, so the
    ranks with the fewest heartbeats are behind. Of these, ranks that only wait in a collective are skipped. If all of
    them wait, it is a rank further ahead that does not: in a pipeline the first rank is some micro-batches ahead. If
    all ranks wait, or are in one place, it is the one whose device is behind: the host of a GPU runs ahead of it.
    """
    known = [rows[rank] for rank in sorted(rows)]
    if silent := [rank for rank in range(size) if rank not in rows or not rows[rank].answers]:
        return Culprit(silent, _silent(rows.get(silent[0])))
    if frozen := [row for row in known if row.frozen]:
        return Culprit(_ranks(frozen), f"was frozen, as by SIGSTOP, in {_stay(frozen[0])}")
    if cut := [row for row in known if row.cut_off and row.cut_off > row.seconds / 2]:
        return Culprit(
            _ranks(cut),
            f"on {cut[0].host} lost its connection to the first host {cut[0].cut_off:.0f} s ago, in {_stay(cut[0])}",
        )
    least = min((row.step, row.beats) for row in known)
    behind = [row for row in known if (row.step, row.beats) == least]
    busy = [row for row in behind if not _waits(row)] or [row for row in known if not _waits(row)]
    behind = busy or behind
    if (not busy or len(behind) == size) and (late := _with_late_devices(known)):
        return Culprit(_ranks(late), _late_device(late, known))
    if len(behind) == size:
        return Culprit(_ranks(behind), f"and all others made no progress in {_stay(behind[0])}: none is behind")
    others = "the others waited for it" if len(behind) == 1 else f"as did {_and(behind[1:])}; the others waited"
    return Culprit(_ranks(behind), f"made no progress in {_stay(behind[0])}; {others}")


def _ranks(rows: Sequence[RankStatus]) -> list[int]:
    return [row.rank for row in rows]


def _with_late_devices(rows: Sequence[RankStatus]) -> list[RankStatus]:
    """Returns the rows whose devices have finished fewer steps than others; empty if one is not known."""
    steps = [row.on_device for row in rows]
    return [row for row in rows if row.on_device == min(steps)] if 0 < min(steps) < max(steps) else []


def _late_device(late: Sequence[RankStatus], known: Sequence[RankStatus]) -> str:
    also = f", as did {_and(late[1:])}" if len(late) > 1 else ""
    ahead = max(row.on_device for row in known)
    return (
        f"made no progress in {_stay(late[0])}{also}: its device has finished the forward passes of step "
        f"{late[0].on_device}, others those of step {ahead}, and wait for it"
    )


def _and(rows: Sequence[RankStatus]) -> str:
    return f"rank{'s' * (len(rows) > 1)} {', '.join(str(row.rank) for row in rows)}"


def _stay(row: RankStatus) -> str:
    at = f" at {row.at}" if row.at else ""
    return f"{row.location()} for {row.seconds:.0f} s{at}"


def _silent(row: RankStatus | None) -> str:
    if row is None:
        return "did not answer and never reported: its host may be down"
    return f"did not answer (process {row.pid} on {row.host}); its last report was from {row.location()}"


def _waits(row: RankStatus) -> bool:
    return row.left or any(part in row.at for part in _WAITING)
