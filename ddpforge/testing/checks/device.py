"""Checks of kinds of devices: the name, and if this machine has such a device: memory, copies and random numbers."""

from __future__ import annotations

from typing import Any

from ddpforge.interfaces import DeviceKind, add_device_kind
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable

_PRECISIONS = {"fp32", "bf16", "fp16"}
_ELEMENTS = 1 << 20  # 4 MiB of float32


@check("own-name", "device")
def own_name(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that `name` is the registered one: `train.device` has it, and the kind is found by it."""
    kind: DeviceKind = case.build()
    if ":" in case.use:
        raise NotApplicable("it is not registered")
    if kind.name != case.name:
        raise Breach(f'`name = "{case.name}"`, as it is registered', f"{kind.name!r}")


@check("declared", "device")
def declared(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that precisions are known ones, and that the reason for a missing device is a text."""
    kind: DeviceKind = case.build()
    if not kind.precisions or not {*kind.precisions} <= _PRECISIONS:
        raise Breach(f"`precisions` from {', '.join(sorted(_PRECISIONS))}", f"{kind.precisions!r}")
    if not kind.is_available() and not kind.why_unavailable().strip():
        raise Breach("a reason in `why_unavailable`, if `is_available` is False", "an empty text")


@check("same-numbers", "device")
def same_numbers(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that `seed` and `set_rng_state` make a device repeat its random numbers."""
    import torch

    kind, device = _on_machine(case)
    kind.seed(7, device)
    state, first = kind.rng_state(device), torch.rand(8, device=device).cpu()
    kind.set_rng_state(state, device)
    again = torch.rand(8, device=device).cpu()
    kind.seed(7, device)
    for how, found in (("`set_rng_state`", again), ("`seed`", torch.rand(8, device=device).cpu())):
        if not torch.equal(first, found):
            raise Breach(f"the same random numbers after {how}", f"{found[:3].tolist()}, not {first[:3].tolist()}")


@check("copies", "device")
def copies(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that batches arrive, from page-locked memory and over another stream if the kind has these."""
    import torch

    from ddpforge.api import to_device
    from ddpforge.data.pytree import pinned

    kind, device = _on_machine(case)
    batch: Any = {"x": torch.arange(_ELEMENTS, dtype=torch.float32)}
    there = to_device(pinned(batch) if kind.pins else batch, device)["x"]
    doubled = (there * 2).cpu()
    event = kind.current_stream(device).record_event(kind.new_event()) if kind.has_streams else None
    kind.synchronize(device)
    if event is not None and event.query() is not True:
        raise Breach("an event whose `query()` is True after `synchronize`", f"{event.query()!r}")
    if there.device.type != device.type or not torch.equal(doubled, batch["x"] * 2):
        raise Breach("a batch on the device with its numbers", f"a tensor on {there.device} with other numbers")


@check("measures-memory", "device")
def measures_memory(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the peak contains a tensor of the device, and that free memory is at most the total."""
    import torch

    kind, device = _on_machine(case)
    if kind.is_host:
        raise NotApplicable("its memory is the host's")
    kind.reset_peak_memory(device)
    held = torch.zeros(_ELEMENTS, device=device)
    peak = kind.peak_memory(device)
    if peak is not None and peak < held.nbytes:
        raise Breach(f"a peak of at least {held.nbytes} bytes, with a tensor of that size", f"{peak} bytes")
    free, total = kind.free_memory(device) or (0, 0)
    if free > total:
        raise Breach("free memory of at most the total", f"{free} of {total} bytes")


def _on_machine(case: Case) -> tuple[DeviceKind, Any]:
    """Returns the kind, and a device of it; raises NotApplicable if this machine has none."""
    import torch

    kind: DeviceKind = case.build()
    if not kind.is_available():
        raise NotApplicable(f"no such device: {kind.why_unavailable()}")
    device = torch.device(kind.type) if kind.is_host else torch.device(kind.type, 0)
    add_device_kind(kind)
    return kind, device
