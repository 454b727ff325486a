"""Checks that need several ranks: their shared folder, their clocks, and the bandwidth between them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpforge.errors import PeerFailed, SetupError
from ddpforge.guard.node_consistency import check_same_environment, clocks_apart, holds_locks
from ddpforge.interfaces import Ranks, World, device_kind
from ddpforge.tools.doctor.findings import Finding, error, note, ok, warning

if TYPE_CHECKING:
    from ddpforge.components.registry import Registry
    from ddpforge.recipe import LoadedRecipe

__all__ = ["bandwidth", "clocks", "folder", "links", "same_versions"]

_SIZES = (1, 16, 64)  # MiB
_ROUNDS = 5
_LINK = 4  # MiB
_MOST_LINKS = 66  # all pairs of 12 hosts; with more hosts, only neighbors are measured
_UNEVEN = 3.0  # a link is reported if it is this many times slower than the median
_CLOCKS = 1.0  # seconds; a run itself warns only from 3 on


def same_versions(ranks: Ranks, loaded: LoadedRecipe, registry: Registry) -> Iterator[Finding]:
    """Checks that all ranks have the same software and recipe."""
    yield from _rejected(
        lambda: check_same_environment(ranks, loaded, registry), "all ranks have the same software and recipe"
    )


def folder(ranks: Ranks, place: Path) -> Iterator[Finding]:
    """Checks that all ranks see the file that rank 0 writes, and its lock."""
    locks = True

    def look() -> None:
        nonlocal locks
        locks = holds_locks(place, ranks)

    yield from _rejected(look, f"{place} is shared by all ranks")
    if not locks:
        fix = "mount it with locks (NFS: without nolock); until then start no second run there"
        yield warning(f"file locks do not work in {place}", fix)


def _rejected(check: Callable[[], None], well: str) -> Iterator[Finding]:
    try:
        check()
    except (SetupError, PeerFailed) as refused:
        yield error(refused.message, "; ".join(refused.hints))
    else:
        yield ok(well)


def clocks(ranks: Ranks) -> Iterator[Finding]:
    """Measures the largest difference to rank 0's clock: the best of a few rounds, as exact as an exchange is fast."""
    apart = clocks_apart(ranks, _ROUNDS)
    if abs(apart.ahead) > _CLOCKS:
        fix = "run chrony or ntpd on every host: torch's rendezvous, logs and a train.length of wall time use its clock"
        yield warning(str(apart), fix)
    else:
        yield ok(f"clocks differ by {abs(apart.ahead) * 1e3:.0f} ms at most")


def bandwidth(world: World) -> Iterator[Finding]:
    """Measures all-reduces of several sizes, typical for gradients: the best of a few rounds."""
    for size in _SIZES:
        values = torch.ones(size << 18, device=world.device)
        took = min(_timed(world, lambda values=values: dist.all_reduce(values)) for _ in range(_ROUNDS))  # type: ignore[misc]
        rate = 2 * (world.global_ranks.size - 1) / world.global_ranks.size * size / 1024 / took
        yield ok(f"an all-reduce of {size} MiB takes {took * 1e3:.1f} ms: {rate:.2f} GiB/s per rank")


def _timed(world: World, action: Callable[[], object]) -> float:
    world.global_ranks.barrier()
    begin = time.perf_counter()
    action()
    device_kind(world.device).synchronize(world.device)
    return time.perf_counter() - begin


def links(world: World) -> Iterator[Finding]:
    """Measures the bandwidth between pairs of hosts, or of ranks if there is only one host; one pair after another."""
    hosts = world.global_ranks.all_gather_object(socket.gethostname())
    first = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    ends = list(first.values()) if len(first) > 1 else list(range(world.global_ranks.size))
    pairs = list(combinations(ends, 2))
    pairs = pairs if len(pairs) <= _MOST_LINKS else list(pairwise(ends))
    rates = {pair: _rate(world, pair) for pair in pairs}
    yield from _judged({f"{_name(hosts, a)} and {_name(hosts, b)}": rate for (a, b), rate in rates.items()})


def _name(hosts: Sequence[str], rank: int) -> str:
    return f"rank {rank} on {hosts[rank]}"


def _rate(world: World, pair: tuple[int, int]) -> float:
    """Returns the GiB per second of an exchange between two ranks; all ranks return the same."""
    values, best = torch.ones(_LINK << 18, device=world.device), 0.0

    def exchange() -> None:
        here, there = pair if world.global_ranks.rank == pair[0] else pair[::-1]
        for sender in pair:
            (dist.send if sender == here else dist.recv)(values, there)

    for _ in range(3):
        took = _timed(world, exchange if world.global_ranks.rank in pair else lambda: None)
        best = max(best, 2 * _LINK / 1024 / took)
    rates: list[float] = world.global_ranks.all_gather_object(best)
    return rates[pair[0]]


def _judged(rates: Mapping[str, float]) -> Iterator[Finding]:
    usual, slowest = median(rates.values()), min(rates, key=lambda pair: rates[pair])
    text = f"{slowest} exchange {rates[slowest]:.2f} GiB/s"
    if rates[slowest] * _UNEVEN < usual:
        yield warning(f"{text}, and the median is {usual:.2f}", "check the cable, the switch and the interface there")
    elif len(rates) > 1:
        yield note(f"the slowest of {len(rates)} links: {text}; the median is {usual:.2f}")
    else:
        yield note(text)
