"""Offload to NVMe under ZeRO-3: the I/O operation, one folder per rank, and access to its files."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import sysconfig
from collections.abc import Iterable
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpforge.errors import StrategyError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SMALLEST", "Folder", "SwapFiles", "check_root", "is_swapped", "mend_prefetch", "require_io"]

SMALLEST = 1 << 20  # bytes; DeepSpeed leaves smaller tensors in memory


def require_io() -> None:
    """Builds (once per machine) and loads DeepSpeed's asynchronous I/O; raises StrategyError if that fails."""
    builder = import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    # pip installs ninja into the folder of Python. Another ninja would build everything again.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    try:
        builder.load(verbose=False)
    except Exception as error:
        raise StrategyError(
            f"offload to NVMe needs DeepSpeed's async_io operation, but its build failed: {error}",
            hints=[
                "apt-get install libaio-dev g++ && pip install ninja",
                'or offload to memory: "cpu" instead of "nvme"',
            ],
        ) from error


def check_root(root: Path) -> None:
    """Raises StrategyError unless `root` is a writable folder."""
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        raise StrategyError(
            f"strategy.nvme_path = {root} is not a writable folder",
            hints=["name an existing folder on a local NVMe disk"],
        )


class Folder:
    """Folder under `root` that is locked for this process; a later process uses it again."""

    # DeepSpeed names files by rank only, so two runs must not share a folder. It leaves its files behind when it is
    # killed.

    def __init__(self, root: Path) -> None:
        check_root(root)
        for number in count():
            self.path = root / f"ddpforge-{number}"
            self.path.mkdir(exist_ok=True)
            self._lock = (self.path / "lock").open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
            else:
                break
        self._clear()

    def close(self) -> None:
        """Deletes DeepSpeed's files in the folder and releases the lock."""
        self._clear()
        self._lock.close()

    def _clear(self) -> None:
        shutil.rmtree(self.path / "zero_stage_3", ignore_errors=True)


class SwapFiles:
    """Files to which DeepSpeed swaps float32 tensors, as memory-mapped tensors.

    Writes into these tensors reach DeepSpeed only after `flush`.
    """

    # DeepSpeed bypasses the system's page cache. Its writes appear in the cache, but the cache must be flushed for it.

    def __init__(self, zero: Any) -> None:
        self._swapper = zero.optimizer_swapper if zero.swap_optimizer else None
        self._maps: dict[str, mmap.mmap] = {}

    def optimizers(self, flat: Any, tensor: Tensor) -> Tensor:
        """Returns `tensor`, which is `flat` or optimizer state of it; the file instead if it is swapped out."""
        if self._swapper and (info := self._swapper.swap_params_info.get(flat.ds_id)):
            for swapped in info.tensors:
                if swapped.compute_tensor is tensor:
                    return self._map(swapped.swap_path, info.numel())
        return tensor.detach()

    def parameters(self, parameter: Any) -> Tensor:
        """Returns this rank's part of a model's parameter; the file instead if it is swapped out."""
        held: Tensor = parameter.ds_tensor.detach()
        if is_swapped(parameter):
            return self._map(parameter.nvme_swapper.get_path(parameter, must_exist=True), parameter.ds_tensor.ds_numel)
        return held

    def flush(self) -> None:
        """Writes changes of the tensors to the files."""
        for memory in self._maps.values():
            memory.flush()

    def _map(self, path: str, numel: int) -> Tensor:
        if path not in self._maps:
            with open(path, "r+b") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0)
        import torch

        return torch.frombuffer(self._maps[path], dtype=torch.float32, count=numel)


def mend_prefetch(parameters: Iterable[Any]) -> None:
    """Removes duplicates when DeepSpeed swaps parameters in."""
    # DeepSpeed 0.19.8 fails when it prefetches a parameter for the forward and the backward pass at the same time.
    for swapper in {parameter.nvme_swapper for parameter in parameters}:
        theirs = swapper.swap_in
        swapper.swap_in = lambda params, *rest, theirs=theirs, **more: theirs([*dict.fromkeys(params)], *rest, **more)


def is_swapped(parameter: Any) -> bool:
    """True if a parameter of the model is offloaded to NVMe."""
    return bool(getattr(parameter.ds_tensor, "final_location", None) == "nvme")
