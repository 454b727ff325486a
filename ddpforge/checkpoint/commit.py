"""Brings all of a checkpoint or nothing of it to the disk: contents, hashes, name, hint, in this order."""

import hashlib
import json
import logging
import platform
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from ddpforge import __version__, disk
from ddpforge.checkpoint import safetensors_writer
from ddpforge.checkpoint.contents import Facts, Flat, RankState
from ddpforge.checkpoint.schema import COMMIT, LATEST, MANIFEST, MOST_TEXT, Commit, Manifest
from ddpforge.errors import CheckpointError

log = logging.getLogger("ddpforge")


def describe(facts: Facts, state: RankState, flat: Flat) -> Manifest:
    """A manifest that lacks only files and tensors; raises CheckpointError for what JSON cannot hold."""
    versions = {"ddpforge": __version__, "torch": torch.__version__, "python": platform.python_version()}
    metrics = {
        name: safetensors_writer.to_scalar(x, f"the metric {name}", (int, float)) for name, x in facts.metrics.items()
    }
    try:
        manifest = Manifest(
            step=facts.step,
            samples=facts.samples,
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            strategy=facts.strategy,
            world_size=facts.world_size,
            versions=versions,
            metrics=metrics,
            position=facts.position,
            loop=facts.loop,
            lineage=facts.lineage,
            recipe=facts.recipe,
            run=facts.run,
            data=facts.data,
            rows=facts.rows,
            aliases=dict(state.aliases),
            optimizer=flat.optimizer,
            callbacks=flat.callbacks,
            files={},
            tensors={},
        )
        json.dumps(manifest.model_dump(), allow_nan=False)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint of step {facts.step} cannot be saved: {error}") from error
    return manifest


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written: `temporary` is the folder to fill, which becomes `final`."""

    temporary: Path
    final: Path

    @classmethod
    def begin(cls, folder: Path, step: int) -> "Draft":
        """Makes the folder to fill, and the one that it is in."""
        if not folder.is_dir():
            log.warning("%s is not there: it is made again, and what may have been in it is gone", folder)
            disk.make_folder(folder)
            disk.sync_folder(folder.parent)
        final = _unused(folder, step)
        draft = cls(folder / f".{final.name}.tmp", final)
        disk.make_folder(draft.temporary)
        return draft

    def publish(self, manifest: Manifest) -> Path:
        """Seals the folder, when all that the manifest lists is in it, and gives it its name."""
        text = manifest.dumps()
        if len(text) > MOST_TEXT:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} has a manifest of {len(text):,} bytes: too many"
            )
        disk.write_new(self.temporary / MANIFEST, [text])
        commit = Commit(manifest_sha256=hashlib.sha256(text).hexdigest())
        disk.write_new(self.temporary / COMMIT, [commit.model_dump_json().encode()])
        disk.sync_folder(self.temporary)
        hint = json.dumps({"dir": self.final.name, "step": manifest.step})
        disk.remove(self._hint)  # of an attempt that was killed here
        disk.write_new(self._hint, [hint.encode()])  # a disk that is full must say so before there is a checkpoint

        disk.rename(self.temporary, self.final)
        disk.sync_folder(self.final.parent)
        disk.rename(self._hint, self.final.with_name(LATEST))
        disk.sync_folder(self.final.parent)
        return self.final

    @property
    def _hint(self) -> Path:
        return self.final.with_name(f".{LATEST}.tmp")

    def discard(self) -> None:
        """Removes what was not published. What cannot be removed now is removed when the run starts again."""
        with suppress(OSError):
            disk.remove(self._hint)
            disk.remove(self.temporary)


def _unused(folder: Path, step: int) -> Path:
    """A name for the step that no checkpoint has: saving a step twice must not overwrite the first."""
    while (path := folder / f"step-{step:09d}-{secrets.token_hex(2)}").exists():
        pass
    return path


def unwritten(folder: Path, step: int, needed: int, error: OSError) -> CheckpointError:
    """The error for a disk that refuses `needed` bytes."""
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder}: "
        f"{error.strerror or error}; it takes {needed:,} bytes and {_free(folder):,} are free",
        hints=["earlier checkpoints are intact: make room, or keep fewer (`checkpoint.keep`), and resume"],
    )


def _free(folder: Path) -> int:
    """Bytes left on the disk that holds, or was to hold, the folder."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
