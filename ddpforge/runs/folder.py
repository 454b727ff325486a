"""Folder of a run: its files, its lock, and its status.

runs/<name>/
  recipe.toml              as the user gave it      recipe.resolved.toml     with every default; can be run itself
  env.json                 machine of the last attempt               run.json   id, attempts, lineage
  status.json              state of the run: see `Status`            metrics.jsonl
  failure.json             the rank that failed first, and the position of every rank
  flops.json               FLOPs of a sample
  memory.json              memory of a step, measured and planned
  logs/                    checkpoints/
  evaluations/             of checkpoints, by another process
"""

import errno
import fcntl
import glob
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from itertools import chain, count
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,  # pydantic can read this one
    TypeVar,
)

from annotated_types import Ge, Lt
from typing_extensions import TypedDict

from ddpforge import disk
from ddpforge.components.local_code import neighbours
from ddpforge.errors import SetupError, UsageError, unexpanded
from ddpforge.machine import is_locked
from ddpforge.runs.environment import describe_environment, without_launcher
from ddpforge.runs.metrics import renamed_metric

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from ddpforge.recipe import LoadedRecipe, Recipe

log = logging.getLogger("ddpforge")

_Kind = TypeVar("_Kind")

# Lone surrogates, which earlier versions wrote for bytes that were not text. No JSON reader accepts them.
_NO_TEXT = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][cC][89a-fA-F][0-9a-fA-F]")

# Most bytes of a file that is read whole. A run writes less, but a folder from elsewhere may contain anything.
_MOST = 16 << 20
_MOST_RECIPE = 4 << 20
_MOST_CODE = 64 << 20

# A link in these folders would make a run write, and a reader read, outside the run's folder. Checkpoints may be on
# another disk: their readers trust nothing. Folders of trackers are not checked.
_OWN = ("logs", "shown", "code", "profile", "evaluations")
_MAY_BE_LINKED = ("checkpoints",)

State = Literal["running", "done", "failed", "preempted", "diverged"]
_Count = Annotated[int, Ge(0), Lt(2**63)]


def _open(kind: type[_Kind]) -> type[_Kind]:
    """Makes pydantic accept extra keys in a TypedDict: another version of ddpforge may write more."""
    kind.__pydantic_config__ = {"extra": "allow"}  # type: ignore[attr-defined]
    return kind


@_open
class Status(TypedDict):
    """Contents of `status.json`. Metrics that are not finite are null."""

    state: State
    exit_code: int | None  # null while running
    step: _Count
    total_steps: NotRequired[_Count | None]  # null if a wall time ends the run
    samples: _Count
    world_size: _Count
    strategy: str
    metrics: Mapping[str, float | None]
    error: str | None


class RecipeSnapshot(TypedDict):
    """Recipe as a run's folder keeps it: as given, resolved, and copies of local code by relative path."""

    text: str
    resolved: str
    local_files: dict[str, bytes]


def in_words(status: "Status") -> str:
    """Returns a status in one line: state, step and evaluation metrics."""
    metrics = {name: value for name, value in status["metrics"].items() if name.startswith("eval/")}
    numbers = "".join(f", {name} {value:.4g}" for name, value in metrics.items() if value is not None)
    return f"{status['state']} at step {status['step']}{numbers}"


def snapshot(loaded: "LoadedRecipe", sources: Mapping[str, bytes] = {}) -> RecipeSnapshot:
    """Reads a recipe and its local code now: the recipe may be in a folder that is about to be renamed.

    `sources` is further code, by the path of its file.
    """
    named, copies = _copies(loaded.local_files())
    files = {**_contents(copies), **sources}
    return RecipeSnapshot(text=loaded.text, resolved=loaded.dumps(named), local_files=files)


def local_code(loaded: "LoadedRecipe") -> dict[str, bytes]:
    """Reads the recipe's local code that a run's folder keeps, by relative path."""
    return _contents(_copies(loaded.local_files())[1])


def _contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


def _copies(files: Mapping[Path, Path]) -> tuple[dict[Path, str], dict[str, Path]]:
    """Returns the name of the copy of each file, and the source of each copy, imported neighbours included.

    A copy and the copies of its neighbours are in the same folder, as the originals are.
    """
    # A new file never renames the copies of others: the resolved recipe contains these names, and would change.
    named: dict[Path, str] = {}
    copies: dict[str, Path] = {}
    for file, base in files.items():
        together = {file.name: file, **neighbours(file, base)}
        for folder in chain(["code"], (f"code/{number}" for number in count(1))):
            mine = {f"{folder}/{place}": each for place, each in together.items()}
            if all(copies.get(name, each) == each for name, each in mine.items()):
                break
        copies |= mine
        named[file] = f"{folder}/{file.name}"
    return named, copies


class Lineage(TypedDict):
    """Entry of a run's history: from `step` on, it followed the resolved recipe with this sha256."""

    step: Annotated[int, Lt(2**63)]
    recipe: str


@_open
class _Environment(TypedDict, total=False):
    """Keys of `env.json` that ddpforge reads."""

    command: list[str]
    packages: dict[str, str | None]
    git: "_Commit | None"
    environment: dict[str, str]


@_open
class _Commit(TypedDict):
    commit: str
    dirty: bool


@_open
class _Failure(TypedDict):
    """Keys of `failure.json` that ddpforge reads."""

    rank: _Count
    error: str
    told_by: str
    phase: NotRequired[str | None]
    step: NotRequired[_Count | None]


@_open
class _RunFacts(TypedDict):
    """Contents of `run.json`."""

    id: str
    created: str
    attempts: _Count
    lineage: list[Lineage]


@dataclass(frozen=True)
class RunFolder:
    """Folder of one run. Only rank 0 writes in it, except in `logs` and `evaluations`."""

    path: Path

    @property
    def recipe(self) -> Path:
        """Returns the path of the recipe as the user gave it."""
        return self.path / "recipe.toml"

    @property
    def resolved(self) -> Path:
        """Returns the path of the recipe with every default written out."""
        return self.path / "recipe.resolved.toml"

    @property
    def metrics(self) -> Path:
        """Returns the path of the metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def failure(self) -> Path:
        """Returns the path of the last attempt's failure, with the position of every rank."""
        return self.path / "failure.json"

    @property
    def memory(self) -> Path:
        """Returns the path of the measured and planned memory of a step in the newest attempt."""
        return self.path / "memory.json"

    @property
    def logs(self) -> Path:
        """Returns the folder of the ranks' logs and failure reports."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Returns the folder of checkpoints."""
        return self.path / "checkpoints"

    @classmethod
    def of(cls, recipe: "Recipe", out: str | Path | None = None) -> "RunFolder":
        """Returns the run folder of a recipe; `out` replaces its `output_dir`.

        Raises UsageError if `out` is a remote address.
        """
        from ddpforge.recipe.schema import reject_remote

        if out is not None and not isinstance(out, str | Path):
            raise UsageError(f"out={out!r}: expected the path of a folder")
        try:
            reject_remote(str(out or recipe.output_dir))
        except ValueError as error:
            raise UsageError(f"--out {str(out)!r} {error}") from error
        return cls(Path(out or recipe.output_dir) / recipe.name)

    @classmethod
    def find(cls, run: str, runs: Path = Path("runs")) -> "RunFolder":
        """Returns the run in the folder `run`, or named `run` in `runs`; raises UsageError if there is none."""
        for path in (Path(run), runs / run):
            if (folder := cls(path)).exists():
                return folder

        names = sorted(path.name for path in runs.glob("*") if cls(path).exists())
        close = get_close_matches(run, names, n=1)
        raise UsageError(
            f"there is no run {run!r}: it is neither a run's folder nor the name of a run in {runs}/",
            hints=[
                *(["it is a recipe: give the folder of a run, or its name"] if run.endswith(".toml") else []),
                *unexpanded(run),
                *(["it is a file; a run is a folder"] if Path(run).is_file() and not run.endswith(".toml") else []),
                f"did you mean {close[0]}?" if close else f"runs there: {', '.join(names) or 'none'}",
            ],
        )

    # -- life
    def exists(self) -> bool:
        """True if this is the folder of a run, in any state."""
        return (self.path / "run.json").is_file()

    def create(self, *, text: str, resolved: str, local_files: Mapping[str, bytes]) -> bool:
        """Creates the folder atomically; returns False if another process did first. See `claim_new`."""
        with self.claim_new(text=text, resolved=resolved, local_files=local_files) as mine:
            return mine

    @contextmanager
    def claim_new(self, *, text: str, resolved: str, local_files: Mapping[str, bytes]) -> Iterator[bool]:
        """Creates the folder atomically, and keeps it claimed; see `claim`.

        Yields False, without a claim, if another process created the folder first.

        Args:
            text: Recipe as the user gave it.
            resolved: Recipe with all defaults.
            local_files: Contents of plugin files, by their paths in `resolved`.

        Raises:
            UsageError: Something other than a run is at this path.
            SetupError: The folder cannot be written.
        """
        with ExitStack() as claims:
            draft = self._draft()
            with _writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._clear_drafts()
                disk.make_folder(draft.path)
                disk.make_folder(draft.checkpoints)
                draft._write_recipe(text, resolved, local_files)
                run = _RunFacts(id=secrets.token_hex(4), created=datetime.now(UTC).isoformat(), attempts=0, lineage=[])
                draft._write_json("run.json", run)
            claims.enter_context(draft.claim())  # before other processes can see it; a rename keeps the lock
            mine = self._take(draft)
            if not mine:
                claims.close()
            yield mine

    def _draft(self) -> "RunFolder":
        """Returns the temporary folder of this process; `_clear_drafts` parses its name."""
        return RunFolder(self.path.with_name(f".{self.path.name}.{gethostname()}-{os.getpid()}.tmp"))

    def _clear_drafts(self) -> None:
        """Removes temporary folders of killed processes of this host."""
        prefix = f".{self.path.name}.{gethostname()}-"
        for path in self.path.parent.glob(f"{glob.escape(prefix)}*.tmp"):
            number = path.name.removeprefix(prefix).removesuffix(".tmp")
            if number.isdecimal() and (int(number) == os.getpid() or not _is_alive(int(number))):
                disk.remove(path)

    def _take(self, draft: "RunFolder") -> bool:
        """Renames the draft to its final name; if a run has that name already, removes the draft and returns False."""
        with _writing(self.path):
            try:
                if self.path.exists():
                    raise FileExistsError
                disk.rename(draft.path, self.path)  # fails if the target is a folder that is not empty
            except OSError:
                disk.remove(draft.path)
                if self.exists():
                    return False
                if self.path.exists():
                    raise UsageError(
                        f"{self.path} exists and is not the folder of a run",
                        hints=["give the recipe another `name`, or choose another place with --out"],
                    ) from None
                raise
            disk.sync_folder(self.path.parent)
        return True

    def begin_attempt(self, *, step: int, text: str, resolved: str, local_files: Mapping[str, bytes]) -> int:
        """Records that training continues from `step` with this recipe; returns the number of the attempt, from 1."""
        run = self._run()
        run["attempts"] += 1
        entry = Lineage(step=step, recipe=sha256(resolved.encode()).hexdigest())
        # After a return to an earlier step, the recipes from later steps on no longer apply.
        lineage = [each for each in run["lineage"] if each["step"] < step]
        if not lineage or lineage[-1]["recipe"] != entry["recipe"]:
            lineage.append(entry)
        run["lineage"] = lineage

        with _writing(self.path):
            self._write_recipe(text, resolved, local_files)
            self._write_json("env.json", describe_environment())
            self._write_json("run.json", run)
        return run["attempts"]

    def retire(self) -> Path:
        """Renames the folder to the first free name of `<name>.1`, `<name>.2`, ...; returns the new path."""
        free = (self.path.with_name(f"{self.path.name}.{number}") for number in count(1))
        target = next(path for path in free if not path.exists())
        with _writing(self.path):
            disk.rename(self.path, target)
            disk.sync_folder(target.parent)
        return target

    def delete(self) -> None:
        """Removes the folder and its contents, atomically for readers; raises as `claim` does."""
        doomed = self._draft()
        with self.claim(), _writing(self.path):
            disk.rename(self.path, doomed.path)
            disk.sync_folder(self.path.parent)
            disk.remove(doomed.path)

    def is_claimed(self) -> bool | None:
        """True if another process trains here; None if the file system does not support the query.

        Must not be called by the process that trains here: closing the file would release its own lock.
        """
        try:
            with disk.open_plain(self.logs / "lock", within=self.path) as file:
                return is_locked(file.fileno())
        except FileNotFoundError:
            return False
        except OSError:
            return None

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Locks the folder, so that no other process trains here at the same time and removes files of this one.

        Raises SetupError if another process holds the lock. The lock ends with its process.
        """
        path = self.logs / "lock"
        with _writing(self.path):
            path.parent.mkdir(exist_ok=True)
            file = disk.open_plain(path, "a+b", within=self.path, buffering=0)
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by loader processes
            except (BlockingIOError, PermissionError) as error:
                file.seek(0)
                who = file.read(200).decode("ascii", errors="replace").strip() or "another process"
                raise SetupError(
                    f"another training already uses {self.path}: {who}",
                    hints=["wait until it ends, or end it; if its launcher was killed, its ranks may still be running"],
                ) from error
            except OSError as error:
                log.warning("%s cannot be locked (%s): make sure that no other process trains there", self.path, error)
            else:
                with suppress(OSError):  # a full disk; the text is only for the error message above
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {gethostname()}\n".encode())
            yield

    # -- contents
    @property
    def id(self) -> str:
        """Returns the random id that distinguishes runs of the same name."""
        return self._run()["id"]

    def tables(self) -> dict[str, Any]:
        """Returns the resolved recipe of the last attempt; one of version 1 is upgraded in memory."""
        return self._toml(self.resolved)

    def given(self) -> dict[str, Any]:
        """Returns the recipe as the user gave it; empty if the folder has none."""
        return self._toml(self.recipe) if os.path.lexists(self.recipe) else {}

    def _toml(self, path: Path) -> dict[str, Any]:
        from ddpforge.recipe.upgrade import upgrade_tables

        with _reading(path):
            return upgrade_tables(disk.read_plain(path, _MOST_RECIPE).decode("utf-8"))

    def lineage(self) -> list[Lineage]:
        """Returns the hashes of the resolved recipes that the run has followed, oldest first."""
        return self._run()["lineage"]

    def attempts(self) -> int:
        """Returns how often training was started or resumed."""
        return self._run()["attempts"]

    def status(self) -> Status | None:
        """Returns the contents of `status.json`; None before the run's first status."""
        path = self.path / "status.json"
        return _read(path, Status) if os.path.lexists(path) else None

    def code(self, path: Path) -> bytes:
        """Returns the contents of a copy of local code; raises SetupError if it is not a plain file."""
        with _reading(path):
            return disk.read_plain(path, _MOST_CODE, within=self.path)

    def reject_odd(self) -> None:
        """Raises SetupError if the folder contains a link, a pipe or a device.

        The folder of checkpoints may be a link to another disk.
        """
        # A run would write through a link, and a reader would show its target. Reading a pipe may block forever.
        odd = [path for path in disk.odd_entries(self.path, deep=False) if path.name not in _MAY_BE_LINKED]
        for name in _OWN:
            if not (self.path / name).is_symlink():
                odd += disk.odd_entries(self.path / name, deep=True)
        if odd:
            raise SetupError(
                f"{odd[0]} is a link or a special file, which no run creates",
                hints=["remove it: a run's folder has only files and folders; only `checkpoints` may be a link"],
            )

    def surroundings(self, *, launcher: bool = True) -> dict[str, Any]:
        """Returns `env.json`: command, packages, commit and variables of the last attempt; empty before the first.

        With `launcher=False`, without variables in which a launcher numbers or places its processes.
        """
        path = self.path / "env.json"
        found = dict(_read(path, _Environment)) if os.path.lexists(path) else {}
        return found if launcher else without_launcher(found)

    def status_version(self) -> int | None:
        """Returns a number that changes with each write of the status; None if there is no status."""
        path = self.path / "status.json"
        return path.lstat().st_mtime_ns if os.path.lexists(path) else None

    def write_status(self, status: Status) -> None:
        """Replaces `status.json` atomically.

        On a full disk, overwrites the old file in place, if necessary without metrics, to record the failure.
        """
        odd = [name for name, value in status["metrics"].items() if value is None or not math.isfinite(value)]
        metrics = {**status["metrics"], **dict.fromkeys(odd)}  # JSON has no NaN and no infinity
        status = {**status, "metrics": metrics}
        with _writing(self.path):
            try:
                self._write_json("status.json", status)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._overwrite_status(status):
                    raise

    def write_failure(self, facts: Mapping[str, Any]) -> None:
        """Writes `failure.json`: the rank that failed first, and the position of every rank."""
        with _writing(self.path):
            self._write_json(self.failure.name, facts)

    def read_failure(self) -> dict[str, Any] | None:
        """Reads `failure.json`; None if it is missing or damaged."""
        with suppress(SetupError):
            return {"phase": None, "step": None, **_read(self.failure, _Failure)}
        return None

    def _overwrite_status(self, status: Status) -> bool:
        """Writes into the blocks that the file already has; False if there is none or the status does not fit."""
        path = self.path / "status.json"
        shorter: Status = {**status, "metrics": {}, "error": status["error"] and status["error"][:500]}
        if not disk.is_plain(path):
            return False
        found = path.lstat()
        for each in (status, shorter):
            data = _json(each).ljust(found.st_size)
            if len(data) <= max(found.st_size, found.st_blocks * 512):
                with disk.open_plain(path, "r+b") as file:
                    file.write(data)
                return True
        return False

    def amend_failure(self, error: str, code: int, states: Collection[State] = ("running", "failed")) -> None:
        """Records a failure in `status.json` if no run trains here and the state is one of `states`."""
        with suppress(SetupError), self.claim():
            if (status := self.status()) and status["state"] in states:
                self.write_status({**status, "state": "failed", "exit_code": code, "error": error})

    def sync_metrics(self) -> None:
        """Waits until the rows of metrics written so far are on disk and would survive a power failure."""
        with suppress(FileNotFoundError), disk.open_plain(self.metrics) as file:
            os.fsync(file.fileno())
            disk.sync_folder(self.path)

    def _run(self) -> _RunFacts:
        return _read(self.path / "run.json", _RunFacts)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        disk.replace(self.path / name, _json(value))

    def _write_recipe(self, text: str, resolved: str, local_files: Mapping[str, bytes]) -> None:
        for name, contents in local_files.items():
            target = self.path / _inside(name)
            disk.reject_linked_folders(target.parent, self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(target, contents)
        disk.replace(self.recipe, text.encode())
        disk.replace(self.resolved, resolved.encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(
            f"the plugin file {name} is not below the recipe's folder, so a run cannot keep a copy of it",
            hints=["move it there, or install it as a package and name it `package.module:attribute`"],
        )
    return path


def _json(value: Mapping[str, Any]) -> bytes:
    # File names and arguments may contain bytes that are not text. They become "?", which JSON readers accept.
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False).encode(errors="replace")


def _read(path: Path, kind: type[_Kind]) -> _Kind:
    """Reads a JSON object with the keys and types of a TypedDict; raises SetupError for any other content."""
    from pydantic import ValidationError

    with _reading(path):
        content = _NO_TEXT.sub(rb"\\ufffd", disk.read_plain(path, _MOST))
        try:
            adapter: TypeAdapter[_Kind] = _adapter(kind)  # type: ignore[arg-type]  # mypy: a protocol of functions
            return adapter.validate_json(content)  # limits the depth of nesting
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import BeforeValidator, TypeAdapter

    return TypeAdapter(Annotated[kind, BeforeValidator(_with_new_words)] if kind is Status else kind)


def _with_new_words(status: Any) -> Any:
    """Returns a status of 0.4 or an earlier version with the words of this version."""
    if not isinstance(status, dict):
        return status
    words = {"stopped": "preempted"}
    metrics = status.get("metrics")
    if isinstance(metrics, dict):
        status = {**status, "metrics": {renamed_metric(name): value for name, value in metrics.items()}}
    state = status.get("state")
    return {**status, "state": words.get(state, state)} if isinstance(state, str) else status


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        raise SetupError(f"{path} cannot be read: {why}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"the run's folder {path} cannot be written: {error}") from error
