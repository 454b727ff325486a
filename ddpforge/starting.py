"""Starts a recipe's ranks on this machine: checks the recipe first, and tells afterwards what ranks could not."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpforge.errors import ForgeError, RecipeError
from ddpforge.launchers import process
from ddpforge.launchers.command import torchrun_command
from ddpforge.launchers.verdict import Ended
from ddpforge.runs.folder import RunFolder

if TYPE_CHECKING:
    from ddpforge.recipe import LoadedRecipe

__all__ = ["Started", "check_world", "start_ranks"]


@dataclass(frozen=True)
class Started:
    """The end of a launch; `untold` names a rank that could not say anything."""

    ended: Ended
    folder: RunFolder
    untold: ForgeError | None


def start_ranks(
    recipe: str,
    *,
    nproc: int | None,
    sets: Sequence[str],
    out: str | None,
    fresh: bool,
    allow_change: Sequence[str],
    flags: Sequence[str],
    as_json: bool = False,
) -> Started:
    """Trains `recipe` in `nproc` processes, by default one per GPU, or one; `flags` go to torchrun.

    Raises RecipeError before anything is started; what goes wrong later, ranks say themselves.
    """
    from ddpforge.recipe import load_recipe

    loaded = load_recipe(recipe, sets=sets)
    nproc = nproc or (loaded.recipe.train.device != "cpu" and _gpus()) or 1
    if not any(flag.startswith("--nnodes") for flag in flags):
        check_world(loaded, nproc)

    arguments = [recipe, *(f"--set={value}" for value in sets), *(f"--allow-change={key}" for key in allow_change)]
    arguments += [f"--out={out}"] if out else []
    arguments += ["--fresh"] if fresh else []
    arguments += ["--json"] if as_json else []
    folder = RunFolder(Path(out or loaded.recipe.output_dir) / loaded.recipe.name)
    before = folder.read_failure()
    ended = process.start(torchrun_command(arguments, nproc=nproc, flags=flags), nproc=nproc)
    failure = folder.read_failure()
    return Started(ended, folder, _untold(ended, folder, failure if failure != before else None))


def check_world(loaded: LoadedRecipe, nproc: int) -> None:
    """Raises RecipeError where the batch cannot be dealt to the ranks that see different data.

    Only a strategy knows how many these are, and importing one takes seconds. A batch that all ranks can share out can
    be shared out by fewer, which divide them; so a strategy is asked where the batch is refused.
    """
    from ddpforge.recipe.load import check_world

    try:
        check_world(loaded, nproc)
    except RecipeError:
        from ddpforge.components.building import build
        from ddpforge.components.registry import Registry

        strategy = build(Registry.installed(), "strategy", loaded.recipe.strategy)
        check_world(loaded, strategy.data_ranks(nproc))


def _untold(ended: Ended, folder: RunFolder, failure: Mapping[str, Any] | None) -> ForgeError | None:
    """The failure of a rank that could not say anything; that of one which nobody watched goes into the status."""
    from ddpforge.ranks.failures import told_causes

    watched = bool(ended.code and failure and failure["told_by"] == "watch")
    died = ended.death is not None and failure is not None and failure["rank"] == ended.death.rank
    if watched and failure and not (died and "without a word" in failure["error"]):
        return ForgeError(failure["error"], hints=[f"where all ranks stood: {folder.failure}"])
    if ended.death is None or (told_causes(folder.logs) and not watched):
        return None
    named = f"rank {ended.death.rank} was {ended.death}"
    out_of_memory = ["was there not enough memory? `dmesg` says so"] if ended.death.signal == signal.SIGKILL else []
    if folder.exists():
        folder.amend_failure(named, ended.code)
    return ForgeError(named, hints=out_of_memory)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
