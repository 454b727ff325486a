"""Checkpoints of a run on all ranks: saves them during training, opens them on resume, and prunes them."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from ddpforge import disk
from ddpforge.checkpoint import retention
from ddpforge.checkpoint.manifest import layout_of, read_manifest, verify_contents
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.staging import Staging
from ddpforge.checkpoint.state import CheckpointMetadata, RankState, flatten, local_shards
from ddpforge.checkpoint.writer import Writer
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Ranks
from ddpforge.ranks.writers import WriterGroup, on_rank_zero
from ddpforge.recipe.schema import CheckpointSection

T = TypeVar("T")
_Flaw = tuple[str, tuple[str, ...]]  # message and hints
log = logging.getLogger(__name__)


class Checkpoints:
    """Saves, finds and prunes checkpoints in a folder that every rank can read.

    All methods are collective, except `pending`, `ready`, `reserve`, `before_update` and `finish`.
    Args:
        keep_every: the recipe's `checkpoint.keep.every` in steps
        peers: communication of the writer threads
        ranks: communication of the training threads
        before_commit: called on rank 0 before a checkpoint is committed, to bring files that it depends on to the disk
        evaluations: returns the metrics of checkpoints that another process evaluates, see `retention.prune`
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSection,
        *,
        peers: WriterGroup,
        ranks: Ranks,
        keep_every: int | None = None,
        before_commit: Callable[[], None] = lambda: None,
        evaluations: Callable[[], Mapping[str, Mapping[str, Any]] | None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._settings, self._keep_every = settings, keep_every
        self._peers = peers
        self._ranks = ranks
        self._before_commit, self._evaluations = before_commit, evaluations
        self._staging = Staging()
        self._known = retention.Known()
        self._saving: Future[Path] | None = None
        self._remover = ThreadPoolExecutor(1, "removal of checkpoints")
        self._removals: list[Future[None]] = []

    # -- saving
    def save(self, facts: CheckpointMetadata, state: RankState) -> None:
        """Begins to write a checkpoint. Call `wait` for its result; errors of the write are raised there, not here.

        With `checkpoint.async_save`, a thread writes. The state may then change as soon as this returns, except trained
        weights and their optimizer state: see `before_update`. Without it, the write has ended when this returns.
        If an earlier save is still pending, this first calls `wait` for it, and raises its error.
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
        # A daemon thread does not keep a failed process alive. An unfinished write does not count as a checkpoint.
        name = f"checkpoint writer of rank-{self._peers.rank}"
        Thread(target=self._write, args=(save, saving), name=name, daemon=True).start()

    def reserve(self, state: RankState) -> None:
        """Allocates host memory for a copy of `state` from GPUs, in a thread, so that the first save is faster."""
        if self._settings.async_save and not self.pending:
            with suppress(CheckpointError):  # the save will raise it
                self._staging.reserve(local_shards(flatten(state, rank=self._peers.rank, ranks=self._peers.size).held))

    def before_update(self) -> None:
        """Finishes the copy of the weights. Call it before each update, and before any other change of weights."""
        self._staging.before_update()

    @property
    def pending(self) -> bool:
        """True between `save` and `wait`."""
        return self._saving is not None

    def ready(self) -> bool:
        """True if `wait` would return at once on this rank."""
        return self._saving is not None and self._saving.done()

    def wait(self) -> Path:
        """Waits for the checkpoint that `save` began, and returns its path.

        Raises CheckpointError on every rank if any rank failed to write its part.
        """
        if self._saving is None:
            raise RuntimeError("no checkpoint is being saved")
        wait([self._saving])  # if this is interrupted, the save stays pending
        saving, self._saving = self._saving, None
        return saving.result()

    def _write(self, save: Writer, outcome: "Future[Path]") -> None:
        try:
            self.finish()  # otherwise the disk would need room for the new checkpoint and the removed ones
            self._staging.wait()
            path = save.write()
            if self._peers.rank == 0:
                self._prune(path)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(path)

    def finish(self) -> None:
        """Waits until superseded checkpoints are deleted from the disk. Failures are logged."""
        removals, self._removals = self._removals, []
        for removal in removals:
            try:
                removal.result()
            except OSError as error:
                log.warning("older checkpoints were not removed: %s", error)

    def _prune(self, path: Path) -> None:
        """Starts to remove checkpoints that `checkpoint.keep` does not keep, if the new one can be read back."""

        def remove(put_away: Path) -> None:
            self._removals.append(self._remover.submit(disk.remove, put_away))

        keep = self._settings.keep
        try:
            layout_of(path, self._known.read(path))
            evaluated = self._evaluations()
            every, known = self._keep_every, self._known
            retention.prune(self.folder, keep, every=every, known=known, evaluated=evaluated, remove=remove)
        except Exception as error:
            defect = None if isinstance(error, CheckpointError) else error
            log.warning("older checkpoints were not removed: %s", error, exc_info=defect)

    # -- existing checkpoints
    def open(self, path: Path | None = None) -> CheckpointReader | None:
        """Opens the checkpoint at `path`, or the newest intact one; returns None if the folder has no checkpoint.

        Logs a warning for each damaged checkpoint that is newer. Raises CheckpointError if all are damaged, so that
        the run does not silently start from scratch.
        """
        if self._saving is not None:
            wait([self._saving])  # `_choose` removes half-written checkpoints
        self.finish()
        if self._peers.rank != 0:
            self._help_to_verify()
        chosen = self._on_main(lambda: self._choose(path))
        # A single rank has just verified every byte. Several ranks verified one share each, and may see other disks.
        return None if chosen is None else CheckpointReader(chosen, verify=self._peers.size > 1)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True if the metric `keep.monitor` is better in `metrics` than in every checkpoint of the folder."""

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
                self._peers.ranks.broadcast(None)  # ends `_help_to_verify` on the other ranks

        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is None and skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact; the newest: {skipped[0][1]}",
                hints=["start from scratch with --fresh, which keeps this folder under another name"],
            )
        return path

    # All ranks verify a share each: if rank 0 verified alone, the other ranks would only wait.
    def _verify(self, path: Path) -> None:
        """Raises CheckpointError if any rank finds damage in its share. Called on rank 0."""
        if self._peers.size == 1:
            retention.verify(path)
            return
        self._peers.ranks.broadcast(path)
        if (flaw := self._look_together(path)) is not None:
            message, hints = flaw
            raise CheckpointError(message, hints=hints)

    def _help_to_verify(self) -> None:
        """Verifies a share of each checkpoint that rank 0 considers. Called on the other ranks."""
        nothing: Path | None = None
        while (path := self._peers.ranks.broadcast(nothing)) is not None:
            self._look_together(path)

    def _look_together(self, path: Path) -> _Flaw | None:
        """Verifies this rank's share; returns the flaw that the lowest rank found, or None."""
        rank, ranks = self._peers.rank, self._peers.size
        mine, _ = self._peers.run_all_or_none(lambda: _flaw(path, rank, ranks), lambda: None)
        return next((flaw for flaw in self._peers.ranks.all_gather_object(mine) if flaw), None)

    def _on_main(self, action: Callable[[], T]) -> T:
        return on_rank_zero(self._ranks, action)


def _flaw(path: Path, rank: int, ranks: int) -> _Flaw | None:
    try:
        verify_contents(path, read_manifest(path), rank=rank, ranks=ranks)
    except CheckpointError as error:
        return error.message, error.hints
    return None
