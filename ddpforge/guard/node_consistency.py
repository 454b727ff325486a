"""Checks before training that all hosts run the same software and recipe, and share the run's folder."""

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
from ddpforge.errors import ExitCode, PeerFailed, SetupError
from ddpforge.interfaces import Ranks
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.recipe.layers import kind_at
from ddpforge.runs.changes import Change, recipe_changes
from ddpforge.runs.folder import local_code

if TYPE_CHECKING:
    from ddpforge.recipe import LoadedRecipe
    from ddpforge.training.stages import Chosen

__all__ = [
    "FOLDER",
    "JOINED",
    "Apart",
    "check_same_environment",
    "check_shared_filesystem",
    "clocks_apart",
    "compare_clocks",
    "holds_locks",
]

log = logging.getLogger("ddpforge")

_CLOCKS = 3.0  # seconds; a larger difference between the clocks of hosts is logged
_CACHED = 5.0  # seconds until a network file system shows a new file on all hosts
_EITHER = ("data.workers", "data.prefetch")  # keys that may differ between machines

_Sight = Literal["unseen", "locked", "free"]


# ---------------------------------------------------------------------------------------------- software and recipe
@dataclass(frozen=True)
class _Facts:
    """Host of a rank, the versions of its software, and a digest of the recipe and of its local code."""

    host: str
    software: Mapping[str, str]
    recipe: str


def check_same_environment(ranks: Ranks, loaded: LoadedRecipe, registry: Registry) -> None:
    """Raises on every rank unless all run the same versions and recipe. One exchange, which waits for all ranks."""
    if ranks.size == 1:
        return
    gathered = ranks.all_gather_object(_Facts(socket.gethostname(), _software(loaded, registry), _digest(loaded)))
    if different := [name for name in _names(gathered) if len({each.software.get(name) for each in gathered}) > 1]:
        listed = [
            f"{name} {_by_host(gathered, [each.software.get(name, 'none') for each in gathered])}" for name in different
        ]
        _raise(ranks, f"ranks do not run the same software: {'; '.join(listed)}", "use one environment on all hosts")
    if len({each.recipe for each in gathered}) > 1:
        _compare_recipes(ranks, gathered, loaded)


def _software(loaded: LoadedRecipe, registry: Registry) -> dict[str, str]:
    """Returns the versions of Python, torch, ddpforge and the distributions of the recipe's components."""
    used = {name: version(name) or "none" for name in ("torch", "ddpforge")}
    for path, component in loaded.recipe.components().items():
        kind = kind_at(path, loaded.tables)
        if kind and (entry := registry.find(kind, component.use)):
            used[entry.distribution] = entry.version
    return {"Python": ".".join(map(str, sys.version_info[:2])), **used}


def _names(gathered: Sequence[_Facts]) -> list[str]:
    return list(dict.fromkeys(name for each in gathered for name in each.software))


def _by_host(gathered: Sequence[_Facts], values: Sequence[str]) -> str:
    """Lists every value with its hosts and ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, (each, value) in enumerate(zip(gathered, values, strict=True)):
        found.setdefault(value, {}).setdefault(each.host, []).append(rank)
    return ", ".join(f"{value} on {' and '.join(map(_named, hosts.items()))}" for value, hosts in found.items())


def _named(place: tuple[str, Sequence[int]]) -> str:
    host, ranks = place
    return f"{host} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def _digest(loaded: LoadedRecipe) -> str:
    return sha256(repr((loaded.tables, _code(loaded))).encode()).hexdigest()


def _code(loaded: LoadedRecipe) -> dict[str, str]:
    """Returns the digests of the code files that the recipe names, and of the local modules that they import."""
    return {name: sha256(code).hexdigest() for name, code in local_code(loaded).items()}


def _compare_recipes(ranks: Ranks, gathered: Sequence[_Facts], loaded: LoadedRecipe) -> None:
    """Raises on every rank unless recipes differ only in allowed keys: data loading, and absolute paths of data."""
    recipes = ranks.all_gather_object((loaded.tables, _code(loaded)))
    tables, code = recipes[0]
    for rank, (its_tables, its_code) in enumerate(recipes):
        found = [str(change) for change in recipe_changes(tables, its_tables) if not _may_differ(change)]
        found += [f"the code in {Path(name).name}" for name, _ in sorted(code.items() ^ its_code.items())]
        if found:
            where = _named((gathered[rank].host, [rank]))
            listed = "\n".join(f"  {each}" for each in dict.fromkeys(found))
            hint = "start all ranks with the same files, flags and environment variables"
            _raise(ranks, f"the recipe on {where} differs from that of rank 0 on {gathered[0].host}:\n{listed}", hint)


def _may_differ(change: Change) -> bool:
    a_path = all(isinstance(value, str) and value.startswith("/") for value in (change.old, change.new))
    return change.path in _EITHER or (a_path and change.path.startswith("data."))


def _raise(ranks: Ranks, message: str, *hints: str) -> None:
    """Raises on this rank: SetupError on rank 0, which shows the message, PeerFailed on the others."""
    raises = SetupError if ranks.is_rank_zero else partial(PeerFailed, ExitCode.ENVIRONMENT)
    raise raises(message, hints=hints)


# ---------------------------------------------------------------------------------------------- clocks
@dataclass(frozen=True)
class Apart:
    """Clock with the largest difference to rank 0's: `ahead` in seconds, its rank and host, rank 0's host (`first`)."""

    ahead: float
    rank: int
    host: str
    first: str

    def __str__(self) -> str:
        how = f"{abs(self.ahead):.1f} s {'ahead of' if self.ahead > 0 else 'behind'}"
        return f"the clock of {self.host} (rank {self.rank}) is {how} that of {self.first} (rank 0)"


def clocks_apart(ranks: Ranks, rounds: int = 1) -> Apart:
    """Returns the clock with the largest difference to rank 0's. Each round reads all clocks after a barrier.

    The smallest difference of the rounds counts. Its error is the time between the first and the last rank that leaves
    the barrier.
    """
    clocks: list[Sequence[tuple[str, float]]] = []
    for _ in range(rounds):
        ranks.barrier()
        clocks.append(ranks.all_gather_object((socket.gethostname(), time.time())))
    ahead = [min((each[rank][1] - each[0][1] for each in clocks), key=abs) for rank in range(ranks.size)]
    rank = max(range(ranks.size), key=lambda rank: abs(ahead[rank]))
    return Apart(ahead[rank], rank, clocks[0][rank][0], clocks[0][0][0])


def compare_clocks(ranks: Ranks) -> None:
    """Logs a warning on rank 0 if the clocks of hosts differ. Costs one to four barriers and small exchanges."""
    if ranks.size == 1 or abs(clocks_apart(ranks).ahead) <= _CLOCKS:
        return
    apart = clocks_apart(ranks, rounds=3)  # measured again: a rank may have left the barrier late
    if abs(apart.ahead) > _CLOCKS and ranks.is_rank_zero:
        log.warning("%s: logs and a train.length in hours depend on these clocks; set them with chrony or ntpd", apart)


# ---------------------------------------------------------------------------------------------- the folder
def check_shared_filesystem(place: Path, ranks: Ranks) -> None:
    """Raises on every rank unless all can read a file of rank 0 in `place`. Logs a warning if file locks fail there.

    Removes the file and the folders that it creates. Costs two small exchanges.
    """
    if not holds_locks(place, ranks) and ranks.is_rank_zero:
        log.warning("file locks do not work in %s: make sure that no second process trains there", place)


def holds_locks(place: Path, ranks: Ranks) -> bool:
    """True if file locks in `place` work across all hosts. Raises on every rank if one cannot see rank 0's file."""
    if ranks.size == 1:
        return True
    with ExitStack() as held:
        name = on_rank_zero(ranks, lambda: held.enter_context(_word(place)))
        # Rank 0 does not look: a process that closes a file loses its locks on that file.
        sight = "locked" if ranks.is_rank_zero else _look(place / name)
        gathered = ranks.all_gather_object((socket.gethostname(), str(place.absolute()), sight))
    blind = [
        f"rank {rank} on {host} ({path})" for rank, (host, path, sight) in enumerate(gathered) if sight == "unseen"
    ]
    if blind:
        _raise(
            ranks,
            f"a file that rank 0 on {gathered[0][0]} wrote in {gathered[0][1]} is not visible to {', '.join(blind)}",
            "all hosts must share the run's folder: set --out DIR, or output_dir in the recipe",
            "if its path is relative, start all ranks in the same folder",
        )
    return all(sight == "locked" for _, _, sight in gathered)


@contextmanager
def _word(place: Path) -> Iterator[str]:
    """Creates a locked file in `place` and yields its name; removes it afterwards."""
    made = [folder for folder in (place, *place.parents) if not folder.exists()]
    word = place / f".ddpforge-{secrets.token_hex(8)}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = word.open("xb")
    except OSError as error:
        raise SetupError(f"cannot write to the folder of runs {place}: {error}") from error
    with file, suppress(OSError):
        with suppress(OSError):  # the claim on the run's folder reports this error later
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield word.name
        finally:
            word.unlink()
            for folder in made:
                folder.rmdir()


def _look(word: Path) -> _Sight:
    """Returns if this process sees a file that another process has locked, and if it sees the lock."""
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


def compare_nodes(chosen: Chosen, ranks: Ranks) -> None:
    """Raises on every rank unless all hosts run the same software and recipe; logs clocks that differ."""
    check_same_environment(ranks, chosen.loaded, chosen.registry)
    compare_clocks(ranks)


JOINED, FOLDER = (("", compare_nodes),), (("", check_shared_filesystem),)
