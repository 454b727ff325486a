"""Jobs of the kit's ranks: a job leaves nothing behind that disturbs the next."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback
from ddpforge.testing import job
from ddpforge.testing.multi_rank_runs import _outcome


class Saving:
    """Fake checkpoints with a pending save, which fails."""

    pending = True

    def wait(self) -> None:
        self.pending = False
        raise CheckpointError("the disk is full")


def test_pending_save_is_waited_for_when_ranks_disagree() -> None:
    """Saves communicate from a thread: without the wait, the messages of two jobs' saves would mix."""
    saving = Saving()

    def fit() -> None:
        raise job._Disagreement("on_step at step 4 is False on rank 0 and True on rank 1")

    parts = {"callbacks": {"a": Callback()}, "evaluator": SimpleNamespace(), "replica": SimpleNamespace(weights=None)}
    calls = SimpleNamespace(callbacks=parts["callbacks"])
    trainer = SimpleNamespace(**parts, calls=calls, fit=fit, saving=SimpleNamespace(checkpoints=saving))
    site = SimpleNamespace(trainer=lambda tracker, folder: trainer)
    with pytest.raises(job._Disagreement):
        job._watched(cast(job.Site, site), "first", None)
    assert not saving.pending


def test_own_error_of_a_rank_takes_precedence_over_an_earlier_symptom(tmp_path: Path) -> None:
    def failed(rank: int, error: str, time: float, *, symptom: bool) -> None:
        said = {"time": time, "symptom": symptom, "rank": rank, "error": error, "where": "", "hints": []}
        (tmp_path / f"failed-{rank}.json").write_text(json.dumps(said))

    failed(0, "RuntimeError: Connection closed by peer", 1.0, symptom=True)
    failed(1, "KeyError: 'x'", 2.0, symptom=False)
    case = SimpleNamespace(kind="callback", base=tmp_path)
    found = _outcome(cast(Any, SimpleNamespace(folder=tmp_path, case=case)), 2)
    assert "rank 1: KeyError: 'x'" in str(vars(cast(Any, found)))
