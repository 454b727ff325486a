"""The checkpoints of a run as all its ranks see them: saved while training goes on, found again, and pruned."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

from ddpforge import disk
from ddpforge.checkpoint import retention
from ddpforge.checkpoint.contents import Facts, RankState, flatten, own_part
from ddpforge.checkpoint.manifest import layout_of, read_manifest, verify_contents
from ddpforge.checkpoint.reader import Reader
from ddpforge.checkpoint.staging import Staging
from ddpforge.checkpoint.writer import Writer
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Ranks
from ddpforge.ranks.writers import Peers, on_rank_zero
from ddpforge.recipe.schema import CheckpointSection

T = TypeVar("T")
_Flaw = tuple[str, tuple[str, ...]]  # message and hints
log = logging.getLogger(__name__)


class Checkpoints:
    """Saves, finds and prunes checkpoints in a folder that every rank can read.

    `peers` connects the threads that write, `ranks` those that train. All methods are collective, except `pending`,
    `ready`, `reserve`, `before_update` and `finish`.

    `before_commit` is called on rank 0 before a checkpoint counts: what it builds on must be on the disk first.

    `keep_every` is the recipe's `checkpoint.keep.every` in steps, once that is known.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSection,
        *,
        peers: Peers,
        ranks: Ranks,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.keep_every: int | None = None
        self._settings = settings
        self._peers = peers
        self._ranks = ranks
        self._before_commit = before_commit
        self._staging = Staging()
        self._known = retention.Known()
        self._saving: Future[Path] | None = None
        self._remover = ThreadPoolExecutor(1, "removal of checkpoints")
        self._removals: list[Future[None]] = []

    # -- saving
    def save(self, facts: Facts, state: RankState) -> None:
        """Begins to write a checkpoint; `wait` tells how it went, and nothing of that is raised here.

        With `checkpoint.async_save`, a thread writes, and the state may change as soon as this returns, but for weights
        and what the optimizer keeps of them: see `before_update`. Otherwise all is written when this returns. A save
        whose outcome was not taken yet is waited for first, see `wait`.
        """
        if self.pending:
            self.wait()
        background = self._settings.async_save
        save = Writer(
            self.folder,
            facts,
            state,
            self._peers,
            full=self._settings.layout == "full",
            copy=self._staging.copy if background else None,
            before_commit=self._before_commit,
        )
        saving: Future[Path] = Future()
        self._saving = saving
        if not background:
            self._write(save, saving)
            return
        # A daemon: a process that has failed must not be kept alive. What it leaves unfinished is no checkpoint.
        name = f"checkpoint writer of rank-{self._peers.rank}"
        Thread(target=self._write, args=(save, saving), name=name, daemon=True).start()

    def reserve(self, state: RankState) -> None:
        """Takes memory to copy such a state from GPUs, in a thread, so that the first save need not wait for it."""
        if self._settings.async_save and not self.pending:
            with suppress(CheckpointError):  # that `save` will raise
                self._staging.reserve(own_part(flatten(state, rank=self._peers.rank, ranks=self._peers.size).held))

    def before_update(self) -> None:
        """To be called before an update, or whatever else changes weights: they are copied to the end first."""
        self._staging.before_update()

    @property
    def pending(self) -> bool:
        """True between `save` and `wait`."""
        return self._saving is not None

    def ready(self) -> bool:
        """True when `wait` would not block, as far as this rank is concerned."""
        return self._saving is not None and self._saving.done()

    def wait(self) -> Path:
        """The path of the checkpoint that `save` began, once it is complete.

        Raises CheckpointError on every rank when any rank could not do its part.
        """
        if self._saving is None:
            raise RuntimeError("no checkpoint is being saved")
        wait([self._saving])  # may be interrupted: then it is still pending
        saving, self._saving = self._saving, None
        return saving.result()

    def _write(self, save: Writer, outcome: "Future[Path]") -> None:
        try:
            self.finish()  # else the disk would need room for both, what goes and what comes
            self._staging.wait()
            path = save.write()
            if self._peers.rank == 0:
                self._prune(path)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(path)

    def finish(self) -> None:
        """Waits until what newer checkpoints made superfluous is gone; nobody else waits for that."""
        removals, self._removals = self._removals, []
        for removal in removals:
            try:
                removal.result()
            except OSError as error:
                log.warning("older checkpoints were not removed: %s", error)

    def _prune(self, path: Path) -> None:
        """Puts away what the new checkpoint makes superfluous, provided that it can be read back."""

        def remove(put_away: Path) -> None:
            self._removals.append(self._remover.submit(disk.remove, put_away))

        keep = self._settings.keep
        try:
            layout_of(path, self._known.read(path))
            retention.prune(self.folder, keep, every=self.keep_every, known=self._known, remove=remove)
        except Exception as error:
            defect = None if isinstance(error, CheckpointError) else error
            log.warning("older checkpoints were not removed: %s", error, exc_info=defect)

    # -- what there is
    def open(self, path: Path | None = None) -> Reader | None:
        """The checkpoint at `path`, or the newest intact one; None where there is none at all.

        Damaged ones that the newest would have been are named in a warning. Raises CheckpointError when the
        folder has checkpoints and all are damaged: that run must not silently start from scratch.
        """
        if self._saving is not None:
            wait([self._saving])  # what is half-written is about to be cleared away
        self.finish()
        if self._peers.rank != 0:
            self._help_to_verify()
        chosen = self._on_main(lambda: self._choose(path))
        # A rank alone has just verified all of it; others have only their shares, and may see another disk.
        return None if chosen is None else Reader(chosen, verify=self._peers.size > 1)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True when the metric that `keep.monitor` names beats that of every checkpoint in the folder."""

        def look() -> bool:
            found, _ = retention.committed(self.folder, self._known)
            return retention.is_best(metrics, self._settings.keep, found)

        return self._on_main(look)

    def _choose(self, path: Path | None) -> Path | None:
        try:
            retention.clean(self.folder)
            if path is not None:
                self._verify(path)
                return path
            path, skipped = retention.newest(self.folder, self._verify)
        finally:
            if self._peers.size > 1:
                self._peers.ranks.broadcast(None)  # there is nothing more to verify

        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is None and skipped:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is intact; the newest: {skipped[0][1]}",
                hints=["start from scratch with --fresh, which keeps this folder under another name"],
            )
        return path

    # One rank would take as many times as long as there are ranks, and the others would wait in vain.
    def _verify(self, path: Path) -> None:
        """On rank 0: raises CheckpointError unless what each rank has looked at is intact."""
        if self._peers.size == 1:
            retention.verify(path)
            return
        self._peers.ranks.broadcast(path)
        if (flaw := self._look_together(path)) is not None:
            message, hints = flaw
            raise CheckpointError(message, hints=hints)

    def _help_to_verify(self) -> None:
        """On the other ranks: looks at a share of each checkpoint that rank 0 considers."""
        nothing: Path | None = None
        while (path := self._peers.ranks.broadcast(nothing)) is not None:
            self._look_together(path)

    def _look_together(self, path: Path) -> _Flaw | None:
        """The first flaw that a rank has found in its share."""
        rank, ranks = self._peers.rank, self._peers.size
        mine, _ = self._peers.together(lambda: _flaw(path, rank, ranks), lambda: None)
        return next((flaw for flaw in self._peers.ranks.everyone(mine) if flaw), None)

    def _on_main(self, action: Callable[[], T]) -> T:
        return on_rank_zero(self._ranks, action)


def _flaw(path: Path, rank: int, ranks: int) -> _Flaw | None:
    try:
        verify_contents(path, read_manifest(path), rank=rank, ranks=ranks)
    except CheckpointError as error:
        return error.message, error.hints
    return None
