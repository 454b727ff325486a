"""Copies a run's folder to remote storage during training, and restores it on a machine that does not have it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from typing_extensions import override

from ddpforge import disk
from ddpforge.checkpoint.schema import COMMIT, FOLDER
from ddpforge.errors import CheckpointError, ForgeError, SetupError, UsageError, pip_install
from ddpforge.interfaces import Tracker
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.observers import ObservedRun, RunObserver
from ddpforge.secret_redaction import redact

if TYPE_CHECKING:
    from ddpforge.recipe.schema import CheckpointSection

__all__ = ["Mirror", "MirroredRun"]

log = logging.getLogger("ddpforge")

_BLOCK = 8 << 20  # bytes that are compared at a time
_STORES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # protocol to the extra of ddpforge that it needs
_OWN = ("checkpoints", "logs")  # checkpoints are copied atomically; logs stay on this machine


class _Copied(NamedTuple):
    """Size and time of change of a file when it was copied."""

    size: int
    changed: int


class MirroredRun(RunObserver):
    """Copy of a run's folder, if `checkpoint.mirror` names a place."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    @classmethod
    @override
    def of(cls, run: ObservedRun) -> Self | None:
        mirror = Mirror.of(run.folder, run.recipe.checkpoint) if run.world.is_rank_zero else None
        return cls(mirror) if mirror else None

    @override
    def before_open(self, *, fresh: bool) -> None:
        self._mirror.fetch(fresh=fresh)

    @override
    def on_finished(self) -> None:
        self._mirror.complete()

    @override
    def tracker(self) -> Tracker:
        return self._mirror

    @override
    def on_begin(self) -> None:
        self._mirror.begin()

    @override
    def on_end(self, error: BaseException | None) -> None:
        self._mirror.end(error)


class Mirror(Tracker):
    """Copy of a run's folder below `url`, an fsspec address: "s3://bucket/runs", "file:///mnt/runs".

    Only rank 0 has one. A thread copies after each checkpoint: first the small files, then the checkpoint. It reads
    each copied file back and compares it. The COMMIT file comes last and makes the copy valid. Checkpoints that
    retention has removed from the run are removed from the copy, too.
    """

    def __init__(self, folder: RunFolder, url: str, *, must: bool) -> None:
        """Sets up the copy. With `must`, an incomplete copy at the end of the run is an error."""
        self._folder, self._url, self._must = folder, url.rstrip("/"), must
        self.place = f"{redact(self._url)}/{folder.path.name}"
        self._copied: dict[str, _Copied] = {}
        self._asked, self._over = Event(), False
        self._error: Exception | None = None
        self._thread: Thread | None = None

    @classmethod
    def of(cls, folder: RunFolder, settings: CheckpointSection) -> Mirror | None:
        """Returns the mirror of `checkpoint.mirror`; None if the recipe has none."""
        return cls(folder, settings.mirror, must=settings.on_failure == "stop") if settings.mirror else None

    @cached_property
    def _files(self) -> Any:
        return _open(self._url)[0]

    @cached_property
    def _root(self) -> str:
        return f"{_open(self._url)[1]}/{self._folder.path.name}"

    # -- before training
    def fetch(self, *, fresh: bool) -> None:
        """Restores the run if this machine does not have it.

        Raises SetupError if the mirror cannot be read. Raises UsageError if it contains another run or a later
        state of this run, or, with `fresh`, any run.
        """
        with self._reaching("read"):
            there = self._run_there()
        if there is None:
            return
        if fresh:
            raise UsageError(
                f"{self.place} already contains a run, and --fresh would mix it with the new one",
                hints=["give the recipe another `name` or checkpoint.mirror", "or remove the old run there"],
            )
        if self._folder.exists():
            self._reject_another(there)
        else:
            with self._reaching("read"):
                self._bring()

    def _run_there(self) -> str | None:
        path = f"{self._root}/run.json"
        self._files.invalidate_cache()
        self._reject_odd(path)
        return self._files.cat_file(path).decode() if self._files.exists(path) else None

    def _reject_another(self, there: str) -> None:
        if _id_in(there) != self._folder.id:
            raise UsageError(
                f"{self.place} contains another run than {self._folder.path}",
                hints=["give the recipe another `name` or checkpoint.mirror"],
            )
        with self._reaching("read"):
            later = max(map(_step, self._complete()), default=-1)
        here = max(map(_step, self._local()), default=-1)
        if later > here:
            raise UsageError(
                f"{self.place} is at step {later}, but {self._folder.path} only at step {max(here, 0)}",
                hints=[f"to resume from the mirror, move {self._folder.path} away: the run is then restored from it"],
            )

    def _bring(self) -> None:
        """Copies the mirror into a temporary folder, and renames that to the run's folder."""
        began, path = time.monotonic(), self._folder.path
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.mirror")
        for old in path.parent.glob(f".{path.name}.*.mirror"):
            shutil.rmtree(old, ignore_errors=True)
        complete = set(self._complete())
        for file in self._files.find(self._root):
            name = file.removeprefix(f"{self._root}/")
            parts = name.split("/")
            # A name in a bucket may contain "..", which would lead out of the folder. No run writes one.
            if ".." not in parts and (parts[0] != "checkpoints" or (len(parts) > 2 and parts[1] in complete)):
                self._reject_odd(file)
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(file, str(draft / name))
        (draft / "checkpoints").mkdir(exist_ok=True)
        disk.rename(draft, path)
        log.info("%s was restored from %s in %.0f s", path, self.place, time.monotonic() - began)

    def begin(self) -> None:
        """Copies the small files, to fail before training if the mirror cannot be written, and starts the thread."""
        with self._reaching("written"):
            self._copy_small()
        self._thread = Thread(target=self._serve, name="mirror", daemon=True)
        self._thread.start()

    # -- during training
    def checkpoint(self, step: int, folder: Path) -> None:
        """Wakes the thread, which copies the checkpoint."""
        self._asked.set()

    def _serve(self) -> None:
        while self._asked.wait() and not self._over:
            self._asked.clear()
            self._try()

    def _try(self) -> None:
        self._error = None
        try:
            self._copy_all()
        except Exception as error:
            self._error = error
            log.warning("the copy at %s is not complete yet: %s", self.place, _said(error))

    def _copy_all(self) -> None:
        self._copy_small()
        complete = set(self._complete())
        for name in sorted(self._local()):
            if name not in complete:
                began = time.monotonic()
                try:
                    size = self._copy_checkpoint(name)
                except FileNotFoundError:
                    if name in self._local():  # else retention removed it during the copy
                        raise
                else:
                    log.info(
                        "%s was copied to %s: %d bytes in %.1f s", name, self.place, size, time.monotonic() - began
                    )
        if kept := set(self._local()):
            for name in sorted(complete - kept):
                if _step(name) <= max(map(_step, kept)):
                    self._remove(name)

    def _copy_small(self) -> None:
        for path in _small(self._folder.path):
            name, facts = path.relative_to(self._folder.path).as_posix(), path.lstat()
            now = _Copied(facts.st_size, facts.st_mtime_ns)
            if self._copied.get(name) != now:
                self._put(path, f"{self._root}/{name}")
                self._copied[name] = now

    def _copy_checkpoint(self, name: str) -> int:
        here, there = self._folder.checkpoints / name, f"{self._root}/checkpoints/{name}"
        files = sorted((path for path in here.rglob("*") if disk.is_plain(path)), key=lambda path: path.name == COMMIT)
        for path in files:
            target = f"{there}/{path.relative_to(here).as_posix()}"
            self._put(path, target)
            self._compare(path, target)
        return sum(path.lstat().st_size for path in files)

    def _reject_odd(self, there: str) -> None:
        """Raises OSError if a mirror on a disk has a link, a pipe or a device at this path, or a link in a parent."""
        # Reading a pipe may block forever, and a copy would write through a link.
        if isinstance(self._files.protocol, str) or "file" not in self._files.protocol:
            return
        path, place = Path(there), Path(_open(self._url)[1])
        disk.reject_linked_folders(path.parent, place)
        if os.path.lexists(path):
            try:
                disk.plain_size(path)
            except OSError as error:
                raise OSError(error.errno, f"{path}: {error.strerror}") from error

    def _put(self, path: Path, target: str) -> None:
        self._reject_odd(target)
        if self._url.partition("://")[0] not in _STORES:  # object stores have no folders
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)

    def _compare(self, path: Path, target: str) -> None:
        self._files.invalidate_cache()
        with path.open("rb") as here, self._files.open(target, "rb", block_size=_BLOCK) as there:
            while True:
                mine, other = here.read(_BLOCK), there.read(_BLOCK)
                if mine != other:
                    raise CheckpointError(f"{target} differs from the file that was copied there")
                if not mine:
                    return

    def _remove(self, name: str) -> None:
        there = f"{self._root}/checkpoints/{name}"
        self._reject_odd(f"{there}/{COMMIT}")
        self._files.rm_file(f"{there}/{COMMIT}")  # from here on the copy is not valid
        self._files.rm(there, recursive=True)

    # -- at the end
    def end(self, error: BaseException | None = None) -> None:
        """Copies the missing files; raises CheckpointError if that fails, with `must`, and the run did not fail."""
        if self._thread is None:
            return
        self._over = True
        self._asked.set()
        self._thread.join()
        self._try()
        if self._error is not None and self._must and error is None:
            raise CheckpointError(
                f"the copy of {self._folder.path} at {self.place} is incomplete: {_said(self._error)}",
                hints=["the run here is complete: run the same command again to copy the missing files"],
            ) from self._error

    def complete(self) -> None:
        """Copies the missing files of a run that ended earlier; raises as `begin` and `end` do."""
        try:
            self.begin()
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    # -- both places
    def _local(self) -> list[str]:
        return [path.parent.name for path in self._folder.checkpoints.glob(f"step-*/{COMMIT}")]

    def _complete(self) -> list[str]:
        """Returns the names of the mirror's checkpoints that have a COMMIT file."""
        self._files.invalidate_cache()
        names = (file.split("/") for file in self._files.find(f"{self._root}/checkpoints"))
        return [parts[-2] for parts in names if parts[-1] == COMMIT and FOLDER.fullmatch(parts[-2])]

    @contextmanager
    def _reaching(self, how: str) -> Iterator[None]:
        """Converts any exception of a file system into a SetupError."""
        try:
            yield
        except ForgeError:
            raise
        except Exception as error:  # fsspec's exceptions have no common base class
            raise SetupError(
                f"checkpoint.mirror: {self.place} cannot be {how}: {_said(error)}",
                hints=["check that the address exists, and that the credentials in the environment have access to it"],
            ) from error


def _open(url: str) -> tuple[Any, str]:
    """Returns the file system of an address and the path in it; raises UsageError for an unknown address."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    protocol = url.partition("://")[0]
    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        extra = _STORES.get(protocol)
        hint = pip_install(extra) if extra else str(error)
        raise SetupError(
            f"checkpoint.mirror: {protocol}:// needs a package that is not installed", hints=[hint]
        ) from error
    except Exception as error:
        raise UsageError(
            f"checkpoint.mirror: fsspec does not accept the address {redact(url)}: {_said(error)}",
            hints=['e.g. "s3://bucket/runs" or "file:///mnt/runs"'],
        ) from error
    return files, root


def _small(folder: Path) -> Iterator[Path]:
    """Yields all files except checkpoints, logs and temporary files."""
    for path in sorted(folder.rglob("*")):
        parts: Sequence[str] = path.relative_to(folder).parts
        if parts[0] not in _OWN and disk.is_plain(path) and not path.name.endswith(".tmp"):
            yield path


def _id_in(there: str) -> object:
    """Returns the id in the text of a run.json; None if the text is not valid."""
    try:
        found = json.loads(there)
    except (ValueError, RecursionError):
        return None
    return found.get("id") if isinstance(found, dict) else None


def _step(name: str) -> int:
    match = FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
