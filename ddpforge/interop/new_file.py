"""A file that appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddpforge import disk
from ddpforge.errors import EnvironmentProblem, UsageError

__all__ = ["appearing", "refuse_existing"]


def refuse_existing(out: Path, *, force: bool) -> None:
    """Raises UsageError where the file exists, unless it may be replaced, or its folder does not."""
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", hints=[f"mkdir -p {out.parent}"])
    if out.is_dir() or (out.exists() and not force):
        raise UsageError(f"{out} exists", hints=["choose another file with --out, or replace it with --force"])


@contextmanager
def appearing(out: Path, error: type[EnvironmentProblem] = EnvironmentProblem) -> Iterator[Path]:
    """A file to write, which is `out` when all went well; raises `error` where a disk refuses."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp{out.suffix}")
    try:
        yield temporary
        disk.rename(temporary, out)
        disk.sync_folder(out.parent)
    except OSError as refusal:
        raise error(f"{out} could not be written: {refusal.strerror or refusal}") from refusal
    finally:
        with suppress(OSError):
            disk.remove(temporary)
