"""ZeRO-3's offload to NVMe: the operation that it needs, a folder of its own for each rank, and what lies in there."""

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

SMALLEST = 1 << 20  # bytes: what is smaller, DeepSpeed leaves in memory


def require_io() -> None:
    """Builds and loads DeepSpeed's asynchronous I/O, once per machine; raises StrategyError where that fails."""
    builder = import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    # Beside Python is where pip puts ninja. Another one would build everything again: they do not know each other.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    try:
        builder.load(verbose=False)
    except Exception as error:
        raise StrategyError(
            f"offload to NVMe needs DeepSpeed's async_io operation, which cannot be built here: {error}",
            hints=["apt-get install libaio-dev g++ && pip install ninja", 'or offload to memory: "cpu" for "nvme"'],
        ) from error


def check_root(root: Path) -> None:
    """Raises StrategyError unless `root` is a folder that can be written to."""
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        raise StrategyError(
            f"strategy.nvme_path = {root}: there is no folder that can be written to",
            hints=["name an existing folder on a local NVMe disk"],
        )


class Folder:
    """A folder under `root` that no other process uses, for as long as this one lives.

    DeepSpeed names files by rank only, and leaves them behind when it is killed. Whoever comes next uses the same
    folder again.
    """

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
        """Removes what is in the folder, and lets others use it."""
        self._clear()
        self._lock.close()

    def _clear(self) -> None:
        shutil.rmtree(self.path / "zero_stage_3", ignore_errors=True)


class SwapFiles:
    """The files that DeepSpeed swaps float32 tensors to, as tensors: reading and writing them is reading and writing
    the files, of which no more is in memory than the system has room for.

    DeepSpeed goes past the system's cache, which sees what DeepSpeed has written. The other way round, `flush` is
    needed.
    """

    def __init__(self, zero: Any) -> None:
        self._swapper = zero.optimizer_swapper if zero.swap_optimizer else None
        self._maps: dict[str, mmap.mmap] = {}

    def optimizers(self, flat: Any, tensor: Tensor) -> Tensor:
        """A tensor that the optimizer updates, or keeps of `flat`: its file if it is swapped out, else itself."""
        if self._swapper and (info := self._swapper.swap_params_info.get(flat.ds_id)):
            for swapped in info.tensors:
                if swapped.compute_tensor is tensor:
                    return self._map(swapped.swap_path, info.numel())
        return tensor.detach()

    def parameters(self, parameter: Any) -> Tensor:
        """A rank's part of a parameter of the model."""
        held: Tensor = parameter.ds_tensor.detach()
        if is_swapped(parameter):
            return self._map(parameter.nvme_swapper.get_path(parameter, must_exist=True), parameter.ds_tensor.ds_numel)
        return held

    def flush(self) -> None:
        """Writes to the files what was written to the tensors."""
        for memory in self._maps.values():
            memory.flush()

    def _map(self, path: str, numel: int) -> Tensor:
        if path not in self._maps:
            with open(path, "r+b") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0)
        import torch

        return torch.frombuffer(self._maps[path], dtype=torch.float32, count=numel)


def mend_prefetch(parameters: Iterable[Any]) -> None:
    """DeepSpeed 0.19.8 fails when it prefetches a parameter for the forward and the backward pass at once."""
    for swapper in {parameter.nvme_swapper for parameter in parameters}:
        theirs = swapper.swap_in
        swapper.swap_in = lambda params, *rest, theirs=theirs, **more: theirs([*dict.fromkeys(params)], *rest, **more)


def is_swapped(parameter: Any) -> bool:
    """True if a parameter of the model waits on NVMe."""
    return bool(getattr(parameter.ds_tensor, "final_location", None) == "nvme")
