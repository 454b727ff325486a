"""What ranks do for the kit: one job leaves nothing behind that the next one could meet."""

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
    """Checkpoints of which one is being written; taking its outcome says that it failed."""

    pending = True

    def wait(self) -> None:
        self.pending = False
        raise CheckpointError("the disk is full")


def test_a_save_that_is_under_way_when_ranks_disagree_is_waited_for() -> None:
    """It talks to the other ranks from a thread, as the saves of the next job do: they would hear each other."""
    saving = Saving()

    def fit() -> None:
        raise job._Disagreement("on_step at step 4 is False on rank 0 and True on rank 1")

    parts = {"callbacks": {"a": Callback()}, "evaluator": SimpleNamespace(), "replica": SimpleNamespace(weights=None)}
    trainer = SimpleNamespace(**parts, fit=fit, saving=SimpleNamespace(checkpoints=saving))
    site = SimpleNamespace(trainer=lambda tracker, folder: trainer)
    with pytest.raises(job._Disagreement):
        job._watched(cast(job.Site, site), "first", None)
    assert not saving.pending


def test_what_a_rank_met_by_itself_counts_more_than_that_another_lost_touch_earlier(tmp_path: Path) -> None:
    def failed(rank: int, error: str, time: float, *, symptom: bool) -> None:
        said = {"time": time, "symptom": symptom, "rank": rank, "error": error, "where": "", "hints": []}
        (tmp_path / f"failed-{rank}.json").write_text(json.dumps(said))

    failed(0, "RuntimeError: Connection closed by peer", 1.0, symptom=True)
    failed(1, "KeyError: 'x'", 2.0, symptom=False)
    case = SimpleNamespace(kind="callback", base=tmp_path)
    found = _outcome(cast(Any, SimpleNamespace(folder=tmp_path, case=case)), 2)
    assert "rank 1: KeyError: 'x'" in str(vars(cast(Any, found)))
