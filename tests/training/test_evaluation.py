"""Results of an evaluation, with test doubles for its collaborators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
import torch
from support.doubles import Line, Loop, Plain, Sums, noting
from torch import Tensor, nn

from ddpforge.data import MicroBatch
from ddpforge.errors import CheckpointError, PeerFailed, PluginError, UsageError
from ddpforge.features.streams import IterableData
from ddpforge.interfaces import Callback, CanonicalState, FullWeights, StepInfo, Task, Total
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.restoring import restore_weights

IDLE: Any = None
"""No optimizer."""


def evaluator(
    replica: Plain,
    task: Task | None = None,
    sets: Mapping[str, Any] | None = None,
    callbacks: Mapping[str, Callback] | None = None,
) -> Evaluator:
    sets = {"": Batched([1.0, 2.0])} if sets is None else sets
    parts: dict[str, Any] = {"task": task or Sums(), "sets": sets, "callbacks": callbacks or {}}
    return Evaluator(world=replica.world, replica=replica, **parts, seed=0, features=[IterableData()])


class Batched:
    """One micro-batch of `values`, and one with a padding sample. `read`: fingerprint of the read samples."""

    def __init__(self, values: list[float], read: int = 0) -> None:
        self.values, self.read = values, read

    def evaluation(self) -> Iterator[MicroBatch]:
        n = len(self.values)
        yield MicroBatch(torch.tensor(self.values), n, n, False, 0, 0, self.read)
        yield MicroBatch(torch.tensor([100.0]), 0, 1, True, 0, 1, self.read)


# ---------------------------------------------------------------------------------------------- one set
def test_every_sample_counts_once_and_padding_samples_do_not() -> None:
    found = evaluator(Plain().holding(Line(), IDLE)).evaluate(0)
    assert found == {"eval/loss": 1.5, "eval/x": 1.5}


@pytest.mark.parametrize("name", ["", "other"])
def test_a_set_without_valid_targets_is_refused(name: str) -> None:
    class NoTargets(Sums):
        def count(self, batch: Any) -> Tensor:
            return torch.zeros(())

    with pytest.raises(UsageError, match=rf"no target of \[data\.eval{'.' * bool(name)}{name}\] counts"):
        evaluator(Plain().holding(Line(), IDLE), NoTargets(), {name: Batched([1.0])}).evaluate(0)


def test_sums_are_accumulated_in_float64() -> None:
    """In bfloat16, 256 + 1 is 256: the mean of 600 ones would be 0.43."""

    class Ones(Sums):
        def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Total]:
            one = torch.ones((), dtype=torch.bfloat16)
            return {"it": Total(one, one)}

    ones = [MicroBatch(torch.ones(1), 1, 1, True, 0, 0)] * 600
    totals = evaluator(Plain().holding(Line(torch.bfloat16), IDLE), Ones()).quantities(ones)
    assert totals["it"].sum.item() == totals["it"].count.item() == 600  # type: ignore[union-attr]
    assert totals["loss"].sum.dtype == torch.float64


def test_the_mean_includes_other_ranks() -> None:
    """This rank has two samples with a sum of 3. On the other rank every sum and every count is 4."""
    replica = Plain(ranks=2, elsewhere=4.0).holding(Line(), IDLE)
    assert evaluator(replica).evaluate(0)["eval/x"] == (3.0 + 4.0) / (2 + 4)


def test_an_evaluation_syncs_buffers_and_disables_gradients_and_training_mode() -> None:
    class Looks(Line):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            assert replica.synced == 1
            return super().forward(x)

    model = Looks()
    replica = Plain().holding(model, IDLE)
    evaluator(replica).evaluate(0)
    assert model.modes == [False, False]
    assert model.training


def test_a_task_knows_whether_an_evaluation_calls_its_loss() -> None:
    class Doubles(Sums):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            loss, outputs = super().loss(model, batch)
            return (2 * loss if self.evaluates else loss), outputs

    task = Doubles()
    assert evaluator(Plain().holding(Line(), IDLE), task).evaluate(0) == {"eval/loss": 3.0, "eval/x": 1.5}
    assert not task.evaluates


def test_some_datasets_may_have_no_loss() -> None:
    """Checks that a set without losses has only metrics, and that others report the mean of the losses that exist."""

    class Positive(Sums):
        evaluation_loss = "some"

        def loss(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
            loss, outputs = super().loss(model, batch)
            return (loss if (batch > 0).all() else None), outputs

    class Mixed(Batched):
        def evaluation(self) -> Iterator[MicroBatch]:
            yield MicroBatch(torch.tensor([-1.0]), 1, 1, False, 0, 0)
            yield from super().evaluation()

    sets = {"a": Batched([1.0, 2.0]), "b": Batched([-1.0, -2.0]), "c": Mixed([1.0, 3.0])}
    assert evaluator(Plain().holding(Line(), IDLE), Positive(), sets).evaluate(0) == {
        **{"eval/a/loss": 1.5, "eval/a/x": 1.5, "eval/b/x": -1.5},
        **{"eval/c/loss": 2.0, "eval/c/x": 1.0},
    }


def test_a_task_knows_of_no_evaluation_after_one_that_failed() -> None:
    class Fails(Sums):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            raise RuntimeError("broken")

    task = Fails()
    with pytest.raises(RuntimeError, match="broken"):
        evaluator(Plain().holding(Line(), IDLE), task).evaluate(0)
    assert not task.evaluates


def test_random_numbers_are_the_same_in_every_evaluation() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.drawn = nn.Parameter(torch.ones(())), list[float]()

        def forward(self, x: Tensor) -> Tensor:
            self.drawn.append(torch.rand(()).item())
            return self.w * x

    model = Draws()
    sets = {"a": Batched([1.0]), "b": Batched([2.0])}
    ours = evaluator(Plain().holding(model, IDLE), sets=sets)
    ours.evaluate(0)
    ours.evaluate(1)
    assert len(set(model.drawn)) == 2
    assert model.drawn == model.drawn[:2] * 4


def test_a_failed_evaluation_restores_callbacks_and_training_mode() -> None:
    """Includes a callback that swaps weights without `finally`: its context manager exits without an error."""

    class Fails(Sums):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            raise ArithmeticError

    model, live = Line(), torch.ones(())

    class Swaps(Callback):
        @contextmanager
        def evaluating(self) -> Iterator[None]:
            model.w.data = torch.zeros(())
            yield
            model.w.data = live

    ours = evaluator(Plain().holding(model, IDLE), Fails(), callbacks={"swaps": Swaps()})
    with pytest.raises(ArithmeticError):
        ours.evaluate(0)
    assert model.w.item() == 1.0
    assert model.training


def test_callback_writes_are_guarded_at_the_start_and_end_of_an_evaluation() -> None:
    events: list[str] = []

    class Observed(FullWeights):
        def callback_guard(self) -> AbstractContextManager[None]:
            return noting(events, "watch")

    class Swaps(Callback):
        def evaluating(self) -> AbstractContextManager[None]:
            return noting(events, "swap")

    class Counts(Line):
        def forward(self, x: Tensor) -> Tensor:
            events.append("forward")
            return super().forward(x)

    replica = Plain().holding(Counts(), IDLE)
    replica.weights = Observed(replica.unwrapped, replica.ranks)
    evaluator(replica, callbacks={"swaps": Swaps()}).evaluate(0)
    assert events[:3] == ["watch begins", "swap begins", "watch ends"]
    assert events[-3:] == ["watch begins", "swap ends", "watch ends"]
    assert set(events[3:-3]) == {"forward"}


def test_a_first_evaluation_that_fails_on_another_rank_fails_on_this_rank() -> None:
    replica = Plain(ranks=2).holding(Line(), IDLE)
    replica.ranks.all_gather_object = lambda mine: [mine, True]  # type: ignore[method-assign]
    ours = evaluator(replica)
    with pytest.raises(PeerFailed, match="the evaluation has failed on another rank"):
        ours.evaluate(0)
    assert ours.failed_together, "all ranks failed together: the trained weights can be saved"


def test_the_task_computes_final_metrics_of_a_set() -> None:
    class Rooted(Sums):
        def finish(self, metrics: dict[str, float]) -> dict[str, float]:
            return {"loss": metrics["loss"], "square": metrics["x"] ** 2}

    found = evaluator(Plain().holding(Line(), IDLE), Rooted()).evaluate(0)
    assert found == {"eval/loss": 1.5, "eval/square": 2.25}


def test_an_evaluation_without_sets_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the recipe has no evaluation set"):
        evaluator(Plain().holding(Line(), IDLE), sets={}).evaluate(0)


def test_ranks_that_read_different_samples_from_a_stream_are_refused() -> None:
    alike = evaluator(Plain().holding(Line(), IDLE), sets={"": Batched([1.0], read=3)})
    assert alike.evaluate(7) == {"eval/loss": 1.0, "eval/x": 1.0}

    apart = Plain(ranks=2, elsewhere=1.0).holding(Line(), IDLE)
    with pytest.raises(PluginError, match="ranks read different samples from the iterable dataset, by step 7"):
        evaluator(apart, sets={"": Batched([1.0], read=3)}).evaluate(7)


# ---------------------------------------------------------------------------------------------- callbacks
class Doubled(Callback):
    """Callback that doubles the weights during an evaluation."""

    def __init__(self, model: Line) -> None:
        self.model, self.entered = model, 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.entered += 1
        self.model.w.data *= 2
        try:
            yield
        finally:
            self.model.w.data /= 2


def test_a_callback_swaps_weights_once_for_all_sets() -> None:
    model = Line()
    lender = Doubled(model)
    sets = {"one": Batched([1.0]), "two": Batched([2.0])}
    found = evaluator(Plain().holding(model, IDLE), sets=sets, callbacks={"double": lender}).evaluate(0)
    assert (found["eval/one/loss"], found["eval/two/loss"]) == (2.0, 4.0)
    assert (model.w.item(), lender.entered) == (1.0, 1)


def test_a_callback_restores_weights_if_the_evaluation_fails() -> None:
    class Broken(Sums):
        def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Total]:
            raise RuntimeError("no such metric")

    model = Line()
    with pytest.raises(RuntimeError, match="no such metric"):
        evaluator(Plain().holding(model, IDLE), Broken(), callbacks={"double": Doubled(model)}).evaluate(0)
    assert model.w.item() == 1.0


# ---------------------------------------------------------------------------------------------- several sets
class Watcher(Callback):
    """Callback that records the metrics of evaluations. Requests a stop if `metric` exceeds `enough`."""

    def __init__(self, metric: str = "", enough: float = 0.0) -> None:
        self.metric, self.enough = metric, enough
        self.received: list[dict[str, float]] = []

    def on_step(self, info: StepInfo) -> None:
        assert not any(name.startswith("eval/") for name in info.metrics)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.received.append(dict(metrics))
        return bool(self.metric) and metrics[self.metric] > self.enough


def test_named_sets_log_separate_metrics_in_one_row() -> None:
    """Means: 0.5 of 0 and 1, and 2 of 0 to 4."""
    watcher = Watcher()
    loop = Loop(steps=2, evaluation={"few": 2, "many": 5}, callbacks={"watch": watcher})
    loop.fit()
    names = ["eval/few/loss", "eval/few/x", "eval/many/loss", "eval/many/x"]
    step, row = loop.tracker.rows[-1]
    assert (step, sorted(row)) == (2, names)
    assert (row["eval/few/x"], row["eval/many/x"]) == (0.5, 2.0)
    assert sorted(watcher.received[0]) == names
    assert {name: value for name, value in loop.trainer.rows.newest.items() if name.startswith("eval/")} == row


def test_a_callback_stops_training_by_the_metric_of_one_set() -> None:
    watcher = Watcher("eval/many/x", enough=1.0)
    loop = Loop(steps=5, train={"eval_every": "2st"}, evaluation={"few": 2, "many": 5}, callbacks={"watch": watcher})
    assert loop.fit() == "done"
    assert loop.trainer.progress.step == 2


def test_the_best_checkpoint_is_chosen_by_the_metric_of_one_set() -> None:
    keep = {"keep": {"best": 1, "monitor": "eval/many/loss"}}
    loop = Loop(steps=2, train={"eval_every": "1st"}, evaluation={"few": 2, "many": 5}, checkpoint=keep)
    loop.fit()
    metrics, _ = loop.checkpoints.asked_for_best[0]
    assert metrics["eval/many/loss"] == pytest.approx(2.0, rel=0.01)
    assert {name for name in loop.checkpoints.saved[-1].metadata.metrics if name.startswith("eval/")} == {
        *("eval/few/loss", "eval/few/x", "eval/many/loss", "eval/many/x")
    }


# ---------------------------------------------------------------------------------------------- weights only
class Unread:
    """Object that fails on every attribute access."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


class OnDisk:
    """Checkpoint that allows only the model to be read."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def state(self) -> CanonicalState[Any]:
        model = {name: torch.tensor(5.0) for name in self.names}
        unread: Any = Unread()
        return CanonicalState(model, unread, extra_state=unread, scalars={"scale": 3.0})


def test_restore_weights_reads_neither_optimizer_nor_extra_state() -> None:
    loop = Loop()
    restore_weights(loop.replica, OnDisk("w"), ())  # type: ignore[arg-type]
    assert loop.model.w.item() == 5.0  # type: ignore[union-attr, operator]
    assert (loop.replica.loaded.optimizer, loop.replica.loaded.extra_state, loop.replica.loop) == ({}, {}, {})


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"of another model \(missing from the checkpoint: w\)"):
        restore_weights(Loop().replica, OnDisk("v"), ())  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- before training
def test_a_batch_of_each_set_is_tried_before_training_with_its_metrics() -> None:
    class Counts(Batched):
        given = 0

        def evaluation(self) -> Iterator[MicroBatch]:
            for micro in super().evaluation():
                self.given += 1
                yield micro

    class Seen(Sums):
        finished: ClassVar[list[dict[str, float]]] = []

        def finish(self, metrics: dict[str, float]) -> dict[str, float]:
            self.finished.append(metrics)
            return metrics

    sets = {"": Counts([1.0, 2.0]), "other": Counts([4.0])}
    evaluator(Plain().holding(Line(), IDLE), Seen(), sets).try_first_batches()
    assert [one.given for one in sets.values()] == [1, 1]
    assert Seen.finished == [{"loss": 1.5, "x": 1.5}, {"loss": 4.0, "x": 4.0}]


@pytest.mark.parametrize("where", ["loss", "metrics", "finish", "data"])
def test_a_set_that_cannot_be_evaluated_is_named_before_training(where: str) -> None:
    class Fails(Sums):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            self._fail("loss")
            return super().loss(model, batch)

        def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Total]:
            self._fail("metrics")
            return super().metrics(outputs, batch)

        def finish(self, metrics: dict[str, float]) -> dict[str, float]:
            self._fail("finish")
            return metrics

        def _fail(self, here: str) -> None:
            if where == here:
                raise KeyError("mean")

    class Damaged(Batched):
        def evaluation(self) -> Iterator[MicroBatch]:
            if where == "data":
                raise KeyError("mean")
            return super().evaluation()

    sets = {"": Batched([1.0]), "night": Damaged([1.0])}
    sets = {"night": sets["night"]} if where != "data" else sets
    with pytest.raises(UsageError, match=r"a batch of \[data\.eval\.night\] cannot be evaluated: KeyError: 'mean'"):
        evaluator(Plain().holding(Line(), IDLE), Fails(), sets).try_first_batches()


def test_a_finish_that_refuses_few_samples_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    class NeedsTwoClasses(Sums):
        def finish(self, metrics: dict[str, float]) -> dict[str, float]:
            raise ValueError("only one class is present")

    evaluator(Plain().holding(Line(), IDLE), NeedsTwoClasses()).try_first_batches()
    assert "only one class is present; this may be because of the few samples" in caplog.text


def test_a_replica_whose_first_pass_must_be_one_of_training_is_not_evaluated_before() -> None:
    class Fails(Sums):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            raise AssertionError("called")

    replica = Plain().holding(Line(), IDLE)
    replica.may_evaluate_first = False
    evaluator(replica, Fails()).try_first_batches()


def test_callbacks_are_not_called_for_the_batches_before_training() -> None:
    class Averages(Callback):
        def evaluating(self) -> AbstractContextManager[None]:
            raise AssertionError("called")

    evaluator(Plain().holding(Line(), IDLE), callbacks={"mean": Averages()}).try_first_batches()
