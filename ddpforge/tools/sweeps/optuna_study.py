"""Searches with Optuna: the study is a journal in the sweep's folder, and each trial is a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpforge.api import RunFolder, summarize
from ddpforge.errors import SetupError, UsageError, pip_install
from ddpforge.recipe.toml import toml_value
from ddpforge.tools.sweeps.pruning import PRUNED, STUDY, OptunaPruning, opened_trial, quiet, storage
from ddpforge.tools.sweeps.space import SearchSpace, ValueRange, Variant
from ddpforge.tools.sweeps.training import Trained

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.study import StudyDirection

__all__ = ["Search"]

_JOURNAL = "optuna.log"
_CALLBACK = f"{OptunaPruning.__module__}:{OptunaPruning.__name__}"


class Search:
    """Iterator over the runs of a search; each is chosen after the results of the previous ones were reported.

    `count` is the total number of trials. A search that was killed resumes with its unfinished trials.
    """

    def __init__(
        self,
        space: SearchSpace,
        folder: Path,
        *,
        count: int,
        metric: str,
        mode: Literal["min", "max"],
        seed: int,
        prunes: bool,
    ) -> None:
        """Opens the study in the folder; raises SetupError if Optuna is not installed."""
        self._space, self._folder, self._count, self._metric, self._prunes = space, folder, count, metric, prunes
        self._numbers: dict[str, int] = {}
        self._study = _study(folder, mode, seed)
        self._begun = [trial.number for trial in self._study.trials if not trial.state.is_finished()]

    def __iter__(self) -> Iterator[Variant]:
        return self

    def __next__(self) -> Variant:
        """Returns the next run; raises StopIteration after `count` trials, UsageError if the study has other values."""
        while self._begun:
            number = self._begun.pop(0)
            if summarize(RunFolder(self._folder / _name(number))).state not in ("running", "starting"):
                return self._variant(opened_trial(self._folder / _JOURNAL, number))
        if len(self._study.trials) >= self._count:
            raise StopIteration
        return self._variant(self._study.ask())

    def report(self, variant: Variant, trained: Trained) -> None:
        """Reports the result of a run to the study; a run that was stopped stays open for the next time."""
        from optuna.trial import TrialState

        number = self._numbers[variant.name]
        if trained.state == "done":
            pruned = self._study.trials[number].user_attrs.get(PRUNED)
            value = trained.metrics.get(self._metric)
            if pruned or value is None or not math.isfinite(value):
                self._study.tell(number, state=TrialState.PRUNED)
            else:
                self._study.tell(number, value)
        elif trained.state in ("diverged", "failed"):
            self._study.tell(number, state=TrialState.PRUNED if trained.state == "diverged" else TrialState.FAIL)

    def earlier(self, now: Collection[str]) -> list[Trained]:
        """Returns the results of earlier runs that are not in `now`."""
        names = [name for trial in self._study.trials if (name := _name(trial.number)) not in now]
        found = [(name, RunFolder(self._folder / name)) for name in names]
        logs = self._folder / "logs"
        return [Trained.of(summarize(folder), logs / f"{name}.log") for name, folder in found if folder.exists()]

    def _variant(self, trial: Trial) -> Variant:
        try:
            values = {key: _suggested(trial, key, axis) for key, axis in self._space.axes.items()}
        except ValueError as error:
            raise UsageError(
                f"the search in {self._folder} has other values: {error}", hints=["choose another folder with --out"]
            ) from error
        name = _name(trial.number)
        self._numbers[name] = trial.number
        return Variant(name, (*self._space.sets(values), *self._pruning(trial.number)))

    def _pruning(self, number: int) -> tuple[str, ...]:
        if not self._prunes:
            return ()
        journal = toml_value(str((self._folder / _JOURNAL).absolute()))
        options = f"journal = {journal}, trial = {number}, metric = {toml_value(self._metric)}"
        return (f"callbacks.pruning={{ use = '{_CALLBACK}', {options} }}",)


def _name(number: int) -> str:
    return f"trial-{number:04}"


def _suggested(trial: Trial, key: str, axis: ValueRange | tuple[str, ...]) -> str:
    if not isinstance(axis, ValueRange):
        return str(trial.suggest_categorical(key, axis))
    if axis.integers:
        return str(trial.suggest_int(key, int(axis.low), int(axis.high), log=axis.log))
    return repr(trial.suggest_float(key, axis.low, axis.high, log=axis.log))


def _study(folder: Path, mode: str, seed: int) -> Study:
    try:
        import optuna
    except ImportError as error:
        raise SetupError("searches need Optuna, which is not installed", hints=[pip_install("optuna")]) from error
    quiet()
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=STUDY, storage=storage(folder / _JOURNAL), direction=_direction(mode), load_if_exists=True
    )
    # Another seed for the following trials: the same one would propose the same values again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), constant_liar=True)
    return study


def _direction(mode: str) -> StudyDirection:
    from optuna.study import StudyDirection

    return StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
