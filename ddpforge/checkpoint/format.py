"""Whole checkpoints: everything from memory into one file per section; and back, whatever the layout."""

from pathlib import Path

from torch import Tensor

from ddpforge.checkpoint.commit import Draft, describe, unwritten
from ddpforge.checkpoint.contents import Checkpoint as Checkpoint
from ddpforge.checkpoint.contents import Share, take_apart
from ddpforge.checkpoint.reader import Reader
from ddpforge.checkpoint.regions import Part
from ddpforge.checkpoint.schema import SECTIONS, FileEntry, Manifest, Section, Tensors
from ddpforge.checkpoint.shard import Held, nbytes, write_shard
from ddpforge.interfaces import CanonicalState


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Adds a checkpoint to `folder` and returns its path, which appears complete or not at all.

    Raises CheckpointError when the state holds what cannot be saved, before anything is written, and when the
    disk refuses. The checkpoints that were there are never touched.
    """
    share = Share.of(checkpoint)
    apart = take_apart(share)
    manifest = describe(checkpoint, share, apart)
    held: Held = {
        section: {name: [Part.whole(x)] if isinstance(x, Tensor) else x for name, x in found.items()}
        for section, found in apart.held.items()
    }

    draft = None
    try:
        draft = Draft.begin(folder, checkpoint.step)
        return draft.publish(_fill(draft.temporary, manifest, held))
    except BaseException as error:
        if draft is not None:
            draft.discard()
        if isinstance(error, OSError):
            raise unwritten(folder, checkpoint.step, nbytes(held), error) from error
        raise


def _fill(folder: Path, manifest: Manifest, held: Held) -> Manifest:
    """Writes a file for each section that has tensors; returns the manifest with them."""
    written: dict[str, FileEntry] = {}
    tensors: Tensors = {}
    for section, found in held.items():
        tensors[section] = {}
        if found:
            file = f"{section}.safetensors"
            written[file], described = write_shard(folder / file, {section: found})
            tensors |= described
    return manifest.model_copy(update={"files": written, "tensors": tensors})


def read(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`, every byte of it verified unless `verify` is False; tensors are on the CPU.

    Raises CheckpointError naming the file that is missing, damaged, not what the manifest says, or too new.
    """
    reader = Reader(path, verify=verify)
    model, optimizer, callbacks = (_section(reader, section) for section in SECTIONS)
    state = CanonicalState(model=model, optimizer=reader.optimizer(optimizer), aliases=reader.aliases)
    checkpoint = Checkpoint(**vars(reader.facts), state=state, callbacks=reader.callbacks(callbacks))
    reader.finish()
    return checkpoint


def read_section(path: Path, manifest: Manifest, section: Section) -> dict[str, Tensor]:
    """The tensors of one section, verified, on the CPU."""
    return _section(Reader(path, manifest=manifest), section)


def _section(reader: Reader, section: Section) -> dict[str, Tensor]:
    return {name: reader.read(section, name) for name in reader.names(section)}
