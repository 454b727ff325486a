"""Evaluations and checkpoints of a run: their times, the saved metrics, and failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doubles import Loop, Sums, Watcher, saved
from torch import Tensor

from ddpforge.errors import CheckpointError


def test_old_checkpoints_are_deleted_at_the_end_without_delaying_steps() -> None:
    loop = Loop(steps=2, evaluation=False, checkpoint={"every": "1st"})
    loop.checkpoints.finish = lambda: loop.events.append("gone")  # type: ignore[method-assign]
    assert loop.fit() == "done"
    assert loop.events == ["step", "log", "save", "step", "log", "save", "gone"]


def test_evaluation_syncs_buffers_and_disables_training_mode() -> None:
    loop = Loop(steps=2, train={"eval_every": "1st"})
    loop.fit()
    assert loop.model.modes == [True, False, False, True, False, False]
    assert loop.model.training
    assert loop.replica.synced == 3  # two evaluations and the save at the end
    assert dict(loop.tracker.rows[-1][1])["eval/x"] == 1.0


def test_buffers_are_synced_before_a_save() -> None:
    loop = Loop(steps=4, evaluation=False, checkpoint={"every": "2st"})
    loop.fit()
    assert loop.replica.synced == 2


def test_metrics_of_an_older_evaluation_are_not_saved_with_newer_weights() -> None:
    loop = Loop(steps=5, train={"eval_every": "4st"}, checkpoint={"every": "1st"}, length="7st")
    loop.fit()
    evaluated = {
        saved.metadata.step
        for saved in loop.checkpoints.saved
        if any("eval/" in name for name in saved.metadata.metrics)
    }
    assert evaluated == {4, 7}
    assert all("train/loss" in saved.metadata.metrics for saved in loop.checkpoints.saved)


def test_a_step_is_saved_once_and_callbacks_are_called() -> None:
    watcher = Watcher()
    loop = Loop(steps=4, checkpoint={"every": "2st", "at_start": True}, callbacks={"watch": watcher})
    loop.fit()
    assert loop.checkpoints.steps() == watcher.checkpoints == [0, 2, 4]
    facts = loop.checkpoints.saved[1].metadata
    assert (facts.step, facts.samples, facts.loop) == (2, 2, {"scale": 3.0})
    assert loop.checkpoints.saved[1].share.callbacks == {"watch": {"told": 2}}


def test_on_failure_decides_if_a_failed_checkpoint_stops_the_run() -> None:
    failing: dict[str, Any] = {"steps": 6, "fails_at": [2], "evaluation": False}
    loop = Loop(**failing, checkpoint={"every": "2st", "on_failure": "continue"})
    assert loop.fit() == "done"
    assert loop.checkpoints.steps() == [4, 6]

    loop = Loop(**failing, checkpoint={"every": "2st", "on_failure": "stop"})
    with pytest.raises(CheckpointError):
        loop.fit()


def test_a_failed_last_checkpoint_always_fails_the_run() -> None:
    for background in (True, False):
        loop = Loop(
            steps=2, fails_at=[2], evaluation=False, checkpoint={"on_failure": "continue", "async_save": background}
        )
        with pytest.raises(CheckpointError):
            loop.fit()


def test_checkpoints_in_progress_count_in_the_search_for_the_best() -> None:
    """Saves are at steps 2 and 4, evaluations at 3 and 6. The second search must include the save at 4."""
    loop = Loop(
        steps=6,
        train={"eval_every": "3st"},
        checkpoint={"every": "2st", "keep": {"last": 1, "best": 1, "monitor": "eval/loss"}},
    )
    loop.checkpoints.ready = lambda: False  # type: ignore[method-assign]
    loop.fit()
    assert [steps for _, steps in loop.checkpoints.asked_for_best] == [[2]]


def test_a_new_best_is_saved_at_once() -> None:
    loop = Loop(steps=4, train={"eval_every": "3st"}, checkpoint={"keep": {"best": 1, "monitor": "eval/loss"}})
    loop.checkpoints.best = True
    loop.fit()
    assert loop.checkpoints.steps() == [3, 4]


@pytest.mark.parametrize(("done", "first"), [({}, [3, 6]), ({"eval/loss": 1.0}, [6])])
def test_a_resumed_run_performs_an_evaluation_that_a_stop_skipped(done: dict[str, float], first: list[int]) -> None:
    loop = Loop(steps=6, train={"eval_every": "3st"})
    loop.trainer.restore(saved(3, metrics=done))  # type: ignore[arg-type]
    loop.fit()
    assert loop.tracker.steps("eval/loss") == first


def test_a_resumed_run_performs_a_missing_final_evaluation() -> None:
    loop = Loop(steps=6, train={"eval_every": "4st"})
    loop.trainer.restore(saved(6))  # type: ignore[arg-type]
    loop.fit()
    assert loop.tracker.steps("eval/loss") == [6]


class Derives(Sums):
    """Task with a loss that needs gradients, as physics-informed networks do."""

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Any]:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope * batch).sum(), slope.detach()


def test_a_failed_evaluation_saves_the_trained_weights_and_ends_the_run() -> None:
    loop = Loop(steps=6, train={"eval_every": "3st"}, task=Derives())
    with pytest.raises(RuntimeError, match="does not require grad") as failed:
        loop.fit()
    assert loop.checkpoints.steps() == [3]
    assert any("with torch.enable_grad()" in note for note in failed.value.__notes__)


@pytest.mark.parametrize(("monitor", "warned"), [("eval/los", True), ("eval/loss", False)])
def test_a_monitor_that_no_evaluation_reports_is_logged_with_the_names_that_there_are(
    monitor: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keep = {"best": 1, "monitor": monitor, "mode": "min"}
    Loop(steps=2, train={"eval_every": "1st"}, checkpoint={"keep": keep}).fit()
    said = [record.getMessage() for record in caplog.records if "no metric is named" in record.getMessage()]
    assert len(said) == (2 if warned else 0)
    assert all(f"no metric is named {monitor}, " in one and "eval/loss" in one for one in said)
