"""Restores the state of components from a checkpoint, except for components that the recipe has replaced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ddpforge.checkpoint.reader import CheckpointReader, Saved
from ddpforge.checkpoint.state import CheckpointMetadata
from ddpforge.checkpoint.weights_file import chosen_weights
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, CanonicalState, Replica, TensorShard, World
from ddpforge.recipe.schema import Recipe
from ddpforge.recipe.upgrade import upgrade_tables
from ddpforge.training.features import Assembled, Feature, OwnedState, methods_of
from ddpforge.training.initial_weights import in_dtype

__all__ = ["OF_TASK", "restore_callbacks", "restore_kept", "restore_training", "restore_weights"]

log = logging.getLogger("ddpforge")


OF_TASK = "task.callback"  # name of the task's own callback, which has no state


def restore_training(
    run: Assembled, callbacks: Mapping[str, Callback], checkpoint: CheckpointReader, features: Sequence[Feature]
) -> None:
    """Restores the model, the optimizer and the callbacks; any strategy and any number of ranks may have saved them."""
    recipe, state = run.parts.recipe, checkpoint.state()
    # A path of four keys is ("optimizer", "updates", NAME, "schedule"), which has no state.
    optimizers = [
        (path, one.use) for path, one in recipe.components().items() if path[0] == "optimizer" and len(path) != 4
    ]
    if any(_is_another(checkpoint.metadata, use, *path, world=run.world) for path, use in optimizers):
        state = replace(state, optimizer={}, extra_state={})
    for loaded in methods_of(features, "loaded_state"):
        state = loaded(state)
    run.replica.load_state(state)
    restore_callbacks(recipe, callbacks, checkpoint, run.world)
    checkpoint.finish()


def restore_weights(replica: Replica, checkpoint: CheckpointReader, features: Sequence[Feature]) -> None:
    """Restores the weights and buffers of the model, but no state of the optimizer and the strategy.

    Raises CheckpointError if the checkpoint is of another model.
    """
    saved = checkpoint.state()
    for loaded in methods_of(features, "loaded_state"):
        saved = loaded(saved)
    if missing := sorted(replica.state().model.keys() - saved.model.keys()):
        more = " …" if len(missing) > 5 else ""
        raise CheckpointError(
            f"the checkpoint is of another model (missing from the checkpoint: {', '.join(missing[:5])}{more})"
        )
    # `partial` skips the optimizer. It accepts missing tensors too, which the check above has excluded.
    replica.load_state(CanonicalState(saved.model, {}, saved.aliases), partial=True)
    replica.weights.mark_changed()


def restore_kept(replica: Replica, checkpoint: CheckpointReader, weights: str) -> None:
    """Replaces the model's weights by the ones that the callback `weights` keeps; "model" changes nothing.

    Raises UsageError if the checkpoint has no such weights.
    """
    if weights == "model":
        return
    chosen_weights(checkpoint, weights)  # raises if they are not of this model
    kept = {name: saved for name, saved in checkpoint.callbacks()[weights].items() if isinstance(saved, Saved)}
    held = replica.state().model
    dtypes = {name: (mine.tensor if isinstance(mine, TensorShard) else mine).dtype for name, mine in held.items()}
    fits = {name: in_dtype(saved, dtypes[name]) if name in dtypes else saved for name, saved in kept.items()}
    replica.load_state(CanonicalState(fits, {}, checkpoint.aliases), partial=True)
    replica.weights.mark_changed()


def restore_callbacks(
    recipe: Recipe, callbacks: Mapping[str, Callback], checkpoint: CheckpointReader, world: World
) -> None:
    """Restores the state of each callback, unless another component had its name when the state was saved.

    The state of features belongs to the task: with another task it begins as in a new run.
    """
    facts, kept = checkpoint.metadata, checkpoint.callbacks()
    for name, callback in callbacks.items():
        if isinstance(callback, OwnedState):
            callback.restore(kept.get(name), partial(_is_another, facts, recipe.task.use, "task", world=world))
        elif (
            name in kept
            and name != OF_TASK
            and not _is_another(facts, recipe.callbacks[name].use, "callbacks", name, world=world)
        ):
            callback.load_state(kept[name])


def _is_another(facts: CheckpointMetadata, use: str, *table: str, world: World) -> bool:
    """True if the recipe's table had another component than `use` when the checkpoint was saved; logs it."""
    try:
        found: Any = upgrade_tables(facts.recipe)
        for name in (*table, "use"):
            found = found[name]
    except (ValueError, KeyError, TypeError):
        return False  # the checkpoint's recipe has no such table, as after an import
    earlier = str(found)
    if earlier.rpartition("/")[2] == use.rpartition("/")[2]:  # local code may have moved
        return False
    if world.is_rank_zero:
        log.warning("%s `%s` starts from scratch: the checkpoint has the state of `%s`", ".".join(table), use, earlier)
    return True
