"""Finds the rank that the others wait for, in what is known of where all of them stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpforge.watchdog.board import Row

__all__ = ["Blame", "blame"]

# Innermost lines of Python on which a rank stands that only waits for others: in collectives, and in autograd's engine,
# from which DDP and FSDP call them; in the schedules of pipelines, and where a pipeline evaluates. And those on which a
# rank waits for its GPU, which may wait in a collective: it reads norms, means and losses there, and what is saved.
_WAITING = (
    *("torch/distributed/", "torch/autograd/", "deepspeed/comm/", "torch/_ops.py"),
    *("distributed/pipelining/schedules.py", "strategies/pipeline/replica.py"),
    *("ddpforge/training/nonfinite.py", "ddpforge/training/step.py", "ddpforge/ranks/means.py", "torch/cuda/"),
    *("ddpforge/ranks/collectives.py", "ddpforge/checkpoint/staging.py", "ddpforge/checkpoint/contents.py"),
    *("ddpforge/strategies/torch_replica.py", "ddpforge/strategies/precision.py"),
)


class Blame(NamedTuple):
    """The ranks that the others wait for, all in the same way, and a sentence about the first of them."""

    ranks: Sequence[int]
    sentence: str


def blame(rows: Mapping[int, Row], size: int) -> Blame:
    """The ranks that do not answer; else frozen ones; else those out of touch; else those that are behind.

    `rows` has the newest of each rank. All ranks make the same marks, so the one with the fewest is the one
    that the others wait for; of several such ranks, those that are not merely waiting in a collective. Where these all
    wait it is one further on, as in a pipeline, whose first rank is some micro-batches ahead of the next.
    """
    told = [rows[rank] for rank in sorted(rows)]
    if silent := [rank for rank in range(size) if rank not in rows or not rows[rank].answers]:
        return Blame(silent, _silent(rows.get(silent[0])))
    if frozen := [row for row in told if row.frozen]:
        return Blame(_ranks(frozen), f"was frozen, as by SIGSTOP, in {_stay(frozen[0])}")
    if cut := [row for row in told if row.cut_off and row.cut_off > row.seconds / 2]:
        return Blame(_ranks(cut), f"on {cut[0].host} lost touch with the first host {cut[0].cut_off:.0f} s ago: "
                     f"it stood in {_stay(cut[0])}")  # fmt: skip
    least = min((row.step, row.marks) for row in told)
    behind = [row for row in told if (row.step, row.marks) == least]
    busy = [row for row in behind if not _waits(row)] or [row for row in told if not _waits(row)]
    behind = busy or behind
    if len(behind) == size:
        return Blame(_ranks(behind), f"and all others stood in {_stay(behind[0])}: none is behind")
    others = "the others waited for it" if len(behind) == 1 else f"as did {_and(behind[1:])}; the others waited"
    return Blame(_ranks(behind), f"stood in {_stay(behind[0])}; {others}")


def _ranks(rows: Sequence[Row]) -> list[int]:
    return [row.rank for row in rows]


def _and(rows: Sequence[Row]) -> str:
    return f"rank{'s' * (len(rows) > 1)} {', '.join(str(row.rank) for row in rows)}"


def _stay(row: Row) -> str:
    at = f" at {row.at}" if row.at else ""
    return f"{row.place()} for {row.seconds:.0f} s{at}"


def _silent(row: Row | None) -> str:
    if row is None:
        return "did not answer, and was never heard of: its host may be gone"
    return f"did not answer (process {row.pid} on {row.host}), last heard of in {row.place()}"


def _waits(row: Row) -> bool:
    return row.left or any(part in row.at for part in _WAITING)
