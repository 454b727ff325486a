"""The checkpoints of a run as all its ranks see them: one rank writes, every rank learns how it went."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ddpforge.agree import on_main
from ddpforge.checkpoint import retention, sharded
from ddpforge.checkpoint.contents import Facts, Share
from ddpforge.checkpoint.format import Checkpoint, read, write
from ddpforge.checkpoint.manifest import read_manifest
from ddpforge.checkpoint.peers import Peers
from ddpforge.checkpoint.reader import Reader
from ddpforge.errors import CheckpointError
from ddpforge.recipe.schema import KeepSection

T = TypeVar("T")
log = logging.getLogger(__name__)


class Checkpoints:
    """Saves, finds and prunes checkpoints in a folder that every rank can read.

    Every method is called on every rank, and fails on all of them when it fails on rank 0 (see `agree.on_main`).
    `broadcast` gives rank 0's value to every rank: a strategy's own.
    """

    def __init__(self, folder: Path, *, keep: KeepSection, is_main: bool, broadcast: Callable[[Any], Any]) -> None:
        self.folder = folder
        self._keep = keep
        self._is_main = is_main
        self._broadcast = broadcast

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, then removes those that it makes superfluous; returns its path."""

        def write_and_prune() -> Path:
            path = write(self.folder, checkpoint)
            retention.prune(self.folder, self._keep)
            return path

        return self._on_main(write_and_prune)

    def save_sharded(self, facts: Facts, share: Share, peers: Peers) -> Path:
        """Writes a checkpoint to which every rank adds its share, then removes those that it makes superfluous.

        When any rank fails, all of them raise CheckpointError with its number and its reason.
        """
        path = sharded.write(self.folder, facts, share, peers)
        self._on_main(lambda: retention.prune(self.folder, self._keep))
        return path

    def open(self, path: Path | None = None) -> Reader | None:
        """The checkpoint that `load` would load, for reading no more of it than a rank needs."""
        chosen = self._on_main(lambda: self._choose(path))
        return None if chosen is None else Reader(chosen, verify=not self._is_main)

    def load(self, path: Path | None = None) -> Checkpoint | None:
        """The checkpoint at `path`, or the newest intact one; None where there is none at all.

        Damaged ones that the newest would have been are named in a warning. Raises CheckpointError when the
        folder has checkpoints and all are damaged: that run must not silently start from scratch.
        """
        chosen = self._on_main(lambda: self._choose(path))
        # Rank 0 has just verified it; the others may see the disk from another machine.
        return None if chosen is None else read(chosen, verify=not self._is_main)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True when the metric that `keep.by` names beats that of every checkpoint in the folder."""
        return self._on_main(lambda: retention.is_best(metrics, self._keep, retention.committed(self.folder)[0]))

    def _choose(self, path: Path | None) -> Path | None:
        retention.clean(self.folder)
        if path is not None:
            read_manifest(path, verify=True)
            return path

        path, skipped = retention.newest(self.folder)
        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is None and skipped:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is intact; the newest: {skipped[0][1]}",
                hints=["start anew with --fresh, which keeps this folder under another name"],
            )
        return path

    def _on_main(self, action: Callable[[], T]) -> T:
        return on_main(action, is_main=self._is_main, broadcast=self._broadcast)
