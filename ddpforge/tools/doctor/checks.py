"""Runs all checks of the doctor, in order: each machine by itself, then the ranks together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpforge.api import world_size
from ddpforge.components.registry import Registry
from ddpforge.errors import ForgeError, StrategyError
from ddpforge.interfaces.durations import Duration
from ddpforge.local_world import local_world_size
from ddpforge.recipe import load_recipe
from ddpforge.tools.doctor import machine
from ddpforge.tools.doctor.findings import Finding, error, merged, ok, warning

if TYPE_CHECKING:
    from ddpforge.recipe import LoadedRecipe

__all__ = ["devices", "run_checks"]

_STANDS_IN = "digits"  # used without a recipe: its settings are those of most recipes
_COPIES = 3  # numbers per parameter in a checkpoint: the weight, and two of the optimizer (as in Adam)
_BYTES = 4
_JOINING = Duration(1, "m")


def run_checks(recipe: str | None, sets: Sequence[str], out: str | None) -> list[Finding] | None:
    """Returns the findings on rank 0, None on other ranks. Raises RecipeError if the recipe cannot be read."""
    registry = Registry.installed()
    loaded = load_recipe(recipe or _STANDS_IN, sets=sets, registry=registry)
    place = Path(out or loaded.recipe.output_dir)
    mine = list(_alone(loaded if recipe else None, registry, place))
    if world_size() == 1:
        return merged([(socket.gethostname(), mine)])
    return _together(loaded, registry, place, mine)


def _alone(loaded: LoadedRecipe | None, registry: Registry, place: Path) -> Iterator[Finding]:
    """Yields the findings about this machine, on the first of its ranks; nothing on others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    here = local_world_size()
    workers = loaded.recipe.data.workers if loaded else None
    workers = 0 if workers == "auto" else workers  # "auto" adapts to the cores and the memory of the machine
    yield from machine.packages()
    yield from devices()
    yield from machine.names(os.environ.get("MASTER_ADDR", ""))
    yield from machine.shared_memory(workers)
    yield from machine.limits(here, workers)
    yield from machine.variables()
    size = None
    if loaded:
        try:
            size = _checkpoint(loaded, registry)
        except ForgeError as refused:
            yield error(refused.message, "; ".join(refused.hints) or "ddpforge check RECIPE --build")
    keep = loaded.recipe.checkpoint.keep if loaded else None
    yield from machine.files(place, size, keep.last + keep.best if keep else 0)


def _checkpoint(loaded: LoadedRecipe, registry: Registry) -> int:
    """Returns an upper bound for the bytes of a checkpoint; raises ForgeError if the recipe cannot work here."""
    from ddpforge.api import build_without_ranks

    return build_without_ranks(loaded, registry, ranks=world_size()).size.all * _COPIES * _BYTES


def _together(loaded: LoadedRecipe, registry: Registry, place: Path, mine: Sequence[Finding]) -> list[Finding] | None:
    from ddpforge.api import leave
    from ddpforge.components.registry import build
    from ddpforge.ranks.join import join
    from ddpforge.tools.doctor import multi_rank

    train = loaded.recipe.train.model_copy(update={"collective_timeout": _JOINING})
    try:
        world = join(train, build(registry, "strategy", loaded.recipe.strategy))
    except (ForgeError, RuntimeError) as failed:
        hint = "check that every host can reach MASTER_ADDR and the other hosts; run `ddpforge doctor` on each"
        hint = "; ".join(failed.hints) if isinstance(failed, ForgeError) and failed.hints else hint
        return merged([(socket.gethostname(), [*mine, error(f"the ranks cannot join: {failed}", hint)])])
    ranks = world.global_ranks
    ours = [
        *multi_rank.same_versions(ranks, loaded, registry),
        *multi_rank.folder(ranks, place),
        *multi_rank.clocks(ranks),
        *multi_rank.bandwidth(world),
        *multi_rank.links(world),
    ]
    gathered = ranks.all_gather_object((socket.gethostname(), mine))
    leave(world)
    return [*merged(gathered), *ours] if ranks.is_rank_zero else None


def devices() -> Iterator[Finding]:
    """Reports the GPUs, or the reason why torch cannot use a GPU of this machine."""
    import torch

    from ddpforge.api import choose_device
    from ddpforge.ranks.devices import detected_kind

    kind = detected_kind()
    if not kind.is_host and kind.type != "cuda":
        names = sorted({str(one["name"]) for one in kind.describe()})
        yield ok(f"{kind.count()} × {kind.noun}: {', '.join(names)}; torch calls it `{kind.type}`")
        return
    if kind.is_host:
        try:
            choose_device("cpu", asked=False)
        except StrategyError as unusable:
            yield error(unusable.message, "; ".join(unusable.hints))
        else:
            yield ok("no GPU: ranks train on the CPU, and communicate over gloo")
        return
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    kinds = {f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus}
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield ok(f"{len(gpus)} GPUs: {', '.join(sorted(kinds))}; CUDA {torch.version.cuda}, NCCL {nccl or 'is missing'}")
    if nccl is None and len(gpus) > 1:
        yield error("torch has no NCCL, which GPUs need to communicate", "install a build of torch for CUDA")
    if len(kinds) > 1:
        yield warning("GPUs are not of one kind: all wait for the slowest", "select equal ones by CUDA_VISIBLE_DEVICES")
