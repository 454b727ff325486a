"""Test doubles: checkpoints whose values all equal their step, and a disk that fails at a chosen operation."""

import errno
import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import xxhash
from torch import Tensor

from ddpforge import disk
from ddpforge.checkpoint import writer
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.retention import newest
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.interfaces import CanonicalState
from ddpforge.ranks.writers import WriterGroup

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
FAILURES = ("kill", "power", "power, names lost")
OPERATIONS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove")


@dataclass(kw_only=True)
class Checkpoint(CheckpointMetadata):
    """Complete checkpoint in memory."""

    state: CanonicalState[Tensor]
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def share(self) -> RankState:
        """Returns the state of a rank that holds everything."""
        return RankState.of(self.state, self.callbacks)


def write(folder: Path, checkpoint: Checkpoint, *, full: bool = False) -> Path:
    """Writes the checkpoint as a single rank; returns its path."""
    return writer.write(folder, checkpoint, checkpoint.share, WriterGroup.alone(), full=full)


def read(path: Path, *, verify: bool = True) -> Checkpoint:
    """Reads the whole checkpoint; verifies every byte if `verify` is true."""
    reader = CheckpointReader(path, verify=verify)
    state, callbacks = reader.state(), reader.callbacks()
    checkpoint = Checkpoint(
        **vars(reader.metadata),
        state=CanonicalState(
            {name: saved.read() for name, saved in state.model.items()}, loaded(state.optimizer), state.aliases
        ),
        callbacks=loaded(callbacks),
    )
    reader.finish()
    return checkpoint


def loaded(owners: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        owner: {key: x.read() if hasattr(x, "read_into") else x for key, x in values.items()}
        for owner, values in owners.items()
    }


def checkpoint_of(step: int, **changes: Any) -> Checkpoint:
    """Returns a small checkpoint in which every number is `step`."""
    state = CanonicalState(
        model={
            "layer.weight": torch.full((3, 5), float(step)),
            "layer.bias": torch.full((3,), step, dtype=torch.bfloat16),
            "norm.num_batches_tracked": torch.tensor(step),
        },
        optimizer={
            "layer.weight": {"step": torch.tensor(float(step)), "exp_avg": torch.full((3, 5), float(step))},
            "layer.bias": {"step": torch.tensor(float(step)), "exp_avg": torch.full((3,), float(step))},
        },
        aliases={"head.weight": "layer.weight"},
    )
    values: dict[str, Any] = {
        "step": step,
        "samples": step,
        "state": state,
        "strategy": "single",
        "world_size": 1,
        "callbacks": {"ema": {"layer.weight": torch.full((3, 5), float(step))}, "early_stopping": {"bad": step}},
        "metrics": {"eval/loss": float(step)},
    }
    return Checkpoint(**(values | changes))


def steps_in(checkpoint: Checkpoint) -> set[float]:
    """Returns all numbers in a checkpoint of `checkpoint_of`; more than one means that it mixes two states."""
    owners: list[Mapping[str, Any]] = [
        checkpoint.state.model,
        *checkpoint.state.optimizer.values(),
        *checkpoint.callbacks.values(),
    ]
    numbers = {float(x) for owner in owners for value in owner.values() for x in torch.as_tensor(value).flatten()}
    return numbers | {checkpoint.step, checkpoint.samples, checkpoint.metrics["eval/loss"]}


def nothing(manifest: dict[str, Any]) -> None:
    """Changes nothing."""


def reseal(path: Path, change: Callable[[dict[str, Any]], object] = nothing) -> None:
    """Corrects all hashes, then applies `change` to the manifest and seals it, as an attacker could."""
    manifest = json.loads((path / "manifest.json").read_text())
    begins = {name: _reseal_file((path / name).read_bytes(), entry) for name, entry in manifest["files"].items()}
    for section in manifest["tensors"].values():
        for chunk in (chunk for tensor in section.values() for chunk in tensor["chunks"]):
            content = (path / chunk["file"]).read_bytes()
            start, stop = begins[chunk["file"]].get(chunk["entry"], (0, 0))
            if chunk["hashes"]:
                chunk["hashes"] = [xxhash.xxh3_128_hexdigest(content[start:stop])]
    change(manifest)
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_text(json.dumps({"manifest_sha256": sha256(text).hexdigest()}))


def _reseal_file(content: bytes, entry: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Corrects a file's entry in the manifest; returns the byte span of each tensor if the header can be parsed."""
    entry["bytes"] = len(content)
    if "sha256" in entry:
        entry["sha256"] = sha256(content).hexdigest()
    if "header_xxh3" not in entry:
        return {}
    begin = 8 + int.from_bytes(content[:8], "little")
    entry["header_xxh3"] = xxhash.xxh3_128_hexdigest(content[:begin])
    try:
        header = json.loads(content[8:begin])
        spans = {name: [begin + int(at) for at in x["data_offsets"]] for name, x in header.items() if "dtype" in x}
    except (ValueError, RecursionError, AttributeError, KeyError):
        return {}
    return {name: (start, stop) for name, (start, stop, *_) in spans.items()}


def tensors_of_every_kind() -> dict[str, Tensor]:
    torch.manual_seed(0)
    bits = torch.randint(0, 256, (6, 16), dtype=torch.uint8)
    made = {f"{dtype}".replace("torch.", ""): bits.view(dtype) for dtype in (*DTYPES, *INTEGERS[:-1])}
    made |= {
        "bool": bits > 127,
        "nan": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        "empty": torch.zeros(0, 3),
        "0-d": torch.tensor(3.5),
        "transposed": torch.randn(4, 3).t(),
        "a view": torch.randn(10)[2:5],
        "one of a column": torch.randn(3, 2)[:1, 0],  # contiguous, and its stride is 2
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    return made


def same(a: Tensor, b: Tensor) -> bool:
    """True if dtype, shape and all bits are equal, including NaNs."""
    bits = [x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def state_of(folder: Path) -> float | None:
    """Returns the step of the state that a resume would load; None if there is no checkpoint."""
    path, _ = newest(folder)
    if path is None:
        return None
    (step,) = steps_in(read(path))
    return step


class Bomb:
    """Object whose pickle creates the file `marker` when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


class Killed(BaseException):
    """Simulated death of the process; a BaseException, so that no `except Exception` handles it."""


class Disk:
    """Replacement for the operations of `ddpforge.disk` that fails at operation `at`.

    `failure` is the kind of failure. "kill": completed operations persist, a write is cut in half. "power": also, each
    file without fsync keeps only its first half. "power, names lost": also, new files and renames in folders without
    fsync are undone. "full": this and all later writing operations fail with ENOSPC. With `rank`, only threads of
    this rank of a `World` count operations and fail.
    """

    def __init__(self, at: int, failure: str, *, ignores: tuple[str, ...] = (), rank: int | None = None) -> None:
        self.at, self.failure, self.ignores, self.rank = at, failure, ignores, rank
        self.count, self.failed = 0, False
        self._unsynced: set[Path] = set()
        self._undo: list[tuple[Path, Callable[[], None]]] = []  # with the folder whose fsync makes the change durable
        self._real = {name: getattr(disk, name) for name in OPERATIONS}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in OPERATIONS:
            patch.setattr(disk, name, self._operation(name))

    def _operation(self, name: str) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            if self.rank is not None and not threading.current_thread().name.endswith(f"rank-{self.rank}"):
                return self._real[name](*arguments)
            self.count += 1
            if self.count == self.at:
                self.failed = True
                if name == "write":
                    file, data = arguments
                    self._real["write"](file, data[: len(data) // 2])
                    file.flush()
                if self.failure.startswith("power"):
                    self.lose_power()
            if self.failed and self.failure != "full":
                raise Killed
            if self.count == self.at or (self.failed and name in ("make_folder", "create", "write", "sync")):
                raise OSError(errno.ENOSPC, "No space left on device")
            return None if name in self.ignores else getattr(self, f"_{name}")(*arguments)

        return act

    def _make_folder(self, path: Path) -> None:
        self._real["make_folder"](path)
        self._undo.append((path.parent, lambda: shutil.rmtree(path)))

    def _create(self, path: Path) -> BinaryIO:
        self._unsynced.add(path)
        self._undo.append((path.parent, path.unlink))
        return self._real["create"](path)  # type: ignore[no-any-return]

    def _write(self, file: BinaryIO, data: bytes) -> None:
        self._real["write"](file, data)

    def _sync(self, file: BinaryIO) -> None:
        file.flush()
        self._unsynced.discard(Path(file.name))

    def _sync_folder(self, path: Path) -> None:
        self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]

    def _rename(self, old: Path, new: Path) -> None:
        replaced = new.read_bytes() if new.is_file() else None

        def undo() -> None:
            new.rename(old)
            if replaced is not None:
                new.write_bytes(replaced)

        self._real["rename"](old, new)
        self._unsynced = {new / path.relative_to(old) if path.is_relative_to(old) else path for path in self._unsynced}
        self._undo.append((new.parent, undo))

    def _remove(self, path: Path) -> None:
        self._real["remove"](path)

    def lose_power(self) -> None:
        for path in filter(Path.exists, self._unsynced):
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2])
        if self.failure == "power, names lost":
            for _, undo in reversed(self._undo):
                undo()
