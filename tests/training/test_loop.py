"""Order and time of events in the training loop, with test doubles for its collaborators."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Clock, Line, Loop, Numbers, Plain, Sums, Watcher, saved
from torch import Tensor, nn

import ddpforge.training.loop
import ddpforge.training.nonfinite
from ddpforge.errors import CheckpointError, Diverged, PluginError
from ddpforge.interfaces import Callback
from ddpforge.launchers.exit_record import ExitRecords
from ddpforge.ranks.run_limits import NoLimits
from ddpforge.ranks.signals import NoData
from ddpforge.training.cadence import Stopwatch


@pytest.fixture
def _norms_are_expensive_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a GPU: norms are read only when ranks agree, or when a decision depends on them."""
    monkeypatch.setattr(ddpforge.training.loop, "_reading_is_free", lambda device: False)


@pytest.fixture
def _rare_agreements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree at logged steps, and every thousandth step."""
    monkeypatch.setattr(ddpforge.training.consensus, "_AGREE_SECONDS", 1e9)


# ---------------------------------------------------------------------------------------------- order of events
def test_the_order_of_a_step_is_step_callbacks_log_evaluate_save() -> None:
    watcher = Watcher()
    loop = Loop(steps=2, train={"eval_every": "1st"}, checkpoint={"every": "1st"}, callbacks={"watch": watcher})
    watcher.events = loop.events
    assert loop.fit() == "done"
    one = ["step", "callback", "log", "evaluation begins", "evaluation ends", "evaluate", "save"]
    assert loop.events == one * 2


def test_checkpoint_copies_finish_before_updates_and_after_skipped_steps() -> None:
    watcher = Watcher()
    options: dict[str, Any] = {"train": {"on_nonfinite": "rollback"}, "checkpoint": {"every": "1st"}}
    loop = Loop(steps=3, bad=[2], evaluation=False, callbacks={"watch": watcher}, **options)
    watcher.events = loop.events
    loop.checkpoints.before_update = lambda: loop.events.append("copied")  # type: ignore[method-assign]
    assert loop.fit() == "done"
    updated, left_out = ["copied", "step", "callback", "log", "save"], ["copied", "callback", "save"]
    assert loop.events == ["save", *updated, "copied", "step", "log", *left_out, *updated]


@pytest.mark.usefixtures("_norms_are_expensive_to_read")
def test_memory_for_checkpoint_copies_is_reserved_once_on_a_device() -> None:
    loop, asked = Loop(steps=3), []
    loop.checkpoints.reserve = lambda state: asked.append(set(state.model))  # type: ignore[method-assign]
    loop.fit()
    assert asked == [{"w"}], "once, when the optimizer has its state"


def test_rows_are_logged_at_the_first_step_at_the_cadence_and_at_the_last_step() -> None:
    loop = Loop(steps=11, track="4st")
    loop.fit()
    assert loop.tracker.steps() == [1, 4, 8, 11]
    assert loop.tracker.steps("eval/loss") == [11]
    assert [row["epoch"] for _, row in loop.tracker.rows if "epoch" in row] == [1 / 11, 4 / 11, 8 / 11, 1.0]


def test_callbacks_receive_every_step_and_metrics_of_logged_steps() -> None:
    watcher = Watcher()
    loop = Loop(steps=4, track="3st", callbacks={"watch": watcher}, schedule=lambda step: 1.0 / (step + 1))
    loop.fit()
    assert [info.step for info in watcher.told] == [1, 2, 3, 4]
    assert [bool(info.metrics) for info in watcher.told] == [True, False, True, True]
    assert [info.samples for info in watcher.told] == [1, 2, 3, 4]
    assert [info.lr for info in watcher.told] == pytest.approx([0.001, 0.0005, 0.001 / 3, 0.00025])
    assert dict(loop.tracker.rows)[3]["twice"] == 6.0


def test_the_learning_rate_is_the_rate_of_the_recipe_times_the_schedule() -> None:
    """Each step has all three samples: epochs of one step with x = 0 and x = 1 would not show the difference."""
    loop = Loop(steps=1, batch=3, length="3st", schedule=lambda step: 10.0**-step, evaluation=False)
    loop.fit()
    assert loop.model.w.item() == pytest.approx(1.0 - 0.001 * (1 + 0.1 + 0.01))  # type: ignore[union-attr, operator]


def test_speed_covers_the_steps_since_the_last_row() -> None:
    """Steps 1 and 2 take a second each, steps 3 and 4 take ten. Evaluations do not count."""
    loop = Loop(steps=4, batch=5, track="2st")
    loop.trainer.rows.stopwatch = Stopwatch(loop.clock)

    def work(step: int) -> None:
        loop.clock.now += 1.0 if step <= 2 else 10.0

    watch = Watcher(action=work)
    loop.trainer.calls.callbacks = {"watch": watch}
    slow = loop.replica.step

    def step() -> Any:
        work(loop.trainer.progress.step + 1)
        return slow()

    watch.action = None
    loop.replica.step = step  # type: ignore[method-assign]
    loop.fit()
    speeds = {step: row["train/samples_per_second"] for step, row in loop.tracker.rows if "lr" in row}
    assert speeds == pytest.approx({1: 5.0, 2: 5.0, 4: 0.5})
    assert [info.seconds for info in watch.told] == pytest.approx([1.0, 1.0, 10.0, 10.0])


def seconds_a_step(loop: Loop) -> Loop:
    """Returns the loop, with steps that take one second each."""
    loop.trainer.rows.stopwatch = Stopwatch(loop.clock)
    real = loop.replica.step

    def step() -> Any:
        loop.clock.now += 1.0
        return real()

    loop.replica.step = step  # type: ignore[method-assign]
    return loop


def test_evaluation_time_does_not_count_in_the_speed() -> None:
    loop = seconds_a_step(Loop(steps=4, batch=5, track="2st", train={"eval_every": "1st"}))

    def slow(step: int, metrics: Mapping[str, float]) -> None:
        loop.clock.now += 100.0

    loop.trainer.calls.callbacks = {"slow": CallbackOf(on_eval=slow)}
    loop.fit()
    speeds = {step: row["train/samples_per_second"] for step, row in loop.tracker.rows if "lr" in row}
    assert speeds == pytest.approx({1: 5.0, 2: 5.0, 4: 5.0})


def test_time_of_saving_does_not_count_in_the_speed() -> None:
    loop = seconds_a_step(Loop(steps=4, batch=5, track="2st", evaluation=False, checkpoint={"every": "1st"}))
    save = loop.checkpoints.save

    def slow(*given: Any) -> None:
        loop.clock.now += 100.0
        save(*given)

    loop.checkpoints.save = slow  # type: ignore[method-assign]
    loop.fit()
    speeds = {step: row["train/samples_per_second"] for step, row in loop.tracker.rows}
    assert speeds == pytest.approx({1: 5.0, 2: 5.0, 4: 5.0})
    assert loop.checkpoints.steps() == [1, 2, 3, 4]


class Counting(Sums):
    """Each sample has three items."""

    def count(self, batch: Any) -> Tensor:
        return torch.tensor(3.0 * len(batch))


@pytest.mark.parametrize("ranks", [1, 2])
def test_items_per_second_include_all_data_parallel_ranks(ranks: int) -> None:
    """Includes rows over one, two and three steps."""
    replica = Plain(ranks)
    loop = seconds_a_step(Loop(steps=9, batch=5, task=Counting(), track="3st", evaluation=False, replica=replica))
    loop.fit()
    name = f"train/{Counting.items}_per_second"
    assert {step: row[name] for step, row in loop.tracker.rows} == pytest.approx(
        dict.fromkeys((1, 3, 6, 9), 15.0 * ranks)
    )


class Read:
    """Batches as of a stream: this rank reads a share of them."""

    def __init__(self, batches: Any, **known: Any) -> None:
        self.batches, self.known, self.workers = batches, known, 0

    def training(self, start: int) -> Iterator[Any]:
        return (micro._replace(**self.known) for micro in self.batches.training(start))


def test_the_samples_of_a_step_include_all_ranks() -> None:
    loop = Loop(steps=2, batch=5, evaluation=False, replica=Plain(ranks=2))
    loop.trainer.stepping.training = Read(loop.trainer.stepping.training, step_samples=10)  # type: ignore[assignment]
    loop.fit()
    assert [row["samples"] for _, row in loop.tracker.rows] == [10, 20]
    assert loop.checkpoints.saved[-1].metadata.samples == 20


def test_ranks_that_read_different_samples_of_a_stream_are_refused() -> None:
    loop = Loop(steps=2, evaluation=False, replica=Plain(ranks=2))
    loop.trainer.stepping.training = Read(loop.trainer.stepping.training, read=5)  # type: ignore[assignment]
    mean = loop.replica.ranks.reduce_metrics
    loop.replica.ranks.reduce_metrics = lambda totals, *rest: mean(  # type: ignore[method-assign]
        {name: (x + 7) / 2 if name == "?read1" else (x + 49) / 2 if name == "?read2" else x
         for name, x in totals.items()}, *rest
    )  # fmt: skip
    with pytest.raises(PluginError, match="ranks read different samples from the iterable dataset, by step 1"):
        loop.fit()


@pytest.mark.usefixtures("_rare_agreements")
def test_ranks_do_not_communicate_between_rows() -> None:
    loop = Loop(steps=50, track="25st", evaluation=False)
    loop.trainer.consensus.every = 1000
    loop.fit()
    names = 2  # a reduction with names that ranks have not agreed on is followed by a second reduction
    assert len(loop.replica.ranks.asked) == 1 + 3 + names  # one before the first step: is there a stop request?


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loop], list[int]]:
    """Returns a function that runs a loop and returns the steps after which its ranks agree."""

    def found(loop: Loop) -> list[int]:
        agreed: list[int] = []
        agree = loop.trainer._agree
        loop.trainer.consensus.pace = Stopwatch(loop.clock)

        def noted(*arguments: Any, logs: bool) -> Any:
            agreed.append(loop.trainer.progress.step)
            return agree(*arguments, logs=logs)

        monkeypatch.setattr(loop.trainer, "_agree", noted)
        loop.fit()
        return agreed

    return found


def test_ranks_agree_about_once_a_second(agreements: Callable[[Loop], list[int]]) -> None:
    """Steps take a quarter of a second: ranks agree at every fourth."""
    loop = Loop(steps=21, track="20st", evaluation=False)

    def step() -> Any:
        loop.clock.now += 0.25
        return Plain.step(loop.replica)

    loop.replica.step = step  # type: ignore[method-assign]
    assert agreements(loop) == [1, 4, 8, 12, 16, 20, 21]


def test_ranks_agree_after_every_step_if_a_callback_is_slow(agreements: Callable[[Loop], list[int]]) -> None:
    """Holds for the steps after a row, too, before the callback is slow again."""
    loop = Loop(steps=8, track="3st", evaluation=False)

    def sleep(step: int) -> None:
        loop.clock.now += 2.0

    loop.trainer.calls.callbacks = {"slow": Watcher(action=sleep)}
    assert agreements(loop)[1:] == [3, 4, 5, 6, 7, 8]  # at the first step the callback has not taken time yet


def test_steps_without_a_row_agree_on_the_host() -> None:
    """Numbers on the device are read only for a row."""
    loop = Loop(steps=7, track="3st", evaluation=False)
    said: list[tuple[str, int]] = []
    for name in ("reduce_metrics", "all_reduce_mean"):
        real = getattr(loop.trainer.world.global_ranks, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            said.append((name, loop.trainer.progress.step))
            return real(*arguments)

        setattr(loop.trainer.world.global_ranks, name, noted)
    loop.trainer.consensus.every = 1
    loop.fit()
    rows = [(name, step) for name, step in said if step in (1, 3, 6, 7)]
    assert {name for name, step in rows if step} == {"reduce_metrics"}
    assert {name for name, step in said if step in (0, 2, 4, 5)} == {"all_reduce_mean"}


# ---------------------------------------------------------------------------------------------- end of a run
def test_a_callback_stops_training_after_a_step_or_an_evaluation() -> None:
    for until in (3, -4):
        watcher = Watcher(until=until)
        loop = Loop(steps=9, train={"eval_every": "2st"}, callbacks={"watch": watcher})
        assert loop.fit() == "done"
        assert loop.trainer.progress.step == abs(until)
        assert loop.checkpoints.steps() == [abs(until)]
        assert loop.tracker.steps("eval/loss")[-1] == abs(until)


def test_a_stop_request_saves_and_skips_a_due_evaluation() -> None:
    watcher = Watcher(action=lambda step: step == 3 and os.kill(os.getpid(), signal.SIGUSR1))
    loop = Loop(steps=9, train={"eval_every": "1st"}, callbacks={"watch": watcher})
    assert loop.fit() == "preempted"
    assert loop.trainer.progress.step == 4
    assert loop.tracker.steps("eval/loss") == [1, 2, 3]
    assert loop.checkpoints.steps() == [4]


def test_a_stop_request_during_startup_is_met_before_the_first_step() -> None:
    loop = Loop(steps=9)
    loop.trainer.stop.requested = True
    assert loop.fit() == "preempted"
    assert (loop.trainer.progress.step, loop.checkpoints.steps()) == (0, [])  # nothing is lost
    assert loop.events == []

    resumed = Loop(steps=9, train={"eval_every": "3st"})
    resumed.trainer.restore(saved(3))  # type: ignore[arg-type]
    resumed.trainer.stop.requested = True
    assert resumed.fit() == "preempted"
    assert (resumed.trainer.progress.step, resumed.checkpoints.steps(), resumed.tracker.rows) == (3, [], [])


class Stopping(Numbers):
    """Numbers that request a stop when sample `at` is fetched."""

    def __init__(self, size: int, at: int) -> None:
        super().__init__(size)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(index)


@pytest.mark.parametrize(("at", "steps"), [("2st", 4), ("4st", 4)])
def test_a_stop_request_interrupts_an_evaluation(monkeypatch: pytest.MonkeyPatch, at: str, steps: int) -> None:
    """Includes the last evaluation, after which the run would be done. Callbacks leave it without an error."""
    monkeypatch.setattr(ddpforge.training.consensus, "_AGREE_SECONDS", 0.0)  # ranks agree after every batch
    watcher = Watcher()
    loop = Loop(steps=steps, train={"eval_every": at}, callbacks={"watch": watcher}, evaluation={"": 9})
    watcher.events = loop.events
    object.__setattr__(loop.trainer.evaluator.sets[""], "_data", Stopping(9, at=3))
    assert loop.fit() == "preempted"
    stopped = int(at.removesuffix("st"))
    assert (loop.trainer.progress.step, loop.checkpoints.steps()) == (stopped, [stopped])
    assert loop.events[-3:] == ["evaluation begins", "evaluation ends", "save"]
    assert loop.tracker.steps("eval/loss") == []
    assert not any(name.startswith("eval/") for name in loop.checkpoints.saved[-1].metadata.metrics)
    assert loop.model.training


class Owner(NoLimits):
    """Requests the end of the run after `looks` polls, and counts acknowledgements."""

    def __init__(self, looks: int) -> None:
        self.looks, self.acknowledged = looks, 0

    def stop_requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def acknowledge(self) -> None:
        self.acknowledged += 1


def test_the_owner_of_a_run_halts_it_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the exit record: it keeps the launcher from restarting the ranks."""
    verdict = tmp_path / "verdict"
    monkeypatch.setenv("DDPFORGE_VERDICT", str(verdict))
    loop = Loop(steps=9, evaluation=False)
    loop.trainer.consensus.halt = owner = Owner(looks=3)
    assert loop.fit() == "preempted"
    assert (loop.trainer.progress.step, loop.checkpoints.steps(), owner.acknowledged) == (3, [3], 1)
    assert ExitRecords(verdict, 1).halted


def test_a_wall_time_run_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(steps=3, length="1m", evaluation=False)
    monkeypatch.setattr("ddpforge.training.milestones.time.monotonic", loop.clock)
    monkeypatch.setattr("ddpforge.training.cadence.Alarm.rings", lambda alarm: loop.clock() - 1000.0 >= alarm.seconds)
    watcher = Watcher(action=lambda step: setattr(loop.clock, "now", loop.clock.now + 11))
    loop.trainer.calls.callbacks = {"watch": watcher}
    assert loop.fit() == "done"
    assert loop.trainer.progress.step == 7  # detected at the seventh step, after six callbacks of 11 seconds
    assert loop.checkpoints.saved[-1].metadata.position["seconds"] == 77.0


def test_a_resumed_wall_time_run_trains_for_its_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(steps=3, length="1m", evaluation=False)
    monkeypatch.setattr("ddpforge.training.milestones.time.monotonic", loop.clock)
    monkeypatch.setattr("ddpforge.training.cadence.Alarm.rings", lambda alarm: loop.clock() - 1000.0 >= alarm.seconds)
    loop.trainer.restore(saved(4, position={"seconds": 50.0, "skipped": 0, "left_out": []}))  # type: ignore[arg-type]
    watcher = Watcher(action=lambda step: setattr(loop.clock, "now", loop.clock.now + 6))
    loop.trainer.calls.callbacks = {"watch": watcher}
    assert loop.fit() == "done"
    assert loop.trainer.progress.step == 7  # detected at the third step, after two callbacks of 6 seconds
    assert loop.checkpoints.saved[-1].metadata.position["seconds"] == 50.0 + 18.0


def test_a_wall_time_run_that_is_stopped_twice_saves_the_time_of_all_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddpforge.training.milestones.time.monotonic", clock := Clock())
    spent: list[float] = []
    newest: Any = None
    for _ in range(3):
        loop = Loop(steps=3, length="1h", evaluation=False)
        if newest:
            loop.trainer.restore(newest)
        first = loop.trainer.progress.step

        def pass_time(step: int, first: int = first) -> bool:
            clock.now += 7.0
            return step == first + 2

        loop.trainer.calls.callbacks = {"stops": CallbackOf(on_step=lambda info, ends=pass_time: ends(info.step))}
        loop.trainer.calls.ending = {"on_step": ["stops"], "on_eval": []}
        loop.fit()
        newest = loop.checkpoints.saved[-1]
        spent.append(newest.metadata.position["seconds"])
        clock.now += 500.0  # between attempts
    assert spent == [14.0, 28.0, 42.0]


# ---------------------------------------------------------------------------------------------- not finite


def test_a_nonfinite_gradient_stops_the_run_and_is_logged() -> None:
    loop = Loop(steps=6, bad=[3], track="10st", checkpoint={"every": "1st"})
    with pytest.raises(Diverged, match="the gradient of step 3 is not finite"):
        loop.fit()
    assert loop.checkpoints.steps() == [1, 2]
    step, row = loop.tracker.rows[-1]
    assert step == 3
    assert row["train/grad_norm"] != row["train/grad_norm"]
    assert row["train/loss"] != row["train/loss"]


def test_a_skipped_step_has_one_row_and_is_counted() -> None:
    loop = Loop(steps=6, bad=[2, 3], train={"on_nonfinite": "skip"}, evaluation=False)
    assert loop.fit() == "done"
    assert [step for step, _ in loop.tracker.rows] == [1, 2, 3, 4, 5, 6]
    assert [row.get("train/skipped_steps", 0) for _, row in loop.tracker.rows] == [0, 1, 2, 2, 2, 2]
    assert loop.checkpoints.saved[-1].metadata.position["skipped"] == 2


def test_a_nonfinite_step_between_rows_is_logged() -> None:
    loop = Loop(steps=6, bad=[3], train={"on_nonfinite": "skip"}, track="10st", evaluation=False)
    loop.fit()
    assert [step for step, _ in loop.tracker.rows] == [1, 3, 6]


def test_too_many_skipped_steps_in_a_row_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.training.nonfinite._MOST_SKIPS", 3)
    loop = Loop(steps=9, bad=[2, 3, 5, 6, 7], train={"on_nonfinite": "skip"}, evaluation=False)
    with pytest.raises(Diverged, match="the gradient of step 7"):
        loop.fit()
    assert loop.trainer.progress.step == 7


def test_fp16_overflows_are_not_a_divergence() -> None:
    loop = Loop(steps=4, bad=[2], evaluation=False)
    loop.replica.overflowed = lambda: True  # type: ignore[method-assign]
    assert loop.fit() == "done"
    assert loop.trainer.progress.nonfinite_steps == 1


@pytest.mark.usefixtures("_norms_are_expensive_to_read", "_rare_agreements")
def test_nonfinite_steps_are_found_when_ranks_agree_if_reading_is_expensive() -> None:
    loop = Loop(steps=9, bad=[3, 5], track="6st", train={"on_nonfinite": "skip"}, evaluation=False)
    loop.trainer.consensus.every = 1000
    loop.fit()
    assert loop.trainer.progress.nonfinite_steps == 2
    # only the newest of several nonfinite steps is logged
    assert [step for step, _ in loop.tracker.rows] == [1, 5, 6, 9]


@pytest.mark.usefixtures("_norms_are_expensive_to_read", "_rare_agreements")
@pytest.mark.parametrize("due", ["save", "evaluation", "end", "end without evaluation"])
def test_weights_after_a_nonfinite_step_are_neither_saved_nor_evaluated(due: str) -> None:
    loop = Loop(
        steps=9,
        bad=[4],
        track="100st",
        checkpoint={"every": "4st" if due == "save" else "100st"},
        train={"eval_every": "4st" if due == "evaluation" else "100st"},
        callbacks={"watch": Watcher(until=4)} if due.startswith("end") else {},
        evaluation="without" not in due,
    )
    loop.trainer.consensus.every = 1000
    with pytest.raises(Diverged, match="the gradient of step 4"):
        loop.fit()
    assert loop.checkpoints.steps() == []
    assert "evaluate" not in loop.events


# ---------------------------------------------------------------------------------------------- rollbacks
def test_a_rollback_skips_every_nonfinite_step_since_the_checkpoint() -> None:
    loop = Loop(steps=8, bad=[4, 6], train={"on_nonfinite": "rollback"}, checkpoint={"every": "3st"}, evaluation=False)
    assert loop.fit() == "done"
    assert loop.tracker.rewound == [3, 3]
    assert loop.checkpoints.steps() == [0, 3, 6, 8]
    assert loop.trainer.progress.skipped_steps == {4, 6}
    assert loop.trainer.progress.nonfinite_steps == 2
    assert loop.replica.loop == {"scale": 3.0}
    assert loop.events.count("step") == 4 + 2 + 3  # to step 4; 5 and 6; 5, 7 and 8


def test_a_rollback_before_the_first_save_restarts_at_step_0() -> None:
    loop = Loop(steps=4, bad=[1], train={"on_nonfinite": "rollback"}, evaluation=False)
    assert loop.fit() == "done"
    assert loop.tracker.rewound == [0]


def test_too_many_rollbacks_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddpforge.training.nonfinite, "_MOST_ROLLBACKS", 2)
    loop = Loop(steps=9, bad=[2, 4, 6], train={"on_nonfinite": "rollback"}, evaluation=False)
    with pytest.raises(Diverged, match="the gradient of step 6 is not finite, after 2 rollbacks"):
        loop.fit()


def test_only_consecutive_rollbacks_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddpforge.training.nonfinite, "_MOST_ROLLBACKS", 1)
    options: dict[str, Any] = {"train": {"on_nonfinite": "rollback"}, "checkpoint": {"every": "2st"}}
    loop = Loop(steps=9, bad=[3, 6, 9], **options, evaluation=False)
    assert loop.fit() == "done"
    assert loop.tracker.rewound == [
        2,
        4,
        8,
    ]


class Tuned(Line):
    """Model with a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(()), requires_grad=False)


@pytest.mark.parametrize("moves", [False, True])
def test_frozen_weights_that_checkpoints_omit_must_not_change(moves: bool) -> None:
    model = Tuned()
    touch = CallbackOf(on_step=lambda info: model.base.data.add_(1.0 if moves and info.step == 3 else 0.0) is None)
    options: dict[str, Any] = {"checkpoint": {"every": "2st", "save": "trainable"}, "evaluation": False}
    loop = Loop(steps=6, model=model, callbacks={"touch": touch}, **options)
    if not moves:
        assert loop.fit() == "done"
        assert "base" not in loop.checkpoints.saved[-1].share.model
        return
    with pytest.raises(CheckpointError, match="frozen weights have changed during the run"):
        loop.fit()
    assert loop.checkpoints.steps() == [2]


# ---------------------------------------------------------------------------------------------- resuming


def test_a_resumed_run_continues_from_its_checkpoint() -> None:
    watcher = Watcher()
    loop = Loop(steps=6, callbacks={"watch": watcher})
    loop.trainer.restore(saved(4, metrics={"eval/loss": 1.0}))  # type: ignore[arg-type]
    progress = loop.trainer.progress
    assert (progress.step, progress.samples, progress.seconds, progress.nonfinite_steps) == (4, 4, 5.0, 1)
    assert progress.skipped_steps == {2}
    assert watcher.taken == {"n": 3}
    assert loop.trainer._shows.step == 4, "what is shown before the next step belongs to this one"
    assert loop.replica.loop == {"scale": 2.0}
    assert loop.model.w.item() == 7.0  # type: ignore[union-attr, operator]
    loop.fit()
    assert loop.tracker.steps() == [5, 6]
    assert loop.checkpoints.steps() == [6]


class Warming(Sums):
    """The weight of the loss depends on the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        self.seen.append(("eval" if self.evaluates else "train", self.step))
        loss, outputs = super().loss(model, batch)
        return loss * min(1.0, self.step / 4), outputs


def test_a_loss_knows_the_step_also_in_an_evaluation_and_after_a_resume() -> None:
    task = Warming()
    loop = Loop(steps=5, task=task, train={"eval_every": "5st"})
    assert task.step == 0
    loop.trainer.restore(saved(3))  # type: ignore[arg-type]
    loop.fit()
    assert list(dict.fromkeys(task.seen)) == [("train", 4), ("train", 5), ("eval", 5)]


def test_the_attribute_step_of_a_task_is_its_own() -> None:
    class Counting(Sums):
        def __init__(self) -> None:
            self.step = 100

        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            self.step += 1
            return super().loss(model, batch)

    task = Counting()
    Loop(steps=2, task=task, evaluation=False).fit()
    assert task.step == 102


def test_state_of_a_different_optimizer_or_callback_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    recipe = '[optimizer]\nuse = "adamw"\n[callbacks.watch]\nuse = "other"\n'
    watcher = Watcher()
    loop = Loop(steps=6, callbacks={"watch": watcher}, optimizer="sgd")
    loop.trainer.restore(saved(3, recipe=recipe))  # type: ignore[arg-type]
    assert (loop.replica.loaded.optimizer, loop.replica.loaded.extra_state) == ({}, {})
    assert watcher.taken is None
    assert "optimizer `sgd` starts from scratch: the checkpoint has the state of `adamw`" in caplog.text
    assert "callbacks.watch `watch` starts from scratch: the checkpoint has the state of `other`" in caplog.text

    loop.trainer.restore(saved(3, recipe='[optimizer]\nuse = "sgd"\n[callbacks.watch]\nuse = "watch"\n'))  # type: ignore[arg-type]
    assert loop.replica.loaded.optimizer == {"w": {"m": 1.0}}
    assert loop.replica.loaded.extra_state == {"sgd": {"steps": 7}}
    assert watcher.taken == {"n": 3}


# ---------------------------------------------------------------------------------------------- step by step
def test_steps_can_be_run_one_by_one() -> None:
    """Each step is logged, evaluated and saved before it is yielded."""
    loop = Loop(steps=4, train={"eval_every": "2st"}, checkpoint={"every": "2st", "async_save": False})
    steps = loop.trainer.steps()
    first, second = next(steps), next(steps)
    assert (first.step, second.step, second.samples) == (1, 2, 2)
    assert first.metrics["train/loss"] == loop.tracker.rows[0][1]["train/loss"]
    assert loop.checkpoints.steps() == [2]
    assert loop.tracker.steps("eval/loss") == [2]
    assert [info.step for info in steps] == [3, 4]
    assert loop.checkpoints.steps() == [2, 4]


def test_abandoned_iteration_keeps_saved_checkpoints() -> None:
    loop = Loop(steps=4, checkpoint={"every": "1st", "async_save": False})
    for info in loop.trainer.steps():
        if info.step == 2:
            break
    assert loop.checkpoints.steps() == [1, 2]
    assert loop.trainer.progress.step == 2


# ---------------------------------------------------------------------------------------------- callbacks
class CallbackOf(Callback):
    """Callback with the given methods."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            setattr(self, name, method)


class ReadsGradients(Callback):
    def __init__(self, loop: Callable[[], Loop]) -> None:
        self.loop, self.seen = loop, list[tuple[int, float, float]]()

    def on_gradient(self, step: int, norm: Any) -> None:
        (part,) = self.loop().replica.gradients_by_name().values()
        self.seen.append((step, norm.item(), part.tensor.item()))


def test_factors_of_callbacks_multiply_the_rate_of_the_next_step() -> None:
    half, later = CallbackOf(lr_factor=lambda: 0.5), Watcher()
    later.lr_factor = lambda: 0.1 if later.told else 1.0  # type: ignore[method-assign]
    loop = Loop(steps=1, batch=3, length="2st", schedule=lambda step: 1.0 + step, callbacks={"a": half, "b": later})
    loop.fit()
    assert [info.lr for info in later.told] == pytest.approx([0.001 * 0.5, 0.001 * 2 * 0.5 * 0.1])
    assert loop.model.w.item() == pytest.approx(1.0 - 0.001 * (0.5 + 0.1))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -0.1, None, "0.1", torch.tensor(0.1)])
def test_invalid_rate_factors_are_refused(factor: Any) -> None:
    loop = Loop(callbacks={"odd": CallbackOf(lr_factor=lambda: factor)})
    with pytest.raises(PluginError, match="callback `odd` multiplies the learning rate of step 1 by"):
        loop.fit()


def test_a_callback_reads_the_gradient_of_each_step_before_the_update() -> None:
    """Gradients of w·x are x, and steps have the samples 0 to 2 in some order."""
    reads = ReadsGradients(lambda: loop)
    loop = Loop(steps=3, callbacks={"reads": reads}, evaluation=False)
    loop.fit()
    assert [step for step, _, _ in reads.seen] == [1, 2, 3]
    assert [norm for _, norm, _ in reads.seen] == [gradient for _, _, gradient in reads.seen]
    assert sorted(norm for _, norm, _ in reads.seen) == [0.0, 1.0, 2.0]


def test_gradients_are_not_requested_if_no_callback_reads_them() -> None:
    loop = Loop(callbacks={"watch": Watcher()})
    assert "on_gradient" not in vars(loop.replica)


def test_a_strategy_that_declares_gradients_and_provides_none_is_refused_at_the_first_step() -> None:
    reads = ReadsGradients(lambda: loop)
    loop = Loop(callbacks={"reads": reads})
    loop.replica.step = lambda: loop.model.w.detach()  # type: ignore[method-assign, union-attr, operator, return-value]
    with pytest.raises(
        PluginError, match="Plain promises that callbacks can read gradients, but its step did not call"
    ):
        loop.fit()


def test_callbacks_measure_inside_the_evaluation_contexts_of_all_callbacks() -> None:
    averages, measures = Watcher(), Watcher()
    averages.events = measures.events = events = list[str]()

    def measure(step: int) -> dict[str, float]:
        events.append(f"measure {step}, training {loop.model.training}, gradients {torch.is_grad_enabled()}")
        return {"noise": torch.rand(()).item()}

    measures.while_evaluating = measure  # type: ignore[method-assign]
    measures.on_log = lambda info: {}  # type: ignore[method-assign]
    loop = Loop(steps=2, train={"eval_every": "1st"}, callbacks={"measures": measures, "averages": averages})
    loop.fit()
    measured = "measure 1, training False, gradients False"
    assert events[2:7] == ["evaluation begins", "evaluation begins", measured, "evaluation ends", "evaluation ends"]
    rows = [row["eval/noise"] for _, row in loop.tracker.rows if "eval/loss" in row]
    assert rows[0] == rows[1]  # random numbers are the same in each evaluation
    assert measures.evaluated[0][1]["eval/noise"] == rows[0]


@pytest.mark.parametrize(("method", "own", "name"), [("while_evaluating", "loss", "eval/loss"), ("on_log", "lr", "lr")])
def test_a_callback_metric_with_a_name_in_use_is_refused(method: str, own: str, name: str) -> None:
    loop = Loop(callbacks={"again": CallbackOf(**{method: lambda _: {own: 1.0}})})
    with pytest.raises(PluginError, match=f"callback `again` reports {name}, which the run reports already"):
        loop.fit()


@pytest.mark.parametrize("method", ["while_evaluating", "on_log"])
@pytest.mark.parametrize("returned", [None, {"x": "many"}, {"x": None}, {"x": torch.ones(2)}])
def test_a_callback_that_returns_invalid_metrics_is_named(method: str, returned: Any) -> None:
    loop = Loop(callbacks={"odd": CallbackOf(**{method: lambda _: returned})})
    with pytest.raises(PluginError, match=f"callback `odd` returned .* from `{method}`"):
        loop.fit()


def test_a_callback_metric_may_be_a_scalar_tensor() -> None:
    loop = Loop(callbacks={"odd": CallbackOf(on_log=lambda info: {"x": torch.tensor(0.5)})})
    loop.fit()
    assert [type(row["x"]) for _, row in loop.tracker.rows if "x" in row][:1] == [float]


def test_callbacks_are_called_after_a_rollback() -> None:
    calls: list[Any] = []
    watch = CallbackOf(on_rollback=lambda step: calls.append(step), load_state=lambda state: calls.append("state"))
    loop = Loop(
        steps=8,
        bad=[4],
        train={"on_nonfinite": "rollback"},
        checkpoint={"every": "3st"},
        evaluation=False,
        callbacks={"watch": watch},
    )
    loop.fit()
    assert calls == ["state", 3]


def test_trackers_receive_checkpoints() -> None:
    loop = Loop(steps=4, checkpoint={"every": "2st"}, evaluation=False)
    received: list[int] = []
    loop.tracker.checkpoint = lambda step, folder: received.append(step)  # type: ignore[method-assign]
    loop.fit()
    assert received == [2, 4]


@pytest.mark.parametrize("returned", [None, 3, ["x"]])
def test_a_callback_that_returns_an_invalid_state_is_named(returned: Any) -> None:
    class Stateless(Callback):
        def state(self) -> Any:
            return returned

    with pytest.raises(PluginError, match=r"callback `it`: Stateless.state returned") as told:
        Loop(steps=1, callbacks={"it": Stateless()}).fit()
    assert "`{}` if there is nothing to keep" in told.value.hints[0]


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_different_rate_factors_on_ranks_are_refused(factor: float) -> None:
    class Elsewhere(Plain):
        """Replica with another rank, whose factor is always 1."""

        def __init__(self) -> None:
            super().__init__(ranks=2)
            alone = self.ranks.reduce_metrics
            self.ranks.reduce_metrics = lambda totals, *rest: alone(  # type: ignore[method-assign]
                {name: (x + 1) / 2 if "factor" in name else x for name, x in totals.items()}, *rest
            )

    callbacks = {"rates": CallbackOf(lr_factor=lambda: factor)}
    loop = Loop(steps=1, callbacks=callbacks, evaluation=False, replica=Elsewhere())
    if factor == 1.0:
        assert loop.fit() == "done"
        return
    with pytest.raises(PluginError, match=r"callbacks rates multiply .* step 1 by 0.5 on this rank and 0.75 on"):
        loop.fit()


# ---------------------------------------------------------------------------------------------- no data


class Dry(Read):
    """Stream that ends in a stop request after `batches_left` batches."""

    def __init__(self, batches: Any, batches_left: int) -> None:
        super().__init__(batches)
        self.batches_left = batches_left

    def training(self, start: int) -> Iterator[Any]:
        yield from islice(super().training(start), self.batches_left)
        raise NoData


def test_a_stream_without_data_before_the_first_step_is_an_error_and_saves_nothing() -> None:
    loop = Loop(steps=6, evaluation=False)
    loop.trainer.stepping.training = Dry(loop.trainer.stepping.training, 0)  # type: ignore[assignment]
    with pytest.raises(NoData, match="no data came"):
        loop.fit()
    assert loop.checkpoints.steps() == []


def test_a_stream_without_further_data_ends_the_run_as_preempted_and_saves_the_last_step() -> None:
    loop = Loop(steps=6, evaluation=False)
    loop.trainer.stepping.training = Dry(loop.trainer.stepping.training, 2)  # type: ignore[assignment]
    assert loop.fit() == "preempted"
    assert loop.checkpoints.steps() == [2]
