"""Finds the checkpoint that somebody means: of a run, by its step, the best, or the newest that is intact."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ddpforge.checkpoint import retention
from ddpforge.checkpoint.schema import COMMIT, FOLDER, MANIFEST
from ddpforge.errors import CheckpointError, EnvironmentProblem, UsageError
from ddpforge.recipe.schema import KeepSection
from ddpforge.runs.folder import RunFolder

__all__ = ["CheckpointFolder", "choose", "find", "is_checkpoint", "keep_of", "parse"]

log = logging.getLogger("ddpforge")


# ---------------------------------------------------------------------------------------------- of a run
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

    if not best and step is None:
        path, skipped = retention.newest(folder.checkpoints)
        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is not None:
            return path

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
        chosen, problem = [], f"{folder.path} has no intact checkpoint"

    if not chosen:
        steps = ", ".join(str(each.manifest.step) for each in reversed(found))
        raise UsageError(problem, hints=[f"it has checkpoints of step {steps or 'none'}"])
    return chosen[0].path


# ---------------------------------------------------------------------------------------------- of any folder
@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints: a run's, or one that stands by itself, as `ckpt import` makes them."""

    folder: Path
    run: RunFolder | None

    @classmethod
    def find(cls, source: str) -> "CheckpointFolder":
        """The checkpoints of a run (its folder, or its name in runs/), or those in a folder.

        Raises UsageError when there is nothing like that.
        """
        path = Path(source)
        if not RunFolder(path).exists() and any(path.glob("step-*")):
            return cls(path, None)
        run = RunFolder.find(source)
        retention.check_folder(run.checkpoints)
        return cls(run.checkpoints, run)

    def keep(self) -> KeepSection:
        """The `checkpoint.keep` of the run's recipe."""
        return KeepSection() if self.run is None else keep_of(self.run)

    def choose(
        self, *, step: int | None = None, best: bool = False, intact: bool = False, strict: bool = False
    ) -> Path:
        """The checkpoint of `step`, the best one, or the newest; with `intact`, the newest that is intact.

        A newer one that is visibly broken is passed over with a warning; where `strict`, it is a CheckpointError.
        Raises UsageError when there is none.
        """
        if self.run is not None and (best or intact):
            return choose(self.run, step=step, best=best)
        if best:
            raise UsageError(f"{self.folder} is not a run, so no recipe says what is best", hints=["choose by --step"])

        found, broken = retention.committed(self.folder)
        chosen = [each for each in found if step in (None, each.manifest.step)]
        if not chosen:
            steps = ", ".join(str(each.manifest.step) for each in reversed(found)) or "none"
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            hints = [f"it has checkpoints of step {steps}", *(f"broken: {reason}" for _, reason in broken[:3])]
            raise UsageError(f"{self.folder} has {what}", hints=hints)
        newer = [reason for path, reason in broken if step is None and _step(path) > chosen[0].manifest.step]
        if newer and strict:
            hint = f"choose one by its step: the newest that is not broken is of step {chosen[0].manifest.step}"
            raise CheckpointError(newer[0], hints=[hint])
        for reason in newer:
            log.warning("passed over: %s", reason)
        return chosen[0].path


def _step(path: Path) -> int:
    """The step that a checkpoint's name says; -1 where it is no such name."""
    match = FOLDER.fullmatch(path.name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """True for the folder of one checkpoint, however broken."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or (path / COMMIT).is_file() or FOLDER.fullmatch(path.resolve().name) is not None


def find(
    source: str, *, step: int | None = None, best: bool = False, intact: bool = False, strict: bool = False
) -> Path:
    """The checkpoint that is meant: `source` itself, or one of those of a run; see `CheckpointFolder.choose`."""
    if is_checkpoint(path := Path(source)):
        if best or step is not None:
            raise UsageError(
                f"{source} is a checkpoint, and --step and --best choose one among several",
                hints=["leave them out, or name the run"],
            )
        return path
    return CheckpointFolder.find(source).choose(step=step, best=best, intact=intact, strict=strict)


def parse(text: str) -> Path:
    """The checkpoint that "RUN", "RUN:STEP", "RUN:best" or a checkpoint's folder means."""
    source, colon, which = text.rpartition(":")
    if Path(text).exists() or not colon:
        return find(text, strict=True)
    if which == "best":
        return find(source, best=True)
    if not which.isdecimal():
        raise UsageError(f"{text}: {which!r} is neither a step nor `best`", hints=["e.g. digits:207 or digits:best"])
    return find(source, step=int(which))
