"""Model FLOPs utilization in the rows of a run: `perf/mfu`, without options."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from ddpforge import disk
from ddpforge.errors import UsageError
from ddpforge.features.peak_flops import peak_of
from ddpforge.features.plan_process import PlanProcess
from ddpforge.interfaces import Callback, RunContext, StepInfo, device_kind
from ddpforge.recipe import Recipe
from ddpforge.runs.folder import RunFolder
from ddpforge.training.features import Assembled, Feature, OwnedState

__all__ = ["Utilization", "UtilizationRows", "compute_dtype"]

log = logging.getLogger("ddpforge")

_NAME = "?utilization"
_FILE = "flops.json"  # in the run's folder
_NICE = 10  # a process with 19 would get nothing next to busy loader processes


class Utilization(Feature):
    """FLOPs of a step, counted once by `ddpforge plan`, as a fraction of the peak of the devices."""

    def __init__(self, recipe: Recipe, stated: tuple[str, float] | None) -> None:
        self._recipe, self._stated = recipe, stated

    @classmethod
    @override
    def of(cls, run: Assembled) -> Self | None:
        callbacks = run.parts.callbacks
        if not run.trains or any(getattr(one, "flops_per_sample", None) for one in callbacks.values()):
            return None  # a callback computes it from its own options
        peaks = ((name, getattr(one, "peak_flops", None)) for name, one in callbacks.items())
        stated = next(((name, float(peak)) for name, peak in peaks if peak), None)
        return None if stated is None and device_kind(run.world.device).is_host else cls(run.parts.recipe, stated)

    @override
    def callbacks(self) -> Mapping[str, Callback]:
        return {_NAME: UtilizationRows(self._recipe, self._stated)}


class UtilizationRows(OwnedState):
    """Adds `perf/mfu` to the rows of rank 0 as soon as the FLOPs are counted.

    A process of low priority counts them; the file flops.json in the run's folder keeps the result for further
    attempts. Nothing waits for it, and a device without a known peak starts no process.

    Args:
        stated: name of a callback with the option `peak_flops`, and its value; it replaces the table's.
    """

    def __init__(self, recipe: Recipe, stated: tuple[str, float] | None = None) -> None:
        self._recipe, self._stated = recipe, stated
        self._peak: float | None = None  # of all devices together
        self._per_sample: float | None = None
        self._process: PlanProcess | None = None

    @override
    def restore(self, state: Mapping[str, Any] | None, is_another: Callable[[], bool]) -> None:
        """Restores nothing: the callback has no state."""

    @override
    def on_start(self, run: RunContext) -> None:
        folder, world = RunFolder(run.folder), run.world
        if not world.is_rank_zero or not folder.resolved.exists():
            return
        kind, dtype = device_kind(world.device), compute_dtype(self._recipe)
        product = kind.product(world.device)
        peak = self._stated[1] if self._stated else peak_of(product, dtype)
        if peak is None:
            if not kind.is_host:
                log.info(
                    "no perf/mfu: the peak speed of %s in %s is not known; set peak_flops in [callbacks.throughput]",
                    *(product, dtype),
                )
            return
        if self._recipe.train.max_tokens:
            log.info("no perf/mfu: with train.max_tokens the FLOPs of a sample depend on the others of its batch")
            return
        self._ranks = world.global_ranks.size
        self._peak, self._file, self._plan = peak * self._ranks, folder.path / _FILE, folder.resolved
        text = folder.resolved.read_bytes()
        self._digest = f"sha256:{hashlib.sha256(text).hexdigest()}, ranks: {self._ranks}"
        if (found := _read(self._file)).get("of") == self._digest:
            self._use(found)
        else:  # recomputed activations are not FLOPs of the model
            self._process = PlanProcess(self._plan, self._ranks, "train.activation_checkpointing=false")
            self._process.give_way(_NICE)

    @override
    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        """Returns the column of this row, from the speed since the row before."""
        if self._process is not None and self._process.is_over:
            self._finish(self._process.said())
        if self._per_sample is None or self._peak is None:
            return {}
        share = self._per_sample * info.metrics["train/samples_per_second"] / self._peak
        if share <= 1:
            return {"perf/mfu": share}
        self._per_sample = None
        return self._reject(share)

    @override
    def on_end(self, error: BaseException | None) -> None:
        """Ends the count if it is still running; the next attempt begins anew."""
        if self._process is not None:
            self._process.end()

    def _finish(self, plans: list[dict[str, Any]]) -> None:
        self._process = None
        plan = plans[0] if plans else {}
        found: dict[str, Any] = {"of": self._digest, "flops_per_sample": None, "why": ""}
        if plan.get("model_flops"):
            found["flops_per_sample"] = plan["model_flops"] / plan["batch"]["global_batch"]
        else:
            found["why"] = plan.get("unsimulated") or f"see `ddpforge plan {self._plan} --ranks {self._ranks}`"
        try:
            disk.replace(self._file, f"{json.dumps(found, indent=2)}\n".encode())
        except OSError as error:  # the next attempt counts again
            log.warning("%s was not written: %s", self._file, error)
        self._use(found)

    def _use(self, found: Mapping[str, Any]) -> None:
        self._per_sample = found.get("flops_per_sample")
        if self._per_sample is None:
            log.info("no perf/mfu: the FLOPs of a step could not be counted: %s", found.get("why"))

    def _reject(self, share: float) -> Mapping[str, float]:
        """Raises UsageError for a stated peak that the run exceeds; for that of the table logs a warning instead."""
        if self._stated is None:
            log.warning("no perf/mfu any more: it was %.2f, so the device is faster than its data sheet", share)
            return {}
        key = f"callbacks.{self._stated[0]}.peak_flops"
        raise UsageError(
            f"{key} = {self._stated[1]:g} cannot be the peak of this device: the run has {share:.2f} times as many "
            "FLOPs per second",
            hints=["state the dense peak of one device in the compute dtype, from its data sheet, or remove the key"],
            key=key,
        )


def compute_dtype(recipe: Recipe) -> str:
    """Returns the dtype of matrix products: "fp8", "bf16", "fp16", "tf32" or "fp32"."""
    train = recipe.train
    if train.fp8 != "off":
        return "fp8"
    return "tf32" if train.precision == "fp32" and train.tf32 else train.precision


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
