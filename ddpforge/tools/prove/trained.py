"""Program that `ddpforge prove` observes in place of a script: it trains the first steps of a recipe.

    trained.py RECIPE BATCHES EVALUATES FOLDER SETTING...

BATCHES is "order", "doubled", "padding" or "same"; EVALUATES is "yes" or "no". Without FOLDER ("-") nothing is kept;
with it, the recipe trains as `ddpforge run` does, and resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

import ddpforge
from ddpforge.api import Batches, Dealt, MicroBatch
from ddpforge.interfaces import Callback, RunContext
from ddpforge.tools.prove.changes import BEGINS, padded
from ddpforge.tools.trials.ephemeral_run import open_ephemeral

__all__ = ["Begins", "ChangedBatches", "changed_rows", "main"]

_STEPS = 1 << 20  # the observer ends the process earlier


class Begins(Callback):
    """Calls the observer when training begins."""

    def on_start(self, run: RunContext) -> None:
        """Forgets the forward passes of the checks."""
        for begin in BEGINS:
            begin()


class ChangedBatches:
    """Batches of a rank in another order, doubled, or with more padding; other attributes are those of the batches."""

    def __init__(self, batches: Batches, how: str) -> None:
        self._batches, self._how = batches, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def training(self, start: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of training, changed."""
        for micro in self._batches.training(start):
            if self._how == "padding":
                yield micro._replace(data=padded(micro.data))
            elif not micro.samples:
                yield micro
            elif self._how == "order":
                yield micro._replace(data=changed_rows(micro.data, micro.samples, lambda one: one.flip(0)))
            else:
                items = micro.items * 2 if micro.items is not None else None
                data = changed_rows(micro.data, micro.samples, lambda one: torch.cat([one, one]))
                whole = 2 * micro.step_samples
                yield micro._replace(data=data, samples=2 * micro.samples, step_samples=whole, items=items)


def changed_rows(tree: Any, samples: int, change: Any) -> Any:
    """Changes the tensors of a batch that have one row for each sample."""
    if isinstance(tree, Tensor):
        return change(tree) if tree.dim() and len(tree) == samples else tree
    if isinstance(tree, Mapping):
        return {name: changed_rows(one, samples, change) for name, one in tree.items()}
    if isinstance(tree, list | tuple):
        found = [changed_rows(one, samples, change) for one in tree]
        return type(tree)(*found) if hasattr(tree, "_fields") else type(tree)(found)
    return tree


def main(recipe: str, batches: str, evaluates: str, folder: str, *sets: str) -> None:
    """Trains a recipe until the observer ends this process, or a callback the run."""
    if folder != "-":
        ddpforge.run(recipe, sets=sets, out=folder, allow_change=["run"])
        return

    def change(dealt: Dealt) -> Dealt:
        training = dealt.training if batches == "same" else cast(Batches, ChangedBatches(dealt.training, batches))
        evaluation = dealt.evaluation if evaluates == "yes" else {}
        # The comparison of the first loss with its halves calls the model again.
        return replace(dealt, training=training, evaluation=evaluation, compares=False)

    with open_ephemeral(recipe, sets=sets, change=change) as trial:
        for _ in trial.steps(_STEPS):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
