"""Plans a sweep: its runs are checked before any is trained, and those that are finished are found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpforge.app.starting import check_world
from ddpforge.errors import UsageError
from ddpforge.interfaces.direction import lower_is_better
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.opening import is_finished
from ddpforge.runs.overview import standing
from ddpforge.tools.sweeps.space import Space, Variant
from ddpforge.tools.sweeps.training import Trained

if TYPE_CHECKING:
    from ddpforge.components.registry import Registry
    from ddpforge.recipe import LoadedRecipe, Recipe

__all__ = ["Plan", "devices", "mode_of"]


@dataclass(frozen=True)
class Plan:
    """A sweep of a recipe whose values have been checked; `folder` is where its runs are."""

    recipe: str
    space: Space
    folder: Path
    nproc: int
    base: Recipe  # with the first of all values
    registry: Registry

    @classmethod
    def of(cls, recipe: str, space: Space, *, out: str | None, nproc: int) -> Plan:
        """Checks each value by itself; raises RecipeError for one that cannot be, UsageError where runs are named."""
        from ddpforge.components.registry import Registry

        if "name" in (*space.axes, *(text.partition("=")[0].strip() for text in space.fixed)):
            raise UsageError(
                "name: the runs of a sweep are named by their values", hints=["name the sweep's folder: --out DIR"]
            )
        registry = Registry.installed()
        checked = [_checked(recipe, sets, nproc, registry) for sets in space.corners()]
        base = checked[0].recipe
        folder = Path(out) if out else RunFolder.of(base).path.with_name(f"{base.name}-sweep")
        return cls(recipe, space, folder, nproc, base, registry)

    def metric(self, named: str | None) -> str:
        """The metric that runs are compared by: that of `checkpoint.keep.by`, or the evaluation's loss."""
        return named or self.base.checkpoint.keep.by or ("eval/loss" if self.base.data.eval else "train/loss")

    def split(self, variants: Sequence[Variant]) -> tuple[list[Variant], list[Trained]]:
        """The runs to train, and those that have been trained, or that diverged and would again."""
        open_, ended = [], []
        for variant in variants:
            loaded = _checked(self.recipe, variant.sets, self.nproc, self.registry)
            folder = RunFolder(self.folder / variant.name)
            if is_finished(folder, snapshot(loaded)) or (folder.exists() and standing(folder).state == "diverged"):
                ended.append(Trained.of(standing(folder), self.folder / "logs" / f"{variant.name}.log"))
            else:
                open_.append(variant)
        return open_, ended


def _checked(recipe: str, sets: Sequence[str], nproc: int, registry: Registry) -> LoadedRecipe:
    from ddpforge.recipe import load_recipe

    loaded = load_recipe(recipe, sets=sets, registry=registry)
    check_world(loaded, nproc)
    return loaded


def mode_of(metric: str, named: Literal["min", "max"] | None) -> Literal["min", "max"]:
    """Tells whether less or more of the metric is better; raises UsageError where nobody tells."""
    lower = lower_is_better(metric)
    if named is None and lower is None:
        raise UsageError(f"the name of {metric} does not tell if less of it is better", hints=["--mode min, or max"])
    return named or ("min" if lower else "max")


def devices(recipe: Recipe, *, jobs: int, nproc: int) -> list[str]:
    """The GPUs that runs side by side share out; none where there is one run at a time, or no GPU.

    Raises UsageError where there are too few.
    """
    if jobs == 1 or recipe.train.device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()
    if 0 < count < jobs * nproc:
        raise UsageError(
            f"{jobs} runs at a time with {nproc} GPU each need {jobs * nproc}, and there are {count}",
            hints=[f"--jobs {max(1, count // nproc)}", "or compute on the CPU: train.device=cpu"],
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]
