"""Atomic commit of a checkpoint to the disk: first its contents, then hashes, final name and `latest.json`."""

import hashlib
import json
import logging
import platform
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from ddpforge import __version__, disk
from ddpforge.checkpoint import safetensors_writer
from ddpforge.checkpoint.schema import COMMIT, LATEST, MANIFEST, MOST_TEXT, Commit, Manifest
from ddpforge.checkpoint.state import CheckpointMetadata
from ddpforge.errors import CheckpointError

log = logging.getLogger("ddpforge")


def describe(facts: CheckpointMetadata, aliases: Mapping[str, str]) -> Manifest:
    """Returns the manifest without files and state; raises CheckpointError if JSON cannot hold a value."""
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
            aliases=dict(aliases),
            optimizer={},
            callbacks={},
            files={},
            tensors={},
        )
        json.dumps(manifest.model_dump(), allow_nan=False)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint of step {facts.step} cannot be saved: {error}") from error
    return manifest


@dataclass(frozen=True)
class StagedCheckpoint:
    """Unfinished checkpoint: `temporary` is the folder to fill; `publish` renames it to `final`."""

    temporary: Path
    final: Path

    @classmethod
    def begin(cls, folder: Path, step: int) -> "StagedCheckpoint":
        """Creates the temporary folder, and `folder` if it is missing."""
        if not folder.is_dir():
            log.warning("%s does not exist: a new one is created; checkpoints that were in it are lost", folder)
            disk.make_folder(folder)
            disk.sync_folder(folder.parent)
        while (final := folder / f"step-{step:09d}-{secrets.token_hex(2)}").exists():
            pass  # a second save of a step does not overwrite the first
        draft = cls(folder / f".{final.name}.tmp", final)
        disk.make_folder(draft.temporary)
        return draft

    def publish(self, manifest: Manifest) -> Path:
        """Writes the manifest and its hash, renames the folder to `final` and returns that path.

        All files that the manifest lists must already be in the folder.
        """
        text = manifest.dumps()
        if len(text) > MOST_TEXT:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} has a manifest of {len(text):,} bytes, which is too large"
            )
        disk.write_new(self.temporary / MANIFEST, [text])
        commit = Commit(manifest_sha256=hashlib.sha256(text).hexdigest())
        disk.write_new(self.temporary / COMMIT, [commit.model_dump_json().encode()])
        disk.sync_folder(self.temporary)
        hint = json.dumps({"dir": self.final.name, "step": manifest.step})
        disk.remove(self._hint)  # an attempt that was killed here may have left one
        disk.write_new(self._hint, [hint.encode()])  # before the rename: a full disk must fail before the commit

        disk.rename(self.temporary, self.final)
        disk.sync_folder(self.final.parent)
        disk.rename(self._hint, self.final.with_name(LATEST))
        disk.sync_folder(self.final.parent)
        return self.final

    @property
    def _hint(self) -> Path:
        return self.final.with_name(f".{LATEST}.tmp")

    def discard(self) -> None:
        """Removes the unpublished files. Files that cannot be removed now are removed at the next start of the run."""
        with suppress(OSError):
            disk.remove(self._hint)
            disk.remove(self.temporary)


def unwritten(folder: Path, step: int, needed: int, error: OSError) -> CheckpointError:
    """Returns the error for a failed write of `needed` bytes."""
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder}: "
        f"{error.strerror or error}; it takes {needed:,} bytes and {_free(folder):,} are free",
        hints=["earlier checkpoints are intact: make room, or keep fewer (`checkpoint.keep`), and resume"],
    )


def _free(folder: Path) -> int:
    """Returns the free bytes on the disk of `folder`, which need not exist."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
