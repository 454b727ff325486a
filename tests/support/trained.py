"""Trains whole recipes in ranks that the test process forks, without a launcher."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shutil import copy
from typing import Any

import torch.distributed.pipelining  # noqa: F401 (once, here, and not in every rank)

from ddpforge.app.attempt import checkpoints_of
from ddpforge.app.build import build_checked, check_chosen
from ddpforge.app.choose import choose
from ddpforge.app.run import join
from ddpforge.components.registry import Registry
from ddpforge.interfaces import Tracker
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe import LoadedRecipe, load_recipe
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import RunFolder
from ddpforge.training.assemble import assemble
from ddpforge.training.problems import Problems
from support import SUPPORT
from support.forked import in_ranks


@dataclass
class Trained:
    """Result of one rank: its rows, which every rank computes, and the number of trained weights that it held."""

    rows: list[dict[str, float]]
    held: int

    def column(self, key: str = "train/loss") -> list[float]:
        return [row[key] for row in self.rows if key in row]


class _Rows(Tracker):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append(dict(metrics))


def trained(folder: Path, recipe: str, ranks: int) -> list[Trained]:
    """Trains a recipe, from the newest checkpoint of its name in `folder` on; returns one result for each rank."""
    for name in ("parts.py", "odd_models.py", "exploring.py"):
        copy(SUPPORT / name, folder)
    path = folder / "recipe.toml"
    path.write_text(recipe)
    before = Path.cwd()
    os.chdir(folder)
    try:
        registry = Registry.installed()
        loaded = load_recipe(path, registry=registry)
        return in_ranks(ranks, lambda _: _train(loaded, registry, folder), timeout=120)
    finally:
        os.chdir(before)


def _train(loaded: LoadedRecipe, registry: Registry, folder: Path) -> Trained:
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=world_size())
    check_chosen(chosen, problems)
    tracker, world = _Rows(), join(chosen)
    parts = build_checked(chosen, world, problems, samples=False)
    run = RunFolder.of(parts.recipe, folder / "runs")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    (run.path / "metrics.jsonl").touch()
    checkpoints = checkpoints_of(run, parts, world, WriterGroup.of(world.global_ranks, timedelta(seconds=60)))
    found = checkpoints.open()
    source = None if found else parts.recipe.checkpoint.init_from
    with ExitStack() as life:
        trainer = assemble(parts, world, checkpoints, tracker, folder=run.path, life=life, init_from=source)
        if found:
            trainer.restore(found)
        trainer.saving.begin({"strategy": parts.recipe.strategy.use, "world_size": world.global_ranks.size})
        trainer.fit()
    held = sum(part.tensor.numel() for part in trainer.replica.weights.shards().values())
    return Trained(tracker.rows, held)
