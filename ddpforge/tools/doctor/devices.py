"""The GPUs of a machine, and what torch can do with them."""

from __future__ import annotations

from collections.abc import Iterator

from ddpforge.errors import StrategyError
from ddpforge.tools.doctor.findings import Finding, error, ok, warning

__all__ = ["devices"]


def devices() -> Iterator[Finding]:
    """Names the GPUs, or says why torch cannot use one that is there."""
    import torch

    from ddpforge.ranks.devices import choose_device

    if not torch.cuda.is_available():
        try:
            choose_device("cpu", asked=False)
        except StrategyError as unusable:
            yield error(unusable.message, "; ".join(unusable.hints))
        else:
            yield ok("no GPU: ranks train on the CPU, and talk over gloo")
        return
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    kinds = {f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus}
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield ok(f"{len(gpus)} GPUs: {', '.join(sorted(kinds))}; CUDA {torch.version.cuda}, NCCL {nccl or 'is missing'}")
    if nccl is None and len(gpus) > 1:
        yield error("torch has no NCCL, by which GPUs talk", "install a build of torch for CUDA")
    if len(kinds) > 1:
        yield warning("GPUs are not of one kind: all wait for the slowest", "CUDA_VISIBLE_DEVICES chooses among them")
