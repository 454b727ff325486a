"""Sharded checkpoints: every rank writes what it holds, all at once; rank 0 makes one checkpoint of it."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ddpforge.checkpoint import files
from ddpforge.checkpoint.commit import Draft, describe, unwritten
from ddpforge.checkpoint.contents import Apart, Facts, Share, take_apart
from ddpforge.checkpoint.deal import divide
from ddpforge.checkpoint.manifest import check_files, layout, parse, read_text
from ddpforge.checkpoint.peers import OutOfTouch, Peers
from ddpforge.checkpoint.regions import Part
from ddpforge.checkpoint.schema import (
    SECTIONS,
    CallbackScalars,
    Chunk,
    FileEntry,
    Manifest,
    Number,
    OptimizerScalars,
    OtherFile,
    RankManifest,
    Section,
    TensorEntry,
    Tensors,
)
from ddpforge.checkpoint.shard import Held, nbytes, write_shard
from ddpforge.checkpoint.stored import Damaged
from ddpforge.errors import CheckpointError

X = TypeVar("X")

_SHARED = ("all ranks must see the run's folder: keep it on a disk that their machines share",)


def write(folder: Path, facts: Facts, share: Share, peers: Peers) -> Path:
    """Adds a checkpoint to `folder` and returns its path; called on every rank, with what each has.

    It appears complete or not at all. When any rank fails, all raise CheckpointError with its number and its reason;
    the checkpoints that were there are never touched. Of `facts` those of rank 0 count.
    """
    save = _Save(folder, facts, share, peers)
    try:
        _, draft = peers.together(save.plan, save.begin)
        _, final = peers.together(lambda: save.fill(folder / draft), save.publish)
    except BaseException as error:
        failure = save.out_of_touch(error) if isinstance(error, OutOfTouch) else None
        if save.draft is not None:
            save.draft.discard()
        if failure is not None:
            raise failure from error
        raise
    return folder / final


class _Save:
    """What one rank does, in order: plan, (rank 0: begin), fill, (rank 0: publish)."""

    def __init__(self, folder: Path, facts: Facts, share: Share, peers: Peers) -> None:
        self.folder, self.facts, self.share, self.peers = folder, facts, share, peers
        self.draft: Draft | None = None
        self.manifest: Manifest | None = None

    def plan(self) -> None:
        """Finds what cannot be saved before anything is written, and decides what this rank writes."""
        self.apart = take_apart(self.share)
        self.held = _held(self.apart, self.peers)
        if self.peers.rank == 0:
            self.manifest = describe(self.facts, self.share, self.apart)

    def begin(self) -> str:
        with self._disk():
            self.draft = Draft.begin(self.folder, self.facts.step)
        return self.draft.temporary.name

    def fill(self, draft: Path) -> None:
        """Writes this rank's shard and what is to be known of it."""
        if not draft.is_dir():
            raise CheckpointError(f"there is no folder {draft}, which rank 0 has made", hints=_SHARED)
        rank = self.peers.rank
        shard = f"shard-{rank:05d}-of-{self.peers.size:05d}.safetensors"
        with self._disk():
            entry, tensors = write_shard(draft / shard, self.held)
            record = RankManifest(
                rank=rank,
                file=shard,
                entry=entry,
                tensors=tensors,
                optimizer=self.apart.optimizer,
                callbacks=self.apart.callbacks,
            )
            files.write_new(draft / _record(rank), [record.model_dump_json(indent=1).encode()])
            files.sync_folder(draft)

    def publish(self) -> str:
        """Merges what the ranks wrote, and proves that together it is everything, once."""
        assert self.draft is not None
        assert self.manifest is not None
        try:
            manifest = _merged(self.draft.temporary, self.manifest, self.peers.size)
            check_files(self.draft.temporary, manifest)
        except Damaged as error:
            message = f"what a rank wrote is not what rank 0 sees: {error.message}"
            raise CheckpointError(message, hints=_SHARED) from error
        try:
            layout(manifest)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint of step {manifest.step} cannot be saved: {error}") from error
        with self._disk():
            return self.draft.publish(manifest).name

    def out_of_touch(self, error: Exception) -> CheckpointError:
        """What is known when the ranks can no longer talk to each other."""
        what = f"the checkpoint of step {self.facts.step}"
        if self.draft is None:
            return CheckpointError(f"{what}: rank {self.peers.rank} is out of touch with rank 0 ({error})")
        if self.draft.final.exists():
            return CheckpointError(f"{what} is complete, but not all ranks could be told ({error})")
        ranks = range(self.peers.size)
        absent = [f"rank {rank}" for rank in ranks if not (self.draft.temporary / _record(rank)).exists()]
        return CheckpointError(f"{what} was not saved: {', '.join(absent) or 'a rank'} is out of touch ({error})")

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritten(self.folder, self.facts.step, nbytes(self.held), error) from error


def _record(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _held(apart: Apart, peers: Peers) -> Held:
    """This rank's own parts, and its share of the tensors that all ranks hold alike."""
    alike = {
        (section, name): Part.whole(value)
        for section, found in apart.held.items()
        for name, value in found.items()
        if isinstance(value, Tensor)
    }
    mine = divide(alike, rank=peers.rank, ranks=peers.size)
    return {
        section: {name: mine[section, name] if isinstance(value, Tensor) else value for name, value in found.items()}
        for section, found in apart.held.items()
    }


# ---------------------------------------------------------------------------------------------- on rank 0
def _merged(draft: Path, manifest: Manifest, ranks: int) -> Manifest:
    """The manifest of what all ranks wrote; raises CheckpointError where they contradict each other."""
    found: dict[str, FileEntry] = {}
    merged = _Merged()
    for rank in range(ranks):
        path = draft / _record(rank)
        content = read_text(path)
        record = parse(RankManifest, path, content)
        found[record.file] = record.entry
        found[path.name] = OtherFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        merged.add(record)
    return manifest.model_copy(
        update={
            "files": found,
            "tensors": merged.tensors(),
            "optimizer": merged.optimizer,
            "callbacks": merged.callbacks,
        }
    )


class _Merged:
    """What the ranks' records say together."""

    def __init__(self) -> None:
        self.optimizer: OptimizerScalars = {}
        self.callbacks: CallbackScalars = {}
        self._kinds: dict[tuple[Section, str], tuple[str, tuple[int, ...]]] = {}
        self._chunks: dict[tuple[Section, str], list[Chunk]] = {}

    def tensors(self) -> Tensors:
        """All tensors with all their chunks."""
        found: Tensors = {section: {} for section in SECTIONS}
        for (section, name), (dtype, shape) in self._kinds.items():
            found[section][name] = TensorEntry(dtype=dtype, shape=shape, chunks=tuple(self._chunks[section, name]))
        return found

    def add(self, record: RankManifest) -> None:
        """Adds what one rank wrote."""
        for section, found in record.tensors.items():
            for name, entry in found.items():
                kind = self._kinds.setdefault((section, name), (entry.dtype, entry.shape))
                if kind != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{name} ({section}) is {entry.dtype} {list(entry.shape)} on rank {record.rank}, and "
                        f"{kind[0]} {list(kind[1])} on a lower one"
                    )
                self._chunks.setdefault((section, name), []).extend(entry.chunks)
        self._add_numbers(self.optimizer, record.optimizer, record.rank)
        self._add_numbers(self.callbacks, record.callbacks, record.rank)

    @staticmethod
    def _add_numbers(merged: dict[str, dict[str, X]], added: Mapping[str, Mapping[str, X]], rank: int) -> None:
        for owner, numbers in added.items():
            known = merged.setdefault(owner, {})
            for key, number in numbers.items():
                if known.setdefault(key, number) != number:
                    raise CheckpointError(
                        f"{key} of {owner} is {_plain(number)} on rank {rank}, and {_plain(known[key])} on a lower one"
                    )


def _plain(number: object) -> object:
    return number.value if isinstance(number, Number) else number
