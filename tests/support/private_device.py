"""A device of its own for tests, in torch's slot for backends of other packages, and its kind for ddpforge.

Its tensors are not CPU tensors: torch refuses to mix them with tensors of the host, as on a GPU. They wrap CPU tensors,
on which operators run. Like Apple's GPU the device lacks float64. Reads by the host are written to PRIVATE_READS.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ddpforge.checkpoint import safetensors_writer, state
from ddpforge.interfaces import DeviceKind

NAME = "toyacc"
_generator = torch.Generator()
_setup_privateuseone_for_python_backend(
    NAME,
    SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda index: None,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
        get_device_name=lambda device: "Toy accelerator",
        get_device_properties=lambda device: SimpleNamespace(name="Toy accelerator", total_memory=8 << 30),
        synchronize=lambda device: _note("synchronize"),
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: 3 << 30,
        max_memory_reserved=lambda device: 4 << 30,
        memory_reserved=lambda device: 4 << 30,
        mem_get_info=lambda device: (4 << 30, 8 << 30),
        default_generators=[_generator],
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    ),
)


def _note(what: str) -> None:
    if account := os.environ.get("PRIVATE_READS"):
        with Path(account).open("a") as file:
            file.write(f"{what}\n")


class There(torch.Tensor):
    """A tensor of the device."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: Any, raw: torch.Tensor) -> "There":
        if raw.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{NAME} has no {raw.dtype}")
        made: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    def tolist(self) -> Any:
        """Returns the numbers; torch's own method refuses subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        to_host = str(kwargs.get("device", NAME)).startswith("cpu")
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not copies and any(not isinstance(x, There) and x.ndim for x in leaves):
            raise RuntimeError(f"{func} mixes tensors of {NAME} and the host")
        if to_host or func is torch.ops.aten._local_scalar_dense.default:
            _note("read")
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], There):
            _note("read")

        inside, options = pytree.tree_map(lambda x: x.raw if isinstance(x, There) else x, (args, dict(kwargs)))
        if "device" in options:
            options["device"] = "cpu"
        if options.get("generator") is None and torch.Tag.nondeterministic_seeded in func.tags:
            options["generator"] = _generator
        out = func(*inside, **options)
        if to_host:
            return out
        known = {id(x.raw): x for x in leaves if isinstance(x, There)}  # in-place operators return their argument

        def wrapped(x: Any) -> Any:
            return known.get(id(x), There(x)) if isinstance(x, torch.Tensor) else x

        return pytree.tree_map(wrapped, out)


@torch.library.impl("aten::empty.memory_format", "privateuseone")
def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return There(torch.empty(size, dtype=dtype))


@torch.library.impl("aten::empty_strided", "privateuseone")
def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return There(torch.empty_strided(size, stride, dtype=dtype))


# A checkpoint takes no subclasses of Tensor. A real device has none.
_checked = safetensors_writer.check
for _module in (safetensors_writer, state):
    _module.check = lambda tensor, what: None if isinstance(tensor, There) else _checked(tensor, what)


class Private(DeviceKind):
    """Its methods are those of the base class: they call the module of the backend."""

    name = NAME
    noun = "a toy accelerator"
    has_float64 = pins = has_streams = False
    profiler_activity = None
