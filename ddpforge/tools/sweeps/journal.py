"""The journal of a search: an Optuna study in a file, which the sweep and its runs open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.storages import BaseStorage

__all__ = ["PRUNED", "STUDY", "opened_trial", "quiet", "storage"]

STUDY = "sweep"
PRUNED = "pruned"  # the mark of a trial that was ended early


def opened_trial(journal: Path, number: int) -> Trial:
    """A trial of the study in `journal`, to continue with."""
    import optuna

    quiet()
    study = optuna.load_study(study_name=STUDY, storage=storage(journal))
    return optuna.Trial(study, study.trials[number]._trial_id)


def storage(journal: Path) -> BaseStorage:
    """The file as Optuna takes it."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(journal)))


def quiet() -> None:
    """Leaves it to the sweep to say what becomes of trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
