"""Reports the metrics of a trial to its search, and ends the trial if the search prunes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ddpforge import compat
from ddpforge.interfaces import Callback
from ddpforge.interfaces.callback import RunContext

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.storages import BaseStorage

__all__ = ["PRUNED", "STUDY", "OptunaPruning", "opened_trial", "quiet", "storage"]

STUDY = "sweep"
PRUNED = "pruned"  # attribute of a trial that was ended early


def opened_trial(journal: Path, number: int) -> Trial:
    """Returns a trial of the study in `journal`, to continue it."""
    import optuna

    quiet()
    study = optuna.load_study(study_name=STUDY, storage=storage(journal))
    return optuna.Trial(study, compat.trial_id(study.trials[number]))


def storage(journal: Path) -> BaseStorage:
    """Returns the journal file as a storage of Optuna."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(journal)))


def quiet() -> None:
    """Silences Optuna's messages about trials, because the sweep reports them."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


logger = logging.getLogger("ddpforge")


class OptunaPruning(Callback):
    """Reports `metric` after every evaluation to an Optuna study. The study's pruner may end the run.

    Rank 0 reads and writes the study's journal, and broadcasts the decision.
    """

    def __init__(
        self,
        journal: Annotated[str, Field(min_length=1, description="The journal file of the study.")],
        trial: Annotated[int, Field(ge=0, description="The trial's number.")],
        metric: Annotated[str, Field(min_length=1, description='An evaluation metric, e.g. "eval/loss".')],
    ) -> None:
        self._journal, self._number, self._metric = Path(journal), trial, metric

    def on_start(self, run: RunContext) -> None:
        """Opens the study on rank 0."""
        self._ranks = run.world.global_ranks
        if self._ranks.is_rank_zero:
            self._trial = opened_trial(self._journal, self._number)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if the trial must end."""
        ends = self._ranks.broadcast(self._ranks.is_rank_zero and self._asks(step, metrics))
        if ends and self._ranks.is_rank_zero:
            logger.info("pruned: the search expects no good %s from trial %d", self._metric, self._number)
        return ends

    def _asks(self, step: int, metrics: Mapping[str, float]) -> bool:
        if self._metric not in metrics:
            return False  # metrics of another evaluation set
        self._trial.report(metrics[self._metric], step)
        if ends := self._trial.should_prune():
            self._trial.set_user_attr(PRUNED, True)
        return bool(ends)
