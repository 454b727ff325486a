"""Runs the checks of a run's stages: those of ddpforge and of plugins, by the entry-point group `ddpforge.check`.

The name of an entry point is one of `STAGES`. Its object is a list of pairs: a key of the recipe, and a function that
yields, returns or raises errors. An error is reported at the key that it names, or at the key of its pair. A check that
needs a component that could not be built is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddpforge.components.errors import where_raised
from ddpforge.components.hooks import Hook
from ddpforge.components.hooks import found as installed
from ddpforge.errors import ForgeError, says_memory_is_full
from ddpforge.secret_redaction import redact
from ddpforge.training.problems import Problems
from ddpforge.training.stages import MISSING, Built, Dealt, NotBuilt

if TYPE_CHECKING:
    from torch import nn

    from ddpforge.data import MicroBatch
    from ddpforge.interfaces import Replica, Task, World

__all__ = [
    "STAGES",
    "FirstStepCheck",
    "check",
    "check_built",
    "check_first_step",
    "check_samples",
    "check_together",
    "checks_of",
    "compare_built",
]

STAGES = {
    "chosen": "of `Chosen`: the components that need neither data nor model. Must not import torch",
    "model": "of a bare model, or an auxiliary module of the task, before the strategy wraps it",
    "fit": "of `Built`; if one fails, no sample is tried",
    "built": "of `Built`: all components, the same on every rank",
    "samples": "of `Built` or `Dealt`, and `Problems`: tries the first samples, and returns True if it has "
    "compared a loss with the losses of its halves",
    "joined": "of `Chosen` and the ranks, on every rank, after all have joined",
    "folder": "of the folder of runs and the ranks, on every rank, before the run's folder is opened",
    "ranks": "of `Built` and the `World`, on every rank; may return facts by name, each with `as_json`, that "
    "checkpoints keep for the stage `resume`",
    "resume": "of these facts, those of the checkpoint as JSON, and the keys in `allow_change`, on rank 0",
    "optimizer": "of `Dealt`, the `World`, the model and its optimizer, on every rank",
    "first_step": "of `Dealt` and the `World`, on every rank, before the strategy wraps the model; may return a "
    "function of replica, task, module and micro-batch, which is called before the first step",
    "failed_pass": "of an error of a forward pass, the model, the batch, and its key of the recipe; raises a "
    "better error. Of `Diverged`, for each batch of the step; returns the first value that is not finite, in words",
}
"""Stages with the arguments of their checks, in the order of a run."""

FirstStepCheck = Callable[["Replica", "Task", "nn.Module", "MicroBatch"], None]
"""Function of the replica, a task, the module with all buffers that a step may change, and the first micro-batch."""


def checks_of(stage: str) -> Iterator[tuple[Hook, str, Callable[..., Any]]]:
    """Yields the checks of a stage, ddpforge's own first: the entry point, the key of the recipe, the function.

    Raises PluginError for an entry point that cannot be loaded, or is not a list of pairs for a stage.
    """
    for hook in installed("check"):
        if hook.name not in STAGES:
            raise hook.error(f"is named after no stage of a run: {', '.join(STAGES)}")
        if hook.name != stage:
            continue
        pairs = hook.load()
        try:
            found = [(str(key), function) for key, function in pairs]
        except (TypeError, ValueError):
            found = [("", None)]
        if not all(callable(function) for _, function in found):
            raise hook.error("is not a list of pairs: a key of the recipe, and a function")
        yield from ((hook, key, function) for key, function in found)


def check(stage: str, subject: object, problems: Problems, *, key: str = "") -> bool:
    """Adds the errors of a stage's checks to `problems`; returns True if all checks could run and found no error.

    `subject` is the argument of the checks. `key` replaces their keys.
    """
    passed = True
    for hook, own, function in checks_of(stage):
        path, before, made = tuple((key or own).split(".")), len(problems), False
        with problems.at(*path), _naming(hook):
            for error in function(subject) or ():
                problems.add(path, _signed(error, hook))
            made = True
        passed = passed and made and len(problems) == before
    return passed


def check_built(built: Built, problems: Problems) -> bool:
    """Runs the checks of built components; returns True if a batch of the data can be tried with task and model."""
    fits = check("fit", built, problems) and bool(built.data)
    check("built", built, problems)
    return fits and not any(part is MISSING for part in (built.task, built.model, built.auxiliary))


def check_samples(stage: Built, problems: Problems) -> bool:
    """Tries the first samples; returns True if a check has compared their loss with the losses of its halves."""
    compared = False
    for hook, _, function in checks_of("samples"):
        with _naming(hook):
            compared = bool(function(stage, problems)) or compared
    return compared


def check_together(stage: str, *subjects: object) -> list[Any]:
    """Runs the checks of a stage on every rank, collective; returns their results. Raises the first error."""
    found = []
    for hook, _, function in checks_of(stage):
        with _naming(hook):
            found.append(function(*subjects))
    return found


def compare_built(built: Built, world: World) -> dict[str, Any]:
    """Raises on every rank unless all ranks have built the same; returns facts that checkpoints keep, by name."""
    return {name: fact for facts in check_together("ranks", built, world) for name, fact in (facts or {}).items()}


def check_first_step(dealt: Dealt, world: World) -> list[FirstStepCheck]:
    """Runs the checks of the stage "first_step"; returns functions to call before the first step, once. Collective."""
    found: list[FirstStepCheck] = []
    for hook, _, function in checks_of("first_step"):
        with _naming(hook):
            if later := function(dealt, world):
                found.append(_naming(hook)(later))
    return found


@contextmanager
def _naming(hook: Hook) -> Iterator[None]:
    """Names the plugin in errors of its checks: a mistake becomes a PluginError, and a finding gets a hint."""
    try:
        yield
    except NotBuilt:
        raise
    except ForgeError as error:
        _signed(error, hook)
        raise
    except Exception as error:
        if hook.is_own or says_memory_is_full(error):
            raise
        failed = hook.error(f"has a check that fails: {type(error).__name__}: {redact(str(error))}")
        failed.hints = (*where_raised(error), *failed.hints)
        raise failed from error


def _signed(error: ForgeError, hook: Hook) -> ForgeError:
    """Returns an error that a check found, with a hint that names its plugin."""
    if not hook.is_own:
        error.hints = (*error.hints, f"this is a check of the plugin {hook.distribution}")
    return error
