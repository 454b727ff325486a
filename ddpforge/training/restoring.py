"""Takes from a checkpoint the state of components that a recipe still names, and none of those it has replaced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ddpforge.checkpoint.contents import Facts
from ddpforge.checkpoint.reader import Reader, Saved
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, CanonicalState, Part, Ranks, Replica, World
from ddpforge.interop.export import chosen_weights
from ddpforge.interop.initial import in_dtype
from ddpforge.recipe.schema import Recipe
from ddpforge.recipe.upgrade import upgrade_tables
from ddpforge.training.beside import BesideModule
from ddpforge.training.left_out import complete
from ddpforge.training.task_state import TaskState

__all__ = ["is_another", "restore_callbacks", "restore_kept", "restore_weights"]

log = logging.getLogger("ddpforge")


def restore_weights(replica: Replica, checkpoint: Reader, ranks: Ranks) -> None:
    """Gives the model its weights and buffers; of what the optimizer and the strategy have kept, nothing is read.

    Raises CheckpointError where the checkpoint is of another model.
    """
    saved = complete(checkpoint.state(), replica, ranks)
    if missing := sorted(replica.state().model.keys() - saved.model.keys()):
        more = " …" if len(missing) > 5 else ""
        raise CheckpointError(
            f"the checkpoint is of another model (missing from the checkpoint: {', '.join(missing[:5])}{more})"
        )
    # `partial` leaves the optimizer alone; that nothing of the model is missing is known now.
    replica.load_state(CanonicalState(saved.model, {}, saved.aliases), partial=True)
    replica.weights.changed()


def restore_kept(replica: Replica, checkpoint: Reader, weights: str) -> None:
    """Gives the model the weights that a callback keeps, in place of its own; "model" means these.

    Raises UsageError where the checkpoint has no such weights.
    """
    if weights == "model":
        return
    chosen_weights(checkpoint, weights)  # raises, where they are not of this model
    kept = {name: saved for name, saved in checkpoint.callbacks()[weights].items() if isinstance(saved, Saved)}
    held = replica.state().model
    dtypes = {name: (mine.tensor if isinstance(mine, Part) else mine).dtype for name, mine in held.items()}
    fits = {name: in_dtype(saved, dtypes[name]) if name in dtypes else saved for name, saved in kept.items()}
    replica.load_state(CanonicalState(fits, {}, checkpoint.aliases), partial=True)
    replica.weights.changed()


def restore_callbacks(recipe: Recipe, callbacks: Mapping[str, Callback], checkpoint: Reader, world: World) -> None:
    """Gives each callback its state back, unless another component had the name when that was saved.

    Modules beside the model, and its own state, are the task's: with another task they begin as they do in a new run.
    """
    facts, kept = checkpoint.facts, checkpoint.callbacks()
    for name, callback in callbacks.items():
        if isinstance(callback, BesideModule):
            if is_another(facts, recipe.task.use, "task", world=world):
                callback.begin()
            elif name not in kept:
                raise CheckpointError(f"the checkpoint holds nothing of `{callback.name}`, which the task uses")
            else:
                callback.load_state(kept[name])
        elif isinstance(callback, TaskState):
            if name in kept and not is_another(facts, recipe.task.use, "task", world=world):
                callback.load_state(kept[name])
            elif name not in kept and world.is_main:
                log.warning("the checkpoint holds no state of the task, which starts with what its constructor makes")
        elif name in kept and not is_another(facts, recipe.callbacks[name].use, "callbacks", name, world=world):
            callback.load_state(kept[name])


def is_another(facts: Facts, use: str, *table: str, world: World) -> bool:
    """True if the recipe's table, which uses `use`, named another component when the checkpoint was saved; says so."""
    earlier = _use_in(facts.recipe, table)
    if earlier is None or earlier.rpartition("/")[2] == use.rpartition("/")[2]:  # local code may have moved
        return False
    if world.is_main:
        log.warning("%s `%s` starts afresh: the checkpoint has the state of `%s`", ".".join(table), use, earlier)
    return True


def _use_in(recipe: str, table: Sequence[str]) -> str | None:
    """The `use` of a table of a checkpoint's recipe; None where it does not say, as after an import."""
    try:
        found: Any = upgrade_tables(recipe)
        for name in (*table, "use"):
            found = found[name]
    except (ValueError, KeyError, TypeError):
        return None
    return str(found)
