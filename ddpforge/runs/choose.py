"""Chooses the checkpoint of a run that a command means."""

import logging
from pathlib import Path

from pydantic import ValidationError

from ddpforge.checkpoint import retention
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.recipe.schema import KeepSection
from ddpforge.runs.folder import RunFolder

log = logging.getLogger("ddpforge")


def keep_of(folder: RunFolder) -> KeepSection:
    """The `checkpoint.keep` of a run's recipe."""
    try:
        return KeepSection.model_validate(folder.tables().get("checkpoint", {}).get("keep", {}))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise EnvironmentProblem(f"checkpoint.keep in {folder.resolved} cannot be read: {reason}") from error


def choose(folder: RunFolder, *, step: int | None = None, best: bool = False) -> Path:
    """The checkpoint of `step`, the best by `checkpoint.keep.by`, or the newest intact one.

    Raises UsageError when there is no such checkpoint; it names those that there are.
    """
    if best and step is not None:
        raise UsageError("--best and --step each choose a checkpoint", hints=["give one of them"])

    found, _ = retention.committed(folder.checkpoints)
    if best:
        keep = keep_of(folder)
        chosen = retention.best(found, keep)
        problem = f"no checkpoint of {folder.path} has a finite {keep.by}"
        if keep.by is None:
            problem = f"no metric decides what is best: the recipe of {folder.path} does not set checkpoint.keep.by"
    elif step is not None:
        chosen = [each for each in found if each.manifest.step == step]
        problem = f"{folder.path} has no checkpoint of step {step}"
    else:
        path, skipped = retention.newest(folder.checkpoints)
        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is not None:
            return path
        chosen, problem = [], f"{folder.path} has no intact checkpoint"

    if not chosen:
        steps = ", ".join(str(each.manifest.step) for each in reversed(found))
        raise UsageError(problem, hints=[f"it has checkpoints of step {steps or 'none'}"])
    return chosen[0].path
