"""Prepares torch for the pretended CUDA device, in every Python process that has this folder on PYTHONPATH.

PRETEND_CUDA_KERNELS names the library with CPU kernels. If kernels are only counted, it is absent, and
PRETEND_CUDA_COLLECTIVES names the library with collectives that are counted, too.
"""

import ctypes
import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_GLOO = "cuda:gloo,cpu:gloo"


def _prepare_torch(torch: ModuleType) -> None:
    torch.backends.cudnn.enabled = False  # a library without a pretended form
    torch.backends.cuda.enable_cudnn_sdp(False)
    if kernels := os.environ.get("PRETEND_CUDA_KERNELS"):
        torch.backends.cuda.enable_flash_sdp(False)  # these two have no kernels for the CPU
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        ctypes.CDLL(kernels).use_cpu_kernels()
    elif collectives := os.environ.get("PRETEND_CUDA_COLLECTIVES"):
        ctypes.CDLL(collectives).count_collectives()
    _gloo_for_nccl(torch)


def _gloo_for_nccl(torch: ModuleType) -> None:
    """Lets gloo answer for NCCL, which needs a device: it copies through the host."""
    groups = torch.distributed.distributed_c10d

    def over_gloo(call: Any) -> Any:
        @functools.wraps(call)
        def called(*args: Any, **options: Any) -> Any:
            if "nccl" in str(options.get("backend")):
                options["backend"] = _GLOO
            return call(*(_GLOO if isinstance(one, str) and "nccl" in one else one for one in args), **options)

        return called

    for name in ("init_process_group", "new_group"):
        replaced = over_gloo(getattr(groups, name))
        setattr(groups, name, replaced)
        setattr(torch.distributed, name, replaced)


def _prepare_reduction(reduction: Any) -> None:
    """Adds up on the host the row of numbers that ranks share, with their requests to stop: kernels compute nothing."""
    import torch

    on_device = reduction._joined

    def joined(values: Any) -> Any:
        values = list(values)
        on_device(values)  # counts
        rows = [torch.as_tensor(value).detach().to("cpu", torch.float64).reshape(-1) for value in values]
        return torch.cat(rows)

    reduction._joined = joined


def _prepare_collectives(collectives: Any) -> None:
    """Sends that row over gloo: ranks need each other's numbers, and collectives on the device send nothing."""
    collectives.ProcessGroup._add_up = collectives.ProcessGroup._add_up_on_host


def _prepare_probe(probe: Any) -> None:
    """Leaves out the comparison of an optimizer's steps on a shard and on the whole: kernels compute nothing."""
    probe.check_same_update = lambda *_, **__: None


_PREPARED: dict[str, Callable[[Any], None]] = {"torch": _prepare_torch}
if "PRETEND_CUDA_KERNELS" not in os.environ:
    _PREPARED["ddpforge.ranks.metric_reduction"] = _prepare_reduction
    _PREPARED["ddpforge.ranks.collectives"] = _prepare_collectives
    _PREPARED["ddpforge.strategies.optimizer_probe"] = _prepare_probe


class _Prepared(importlib.abc.MetaPathFinder):
    """Finds a module as usual, and prepares it after it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _PREPARED:
            return None
        prepare = _PREPARED.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            prepare(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "pretend_cuda" in os.environ.get("LD_PRELOAD", ""):
    sys.meta_path.insert(0, _Prepared())
