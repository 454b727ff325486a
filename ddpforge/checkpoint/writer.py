"""Writes a checkpoint: all ranks write their shards at the same time, then rank 0 merges and commits them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from ddpforge import disk
from ddpforge.checkpoint import safetensors_writer, untrusted
from ddpforge.checkpoint.commit import StagedCheckpoint, describe, unwritten
from ddpforge.checkpoint.manifest import check_files, layout, read_text
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.safetensors_writer import LazyTensor, dtype_name
from ddpforge.checkpoint.schema import (
    MODEL,
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
    TensorFile,
    Tensors,
)
from ddpforge.checkpoint.state import CheckpointMetadata, Held, RankState, flatten, local_shards
from ddpforge.checkpoint.untrusted import Damaged, uncollected
from ddpforge.checkpoint.weights_file import sources, write_weights
from ddpforge.errors import CheckpointError
from ddpforge.interfaces.regions import Box, TensorShard, whole
from ddpforge.ranks.writers import PeerUnreachable, WriterGroup

X = TypeVar("X")

_SHARED = ("all ranks must see the run's folder: put it on a disk that all machines share",)


def write(folder: Path, facts: CheckpointMetadata, state: RankState, peers: WriterGroup, *, full: bool = False) -> Path:
    """Adds a checkpoint to `folder` and returns its path. Every rank must call it, with its own `state`.

    The checkpoint appears complete or not at all. If any rank fails, all ranks raise CheckpointError with its number
    and its reason. Existing checkpoints are never changed. Only the `facts` of rank 0 are used. With `full`, the
    checkpoint also has one file with the whole model, for other tools.
    """
    return Writer(folder, facts, state, peers, full=full).write()


class Writer:
    """Write of one checkpoint: every rank fills the folder; rank 0 also creates and publishes it.

    The constructor checks the state, but `write` raises its errors, on all ranks. `copy` begins a copy of the parts
    that this rank writes, and returns a function that returns it; the copy must be complete when `write` is called.
    """

    def __init__(
        self,
        folder: Path,
        facts: CheckpointMetadata,
        state: RankState,
        peers: WriterGroup,
        *,
        full: bool = False,
        copy: Callable[[Held], Callable[[], Held]] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._step, self._peers, self._full = folder, facts.step, peers, full
        self._before_commit = before_commit
        self._draft: StagedCheckpoint | None = None
        self._manifest: Manifest | None = None
        self._problem: Exception | None = None
        self._record: tuple[RankManifest, bytes] | None = None
        try:
            with uncollected():
                flat = flatten(state, rank=peers.rank, ranks=peers.size)
                self._optimizer, self._callbacks = flat.optimizer, flat.callbacks
                if peers.rank == 0:
                    self._manifest = describe(facts, state.aliases)
                held = local_shards(flat.held)
                self._copied: Callable[[], Held] = (lambda: held) if copy is None else copy(held)
        except Exception as error:
            self._problem = error

    def write(self) -> Path:
        """Writes the checkpoint together with all other ranks; returns its path."""
        try:
            _, draft = self._peers.run_all_or_none(self._check, self._begin)
            _, final = self._peers.run_all_or_none(lambda: self._fill(self._folder / draft), self._publish)
        except BaseException as error:
            failure = self._out_of_touch(error) if isinstance(error, PeerUnreachable) else None
            if self._draft is not None:
                self._draft.discard()
            if failure is not None:
                raise failure from error
            raise
        return self._folder / final

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem
        with uncollected():
            self._held = self._copied()
        del self._copied  # it holds the tensors that were copied

    def _begin(self) -> str:
        with self._disk():
            self._draft = StagedCheckpoint.begin(self._folder, self._step)
        return self._draft.temporary.name

    def _fill(self, draft: Path) -> None:
        """Writes this rank's shard and its record (`RankManifest`)."""
        if not draft.is_dir():
            raise CheckpointError(f"rank 0 created the folder {draft}, but this rank cannot see it", hints=_SHARED)
        rank = self._peers.rank
        shard = f"shard-{rank:05d}-of-{self._peers.size:05d}.safetensors"
        with self._disk():
            entry, tensors = write_shard(draft / shard, self._held)
            record = RankManifest(
                rank=rank,
                file=shard,
                entry=entry,
                tensors=tensors,
                optimizer=self._optimizer,
                callbacks=self._callbacks,
            )
            text = record.model_dump_json(indent=1).encode()
            disk.write_new(draft / _record(rank), [text])
            if rank == 0:
                self._record = record, text
            disk.sync_folder(draft)

    def _publish(self) -> str:
        """Merges the records of all ranks, checks that every element was written exactly once, and commits."""
        assert self._draft is not None
        assert self._manifest is not None
        draft = self._draft.temporary
        with self._visible(), uncollected():
            manifest = _merged(draft, self._manifest, self._peers.size, self._record)
            self._record = None
            check_files(draft, manifest)
        try:
            layout(manifest)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint of step {self._step} cannot be saved: {error}") from error
        with self._disk():
            if self._full:
                with self._visible():
                    manifest = _with_model(draft, manifest)
            self._before_commit()
            return self._draft.publish(manifest).name

    def _out_of_touch(self, error: Exception) -> CheckpointError:
        """Returns the error to raise if the ranks can no longer communicate."""
        what = f"the checkpoint of step {self._step}"
        if self._draft is None:
            return CheckpointError(f"{what}: rank {self._peers.rank} lost the connection to rank 0 ({error})")
        if self._draft.final.exists():
            return CheckpointError(f"{what} is complete, but not all ranks could be informed ({error})")
        ranks = range(self._peers.size)
        absent = [f"rank {rank}" for rank in ranks if not (self._draft.temporary / _record(rank)).exists()]
        return CheckpointError(f"{what} was not saved: no connection to {', '.join(absent) or 'a rank'} ({error})")

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritten(self._folder, self._step, nbytes(self._held), error) from error

    @contextmanager
    def _visible(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            message = f"rank 0 does not see a file as another rank wrote it: {error.message}"
            raise CheckpointError(message, hints=_SHARED) from error


def _record(rank: int) -> str:
    return f"rank-{rank:05d}.json"


# ---------------------------------------------------------------------------------------------- on rank 0
@uncollected()
def _merged(draft: Path, manifest: Manifest, ranks: int, own: tuple[RankManifest, bytes] | None = None) -> Manifest:
    """Merges the records of all ranks into the manifest; raises CheckpointError if they contradict each other.

    `own` is the record of rank 0 and its text, if they need not be read.
    """
    found: dict[str, FileEntry] = {}
    merged, records = _Merged(), partial(untrusted.parse, TypeAdapter(RankManifest))
    for rank in range(ranks):
        path = draft / _record(rank)
        content: bytes | bytearray
        if own is not None and rank == 0:
            record, content = own
        else:
            content = read_text(path)
            record = records(path, content)
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


def _with_model(draft: Path, manifest: Manifest) -> Manifest:
    """Writes the whole model from the shards, one tensor at a time; returns the manifest with the new file."""
    with closing(CheckpointReader(draft, manifest=manifest)) as reader:
        size, digest = write_weights(draft / MODEL, sources(reader, "model"), reader.aliases)
    return manifest.model_copy(update={"files": {**manifest.files, MODEL: OtherFile(bytes=size, sha256=digest)}})


class _Merged:
    """Merged records of all ranks."""

    def __init__(self) -> None:
        self.optimizer: OptimizerScalars = {}
        self.callbacks: CallbackScalars = {}
        self._entries: dict[tuple[Section, str], list[TensorEntry]] = {}

    def tensors(self) -> Tensors:
        """Returns all tensors with all their chunks."""
        found: Tensors = {section: {} for section in SECTIONS}
        for (section, name), entries in self._entries.items():
            chunks = tuple(chunk for entry in entries for chunk in entry.chunks)
            found[section][name] = entries[0] if len(entries) == 1 else replace(entries[0], chunks=chunks)
        return found

    def add(self, record: RankManifest) -> None:
        """Adds the record of one rank; raises CheckpointError if it contradicts an earlier one."""
        for section, found in record.tensors.items():
            for name, entry in found.items():
                entries = self._entries.setdefault((section, name), [])
                entries.append(entry)
                first = entries[0]
                if first.dtype != entry.dtype or first.shape != entry.shape:
                    raise CheckpointError(
                        f"{name} ({section}) is {entry.dtype} {list(entry.shape)} on rank {record.rank}, and "
                        f"{first.dtype} {list(first.shape)} on a lower one"
                    )
        self._add_numbers(self.optimizer, record.optimizer, record.rank)
        self._add_numbers(self.callbacks, record.callbacks, record.rank)

    @staticmethod
    def _add_numbers(merged: dict[str, dict[str, X]], added: Mapping[str, Mapping[str, X]], rank: int) -> None:
        for owner, numbers in added.items():
            known = merged.setdefault(owner, {})
            for key, number in numbers.items():
                if known.setdefault(key, number) != number:
                    raise CheckpointError(
                        f"{key} of {owner or 'the optimizer'} is {_plain(number)} on rank {rank}, and "
                        f"{_plain(known[key])} on a lower one"
                    )


def _plain(number: object) -> object:
    return number.value if isinstance(number, Number) else number


# ---------------------------------------------------------------------------------------------- files of parts
Entries = dict[tuple[Section, str], list[tuple[str, TensorShard]]]


def nbytes(held: Held) -> int:
    """Returns the size of all parts in bytes."""
    return sum(part.tensor.nbytes for section in held.values() for parts in section.values() for part in parts)


def write_shard(path: Path, held: Held) -> tuple[TensorFile, Tensors]:
    """Writes the file `path`; returns its manifest entry, and the manifest entries of its tensors' chunks.

    A whole tensor is stored under its own name and in its own shape, as other tools expect.
    """
    entries = _named(held)
    sources = {entry: LazyTensor.of_part(part) for stored in entries.values() for entry, part in stored}
    file, hashes = safetensors_writer.write_file(path, sources)
    return file, _described(held, entries, path.name, hashes)


@uncollected()
def _named(held: Held) -> Entries:
    """Returns the parts to store, each under a unique name."""
    taken = {"__metadata__"}  # reserved in a safetensors file
    return {
        (section, name): [(_unused(_entry_name(name, part), taken), part) for part in parts if _is_stored(part)]
        for section, named in held.items()
        for name, parts in named.items()
    }


@uncollected()
def _described(held: Held, entries: Entries, file: str, hashes: Mapping[str, tuple[str, ...]]) -> Tensors:
    found: Tensors = {section: {} for section in held}
    for (section, name), stored in entries.items():
        first = held[section][name][0]
        chunks = (
            Chunk(file=file, entry=entry, region=part.simple_region, hashes=hashes[entry]) for entry, part in stored
        )
        found[section][name] = TensorEntry(
            dtype=dtype_name(first.tensor.dtype), shape=first.shape, chunks=tuple(chunks)
        )
    return found


def _is_stored(part: TensorShard) -> bool:
    """False for a part without elements, unless the tensor itself has none."""
    return bool(part.simple_region.numel) or part.region == whole(part.shape)


def _entry_name(name: str, part: TensorShard) -> str:
    """Returns the tensor's own name; for a part of it, the name with its region."""
    region = part.simple_region
    if region == whole(part.shape):
        return name
    if isinstance(region, Box):
        sides = (f"{begin}:{begin + count}" for begin, count in zip(region.offset, region.size, strict=True))
        return f"{name}[{','.join(sides)}]"
    return f"{name}[flat {region.start}:{region.stop}]"


def _unused(name: str, taken: set[str]) -> str:
    """Returns the name, with added quotes if it is taken, and adds it to `taken`."""
    while name in taken:
        name += "'"
    taken.add(name)
    return name
