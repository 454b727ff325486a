"""The agreement of all hosts of a run before it begins: on software and recipe, and on the folder that they share."""

from __future__ import annotations

import fcntl
import logging
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpforge.components.installed import version
from ddpforge.components.registry import Registry
from ddpforge.errors import EnvironmentProblem, ExitCode, PeerFailed
from ddpforge.interfaces import Ranks
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.recipe.layers import kind_at
from ddpforge.runs.changes import Change, recipe_changes
from ddpforge.runs.folder import local_code

if TYPE_CHECKING:
    from ddpforge.recipe import LoadedRecipe

__all__ = ["Apart", "clocks_apart", "compare_clocks", "holds_locks", "refuse_differences", "share_folder"]

log = logging.getLogger("ddpforge")

_CLOCKS = 3.0  # seconds by which the clocks of hosts may differ without a word
_CACHED = 5.0  # seconds until a network file system shows a new file everywhere
_EITHER = ("data.workers", "data.prefetch")  # what machines may set as suits them

_Sight = Literal["unseen", "locked", "free"]


# ---------------------------------------------------------------------------------------------- software and recipe
@dataclass(frozen=True)
class _Facts:
    """A rank's host, the versions of what trains there, and a digest of the recipe and of the code beside it."""

    host: str
    software: Mapping[str, str]
    recipe: str


def refuse_differences(ranks: Ranks, loaded: LoadedRecipe, registry: Registry) -> None:
    """Raises on every rank unless all run the same versions and recipe; one exchange, which also waits for all."""
    if ranks.size == 1:
        return
    told = ranks.everyone(_Facts(socket.gethostname(), _software(loaded, registry), _digest(loaded)))
    if different := [name for name in _names(told) if len({each.software.get(name) for each in told}) > 1]:
        listed = [f"{name} {_by_host(told, [each.software.get(name, 'none') for each in told])}" for name in different]
        _raise(ranks, f"ranks do not run the same software: {'; '.join(listed)}", "give all hosts the same environment")
    if len({each.recipe for each in told}) > 1:
        _compare_recipes(ranks, told, loaded)


def _software(loaded: LoadedRecipe, registry: Registry) -> dict[str, str]:
    """The versions of Python, torch, ddpforge and the distributions whose components the recipe uses."""
    used = {name: version(name) or "none" for name in ("torch", "ddpforge")}
    for path, component in loaded.recipe.components().items():
        kind = kind_at(path, loaded.tables)
        if kind and (entry := registry.find(kind, component.use)):
            used[entry.distribution] = entry.version
    return {"Python": ".".join(map(str, sys.version_info[:2])), **used}


def _names(told: Sequence[_Facts]) -> list[str]:
    return list(dict.fromkeys(name for each in told for name in each.software))


def _by_host(told: Sequence[_Facts], values: Sequence[str]) -> str:
    """Every value with the hosts and ranks that have it."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, (each, value) in enumerate(zip(told, values, strict=True)):
        found.setdefault(value, {}).setdefault(each.host, []).append(rank)
    return ", ".join(f"{value} on {' and '.join(map(_named, hosts.items()))}" for value, hosts in found.items())


def _named(place: tuple[str, Sequence[int]]) -> str:
    host, ranks = place
    return f"{host} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def _digest(loaded: LoadedRecipe) -> str:
    return sha256(repr((loaded.tables, _code(loaded))).encode()).hexdigest()


def _code(loaded: LoadedRecipe) -> dict[str, str]:
    """The digests of the files of code that the recipe names, and of their neighbours."""
    return {name: sha256(code).hexdigest() for name, code in local_code(loaded).items()}


def _compare_recipes(ranks: Ranks, told: Sequence[_Facts], loaded: LoadedRecipe) -> None:
    """Raises on every rank unless they differ only in what may: how a host fetches data, and from which path."""
    recipes = ranks.everyone((loaded.tables, _code(loaded)))
    tables, code = recipes[0]
    for rank, (its_tables, its_code) in enumerate(recipes):
        found = [str(change) for change in recipe_changes(tables, its_tables) if not _may_differ(change)]
        found += [f"the code in {Path(name).name}" for name, _ in sorted(code.items() ^ its_code.items())]
        if found:
            where = _named((told[rank].host, [rank]))
            listed = "\n".join(f"  {each}" for each in dict.fromkeys(found))
            hint = "start all ranks with the same files, flags and environment variables"
            _raise(ranks, f"the recipe on {where} is not that of rank 0 on {told[0].host}:\n{listed}", hint)


def _may_differ(change: Change) -> bool:
    a_path = all(isinstance(value, str) and value.startswith("/") for value in (change.old, change.new))
    return change.path in _EITHER or (a_path and change.path.startswith("data."))


def _raise(ranks: Ranks, message: str, *hints: str) -> None:
    """Lets rank 0 say it, and all end."""
    raises = EnvironmentProblem if ranks.is_main else partial(PeerFailed, ExitCode.ENVIRONMENT)
    raise raises(message, hints=hints)


# ---------------------------------------------------------------------------------------------- clocks
@dataclass(frozen=True)
class Apart:
    """The clock that is furthest from rank 0's: by how many seconds it is `ahead`, and its rank and both hosts."""

    ahead: float
    rank: int
    host: str
    first: str

    def __str__(self) -> str:
        how = f"{abs(self.ahead):.1f} s {'ahead of' if self.ahead > 0 else 'behind'}"
        return f"the clock of {self.host} (rank {self.rank}) is {how} that of {self.first} (rank 0)"


def clocks_apart(ranks: Ranks, rounds: int = 1) -> Apart:
    """Returns the clock that is furthest from rank 0's, by the best of a few rounds, each after a barrier.

    Ranks leave a barrier at about the same time: no better than that is the difference known.
    """
    clocks: list[Sequence[tuple[str, float]]] = []
    for _ in range(rounds):
        ranks.barrier()
        clocks.append(ranks.everyone((socket.gethostname(), time.time())))
    ahead = [min((each[rank][1] - each[0][1] for each in clocks), key=abs) for rank in range(ranks.size)]
    rank = max(range(ranks.size), key=lambda rank: abs(ahead[rank]))
    return Apart(ahead[rank], rank, clocks[0][rank][0], clocks[0][0][0])


def compare_clocks(ranks: Ranks) -> None:
    """Logs a warning on rank 0 where hosts have different times. A barrier and a small exchange, or a few."""
    if ranks.size == 1 or abs(clocks_apart(ranks).ahead) <= _CLOCKS:
        return
    apart = clocks_apart(ranks, rounds=3)  # a rank may have been late
    if abs(apart.ahead) > _CLOCKS and ranks.is_main:
        log.warning("%s: logs and a train.length of wall time follow these clocks; set them by chrony or ntpd", apart)


# ---------------------------------------------------------------------------------------------- the folder
def share_folder(place: Path, ranks: Ranks) -> None:
    """Raises on every rank unless all see what rank 0 writes in `place`; says so where locks do not hold there.

    What rank 0 makes is gone afterwards. Two small exchanges.
    """
    if not holds_locks(place, ranks) and ranks.is_main:
        log.warning("file locks do not hold in %s: see that no second run trains there", place)


def holds_locks(place: Path, ranks: Ranks) -> bool:
    """True where all see that what rank 0 writes in `place` is locked; raises on every rank where one sees nothing."""
    if ranks.size == 1:
        return True
    with ExitStack() as held:
        name = on_rank_zero(ranks, lambda: held.enter_context(_word(place)))
        # Rank 0 does not look: a process that closes a file loses its locks of it.
        sight = "locked" if ranks.is_main else _look(place / name)
        told = ranks.everyone((socket.gethostname(), str(place.absolute()), sight))
    blind = [f"rank {rank} on {host} ({path})" for rank, (host, path, sight) in enumerate(told) if sight == "unseen"]
    if blind:
        _raise(
            ranks,
            f"what rank 0 on {told[0][0]} writes in {told[0][1]} is not seen by {', '.join(blind)}",
            "all hosts must share the run's folder: --out DIR, or output_dir in the recipe",
            "start all ranks in the same folder if its path is relative",
        )
    return all(sight == "locked" for _, _, sight in told)


@contextmanager
def _word(place: Path) -> Iterator[str]:
    """A file in `place`, locked while it is there; yields its name."""
    made = [folder for folder in (place, *place.parents) if not folder.exists()]
    word = place / f".ddpforge-{secrets.token_hex(8)}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = word.open("xb")
    except OSError as error:
        raise EnvironmentProblem(f"the folder of runs {place} cannot be written: {error}") from error
    with file, suppress(OSError):
        with suppress(OSError):  # who claims the run's folder will say so
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield word.name
        finally:
            word.unlink()
            for folder in made:
                folder.rmdir()


def _look(word: Path) -> _Sight:
    """Tells how this process sees a file that another one has locked."""
    deadline = time.monotonic() + _CACHED
    while not word.exists():
        if time.monotonic() > deadline:
            return "unseen"
        time.sleep(0.1)
    try:
        with word.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return "locked"
    return "free"
