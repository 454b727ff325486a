"""When the loop does what, with doubles for everything that it talks to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Line, Loop, Numbers, Plain, Saved, Sums, noting
from torch import Tensor, nn

import ddpforge.training.loop
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.errors import CheckpointError, Diverged, PluginError, UsageError
from ddpforge.interfaces import Callback, StepInfo
from ddpforge.launchers.exit_record import ExitRecords
from ddpforge.ranks.run_limits import NoLimits
from ddpforge.training.cadence import Stopwatch


class Watcher(Callback):
    """Notes what it is told, and wants to stop after the step `until`."""

    def __init__(
        self, events: list[str] | None = None, until: int = 0, action: Callable[[int], Any] | None = None
    ) -> None:
        self.events = [] if events is None else events
        self.until, self.action = until, action
        self.told: list[StepInfo] = []
        self.evaluated: list[tuple[int, dict[str, float]]] = []
        self.checkpoints: list[int] = []
        self.taken: Any = None

    def on_step(self, info: StepInfo) -> bool:
        self.events.append("callback")
        self.told.append(info)
        if self.action:
            self.action(info.step)
        return info.step == self.until

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        return {"twice": 2.0 * info.step}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.evaluated.append((step, dict(metrics)))
        return step == -self.until

    def evaluating(self) -> AbstractContextManager[None]:
        return noting(self.events, "evaluation")

    def on_checkpoint(self, step: int, folder: Any) -> None:
        self.checkpoints.append(step)

    def state(self) -> dict[str, int]:
        return {"told": len(self.told)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.taken = state


@pytest.fixture
def _looks_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, norms are read only where ranks agree, or where something depends on it."""
    monkeypatch.setattr(ddpforge.training.loop, "_reading_is_free", lambda device: False)


@pytest.fixture
def _agrees_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree at steps that log, and every thousand."""
    monkeypatch.setattr(ddpforge.training.consensus, "_AGREE_SECONDS", 1e9)


# ---------------------------------------------------------------------------------------------- what happens when
def test_the_order_of_a_step_is_step_callbacks_log_evaluate_save() -> None:
    watcher = Watcher()
    loop = Loop(steps=2, train={"eval_every": "1st"}, checkpoint={"every": "1st"}, callbacks={"watch": watcher})
    watcher.events = loop.events
    assert loop.fit() == "done"
    one = ["step", "callback", "log", "evaluation begins", "evaluation ends", "evaluate", "save"]
    assert loop.events == one * 2


def test_copies_for_checkpoints_end_before_an_update_and_before_what_follows_a_step_without_one() -> None:
    watcher = Watcher()
    options: dict[str, Any] = {"train": {"on_nonfinite": "rollback"}, "checkpoint": {"every": "1st"}}
    loop = Loop(steps=3, bad=[2], evaluation=False, callbacks={"watch": watcher}, **options)
    watcher.events = loop.events
    loop.checkpoints.before_update = lambda: loop.events.append("copied")  # type: ignore[method-assign]
    assert loop.fit() == "done"
    updated, left_out = ["copied", "step", "callback", "log", "save"], ["copied", "callback", "save"]
    assert loop.events == ["save", *updated, "copied", "step", "log", *left_out, *updated]


def test_a_run_ends_when_old_checkpoints_are_gone_and_no_step_waits_for_that() -> None:
    loop = Loop(steps=2, evaluation=False, checkpoint={"every": "1st"})
    loop.checkpoints.finish = lambda: loop.events.append("gone")  # type: ignore[method-assign]
    assert loop.fit() == "done"
    assert loop.events == ["step", "log", "save", "step", "log", "save", "gone"]


@pytest.mark.usefixtures("_looks_cost")
def test_memory_for_copies_is_reserved_where_there_is_a_device() -> None:
    loop, asked = Loop(steps=3), []
    loop.checkpoints.reserve = lambda state: asked.append(set(state.model))  # type: ignore[method-assign]
    loop.fit()
    assert asked == [{"w"}], "once, when the optimizer has its state"


def test_rows_are_logged_at_the_first_step_at_every_so_many_and_at_the_last() -> None:
    loop = Loop(steps=11, track="4st")
    loop.fit()
    assert loop.tracker.steps() == [1, 4, 8, 11]
    assert loop.tracker.steps("eval/loss") == [11]
    assert [row["epoch"] for _, row in loop.tracker.rows if "epoch" in row] == [1 / 11, 4 / 11, 8 / 11, 1.0]


def test_callbacks_hear_of_every_step_and_of_metrics_where_they_are_logged() -> None:
    watcher = Watcher()
    loop = Loop(steps=4, track="3st", callbacks={"watch": watcher}, schedule=lambda step: 1.0 / (step + 1))
    loop.fit()
    assert [info.step for info in watcher.told] == [1, 2, 3, 4]
    assert [bool(info.metrics) for info in watcher.told] == [True, False, True, True]
    assert [info.samples for info in watcher.told] == [1, 2, 3, 4]
    assert [info.lr for info in watcher.told] == pytest.approx([0.001, 0.0005, 0.001 / 3, 0.00025])
    assert dict(loop.tracker.rows)[3]["twice"] == 6.0


def test_the_learning_rate_of_a_step_is_that_of_the_recipe_times_its_factor() -> None:
    """Two epochs of one step with x = 0 and x = 1 would not tell: three samples a step, all of them each time."""
    loop = Loop(steps=1, batch=3, length="3st", schedule=lambda step: 10.0**-step, evaluation=False)
    loop.fit()
    assert loop.model.w.item() == pytest.approx(1.0 - 0.001 * (1 + 0.1 + 0.01))  # type: ignore[union-attr, operator]


def test_evaluation_is_without_training_mode_and_buffers_are_made_equal_before_it() -> None:
    loop = Loop(steps=2, train={"eval_every": "1st"})
    loop.fit()
    assert loop.model.modes == [True, False, False, True, False, False]
    assert loop.model.training
    assert loop.replica.synced == 3  # two evaluations and the save at the end
    assert dict(loop.tracker.rows[-1][1])["eval/x"] == 1.0


def test_buffers_are_made_equal_before_a_save_too() -> None:
    loop = Loop(steps=4, evaluation=False, checkpoint={"every": "2st"})
    loop.fit()
    assert loop.replica.synced == 2


def test_what_an_older_evaluation_found_is_not_saved_with_newer_weights() -> None:
    loop = Loop(steps=5, train={"eval_every": "4st"}, checkpoint={"every": "1st"}, length="7st")
    loop.fit()
    evaluated = {
        saved.metadata.step
        for saved in loop.checkpoints.saved
        if any("eval/" in name for name in saved.metadata.metrics)
    }
    assert evaluated == {4, 7}
    assert all("train/loss" in saved.metadata.metrics for saved in loop.checkpoints.saved)


def test_speed_is_that_of_the_steps_since_the_last_row() -> None:
    """A second for each of steps 1 to 2, ten for 3 and 4; evaluations take none of it."""
    loop = Loop(steps=4, batch=5, track="2st")
    loop.trainer.rows.stopwatch = Stopwatch(loop.clock)

    def work(step: int) -> None:
        loop.clock.now += 1.0 if step <= 2 else 10.0

    watch = Watcher(action=work)
    loop.trainer.callbacks = {"watch": watch}
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
    """The loop, each of whose steps takes a second."""
    loop.trainer.rows.stopwatch = Stopwatch(loop.clock)
    real = loop.replica.step

    def step() -> Any:
        loop.clock.now += 1.0
        return real()

    loop.replica.step = step  # type: ignore[method-assign]
    return loop


def test_an_evaluation_between_two_rows_takes_none_of_their_time() -> None:
    loop = seconds_a_step(Loop(steps=4, batch=5, track="2st", train={"eval_every": "1st"}))

    def slow(step: int, metrics: Mapping[str, float]) -> None:
        loop.clock.now += 100.0

    loop.trainer.callbacks = {"slow": Does(on_eval=slow)}
    loop.fit()
    speeds = {step: row["train/samples_per_second"] for step, row in loop.tracker.rows if "lr" in row}
    assert speeds == pytest.approx({1: 5.0, 2: 5.0, 4: 5.0})


class Counting(Sums):
    """Each sample has three items."""

    def count(self, batch: Any) -> Tensor:
        return torch.tensor(3.0 * len(batch))


@pytest.mark.parametrize("ranks", [1, 2])
def test_items_per_second_are_those_of_all_data_ranks(ranks: int) -> None:
    loop = seconds_a_step(Loop(steps=2, batch=5, task=Counting(), evaluation=False, replica=Plain(ranks)))
    loop.fit()
    name = f"train/{Counting.items}_per_second"
    assert [row[name] for _, row in loop.tracker.rows] == pytest.approx([15.0 * ranks] * 2)


class Read:
    """Batches as of a stream, of which this rank has a part."""

    def __init__(self, batches: Any, **known: Any) -> None:
        self.batches, self.known, self.workers = batches, known, 0

    def training(self, start: int) -> Iterator[Any]:
        return (micro._replace(**self.known) for micro in self.batches.training(start))


def test_the_samples_of_a_step_are_those_of_all_ranks() -> None:
    loop = Loop(steps=2, batch=5, evaluation=False, replica=Plain(ranks=2))
    loop.trainer.training = Read(loop.trainer.training, step_samples=10)  # type: ignore[assignment]
    loop.fit()
    assert [row["samples"] for _, row in loop.tracker.rows] == [10, 20]
    assert loop.checkpoints.saved[-1].metadata.samples == 20


def test_ranks_that_read_other_samples_of_a_stream_end_when_they_agree() -> None:
    loop = Loop(steps=2, evaluation=False, replica=Plain(ranks=2))
    loop.trainer.training = Read(loop.trainer.training, read=5)  # type: ignore[assignment]
    mean = loop.replica.ranks.reduce_metrics
    loop.replica.ranks.reduce_metrics = lambda totals, *rest: mean(  # type: ignore[method-assign]
        {name: (x + 7) / 2 if name == "?read1" else (x + 49) / 2 if name == "?read2" else x
         for name, x in totals.items()}, *rest
    )  # fmt: skip
    with pytest.raises(PluginError, match="ranks read different samples from the iterable dataset, by step 1"):
        loop.fit()


@pytest.mark.usefixtures("_agrees_seldom")
def test_between_rows_ranks_do_not_talk() -> None:
    loop = Loop(steps=50, track="25st", evaluation=False)
    loop.trainer.consensus.every = 1000
    loop.fit()
    names = 2  # a reduction that meets names which ranks have not agreed on is followed by a second one
    assert len(loop.replica.ranks.asked) == 1 + 3 + names  # one before the first step: whether to begin at all


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loop], list[int]]:
    """The steps after which the ranks of a loop agree."""

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
    """Steps of a quarter of a second: every fourth."""
    loop = Loop(steps=21, track="20st", evaluation=False)

    def step() -> Any:
        loop.clock.now += 0.25
        return Plain.step(loop.replica)

    loop.replica.step = step  # type: ignore[method-assign]
    assert agreements(loop) == [1, 4, 8, 12, 16, 20, 21]


def test_ranks_agree_after_every_step_where_a_callback_takes_long(agreements: Callable[[Loop], list[int]]) -> None:
    """Also in the steps after a row, of which a callback has not begun to take its time."""
    loop = Loop(steps=8, track="3st", evaluation=False)

    def sleep(step: int) -> None:
        loop.clock.now += 2.0

    loop.trainer.callbacks = {"slow": Watcher(action=sleep)}
    assert agreements(loop)[1:] == [3, 4, 5, 6, 7, 8]  # the first step is told of before it has taken any


def test_what_has_no_row_is_agreed_on_between_hosts() -> None:
    """Numbers of the device are read where there is a row, and nowhere else."""
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


# ---------------------------------------------------------------------------------------------- the end
def test_a_callback_may_end_training_after_a_step_or_an_evaluation() -> None:
    for until in (3, -4):
        watcher = Watcher(until=until)
        loop = Loop(steps=9, train={"eval_every": "2st"}, callbacks={"watch": watcher})
        assert loop.fit() == "done"
        assert loop.trainer.progress.step == abs(until)
        assert loop.checkpoints.steps() == [abs(until)]
        assert loop.tracker.steps("eval/loss")[-1] == abs(until)


def test_a_request_to_stop_saves_and_does_not_wait_for_an_evaluation() -> None:
    watcher = Watcher(action=lambda step: step == 3 and os.kill(os.getpid(), signal.SIGUSR1))
    loop = Loop(steps=9, train={"eval_every": "1st"}, callbacks={"watch": watcher})
    assert loop.fit() == "preempted"
    assert loop.trainer.progress.step == 4
    assert loop.tracker.steps("eval/loss") == [1, 2, 3]
    assert loop.checkpoints.steps() == [4]


def test_a_request_that_came_while_the_run_started_is_met_before_its_first_step() -> None:
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
    """Numbers of which one, when it is fetched, has somebody ask for a stop."""

    def __init__(self, size: int, at: int) -> None:
        super().__init__(size)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(index)


@pytest.mark.parametrize(("at", "steps"), [("2st", 4), ("4st", 4)])
def test_a_request_during_an_evaluation_leaves_it_for_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, at: str, steps: int
) -> None:
    """Also the last one, after which the run would be done; callbacks leave it as they leave any."""
    monkeypatch.setattr(ddpforge.training.consensus, "_AGREE_SECONDS", 0.0)  # ranks agree after every batch
    watcher = Watcher()
    loop = Loop(steps=steps, train={"eval_every": at}, callbacks={"watch": watcher}, evaluation={"": 9})
    watcher.events = loop.events
    object.__setattr__(loop.evaluator.sets[""], "_data", Stopping(9, at=3))
    assert loop.fit() == "preempted"
    stopped = int(at.removesuffix("st"))
    assert (loop.trainer.progress.step, loop.checkpoints.steps()) == (stopped, [stopped])
    assert loop.events[-3:] == ["evaluation begins", "evaluation ends", "save"]
    assert loop.tracker.steps("eval/loss") == []
    assert not any(name.startswith("eval/") for name in loop.checkpoints.saved[-1].metadata.metrics)
    assert loop.model.training


class Owner(NoLimits):
    """Asks for the end of the run after so many looks, and notes that it is obeyed."""

    def __init__(self, looks: int) -> None:
        self.looks, self.heard = looks, 0

    def stop_requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def acknowledge(self) -> None:
        self.heard += 1


def test_the_owner_of_a_run_stops_it_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch hears that its ranks are not to be started again, which they would be when only a node leaves."""
    verdict = tmp_path / "verdict"
    monkeypatch.setenv("DDPFORGE_VERDICT", str(verdict))
    loop = Loop(steps=9, evaluation=False)
    loop.trainer.consensus.halt = owner = Owner(looks=3)
    assert loop.fit() == "preempted"
    assert (loop.trainer.progress.step, loop.checkpoints.steps(), owner.heard) == (3, [3], 1)
    assert ExitRecords(verdict, 1).halted


def test_a_run_by_the_clock_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(steps=3, length="1m", evaluation=False)
    monkeypatch.setattr("ddpforge.training.loop.time.monotonic", loop.clock)
    monkeypatch.setattr("ddpforge.training.cadence.Alarm.rings", lambda alarm: loop.clock() - 1000.0 >= alarm.seconds)
    watcher = Watcher(action=lambda step: setattr(loop.clock, "now", loop.clock.now + 11))
    loop.trainer.callbacks = {"watch": watcher}
    assert loop.fit() == "done"
    assert loop.trainer.progress.step == 7  # asked at the seventh, after six callbacks of 11 seconds
    assert loop.checkpoints.saved[-1].metadata.position["seconds"] == 77.0


def test_a_run_by_the_clock_that_is_resumed_trains_for_what_is_left_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(steps=3, length="1m", evaluation=False)
    monkeypatch.setattr("ddpforge.training.loop.time.monotonic", loop.clock)
    monkeypatch.setattr("ddpforge.training.cadence.Alarm.rings", lambda alarm: loop.clock() - 1000.0 >= alarm.seconds)
    loop.trainer.restore(saved(4, position={"seconds": 50.0, "skipped": 0, "left_out": []}))  # type: ignore[arg-type]
    watcher = Watcher(action=lambda step: setattr(loop.clock, "now", loop.clock.now + 6))
    loop.trainer.callbacks = {"watch": watcher}
    assert loop.fit() == "done"
    assert loop.trainer.progress.step == 7  # asked at the third, after two callbacks of 6 seconds


# ---------------------------------------------------------------------------------------------- not finite


def test_a_bad_gradient_stops_the_run_and_the_log_says_so() -> None:
    loop = Loop(steps=6, bad=[3], track="10st", checkpoint={"every": "1st"})
    with pytest.raises(Diverged, match="the gradient of step 3 is not finite"):
        loop.fit()
    assert loop.checkpoints.steps() == [1, 2]
    step, row = loop.tracker.rows[-1]
    assert step == 3
    assert row["train/grad_norm"] != row["train/grad_norm"]
    assert row["train/loss"] != row["train/loss"]


def test_a_bad_step_that_is_skipped_has_one_row_and_is_counted() -> None:
    loop = Loop(steps=6, bad=[2, 3], train={"on_nonfinite": "skip"}, evaluation=False)
    assert loop.fit() == "done"
    assert [step for step, _ in loop.tracker.rows] == [1, 2, 3, 4, 5, 6]
    assert [row.get("train/skipped_steps", 0) for _, row in loop.tracker.rows] == [0, 1, 2, 2, 2, 2]
    assert loop.checkpoints.saved[-1].metadata.position["skipped"] == 2


def test_a_bad_step_between_rows_has_one_of_its_own() -> None:
    loop = Loop(steps=6, bad=[3], train={"on_nonfinite": "skip"}, track="10st", evaluation=False)
    loop.fit()
    assert [step for step, _ in loop.tracker.rows] == [1, 3, 6]


def test_skipping_a_hundred_steps_in_a_row_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.training.nonfinite._MOST_SKIPS", 3)
    loop = Loop(steps=9, bad=[2, 3, 5, 6, 7], train={"on_nonfinite": "skip"}, evaluation=False)
    with pytest.raises(Diverged, match="the gradient of step 7"):
        loop.fit()
    assert loop.trainer.progress.step == 7


def test_overflows_of_fp16_are_no_divergence() -> None:
    loop = Loop(steps=4, bad=[2], evaluation=False)
    loop.replica.overflowed = lambda: True  # type: ignore[method-assign]
    assert loop.fit() == "done"
    assert loop.trainer.progress.nonfinite_steps == 1


@pytest.mark.usefixtures("_looks_cost", "_agrees_seldom")
def test_where_looking_costs_a_bad_step_is_found_when_ranks_agree() -> None:
    loop = Loop(steps=9, bad=[3, 5], track="6st", train={"on_nonfinite": "skip"}, evaluation=False)
    loop.trainer.consensus.every = 1000
    loop.fit()
    assert loop.trainer.progress.nonfinite_steps == 2
    assert [step for step, _ in loop.tracker.rows] == [1, 5, 6, 9]  # of several bad ones the newest


@pytest.mark.usefixtures("_looks_cost", "_agrees_seldom")
@pytest.mark.parametrize("due", ["save", "evaluation", "end"])
def test_what_a_bad_step_left_behind_is_neither_saved_nor_evaluated(due: str) -> None:
    loop = Loop(
        steps=9,
        bad=[4],
        track="100st",
        checkpoint={"every": "4st" if due == "save" else "100st"},
        train={"eval_every": "4st" if due == "evaluation" else "100st"},
        callbacks={"watch": Watcher(until=4)} if due == "end" else {},
    )
    loop.trainer.consensus.every = 1000
    with pytest.raises(Diverged, match="the gradient of step 4"):
        loop.fit()
    assert loop.checkpoints.steps() == []
    assert "evaluate" not in loop.events


# ---------------------------------------------------------------------------------------------- going back
def test_a_rollback_leaves_out_every_bad_step_since_the_checkpoint() -> None:
    loop = Loop(steps=8, bad=[4, 6], train={"on_nonfinite": "rollback"}, checkpoint={"every": "3st"}, evaluation=False)
    assert loop.fit() == "done"
    assert loop.tracker.rewound == [3, 3]
    assert loop.checkpoints.steps() == [0, 3, 6, 8]
    assert loop.trainer.progress.skipped_steps == {4, 6}
    assert loop.trainer.progress.nonfinite_steps == 2
    assert loop.replica.loop == {"scale": 3.0}
    assert loop.events.count("step") == 4 + 2 + 3  # to 4; 5 and 6; 5, 7 and 8


def test_a_rollback_before_the_first_save_begins_again() -> None:
    loop = Loop(steps=4, bad=[1], train={"on_nonfinite": "rollback"}, evaluation=False)
    assert loop.fit() == "done"
    assert loop.tracker.rewound == [0]


def test_rolling_back_again_and_again_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddpforge.training.loop, "_MOST_ROLLBACKS", 2)
    loop = Loop(steps=9, bad=[2, 4, 6], train={"on_nonfinite": "rollback"}, evaluation=False)
    with pytest.raises(Diverged, match="the gradient of step 6 is not finite, after 2 rollbacks"):
        loop.fit()


def test_rollbacks_are_counted_in_a_row_and_not_over_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddpforge.training.loop, "_MOST_ROLLBACKS", 1)
    options: dict[str, Any] = {"train": {"on_nonfinite": "rollback"}, "checkpoint": {"every": "2st"}}
    loop = Loop(steps=9, bad=[3, 6, 9], **options, evaluation=False)
    assert loop.fit() == "done"
    assert loop.tracker.rewound == [
        2,
        4,
        8,
    ]


# ---------------------------------------------------------------------------------------------- checkpoints


def test_a_step_is_saved_once_and_callbacks_hear_of_it() -> None:
    watcher = Watcher()
    loop = Loop(steps=4, checkpoint={"every": "2st", "at_start": True}, callbacks={"watch": watcher})
    loop.fit()
    assert loop.checkpoints.steps() == watcher.checkpoints == [0, 2, 4]
    facts = loop.checkpoints.saved[1].metadata
    assert (facts.step, facts.samples, facts.loop) == (2, 2, {"scale": 3.0})
    assert loop.checkpoints.saved[1].share.callbacks == {"watch": {"told": 2}}


def test_a_checkpoint_that_cannot_be_written_stops_the_run_or_not() -> None:
    failing: dict[str, Any] = {"steps": 6, "fails_at": [2], "evaluation": False}
    loop = Loop(**failing, checkpoint={"every": "2st", "on_failure": "continue"})
    assert loop.fit() == "done"
    assert loop.checkpoints.steps() == [4, 6]

    loop = Loop(**failing, checkpoint={"every": "2st", "on_failure": "stop"})
    with pytest.raises(CheckpointError):
        loop.fit()


def test_the_last_checkpoint_must_be_written_whatever_the_recipe_says() -> None:
    for background in (True, False):
        loop = Loop(
            steps=2, fails_at=[2], evaluation=False, checkpoint={"on_failure": "continue", "async_save": background}
        )
        with pytest.raises(CheckpointError):
            loop.fit()


def test_what_is_being_written_counts_when_the_best_is_sought() -> None:
    """Saves at steps 2 and 4; evaluations at 3 and 6. The second look must know of what was saved at 4."""
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


class Tuned(Line):
    """Has a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(()), requires_grad=False)


@pytest.mark.parametrize("moves", [False, True])
def test_weights_that_checkpoints_leave_out_must_stay_as_they_are(moves: bool) -> None:
    model = Tuned()
    touch = Does(on_step=lambda info: model.base.data.add_(1.0 if moves and info.step == 3 else 0.0) is None)
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


def saved(step: int, **more: Any) -> Saved:
    facts: dict[str, Any] = {"position": {"seconds": 5.0, "skipped": 1, "left_out": [2]}, "loop": {"scale": 2.0}}
    facts |= {"strategy": "plain", "world_size": 1, "samples": step} | more
    share = RankState(
        model={"w": Loop().model.w.detach() + 6}, optimizer={"w": {"m": 1.0}}, callbacks={"watch": {"n": 3}}
    )  # type: ignore[union-attr, operator]
    return Saved(CheckpointMetadata(step=step, **facts), share)


def test_a_resumed_run_goes_on_where_it_was_saved() -> None:
    watcher = Watcher()
    loop = Loop(steps=6, callbacks={"watch": watcher})
    loop.trainer.restore(saved(4, metrics={"eval/loss": 1.0}))  # type: ignore[arg-type]
    progress = loop.trainer.progress
    assert (progress.step, progress.samples, progress.seconds, progress.nonfinite_steps) == (4, 4, 5.0, 1)
    assert progress.skipped_steps == {2}
    assert watcher.taken == {"n": 3}
    assert loop.replica.loop == {"scale": 2.0}
    assert loop.model.w.item() == 7.0  # type: ignore[union-attr, operator]
    loop.fit()
    assert loop.tracker.steps() == [5, 6]
    assert loop.checkpoints.steps() == [6]


@pytest.mark.parametrize(("done", "first"), [({}, [3, 6]), ({"eval/loss": 1.0}, [6])])
def test_an_evaluation_that_a_stop_left_out_is_made_up_for(done: dict[str, float], first: list[int]) -> None:
    loop = Loop(steps=6, train={"eval_every": "3st"})
    loop.trainer.restore(saved(3, metrics=done))  # type: ignore[arg-type]
    loop.fit()
    assert loop.tracker.steps("eval/loss") == first


def test_an_evaluation_at_the_end_is_made_up_for_whatever_the_cadence() -> None:
    loop = Loop(steps=6, train={"eval_every": "4st"})
    loop.trainer.restore(saved(6))  # type: ignore[arg-type]
    loop.fit()
    assert loop.tracker.steps("eval/loss") == [6]


def test_state_of_another_optimizer_or_callback_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    recipe = '[optimizer]\nuse = "adamw"\n[callbacks.watch]\nuse = "other"\n'
    watcher = Watcher()
    loop = Loop(steps=6, callbacks={"watch": watcher}, optimizer="sgd")
    loop.trainer.restore(saved(3, recipe=recipe))  # type: ignore[arg-type]
    assert loop.replica.loaded.optimizer == {}
    assert watcher.taken is None
    assert "optimizer `sgd` starts from scratch: the checkpoint has the state of `adamw`" in caplog.text
    assert "callbacks.watch `watch` starts from scratch: the checkpoint has the state of `other`" in caplog.text

    loop.trainer.restore(saved(3, recipe='[optimizer]\nuse = "sgd"\n[callbacks.watch]\nuse = "watch"\n'))  # type: ignore[arg-type]
    assert loop.replica.loaded.optimizer == {"w": {"m": 1.0}}
    assert watcher.taken == {"n": 3}


# ---------------------------------------------------------------------------------------------- one by one
def test_steps_can_be_taken_one_by_one() -> None:
    """Each is complete when it is yielded: logged, evaluated and saved."""
    loop = Loop(steps=4, train={"eval_every": "2st"}, checkpoint={"every": "2st", "async_save": False})
    steps = loop.trainer.steps()
    first, second = next(steps), next(steps)
    assert (first.step, second.step, second.samples) == (1, 2, 2)
    assert first.metrics["train/loss"] == loop.tracker.rows[0][1]["train/loss"]
    assert loop.checkpoints.steps() == [2]
    assert loop.tracker.steps("eval/loss") == [2]
    assert [info.step for info in steps] == [3, 4]
    assert loop.checkpoints.steps() == [2, 4]


def test_steps_that_are_not_taken_leave_what_was_saved() -> None:
    loop = Loop(steps=4, checkpoint={"every": "1st", "async_save": False})
    for info in loop.trainer.steps():
        if info.step == 2:
            break
    assert loop.checkpoints.steps() == [1, 2]
    assert loop.trainer.progress.step == 2


# ---------------------------------------------------------------------------------------------- what callbacks can do
class Does(Callback):
    """Has the methods that it is given."""

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
    half, later = Does(lr_factor=lambda: 0.5), Watcher()
    later.lr_factor = lambda: 0.1 if later.told else 1.0  # type: ignore[method-assign]
    loop = Loop(steps=1, batch=3, length="2st", schedule=lambda step: 1.0 + step, callbacks={"a": half, "b": later})
    loop.fit()
    assert [info.lr for info in later.told] == pytest.approx([0.001 * 0.5, 0.001 * 2 * 0.5 * 0.1])
    assert loop.model.w.item() == pytest.approx(1.0 - 0.001 * (0.5 + 0.1))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -0.1, None, "0.1", torch.tensor(0.1)])
def test_what_is_no_factor_is_refused(factor: Any) -> None:
    loop = Loop(callbacks={"odd": Does(lr_factor=lambda: factor)})
    with pytest.raises(PluginError, match="callback `odd` multiplies the learning rate of step 1 by"):
        loop.fit()


def test_a_callback_reads_the_gradient_of_each_step_before_the_update() -> None:
    """The gradient of w·x is x, and steps see the samples 0 to 2 in some order."""
    reads = ReadsGradients(lambda: loop)
    loop = Loop(steps=3, callbacks={"reads": reads}, evaluation=False)
    loop.fit()
    assert [step for step, _, _ in reads.seen] == [1, 2, 3]
    assert [norm for _, norm, _ in reads.seen] == [gradient for _, _, gradient in reads.seen]
    assert sorted(norm for _, norm, _ in reads.seen) == [0.0, 1.0, 2.0]


def test_where_no_callback_reads_gradients_the_strategy_is_not_asked_for_them() -> None:
    loop = Loop(callbacks={"watch": Watcher()})
    assert "on_gradient" not in vars(loop.replica)


def test_a_strategy_that_promises_gradients_and_shows_none_is_found_out_at_the_first_step() -> None:
    reads = ReadsGradients(lambda: loop)
    loop = Loop(callbacks={"reads": reads})
    loop.replica.step = lambda: loop.model.w.detach()  # type: ignore[method-assign, union-attr, operator, return-value]
    with pytest.raises(
        PluginError, match="Plain promises that callbacks can read gradients, but its step did not call"
    ):
        loop.fit()


def test_callbacks_measure_within_the_evaluation_of_all() -> None:
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
    assert rows[0] == rows[1]  # random numbers are the same at each
    assert measures.evaluated[0][1]["eval/noise"] == rows[0]


@pytest.mark.parametrize(("method", "own", "name"), [("while_evaluating", "loss", "eval/loss"), ("on_log", "lr", "lr")])
def test_a_number_that_is_reported_already_is_refused(method: str, own: str, name: str) -> None:
    loop = Loop(callbacks={"again": Does(**{method: lambda _: {own: 1.0}})})
    with pytest.raises(PluginError, match=f"callback `again` reports {name}, which the run reports already"):
        loop.fit()


@pytest.mark.parametrize("method", ["while_evaluating", "on_log"])
@pytest.mark.parametrize("returned", [None, {"x": "many"}, {"x": None}, {"x": torch.ones(2)}])
def test_a_callback_that_returns_no_numbers_is_named(method: str, returned: Any) -> None:
    loop = Loop(callbacks={"odd": Does(**{method: lambda _: returned})})
    with pytest.raises(PluginError, match=f"callback `odd` returned .* from `{method}`"):
        loop.fit()


def test_a_column_may_be_a_tensor_of_one_number() -> None:
    loop = Loop(callbacks={"odd": Does(on_log=lambda info: {"x": torch.tensor(0.5)})})
    loop.fit()
    assert [type(row["x"]) for _, row in loop.tracker.rows if "x" in row][:1] == [float]


def test_callbacks_hear_that_training_went_back() -> None:
    heard: list[Any] = []
    watch = Does(on_rollback=lambda step: heard.append(step), load_state=lambda state: heard.append("state"))
    loop = Loop(
        steps=8,
        bad=[4],
        train={"on_nonfinite": "rollback"},
        checkpoint={"every": "3st"},
        evaluation=False,
        callbacks={"watch": watch},
    )
    loop.fit()
    assert heard == ["state", 3]


def test_trackers_hear_of_checkpoints() -> None:
    loop = Loop(steps=4, checkpoint={"every": "2st"}, evaluation=False)
    heard: list[int] = []
    loop.tracker.checkpoint = lambda step, folder: heard.append(step)  # type: ignore[method-assign]
    loop.fit()
    assert heard == [2, 4]


@pytest.mark.parametrize("returned", [None, 3, ["x"]])
def test_a_callback_without_a_state_is_named_when_it_is_saved(returned: Any) -> None:
    class Stateless(Callback):
        def state(self) -> Any:
            return returned

    with pytest.raises(PluginError, match=r"callback `it`: Stateless.state returned") as told:
        Loop(steps=1, callbacks={"it": Stateless()}).fit()
    assert "`{}` if there is nothing to keep" in told.value.hints[0]


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_ranks_whose_callbacks_want_other_rates_are_told_so(factor: float) -> None:
    class Elsewhere(Plain):
        """Another rank, whose factor is always 1."""

        def __init__(self) -> None:
            super().__init__(ranks=2)
            alone = self.ranks.reduce_metrics
            self.ranks.reduce_metrics = lambda totals, *rest: alone(  # type: ignore[method-assign]
                {name: (x + 1) / 2 if "factor" in name else x for name, x in totals.items()}, *rest
            )

    callbacks = {"rates": Does(lr_factor=lambda: factor)}
    loop = Loop(steps=1, callbacks=callbacks, evaluation=False, replica=Elsewhere())
    if factor == 1.0:
        assert loop.fit() == "done"
        return
    with pytest.raises(PluginError, match=r"callbacks rates multiply .* step 1 by 0.5 on this rank and 0.75 on"):
        loop.fit()


# ---------------------------------------------------------------------------------------------- failing evaluations
class Derives(Sums):
    """A loss that needs gradients, as those of physics-informed networks do."""

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Any]:
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope * batch).sum(), slope.detach()


def test_an_evaluation_that_fails_ends_the_run_with_what_was_trained_saved() -> None:
    loop = Loop(steps=6, train={"eval_every": "3st"}, task=Derives())
    with pytest.raises(RuntimeError, match="does not require grad") as failed:
        loop.fit()
    assert loop.checkpoints.steps() == [3]
    assert any("with torch.enable_grad()" in note for note in failed.value.__notes__)


# ---------------------------------------------------------------------------------------------- targets
class Above(Sums):
    """Only samples of at least `least` count."""

    def __init__(self, least: float) -> None:
        self.least = least

    def count(self, batch: Any) -> Tensor:
        return (batch >= self.least).sum()


def test_a_run_in_which_no_target_counts_is_refused_when_its_data_has_been_seen() -> None:
    loop = Loop(steps=6, task=Above(1e9), evaluation=False)
    with pytest.raises(UsageError, match="no target has counted in 6 steps"):
        loop.fit()
    assert loop.tracker.steps() == [1, 2, 3, 4, 5], "the rows before are logged"


def test_endless_steps_without_a_target_end_after_a_hundred() -> None:
    loop = Loop(steps=300, task=Above(1e9), evaluation=False, track="50st")
    with pytest.raises(UsageError, match="no target has counted in 100 steps"):
        loop.fit()


def test_steps_without_a_target_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(steps=6, task=Above(3), evaluation=False, track="6st")
    assert loop.fit() == "done"
    assert [record.message for record in caplog.records if "no target" in record.message][-1].startswith(
        "by step 6 no target counted in 3 of 6 steps"
    )


def test_the_last_steps_of_a_resumed_run_may_have_no_target() -> None:
    loop = Loop(steps=6, task=Above(1e9), evaluation=False)
    loop.trainer.progress.step = 4
    assert loop.fit() == "done"
