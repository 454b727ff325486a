"""Forecasts memory, work and time of a recipe under a strategy: by simulation if possible, else by arithmetic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ddpforge.api import Built, build_optimizer, build_without_ranks, contract_of, find_blocks
from ddpforge.components.registry import Registry, without_warnings
from ddpforge.errors import ForgeError
from ddpforge.interfaces import Task
from ddpforge.recipe import load_recipe
from ddpforge.strategies.composite_optimizer import member_optimizers
from ddpforge.tools.parity.specs import Spec
from ddpforge.tools.simulation.devices import Device, Seconds
from ddpforge.tools.simulation.fake import Post, fake_mode, fake_world, without_memory
from ddpforge.tools.simulation.simulate import Simulated, simulate

__all__ = ["Forecast", "allowance", "forecast"]

log = logging.getLogger("ddpforge")

_CONTEXT = 1.5 * 2**30  # bytes that CUDA, cuBLAS and NCCL take before the first tensor
_FRAGMENTS = 0.1  # share of live memory that the caching allocator loses to fragmentation
_PLANNED = {"compile": "off", "device": "auto", "fp8": "off", "sync_batchnorm": False}  # replaces the recipe's values


@dataclass
class Forecast:
    """Forecast of a recipe under one strategy, on one rank; bytes, operations and seconds are of one step.

    `unsimulated` is the reason if the simulation was not possible. `peak` is then None, and `state` is calculated.
    """

    strategy: str
    ranks: int
    batch: dict[str, int]
    steps: int | None
    items_name: str
    items: float  # of a step, over all ranks
    parameters: int
    state: dict[str, int]  # bytes of weights, gradients and optimizer state
    checkpoint: int  # bytes of a checkpoint, of all ranks together
    checkpoint_every: int | None  # steps
    unsimulated: str = ""
    peak: int | None = None
    phase: str = ""
    kinds: dict[str, int] | None = None
    flops: int | None = None  # of this rank
    all_flops: int | None = None  # of all ranks
    model_flops: int | None = None  # of all ranks, without attention's scores that are computed again
    wire: dict[str, float] | None = None
    seconds: Seconds | None = None
    needs: int | None = None  # bytes, with the allowance for a GPU
    budget: int | None = None
    largest: Sequence[dict[str, Any]] = ()

    @property
    def fits(self) -> bool | None:
        """True if `needs` is within `budget`; None if either is unknown."""
        return None if self.needs is None or self.budget is None else self.needs <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """Returns the forecast for JSON."""
        found = asdict(self) | {"fits": self.fits}
        if self.seconds:
            found["seconds"] |= {"least": self.seconds.least, "most": self.seconds.most}
        return found


def allowance(live: int, device: Device | None) -> int:
    """Returns the bytes that a process needs on a device for `live` bytes of tensors; on a CPU (None) just `live`."""
    return int(live * (1 + _FRAGMENTS) + _CONTEXT) if device else live


def forecast(
    recipe: str,
    spec: Spec | None,
    *,
    ranks: int,
    registry: Registry,
    sets: Sequence[str] = (),
    device: Device | None = None,
    budget: int | None = None,
) -> Forecast:
    """Forecasts a recipe under its own strategy, or that of `spec`. Raises RecipeError if the recipe cannot train.

    `budget` is the limit of memory per rank in bytes; by default the memory of `device`.
    """
    ranks = spec.ranks if spec else ranks
    loaded = load_recipe(recipe, sets=[*sets, *(spec.sets if spec else ())], registry=registry)
    train = loaded.recipe.train.model_copy(update=_PLANNED)
    loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"train": train}))

    def build() -> Built:
        return build_without_ranks(loaded, registry, ranks=ranks, device="cuda")

    why, found = "", None
    with without_warnings():
        try:
            parts = build()
            of_ranks = _simulated(parts, ranks, build)
            found = max(of_ranks, key=lambda one: one.peak)
            found = replace(
                found,
                all_flops=sum(one.work.flops for one in of_ranks) * ranks // len(of_ranks),
                model_flops=sum(one.work.model_flops for one in of_ranks) * ranks // len(of_ranks),
            )
        except ForgeError:
            raise
        except Exception as error:  # from code of torch or a plugin that does not support fake tensors
            log.debug("simulation failed", exc_info=error)
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
            parts = build()
    state = found.state if found else _arithmetic(parts, ranks)
    whole = found.whole if found else sum(p.numel() * p.element_size() for p in parts.model.parameters())
    answer = _described(parts, spec.text if spec else parts.recipe.strategy.use, ranks, state, whole)
    budget = budget or (int(device.memory) if device else None)
    return (
        replace(answer, unsimulated=why, budget=budget)
        if found is None
        else _filled(answer, found, parts, device, budget)
    )


def _simulated(parts: Built, ranks: int, build: Callable[[], Built]) -> list[Simulated]:
    """Simulates the ranks that hold different parts: the first with `parts`, each other with a result of `build`."""
    few, more = parts.strategy.simulation.micro_batches(ranks) or (0, 0)
    further = max(0, parts.plan.batch.accumulation - more) if more else 0
    forms = parts.strategy.simulation.ranks_to_simulate(
        ranks, parts.model, find_blocks(parts.model, parts.recipe.train.blocks)
    )
    unused = [parts]
    posts: dict[int, Post] = {more: {}, few: {}}

    def step(rank: int, micro_batches: int) -> Simulated:
        own = unused.pop() if unused else build()
        return simulate(own, ranks, rank=rank, micro_batches=micro_batches, post=posts[micro_batches])

    def run(rank: int) -> Simulated:
        found = step(rank, more)
        return found.stage_shapes(step(rank, few), further / (more - few)) if further else found

    found: list[Simulated] = []
    first: dict[Hashable, int] = {}  # the place of the first rank of each kind
    apart = parts.recipe.optimizer.groups or parts.recipe.optimizer.updates  # equal layers may be in different groups
    for place, (rank, form) in enumerate(forms.items()):
        alike = first.setdefault(place if apart else (form, posts[more].get((place - 1, place))), place)
        if alike == place:
            found.append(run(rank))
        else:
            found.append(found[alike])
            for post in filter(None, posts.values()):
                post[place, place + 1] = post[alike, alike + 1]
    return found


def _filled(answer: Forecast, found: Simulated, parts: Built, device: Device | None, budget: int | None) -> Forecast:
    train = parts.recipe.train
    tf32 = train.tf32 or (device is not None and device.fp32 == device.tf32)
    return replace(
        answer,
        peak=found.peak,
        phase=found.phase,
        kinds=found.kinds,
        flops=found.work.flops,
        all_flops=found.all_flops,
        model_flops=found.model_flops,
        wire=found.work.wire(),
        seconds=device.seconds(found.work, answer.ranks, tf32=tf32) if device else None,
        needs=allowance(found.peak, device),
        budget=budget,
        items=found.items * answer.batch["accumulation"] * answer.batch["data_ranks"],
        largest=[
            {
                "bytes": piece.bytes,
                "kind": piece.kind,
                "made_by": piece.made_by,
                "shape": list(piece.shape),
                "dtype": str(piece.dtype).removeprefix("torch."),
            }
            for piece in found.largest
        ],
    )


def _described(parts: Built, strategy: str, ranks: int, state: dict[str, int], weights: int) -> Forecast:
    plan = parts.plan
    held = state.get("master weights") or state["weights"]
    kept = weights * state["optimizer state"] // held if held else 0
    return Forecast(
        strategy=strategy,
        ranks=ranks,
        batch=asdict(plan.batch),
        steps=plan.horizon.total,
        items_name="samples" if type(parts.task).count is Task.count else parts.task.items,
        items=plan.batch.global_batch,
        parameters=parts.size.all,
        state=state,
        checkpoint=weights + kept,
        checkpoint_every=plan.every.get("checkpoint.every"),
    )


def _arithmetic(parts: Built, ranks: int) -> dict[str, int]:
    """Returns the bytes on a rank by the strategy's contract (Rajbhandari et al., "ZeRO", 2020, section 5)."""
    contract = contract_of(parts.strategy)
    with fake_world(1), fake_mode():
        without_memory(parts.model)
        parameters = [p for p in parts.model.parameters() if p.requires_grad]
        optimizer = build_optimizer(
            parts.registry, parts.recipe.optimizer, parts.model, list(parts.updates), parts.recipe.train.blocks
        )
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        states = [state for _, one in member_optimizers(optimizer) for state in one.state.values()]
        tensors = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
        sizes = {
            "weights": sum(p.numel() * p.element_size() for p in parts.model.parameters()),
            "gradients": sum(p.numel() * p.element_size() for p in parameters),
            "optimizer state": sum(x.numel() * x.element_size() for x in tensors),
        }
    among = ranks // contract.replicas
    return {name: -(-size // among) if name in contract.shards else size for name, size in sizes.items()}
