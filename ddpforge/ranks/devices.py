"""Chooses the device of a rank from the recipe and the machine, and compares it with the devices of other ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpforge.errors import StrategyError
from ddpforge.local_world import local_world_size
from ddpforge.machine import has_nvidia_gpu

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["DeviceCheck", "choose_device", "device_type", "name_of_device"]

_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # lets several ranks share a GPU
_SHARES = (2, 30)  # the first version of NCCL that reads it
_ON_CPU = 'to train on the CPU, set train.device = "cpu"'


def device_type(train: TrainSection) -> str:
    """Returns the type of device that ranks on this machine compute on, "cuda" or "cpu".

    `train.device` decides. With "auto": the CPU under `accelerate launch --cpu`, else a GPU if there is one.
    """
    if train.device != "auto":
        return train.device
    return "cuda" if torch.cuda.is_available() and not cpu_requested() else "cpu"


def name_of_device(device: torch.device) -> str | None:
    """Returns a GPU's product name; None for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def cpu_requested() -> bool:
    """True if `accelerate launch` was started with the option not to use GPUs."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"


def choose_device(kind: str, *, asked: bool) -> torch.device:
    """Returns this rank's device of the `kind` "cuda" or "cpu".

    `asked`: the user chose the kind; otherwise it was detected. Raises StrategyError if torch cannot use the GPU, if
    a machine with a GPU was detected as "cpu" for this reason, or if there are fewer GPUs than ranks.
    """
    if kind == "cpu" and not asked and not torch.cuda.is_available() and (sign := _sign_of_gpu()):
        raise StrategyError(f"{sign}, but torch cannot use it: {_why_not()}", hints=[_ON_CPU])
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StrategyError(f'train.device = "cuda", but torch cannot use a GPU: {_why_not()}', hints=[_ON_CPU])

    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    ranks = max(local + 1, local_world_size())
    if ranks > count > 1:  # with one visible GPU, each rank may see a different one
        raise StrategyError(
            f"{ranks} processes would share {count} GPUs, but each process needs its own GPU",
            hints=[f"ddpforge launch RECIPE --nproc {count}", _ON_CPU],
        )
    return torch.device("cuda", local if local < count else 0)


def _sign_of_gpu() -> str | None:
    """Describes a sign that the machine has a GPU; None if there is no sign."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return None if visible.strip() in _HIDDEN else f"CUDA_VISIBLE_DEVICES={visible} names a GPU"
    return "this machine has a GPU" if has_nvidia_gpu() else None


def _why_not() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return str(error).splitlines()[0]
    return "torch gives no reason"


class DeviceCheck:
    """Compares the devices of all ranks before they form a process group, which needs devices of one kind.

    Keeps the store of the comparison alive, because the process group uses it too.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        """Raises StrategyError on every rank if ranks have devices of different kinds, or share a GPU."""
        launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not all(name in os.environ for name in launched):
            return
        self._store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        self._store.set(f"ddpforge/device/{rank}", json.dumps(_describe(device)))
        check([json.loads(self._store.get(f"ddpforge/device/{rank}")) for rank in range(size)])


def _describe(device: torch.device) -> dict[str, Any]:
    """Describes this rank's device for the other ranks."""
    gpu = None
    if device.type == "cuda":
        gpu = [str(torch.cuda.get_device_properties(device).uuid), os.environ.get("CUDA_VISIBLE_DEVICES"), device.index]
    return {"kind": device.type, "host": gethostname(), "gpu": gpu}


def check(ranks: list[Mapping[str, Any]]) -> None:
    """Raises StrategyError unless all ranks have devices of one kind, and no two ranks have the same GPU."""
    kinds = {found["kind"]: (rank, found["host"]) for rank, found in reversed([*enumerate(ranks)])}
    if len(kinds) > 1:
        where = ", ".join(f"rank {rank} on {host} has {kind}" for kind, (rank, host) in sorted(kinds.items()))
        raise StrategyError(
            f"ranks compute on different devices: {where}",
            hints=['set train.device = "cuda" to see why a GPU is not used', _ON_CPU],
        )
    allowed = os.environ.get(_SHARED_GPU) == "1"
    version = torch.cuda.nccl.version() if allowed else ()  # type: ignore[no-untyped-call]
    if allowed and version >= _SHARES:
        return
    owner: dict[str, int] = {}
    for rank, found in enumerate(ranks):
        if found["gpu"] and (first := owner.setdefault(json.dumps([found["host"], found["gpu"]]), rank)) != rank:
            own = len({json.dumps(each["gpu"]) for each in ranks if each["host"] == found["host"]})
            old = f"; NCCL {'.'.join(map(str, version))} ignores {_SHARED_GPU}, NCCL 2.30 does not" if allowed else ""
            raise StrategyError(
                f"ranks {first} and {rank} would share a GPU of {found['host']}, but each rank needs its own GPU{old}",
                hints=[f"ddpforge launch RECIPE --nproc {own}", _ON_CPU],
            )
