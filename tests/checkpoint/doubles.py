"""Checkpoints whose every value tells their step, and a disk that dies on demand."""

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from ddpforge.checkpoint import Checkpoint, files
from ddpforge.interfaces import CanonicalState

OPERATIONS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove")


def checkpoint_of(step: int, **changes: Any) -> Checkpoint:
    """A small checkpoint in which every number is `step`."""
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
    """All the numbers in what `checkpoint_of` made; more than one means a mixture."""
    owners: list[Mapping[str, Any]] = [
        checkpoint.state.model,
        *checkpoint.state.optimizer.values(),
        *checkpoint.callbacks.values(),
    ]
    numbers = {float(x) for owner in owners for value in owner.values() for x in torch.as_tensor(value).flatten()}
    return numbers | {checkpoint.step, checkpoint.samples, checkpoint.metrics["eval/loss"]}


class Killed(BaseException):
    """The process is no more; no handler for errors may run."""


class Disk:
    """Stands behind `ddpforge.checkpoint.files` and fails at the k-th operation.

    `failure` says how. "kill": what was done is there, a write is torn. "power": also, whatever was not fsynced has
    only its first half. "power, names lost": also, files and renames in folders that were not fsynced are undone.
    "full": the operation fails with ENOSPC, and so does all writing after it.
    """

    def __init__(self, at: int, failure: str, *, ignores: tuple[str, ...] = ()) -> None:
        self.at, self.failure, self.ignores = at, failure, ignores
        self.count, self.failed = 0, False
        self._unsynced: set[Path] = set()
        self._undo: list[tuple[Path, Callable[[], None]]] = []  # by the folder whose fsync makes it last
        self._real = {name: getattr(files, name) for name in OPERATIONS}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in OPERATIONS:
            patch.setattr(files, name, self._operation(name))

    def _operation(self, name: str) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
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
