"""Reads every byte of a checkpoint and names every file that is not what was written. Needs no torch."""

from pathlib import Path
from typing import NamedTuple

from ddpforge.checkpoint.manifest import check_listed, check_meaning, check_size, layout_of, read_sealed, verify_file
from ddpforge.checkpoint.schema import COMMIT, MANIFEST
from ddpforge.errors import CheckpointError


class Damage(NamedTuple):
    """A file of a checkpoint that is missing, or not what was written."""

    file: str
    problem: str


def damages(path: Path) -> list[Damage]:
    """All damage to the checkpoint `path`; nothing when it is intact to the last byte.

    Where the manifest itself cannot be trusted nothing is known of the other files, so that is all there is to say.
    """
    try:
        manifest = read_sealed(path)
        check_listed(path, manifest)
        found = layout_of(path, manifest)
        check_meaning(path, manifest)
    except CheckpointError as error:
        return [Damage(COMMIT if str(path / COMMIT) in error.message else MANIFEST, _reason(error))]

    problems = []
    for file, entry in manifest.files.items():
        try:
            check_size(path / file, entry)
            verify_file(path / file, entry, found.get(file, {}))
        except CheckpointError as error:
            problems.append(Damage(file, _reason(error)))
    return problems


def _reason(error: CheckpointError) -> str:
    """The error's message, without the name of the file."""
    return error.message.rpartition(" is damaged: ")[2]
