"""Chooses the device of a rank from the recipe and the machine, and compares it with the devices of other ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpforge.components.registry import Registry, build
from ddpforge.errors import StrategyError
from ddpforge.interfaces import DeviceKind, add_device_kind, device_kind, device_kinds
from ddpforge.local_world import local_world_size
from ddpforge.machine import has_nvidia_gpu
from ddpforge.recipe.schema import Component

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = [
    *("DeviceCheck", "accelerator_kind", "accelerators", "choose_device", "chosen_kind", "detected_kind"),
    *("device_type", "name_of_device", "named_kind"),
]

_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # lets several ranks share a GPU
_SHARES = (2, 30)  # the first version of NCCL that reads it
_ON_CPU = 'to train on the CPU, set train.device = "cpu"'


def device_type(train: TrainSection) -> str:
    """Returns the name of the kind of devices that ranks on this machine compute on; see `chosen_kind`."""
    return chosen_kind(train).name


def chosen_kind(train: TrainSection) -> DeviceKind:
    """Returns the kind of devices that ranks on this machine compute on.

    `train.device` decides. With "auto": the CPU under `accelerate launch --cpu`, else the machine's accelerator, if
    torch can use one. Raises PluginError if the kind is of a plugin, and cannot be loaded.
    """
    if train.device != "auto":
        return named_kind(train.device)
    return device_kind("cpu") if cpu_requested() else detected_kind()


def detected_kind() -> DeviceKind:
    """Returns the kind of the machine's accelerator if torch can use it, else that of the CPU."""
    return next((kind for kind in _accelerator_kinds() if kind.is_available()), device_kind("cpu"))


def _accelerator_kinds() -> Iterator[DeviceKind]:
    """Yields the kinds of accelerators that ddpforge knows, then that of torch's backend if a plugin has it."""
    known = [kind for kind in device_kinds() if not kind.is_host]
    yield from known
    built = torch.accelerator.current_accelerator()  # packages with a backend of torch register it when torch begins
    if built is None or built.type in {kind.type for kind in known}:
        return
    names = [entry.name for entry in Registry.installed().entries("device") if not entry.is_own]
    yield from (kind for name in names if (kind := named_kind(name)).type == built.type)


def named_kind(name: str) -> DeviceKind:
    """Returns the kind that a recipe names, of ddpforge or of a plugin; raises PluginError if there is none."""
    if found := next((kind for kind in device_kinds() if kind.name == name), None):
        return found
    kind: DeviceKind = build(Registry.installed(), "device", Component(use=name))
    add_device_kind(kind)
    return kind


def accelerators() -> int:
    """Returns the number of this machine's accelerators; 0 if it has only the CPU."""
    kind = accelerator_kind()
    return kind.count() if kind else 0


def accelerator_kind() -> DeviceKind | None:
    """Returns the kind of this machine's accelerators; None if it has only the CPU."""
    # `count` does not begin to use a device, so that processes may still be forked. `is_available` may.
    return next((kind for kind in _accelerator_kinds() if kind.count()), None)


def name_of_device(device: torch.device) -> str | None:
    """Returns a device's product name; None for a CPU."""
    return device_kind(device).product(device)


def cpu_requested() -> bool:
    """True if `accelerate launch` was started with the option not to use GPUs."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"


def choose_device(name: str, *, asked: bool) -> torch.device:
    """Returns this rank's device of the kind `name`.

    `asked`: the user chose the kind; otherwise it was detected. Raises StrategyError if torch cannot use the device, if
    a machine with a GPU was detected as "cpu" for this reason, or if there are fewer devices than ranks.
    """
    kind = named_kind(name)
    if kind.is_host:
        cuda = device_kind("cuda")
        if not asked and not cuda.is_available() and (sign := _sign_of_gpu()):
            raise StrategyError(f"{sign}, but torch cannot use it: {cuda.why_unavailable()}", hints=[_ON_CPU])
        return torch.device(kind.type)
    if not kind.is_available():
        raise StrategyError(
            f'train.device = "{name}", but torch cannot use {kind.noun}: {kind.why_unavailable()}', hints=[_ON_CPU]
        )

    count, local = kind.count(), int(os.environ.get("LOCAL_RANK", "0"))
    ranks = max(local + 1, local_world_size())
    total = max(ranks, int(os.environ.get("WORLD_SIZE", "1")))
    if kind.backend is None and total > 1:
        raise StrategyError(
            f'{total} processes cannot train on train.device = "{name}": {kind.noun} trains with one process, because '
            "torch has no collectives for it",
            hints=["start one process: ddpforge run RECIPE", _ON_CPU],
        )
    if ranks > count > 1:  # with one visible GPU, each rank may see a different one
        raise StrategyError(
            f"{ranks} processes would share {count} GPUs, but each process needs its own GPU",
            hints=[f"ddpforge launch RECIPE --nproc {count}", _ON_CPU],
        )
    return torch.device(kind.type, local if local < count else 0)


def _sign_of_gpu() -> str | None:
    """Describes a sign that the machine has a GPU; None if there is no sign."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return None if visible.strip() in _HIDDEN else f"CUDA_VISIBLE_DEVICES={visible} names a GPU"
    return "this machine has a GPU" if has_nvidia_gpu() else None


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
        mine = {"kind": device.type, "host": gethostname(), "gpu": device_kind(device).identity(device)}
        self._store.set(f"ddpforge/device/{rank}", json.dumps(mine))
        check([json.loads(self._store.get(f"ddpforge/device/{rank}")) for rank in range(size)])


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
