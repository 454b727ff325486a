"""Simulated ranks: threads that run one at a time, so that the order of events is deterministic."""

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint.doubles import Checkpoint
from torch import Tensor

from ddpforge.checkpoint import writer
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.interfaces.regions import Box, FlatRange, TensorShard
from ddpforge.ranks.collectives import CollectiveRanks
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.schema import CheckpointSection

HANGS = 300.0  # seconds; on a busy machine, too, only a hang takes longer
FACTS = CheckpointMetadata(step=7, samples=7, strategy="fsdp", world_size=2)


class Turns(CollectiveRanks):
    """Rank that supports only the exchange of small objects."""

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        super().__init__(rank, size)
        self.all_gather_object = exchange  # type: ignore[method-assign]

    def all_gather_object(self, value: Any) -> list[Any]:
        raise AssertionError

    all_reduce_sum = broadcast_bytes = barrier = split = all_gather_object  # type: ignore[assignment]


class World:
    """Runs an action on every rank: one rank at a time, until it waits for the others; then the next of `order`.

    Objects that ranks exchange are pickled, as between processes. If a rank has died and all others wait, these get
    the error that gloo raises.
    """

    def __init__(self, size: int, order: Sequence[int] | None = None) -> None:
        self.size = size
        self._order = list(order or range(size))
        self._condition = threading.Condition()
        self._running: int | None = None
        self._waiting: dict[int, Any] = {}  # by rank: the object that it sends
        self._ready = set(range(size))
        self._values: dict[int, bytes] = {}
        self._broken = False

    def run(self, action: Callable[[WriterGroup], Any]) -> list[Any]:
        """Returns what `action` returns or raises, for each rank."""
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            self._wait_for_turn(rank)
            ranks = Turns(rank, self.size, lambda value: self._exchange(rank, value))
            try:
                results[rank] = action(WriterGroup(ranks=ranks))
            except BaseException as error:
                results[rank] = error
            with self._condition:
                self._pass_on()

        threads = [threading.Thread(target=work, args=(rank,), name=f"rank-{rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        with self._condition:
            self._pass_on()
        for thread in threads:
            thread.join(HANGS)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return results

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        with self._condition:
            if self._broken:
                raise RuntimeError("Connection closed by peer")
            self._waiting[rank] = pickle.dumps(value)
            self._pass_on()
        self._wait_for_turn(rank)
        if self._broken:
            raise RuntimeError("Connection closed by peer")
        return [pickle.loads(self._values[each]) for each in range(self.size)]

    def _wait_for_turn(self, rank: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._running == rank, timeout=HANGS)

    def _pass_on(self) -> None:
        """Starts the next rank; if none is ready, completes the exchange that all are waiting for."""
        if not self._ready and self._waiting:
            self._broken = self._broken or len(self._waiting) < self.size
            self._values = dict(self._waiting)
            self._ready = set(self._waiting)
            self._waiting.clear()
        self._running = next((rank for rank in self._order if rank in self._ready), None)
        self._ready.discard(-1 if self._running is None else self._running)
        self._condition.notify_all()


# ---------------------------------------------------------------------------------------------- saving
def checkpoints(folder: Path, peers: WriterGroup, **settings: Any) -> Checkpoints:
    """Returns the checkpoint manager of one rank; `settings` are keys of [checkpoint]."""
    section = CheckpointSection.model_validate(settings)
    return Checkpoints(folder, section, peers=peers, ranks=peers.ranks)


def save(
    folder: Path, shares: Sequence[RankState], facts: CheckpointMetadata = FACTS, *, full: bool = False, **world: Any
) -> list[Any]:
    """Writes a checkpoint; returns the path or the error of each rank."""

    def write(peers: WriterGroup) -> Path:
        return writer.write(folder, facts, shares[peers.rank], peers, full=full)

    return World(len(shares), **world).run(write)


def saved(folder: Path, shares: Sequence[RankState], **world: Any) -> Path:
    """Writes a checkpoint and returns its path; fails the test if a rank failed."""
    results = save(folder, shares, **world)
    assert all(isinstance(result, Path) for result in results), results
    (path,) = set(results)
    return path  # type: ignore[no-any-return]


def share_of(checkpoint: Checkpoint, rank: int, ranks: int) -> RankState:
    """Returns one rank's share of a checkpoint: weights as rows, momentum as columns, averages as flat ranges.

    Everything else is replicated on all ranks.
    """

    def rows(tensor: Tensor) -> TensorShard:
        edges = [len(tensor) * r // ranks for r in (rank, rank + 1)]
        return TensorShard(
            tensor[slice(*edges)], (*tensor.shape,), Box((edges[0], 0), (edges[1] - edges[0], tensor.shape[1]))
        )

    def columns(tensor: Tensor) -> TensorShard:
        edges = [tensor.shape[1] * r // ranks for r in (rank, rank + 1)]
        return TensorShard(
            tensor[:, slice(*edges)], (*tensor.shape,), Box((0, edges[0]), (len(tensor), edges[1] - edges[0]))
        )

    def line(tensor: Tensor) -> TensorShard:
        edges = [tensor.numel() * r // ranks for r in (rank, rank + 1)]
        return TensorShard(tensor.flatten()[slice(*edges)], (*tensor.shape,), FlatRange(*edges))

    def split(values: Mapping[str, Any], cut: Callable[[Tensor], TensorShard]) -> dict[str, Any]:
        return {key: cut(x) if isinstance(x, Tensor) and x.ndim == 2 else x for key, x in values.items()}

    state = checkpoint.state
    return RankState(
        model=split(state.model, rows),
        optimizer={name: split(values, columns) for name, values in state.optimizer.items()},
        callbacks={name: split(values, line) for name, values in checkpoint.callbacks.items()},
        aliases=state.aliases,
    )


def write_sharded(folder: Path, checkpoint: Checkpoint, ranks: int = 2, *, full: bool = False, **world: Any) -> Path:
    """Writes a checkpoint from several ranks, each with its `share_of` the state."""

    def save(peers: WriterGroup) -> Path:
        return writer.write(folder, checkpoint, share_of(checkpoint, peers.rank, ranks), peers, full=full)

    results = World(ranks, **world).run(save)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise failures[0]
    (path,) = set(results)
    return path  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- tensors
def counted(*shape: int) -> Tensor:
    """Returns a tensor whose elements are their flat indices."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def cuts(tensor: Tensor, ranks: int, how: str) -> list[list[TensorShard]]:
    """Returns the shards of each rank, split as strategies do; the last ranks may hold nothing."""
    shape = tuple(tensor.shape)
    if how == "flat":  # ZeRO
        size = -(-tensor.numel() // ranks)
        spans = [(min(r * size, tensor.numel()), min((r + 1) * size, tensor.numel())) for r in range(ranks)]
        return [[TensorShard(tensor.flatten()[a:b], shape, FlatRange(a, b))] for a, b in spans]
    axis = 0 if how == "rows" else tensor.ndim - 1  # FSDP, tensor parallel
    size = -(-shape[axis] // ranks)
    found = []
    for rank in range(ranks):
        a, b = min(rank * size, shape[axis]), min((rank + 1) * size, shape[axis])
        offset, extent = [0] * len(shape), list(shape)
        offset[axis], extent[axis] = a, b - a
        found.append([TensorShard(tensor.narrow(axis, a, b - a), shape, Box(tuple(offset), tuple(extent)))])
    return found
