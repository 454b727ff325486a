"""Checks that all ranks have built the same model, data, optimizer and schedules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.components.registry import OBJECT
from ddpforge.data.pytree import digest
from ddpforge.errors import PluginError
from ddpforge.guard.data_print import DataPrint, difference, prints_of
from ddpforge.interfaces import Ranks, World
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.training.stages import Dealt

__all__ = [
    "OPTIMIZER",
    "RANKS",
    "check_same_data",
    "check_same_groups",
    "check_same_models",
    "check_same_schedules",
    "check_same_weights",
]


def compare_parts(parts: Dealt, world: World) -> dict[str, DataPrint]:
    """Raises on every rank unless all ranks have built the same model and data; returns the data's fingerprints."""
    check_same_models(world.global_ranks, parts.model)
    if parts.recipe.model.use.startswith(OBJECT):
        check_same_weights(world.global_ranks, parts.model)
    prints = prints_of(parts)
    check_same_data(world.global_ranks, prints)
    return prints


def compare_optimizers(parts: Dealt, world: World, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises on every rank unless all ranks have the same parameter groups and schedules."""
    check_same_groups(world.global_ranks, model, optimizer)
    check_same_schedules(world.global_ranks, {**parts.schedules, **parts.value_schedules}, parts.plan.horizon.total)


RANKS, OPTIMIZER = (("", compare_parts),), (("", compare_optimizers),)


def check_same_models(ranks: Ranks, model: nn.Module) -> None:
    """Raises on every rank unless all ranks have built `model` with the same tensors in the same order."""
    if ranks.size == 1:
        return
    # Strategies match the tensors of ranks by position: with modules registered in the order of a set, they would mix
    # the gradients of different layers.
    lines = [_described_tensor("parameter", name, x) for name, x in model.named_parameters(remove_duplicate=False)]
    lines += [_described_tensor("buffer", name, x) for name, x in model.named_buffers(remove_duplicate=False)]
    _reject_other_lines(ranks, lines, "model", "register modules and parameters in the same order")


def check_same_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raises on every rank unless the weights of `model` are the same on all ranks."""
    if ranks.size == 1:
        return
    # Any other model is built from the recipe's seed. An object was made by the caller's script, before ddpforge runs.
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lines = [f"`{name}` with the hash {digest(x)[:8]}" for name, x in state.items() if not x.is_meta]
    _reject_other_lines(ranks, lines, "model", "call torch.manual_seed(0) before the model is made")


def check_same_groups(ranks: Ranks, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises on every rank unless all ranks with the same parameters have the same parameter groups."""
    if ranks.size == 1:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: x for key, x in group.items() if isinstance(x, bool | int | float | str | tuple)}
        lines.append(f"parameter group {number} with {sorted(options.items())}")
        lines += [f"`{names.get(id(one), '?')}` in parameter group {number}" for one in group["params"]]
    # A pipeline stage has the parameters of other stages on the meta device, and trains only its own.
    here = [(name, x) for name, x in model.named_parameters() if not x.is_meta]
    held = _digest_of([_described_tensor("parameter", name, x) for name, x in here])
    _reject_other_lines(ranks, lines, "optimizer", "make parameter groups in the same order", among=held)


def check_same_schedules(ranks: Ranks, schedules: Mapping[str, Callable[[int], float]], total: int | None) -> None:
    """Raises on every rank unless all ranks have the same values of all schedules, at up to a hundred steps."""
    if ranks.size == 1:
        return
    last = (total or 100) - 1
    steps = sorted({last * part // 99 for part in range(100)})
    lines = [
        f"{schedule(step):.9g} of `{name or 'lr'}` at step {step}"
        for name, schedule in schedules.items()
        for step in steps
    ]
    _reject_other_lines(ranks, lines, "schedule", "give every rank the same schedule")


def _described_tensor(kind: str, name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    frozen = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
    return f"{kind} `{name}` ({dtype} {list(tensor.shape)}{frozen})"


def _digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _reject_other_lines(ranks: Ranks, lines: Sequence[str], what: str, way: str, among: str = "") -> None:
    """Raises on every rank if `lines` differ from those of the first rank with the same `among`.

    The error has the first difference; `way` begins its hint.
    """
    gathered: list[tuple[str, str]] = ranks.all_gather_object((among, _digest_of(lines)))
    first = {group: rank for rank, (group, _) in reversed(list(enumerate(gathered)))}
    if all(its == gathered[first[group]][1] for group, its in gathered):
        return
    everyones: list[list[str]] = ranks.all_gather_object(list(lines))

    def refuse() -> None:
        for rank, (group, hashed) in enumerate(gathered):
            one = first[group]
            if hashed == gathered[one][1]:
                continue
            pairs = enumerate(zip_longest(everyones[one], everyones[rank], fillvalue="nothing"))
            place, (theirs, its) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            raise PluginError(
                f"ranks have built the {what} differently: number {place} on rank {one} is {theirs}, and on rank "
                f"{rank} it is {its}",
                hints=[
                    f"{way} on every rank: not in the order of a set, a folder listing or a hash, nor by the rank",
                    "PYTHONHASHSEED=0 in the environment gives sets the same order on all ranks",
                ],
            )

    on_rank_zero(ranks, refuse)


def check_same_data(ranks: Ranks, prints: Mapping[str, DataPrint]) -> None:
    """Raises on every rank unless all ranks have the same datasets: of equal length, with equal first few samples.

    If samples change when they are read again, only the length of the data is compared.
    """
    if ranks.size == 1:
        return
    # If one rank had another order, some samples would be used twice, and others never.
    gathered: list[dict[str, Any]] = ranks.all_gather_object({key: one.as_json() for key, one in prints.items()})
    found = [
        (key, rank, what)
        for key in prints
        for rank in range(1, ranks.size)
        if (what := difference(gathered[0][key], gathered[rank][key]))
    ]
    if not found:
        return
    differing = {key for key, _, _ in found}
    if not all(ranks.all_gather_object(all(prints[key].is_reproducible() for key in differing))):
        found = [
            (key, rank, what)
            for key, rank, what in found
            if gathered[0][key]["length"] != gathered[rank][key]["length"]
        ]

    def refuse() -> None:
        for key, rank, what in found:
            raise PluginError(
                f"ranks have different data: [data.{key}] on rank 0 and on rank {rank}: {what}",
                hints=[
                    "give every rank the same samples in the same order: sort the listing of a folder, and do not "
                    "order by a set, a hash or the rank",
                    "PYTHONHASHSEED=0 in the environment gives sets the same order on all ranks",
                ],
            )

    on_rank_zero(ranks, refuse)
