"""Kinds of devices that ranks compute on: memory, streams, random numbers and process groups of each.

CPU and CUDA are here. Another kind is a plugin in the entry-point group `ddpforge.device`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from ddpforge.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "CPU",
    "CUDA",
    "DeviceKind",
    "active_kind",
    "add_device_kind",
    "device_kind",
    "device_kinds",
    "in_float64",
]


class DeviceKind:
    """One kind of devices, such as all CUDA devices of a machine.

    The methods call `torch.get_device_module(type)`. By torch's convention this module of a backend has the functions
    of `torch.cuda`: a plugin sets the attributes, and overrides the methods for functions that its module lacks.
    Methods that take a `torch.device` are called with devices of this kind that have an index.
    """

    name: ClassVar[str]
    """Value of `train.device`."""
    type: ClassVar[str] = ""
    """torch's name, such as in `torch.device("cuda")`; empty: `name`."""
    noun: ClassVar[str] = "an accelerator"
    """Name of one device in messages, with its article."""
    backend: ClassVar[str | None] = None
    """Backend of torch.distributed for tensors on the device, such as "nccl"; None: a run has one process."""
    visible: ClassVar[str | None] = None
    """Environment variable that lists the visible devices, such as CUDA_VISIBLE_DEVICES."""
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    """Values of `train.precision` that work."""
    has_float64: ClassVar[bool] = True
    """Tensors on the device may be float64. Otherwise losses and metrics are added on the host, which waits."""
    pins: ClassVar[bool] = True
    """Copies from page-locked host memory are asynchronous."""
    has_streams: ClassVar[bool] = True
    """Copies on another stream overlap with computation."""
    fuses_optimizers: ClassVar[bool] = False
    """torch's SGD and AdamW have `fused = true`, and skip their step if `found_inf` is set, without a wait."""
    synchronizes_batchnorm: ClassVar[bool] = False
    """torch.nn.SyncBatchNorm works."""
    profiler_activity: ClassVar[str | None] = "PrivateUse1"
    """Name of the kind's `torch.profiler.ProfilerActivity`; None if the profiler sees only the host."""
    is_host: ClassVar[bool] = False
    """The device is the CPU: its memory is the host's, and no operation is asynchronous."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.type = cls.__dict__.get("type") or cls.__dict__.get("name") or cls.type

    @property
    def widest_float(self) -> torch.dtype:
        """Returns the floating-point dtype of the device with the most digits: float64, or float32."""
        import torch

        return torch.float64 if self.has_float64 else torch.float32

    @property
    def module(self) -> Any:
        """Returns torch's module with the functions of this kind, such as `torch.cuda`."""
        import torch

        return torch.get_device_module(self.type)

    # -- devices of this machine
    def is_available(self) -> bool:
        """True if torch can use a device of this kind."""
        import torch

        return hasattr(torch, self.type) and bool(self.module.is_available())

    def is_active(self) -> bool:
        """True if this process already uses a device of this kind."""
        return self.type in sys.modules["torch"].__dict__ and bool(self.module.is_initialized())

    def why_unavailable(self) -> str:
        """Returns the reason why `is_available` is False."""
        import torch

        return f"torch {torch.__version__} finds no {self.type} device"

    def count(self) -> int:
        """Returns the number of devices that this process sees. Must not use one: ranks may be forked later."""
        import torch

        return int(self.module.device_count()) if hasattr(torch, self.type) else 0

    def product(self, device: torch.device) -> str | None:
        """Returns the product name of a device; None if there is none."""
        return str(self.module.get_device_name(device))

    def identity(self, device: torch.device) -> list[Any] | None:
        """Returns values for JSON that no other device of the host has; None if ranks may share the device."""
        unique = getattr(self.module.get_device_properties(device), "uuid", None)
        return [str(unique), os.environ.get(self.visible or ""), device.index]

    def current(self) -> int | None:
        """Returns the index of the device that this thread uses by default; None if there is only one."""
        return int(self.module.current_device())

    def make_current(self, index: int | None) -> None:
        """Makes a device the default of this thread; `index` is a result of `current`, or a device's index."""
        if index is not None:
            self.module.set_device(index)

    # -- memory, in bytes
    def peak_memory(self, device: torch.device, *, reserved: bool = False) -> int | None:
        """Returns the largest memory of tensors since `reset_peak_memory`; None if only the process's is known.

        `reserved`: of all memory that torch's allocator has taken from the device.
        """
        found = self.module.max_memory_reserved(device) if reserved else self.module.max_memory_allocated(device)
        return int(found)

    def reset_peak_memory(self, device: torch.device) -> None:
        """Frees unused memory of torch's allocator, and begins to measure the peak anew."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(device)

    def free_memory(self, device: torch.device | None = None) -> tuple[int, int] | None:
        """Returns free and total memory of a device, by default of the current one; None if it is the host's."""
        free, total = self.module.mem_get_info(device)
        return int(free), int(total)

    def unused_memory(self, device: torch.device) -> int:
        """Returns the memory that new tensors may take: free on the device, or reserved by torch's allocator."""
        free, _ = self.free_memory(device) or (0, 0)
        return free + int(self.module.memory_reserved(device))

    def synchronize(self, device: torch.device) -> None:
        """Waits until a device has done all work that is queued."""
        self.module.synchronize(device)

    # -- streams; called only if `has_streams`
    def new_stream(self, device: torch.device) -> Any:
        """Returns a new stream."""
        return self.module.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """Returns the stream on which this thread queues its work."""
        return self.module.current_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context in which this thread queues its work on `stream`."""
        found: AbstractContextManager[Any] = self.module.stream(stream)
        return found

    def new_event(self) -> Any:
        """Returns an event that a stream records. A thread that waits for it should sleep; `query` must not wait."""
        return self.module.Event()

    # -- random numbers
    def seed(self, seed: int, device: torch.device) -> None:
        """Seeds the RNG of one device; called in every step, so it must not wait for the device."""
        self._generator(device).manual_seed(seed)

    def rng_state(self, device: torch.device) -> Tensor:
        """Returns the state of a device's RNG, on the host."""
        return self._generator(device).get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        """Restores a result of `rng_state`."""
        self._generator(device).set_state(state)

    def _generator(self, device: torch.device) -> torch.Generator:
        if not self.module.default_generators:  # CUDA makes them when it begins
            self.module.init()
        found: torch.Generator = self.module.default_generators[device.index or 0]
        return found

    # -- process groups and facts
    @property
    def process_group(self) -> str:
        """Returns the backends of a process group: of the device, and gloo for objects and tensors of the host."""
        return "gloo" if self.is_host else f"{self.type}:{self.backend},cpu:gloo"

    def describe(self) -> list[Mapping[str, Any]]:
        """Returns name and memory of each device, for a run's env.json. Must not begin to use a device."""
        found = map(self.module.get_device_properties, range(self.count()))
        return [{"name": one.name, "memory": one.total_memory} for one in found]


class CPU(DeviceKind):
    """The host's cores."""

    name = "cpu"
    noun = "a CPU"
    backend = "gloo"
    pins = has_streams = False
    profiler_activity = None
    is_host = fuses_optimizers = True

    def is_available(self) -> bool:
        """True on every machine."""
        return True

    def is_active(self) -> bool:
        """False: the host is not an accelerator."""
        return False

    def count(self) -> int:
        """Returns 1: ranks share the host."""
        return 1

    def product(self, device: torch.device) -> str | None:
        """Returns None."""
        return None

    def identity(self, device: torch.device) -> list[Any] | None:
        """Returns None: ranks share the host."""
        return None

    def current(self) -> int | None:
        """Returns None: there is only one."""
        return None

    def peak_memory(self, device: torch.device, *, reserved: bool = False) -> int | None:
        """Returns None: torch does not measure it."""
        return None

    def reset_peak_memory(self, device: torch.device) -> None:
        """Does nothing."""
        pass

    def free_memory(self, device: torch.device | None = None) -> tuple[int, int] | None:
        """Returns None."""
        return None

    def synchronize(self, device: torch.device) -> None:
        """Does nothing: no work is queued."""
        pass

    def _generator(self, device: torch.device) -> torch.Generator:
        import torch

        return torch.default_generator

    def describe(self) -> list[Mapping[str, Any]]:
        """Returns an empty list: env.json has the cores elsewhere."""
        return []


class CUDA(DeviceKind):
    """GPUs of NVIDIA, and in torch's build for ROCm those of AMD, which have the same name there."""

    name = "cuda"
    noun = "a GPU"
    profiler_activity = "CUDA"
    backend = "nccl"  # RCCL under ROCm, by the same name
    visible = "CUDA_VISIBLE_DEVICES"  # ROCm reads it too
    fuses_optimizers = synchronizes_batchnorm = True

    def why_unavailable(self) -> str:
        """Returns the first line of torch's error."""
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} was built without CUDA"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            return str(error).splitlines()[0]
        return "torch gives no reason"

    def new_event(self) -> Any:
        """Returns an event; a thread that waits for it sleeps."""
        return self.module.Event(blocking=True)  # blocking: a waiting thread sleeps


class _Meta(CPU):
    """torch's tensors without memory, for checks: nothing is copied, but reading a number counts as a wait."""

    name = "meta"
    is_host = False


# ---------------------------------------------------------------------------------------------- by name
_META = _Meta()
_KINDS: dict[str, DeviceKind] = {kind.type: kind for kind in (CUDA(), CPU())}


def add_device_kind(kind: DeviceKind) -> None:
    """Makes `device_kind` return `kind` for devices of its type. ddpforge calls it for a plugin that a recipe names."""
    _KINDS[kind.type] = kind


def device_kinds() -> list[DeviceKind]:
    """Returns the known kinds: CUDA, CPU, then kinds of plugins."""
    return [*_KINDS.values()]


def device_kind(device: torch.device | str) -> DeviceKind:
    """Returns the kind of a device, or of torch's name for its type. Raises SetupError if no plugin has added it."""
    type_ = device.partition(":")[0] if isinstance(device, str) else device.type
    kind = _META if type_ == "meta" else _KINDS.get(type_)
    if kind is None:
        raise SetupError(
            f"ddpforge has no device kind for torch's `{type_}`",
            hints=["install a plugin for it, and set train.device to its name; docs/extend/device.md describes one"],
        )
    return kind


def in_float64(values: Tensor) -> Tensor:
    """Returns `values` in float64: on their device, or on the host if the device has no float64, which waits for it."""
    values = values.detach()
    return values.double() if device_kind(values.device).has_float64 else values.cpu().double()


def active_kind() -> DeviceKind | None:
    """Returns the accelerator that this process uses already; None if there is none. Does not import torch."""
    if "torch" not in sys.modules:
        return None
    return next((kind for kind in device_kinds() if kind.is_active()), None)
