"""Callbacks that lower the learning rate, tested with synthetic losses and a small loop."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.doubles import Loop

from ddpforge.builtin.callbacks.plateau import ReduceOnPlateau
from ddpforge.builtin.callbacks.recovery import SpikeGuard, WarmupAfterRollback
from ddpforge.errors import Diverged, PluginError
from ddpforge.interfaces import Callback, GoBack, StepInfo


def factors(callback: ReduceOnPlateau, losses: Sequence[float]) -> list[float]:
    found = []
    for step, loss in enumerate(losses):
        callback.on_eval(step, {"eval/loss": loss})
        found.append(callback.lr_factor())
    return found


def info(step: int, loss: float | None = None) -> StepInfo:
    metrics = {} if loss is None else {"train/loss": loss}
    return StepInfo(step=step, samples=step, lr=0.1, seconds=1.0, metrics=metrics)


# ---------------------------------------------------------------------------------------------- plateau
def test_plateau_lowers_the_rate_down_to_the_minimum() -> None:
    callback = ReduceOnPlateau(patience=2, factor=0.5, min_lr_ratio=0.2)
    losses = [3.0, 2.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors(callback, losses) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2]


def test_plateau_uses_the_direction_of_the_metric_and_ignores_nan() -> None:
    callback = ReduceOnPlateau(metric="eval/accuracy", patience=1, factor=0.1, min_delta=0.05)
    for accuracy in (0.5, 0.6, float("nan"), 0.64):
        callback.on_eval(1, {"eval/accuracy": accuracy})
    assert callback.lr_factor() == pytest.approx(0.01)


def test_plateau_counter_resumes() -> None:
    losses = [3.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    straight, first, second = (ReduceOnPlateau(patience=2) for _ in range(3))
    expected = factors(straight, losses)
    found = factors(first, losses[:3])
    second.load_state(first.state())
    assert found + factors(second, losses[3:]) == expected


def test_unknown_metric_is_refused() -> None:
    with pytest.raises(PluginError, match="reduce_on_plateau watches 'eval/loss', but no evaluation reports it"):
        factors(ReduceOnPlateau(), []) or ReduceOnPlateau().on_eval(1, {"eval/mae": 1.0})
    with pytest.raises(ValueError, match='set mode = "min" or "max"'):
        ReduceOnPlateau(metric="eval/zap")


def test_loop_trains_at_the_lowered_rate() -> None:
    """Lowers the rate after one evaluation without an improvement of 100: the loss of w·x never falls that much."""
    loop = Loop(steps=3, train={"eval_every": "1st"}, callbacks={"p": ReduceOnPlateau(patience=1, min_delta=100)})
    loop.fit()
    rates = [row["lr"] for _, row in loop.tracker.rows if "lr" in row]
    assert rates == pytest.approx([0.001, 0.001, 0.0001])


# ---------------------------------------------------------------------------------------------- after a rollback
def test_rate_warms_up_after_a_rollback() -> None:
    """Goes back from step 4 to 3; skips step 4, at a quarter of the rate; step 5 has half the rate."""
    loop = Loop(
        steps=8,
        bad=[4],
        train={"on_nonfinite": "rollback"},
        checkpoint={"every": "3st"},
        evaluation=False,
        callbacks={"warmup": WarmupAfterRollback(steps=4, min_lr_ratio=0.0)},
    )
    loop.fit()
    rates = {step: row["lr"] for step, row in loop.tracker.rows}
    assert rates == pytest.approx(dict.fromkeys((1, 2, 3), 0.001) | {5: 0.0005, 6: 0.00075, 7: 0.001, 8: 0.001})


def test_warmup_after_rollback_resumes() -> None:
    first, second = WarmupAfterRollback(steps=10, min_lr_ratio=0.5), WarmupAfterRollback(steps=10, min_lr_ratio=0.5)
    first.on_rollback(20)
    assert first.lr_factor() == pytest.approx(0.55)
    for step in (21, 22):
        first.on_step(info(step))
    second.load_state(first.state())
    assert second.lr_factor() == first.lr_factor() == pytest.approx(0.65)


# ---------------------------------------------------------------------------------------------- spikes
def guarded(losses: Sequence[float | None], guard: SpikeGuard, first: int = 1) -> list[float]:
    found = []
    for step, loss in enumerate(losses, first):
        guard.on_step(info(step, loss))
        found.append(guard.lr_factor())
    return found


def test_spike_lowers_the_rate_for_some_steps(caplog: pytest.LogCaptureFixture) -> None:
    guard = SpikeGuard(ratio=2.0, window=3, min_lr_ratio=0.2, steps=4, rollback=False)
    with caplog.at_level(logging.WARNING, "ddpforge"):
        found = guarded([1.0, 1.1, 0.9, 1.9, None, 2.3, None, None, None, 1.0], guard)
    assert found == pytest.approx([1.0] * 5 + [0.4, 0.6, 0.8, 1.0, 1.0])
    assert caplog.messages == ["the loss of step 6 is 2.3, usual is 1.1; the learning rate is lower for some steps"]


@pytest.mark.parametrize(
    "losses",
    [
        [1.0, 1.0, 5.0],  # before there are enough rows
        [1.0, 1.0, 1.0, float("nan"), float("inf")],  # handled by on_nonfinite
        [-1.0, -1.0, -1.0, 5.0],  # a ratio to a negative loss has no meaning
    ],
)
def test_losses_that_are_not_spikes_keep_the_rate(losses: list[float]) -> None:
    assert guarded(losses, SpikeGuard(window=3, rollback=False)) == [1.0] * len(losses), "no lower rate"


def test_lasting_higher_loss_becomes_the_usual_loss() -> None:
    guard = SpikeGuard(window=3, min_lr_ratio=0.5, steps=1, rollback=False)
    guarded([1.0, 1.0, 1.0, 9.0, 9.0], guard)
    assert guard.state()["since"] == 5
    guarded([9.0, 9.0], guard, first=6)
    assert guard.state()["since"] == 5


def test_spike_guard_resumes() -> None:
    losses: list[Any] = [1.0, 1.0, None, 3.0, 9.0, 1.0, 4.0, 1.0]
    straight, first, second = (SpikeGuard(window=3, steps=5, rollback=False) for _ in range(3))
    expected = guarded(losses, straight)
    found = guarded(losses[:5], first)
    second.load_state(first.state())
    assert found + guarded(losses[5:], second, first=6) == expected
    assert min(expected) < 1.0


class _Jumping(torch.nn.Module):
    """The loss of every sample is w²; the fifth forward pass in training sets w to 100."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.passes = torch.nn.Parameter(torch.ones(())), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == 5 and self.training:
            with torch.no_grad():
                self.w.fill_(100.0)
        return (self.w.square() + 0 * x).flatten()


def test_spike_rolls_back_and_skips_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Spikes at step 5, goes back to the checkpoint of step 4, and continues without step 5, at a lower rate."""
    guard = SpikeGuard(ratio=2.0, window=3, min_lr_ratio=0.5, steps=4)
    loop = Loop(steps=8, model=_Jumping(), checkpoint={"every": "2st"}, evaluation=False, callbacks={"guard": guard})
    with caplog.at_level(logging.WARNING, "ddpforge"):
        assert loop.fit() == "done"
    assert "the loss of step 5 is 1e+04, usual is" in caplog.text
    assert "; back to step 4" in caplog.text
    assert loop.trainer.progress.skipped_steps == {5}
    assert loop.tracker.rewound == [4]
    assert loop.checkpoints.steps()[0] == 0  # a checkpoint for a rollback always exists
    rates = {step: row["lr"] for step, row in loop.tracker.rows}
    assert rates == pytest.approx(dict.fromkeys((1, 2, 3, 4), 0.001) | {6: 0.00075, 7: 0.000875, 8: 0.001})
    assert max(row["train/loss"] for _, row in loop.tracker.rows) <= 1.0


def test_spike_skips_all_steps_since_the_previous_row() -> None:
    guard = SpikeGuard(window=3)
    for step, loss in enumerate([1.0, None, 1.0, None, 1.0, None, None, 9.0], 1):
        wish = guard.on_step(info(step, loss))
    assert wish is not None
    assert list(wish.steps) == [6, 7, 8]


def test_run_ends_after_ten_rollbacks() -> None:
    class Always(Callback):
        goes_back = True

        def on_step(self, info: StepInfo) -> GoBack | None:
            return GoBack([], "the loss of step 3 is high") if info.step == 3 else None

    with pytest.raises(Diverged, match="the loss of step 3 is high, after 10 rollbacks"):
        Loop(steps=4, evaluation=False, callbacks={"always": Always()}).fit()


def test_training_metric_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="metric: train/loss is not an evaluation metric"):
        ReduceOnPlateau(metric="train/loss")
