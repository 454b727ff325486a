"""Results of a training step in one process, with values that can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from support.doubles import Line, Plain
from torch import Tensor, nn

from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError, StrategyError, UsageError
from ddpforge.features.multi_pass import MultiPass as MultiPassFeature
from ddpforge.features.restored_buffers import KeepsBuffers
from ddpforge.guard.sum_reduction import check_first_loss
from ddpforge.interfaces import SampleColumns, Task, Total
from ddpforge.training.step import Stepper

IDLE: Any = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
"""Optimizer without effect."""


class Weighed(Task):
    """Task with the loss w·x; the weights of the samples come with the batch, 1 by default."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        x, weights = batch
        outputs = model(x)
        return (outputs * weights).sum(), outputs

    def count(self, batch: Any) -> Tensor:
        weights: Tensor = batch[1]
        return weights.sum()


class Plainly(Weighed):
    """Task that counts samples, with one metric: `metric` of a batch's outputs."""

    def __init__(self, metric: Callable[[Tensor], Any] = lambda outputs: Total(outputs.sum(), len(outputs))) -> None:
        self.metric = metric

    def count(self, batch: Any) -> None:  # type: ignore[override]
        return None

    def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Total]:
        return {"it": self.metric(outputs)}


class Normed(nn.Module):
    """BatchNorm whose running mean is that of the last batch, with a weight to train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w = nn.BatchNorm1d(1, momentum=1.0, affine=False), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * self.norm(x.unsqueeze(1)).squeeze(1)


def micro(
    x: Sequence[float], weights: Sequence[float] = (), *, samples: int | None = None, step: int = 0, **more: Any
) -> MicroBatch:
    data = (torch.tensor(x), torch.tensor(weights or [1.0] * len(x)))
    number = len(x) if samples is None else samples
    return MicroBatch(data, number, step or number, more.get("last", True), more.get("shard", 0), more.get("number", 0))


def run(
    model: nn.Module, task: Task, batches: Sequence[MicroBatch], replica: Plain | None = None, skips: bool = False
) -> tuple[dict[str, Total], Tensor]:
    replica = (replica or Plain()).holding(model, IDLE)
    steps = Stepper(replica.world, replica, task, seed=0)
    train_step = KeepsBuffers(steps, model).train_step if skips else steps.train_step
    return train_step(1, batches[0], batches, measure=True)


# ---------------------------------------------------------------------------------------------- weighted items
@pytest.mark.parametrize("weights", [[0.1, 0.3], [4.0, 12.0]])
def test_weights_of_samples_are_relative(weights: list[float]) -> None:
    """(0.1·1 + 0.3·5) / 0.4 = 4, and the same with weights that sum to 16."""
    model = Line()
    totals, norm = run(model, Weighed(), [micro([1.0], weights[:1]), micro([5.0], weights[1:])])
    assert norm.item() == pytest.approx(4.0)
    assert (totals["loss"].sum / totals["loss"].count).item() == pytest.approx(4.0)


def test_items_of_other_ranks_count_in_the_gradient() -> None:
    """This rank's gradient is 3·2 / (2 + 0.5). Ranks average over two, so it is doubled."""
    model = Line()
    _, norm = run(model, Weighed(), [micro([3.0], [2.0])], Plain(ranks=2, elsewhere=0.5))
    assert norm.item() == pytest.approx(2 * 3.0 * 2.0 / 2.5)


def test_every_rank_counts_in_float64_even_with_a_padding_sample() -> None:
    replica = Plain(ranks=2, elsewhere=2.0)
    run(Line(), Weighed(), [micro([3.0], [2.0], samples=0)], replica)
    assert [(x.dtype, x.item()) for x in replica.ranks.asked] == [(torch.float64, 0.0)]


def test_a_step_without_items_has_a_zero_gradient() -> None:
    _, norm = run(Line(), Weighed(), [micro([3.0, 4.0], [0.0, 0.0])])
    assert norm.item() == 0.0


def test_the_forward_pass_does_not_wait_for_the_sum_of_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    events, replica = [], Plain()

    def begin_sum(_: Any, values: Tensor) -> Callable[[], Tensor]:
        events.append("begins")
        return lambda: events.append("waits") or values  # type: ignore[func-returns-value]

    class Noting(Line):
        def forward(self, x: Tensor) -> Tensor:
            events.append("forward")
            return super().forward(x)

    monkeypatch.setattr(type(replica.world.dp_ranks), "all_reduce_sum_async", begin_sum)
    run(Noting(), Weighed(), [micro([1.0, 5.0], [1.0, 3.0])], replica)
    assert events == ["begins", "forward", "waits"]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_invalid_count_is_refused(weight: float) -> None:
    with pytest.raises(PluginError, match=r"Weighed\.count returned (-1|nan|inf) for a step"):
        run(Line(), Weighed(), [micro([3.0], [weight])])


def test_steps_without_items_are_counted() -> None:
    replica = Plain().holding(Line(), IDLE)
    stepper = Stepper(replica.world, replica, Weighed(), seed=0)
    for step, weight in enumerate([0.0, 1.0, 0.0], start=1):
        batch = micro([3.0], [weight])
        stepper.train_step(step, batch, [batch], measure=False)
    assert (stepper.counts, float(stepper.take_empty()), float(stepper.take_empty())) == (True, 2.0, 0.0)


@pytest.mark.parametrize(("elsewhere", "empty"), [(0.0, 1.0), (0.5, 0.0), (1.0, 0.0)])
def test_a_step_without_items_on_this_rank_counts_as_empty_only_if_no_rank_has_items(
    elsewhere: float, empty: float
) -> None:
    """Items of other ranks may be fractions: sums of weights."""
    replica = Plain(ranks=2, elsewhere=elsewhere).holding(Line(), IDLE)
    stepper = Stepper(replica.world, replica, Weighed(), seed=0)
    batch = micro([3.0], [0.0])
    stepper.train_step(1, batch, [batch], measure=False)
    assert float(stepper.take_empty()) == empty


def test_only_the_last_micro_batch_of_a_step_is_the_last_pass_of_the_replica() -> None:
    """Strategies reduce gradients over ranks in the last pass only."""
    seen: list[bool] = []

    class Looking(Plain):
        def run_microbatches(self, passes: Any, compute: Any, *, trains: bool) -> Any:
            return super().run_microbatches((seen.append(one.last) or one for one in passes), compute, trains=trains)

    batches = [micro([1.0], last=number == 2, number=number) for number in range(3)]
    run(Line(), Weighed(), batches, Looking())
    assert seen == [False, False, True]


def test_the_heartbeat_marks_the_end_of_the_forward_passes_of_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr("ddpforge.training.step.heartbeat.finish_forward", lambda: ends.append("end"))
    run(Line(), Weighed(), [micro([1.0], last=number == 2, number=number) for number in range(3)])
    assert ends == ["end"]


@pytest.mark.parametrize("measure", [True, False])
def test_outputs_are_freed_before_the_backward_pass(measure: bool) -> None:
    """In language models the outputs are logits: a tenth of the peak memory."""
    kept: list[bool] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.square()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            kept.append(outputs() is not None)
            return gradient

    def outputs() -> Tensor | None:
        raise NotImplementedError

    class Squares(Plainly):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            nonlocal outputs
            found = Square.apply(model(batch[0]))
            outputs = ref(found)
            return found.sum(), found

    replica, batch = Plain().holding(Line(), IDLE), micro([1.0, 2.0])
    stepper = Stepper(replica.world, replica, Squares(), seed=0)
    stepper.train_step(1, batch, [batch], measure=measure)
    assert kept == [False]


# ---------------------------------------------------------------------------------------------- totals
def test_totals_are_accumulated_in_float64() -> None:
    """In bfloat16, 256 + 1 is 256: the mean of 600 ones would be 0.43."""
    ones = Plainly(lambda outputs: Total(torch.ones((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)))
    totals, _ = run(Line(torch.bfloat16), ones, [micro([1.0], step=600)] * 600)
    assert float(totals["it"].sum) == float(totals["it"].count) == 600
    assert totals["loss"].sum.dtype == torch.float64


def test_totals_of_different_shapes_are_refused() -> None:
    """Shapes [1] and [3]: torch would broadcast them."""
    growing = Plainly(lambda outputs: Total(torch.zeros(len(outputs)), 1))
    with pytest.raises(PluginError, match=r"`it` is a Total of shape \[1\] for one batch and a Total of shape \[3\]"):
        run(Line(), growing, [micro([1.0], step=4, last=False), micro([1.0, 2.0, 3.0], step=4)])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (0.5, "is a float, but must be a Total of a tensor and a count, or SampleColumns"),
        (torch.tensor(0.5), "is a Tensor, but must be"),
        (Total(0.5, 1), "is a Total with a float for its sum"),  # type: ignore[arg-type]
        (
            Total(torch.zeros(3), torch.ones(2)),
            r"is a Total with float32 \[2\] for its count, and float32 \[3\] for its sum",
        ),
        (SampleColumns(torch.zeros(3), torch.ones(2)), "has SampleColumns with columns of different lengths: 3, 2"),
        (SampleColumns(), "has SampleColumns with columns of different lengths: none"),
    ],
)
def test_a_metric_that_is_not_a_total_is_refused(wrong: Any, told: str) -> None:
    with pytest.raises(PluginError, match=f"metric `it` {told}"):
        run(Line(), Plainly(lambda _: wrong), [micro([1.0])])


def test_metrics_are_not_computed_for_padding_samples() -> None:
    """Totals do not contain the metric either: only ranks with real samples report it."""
    asked: list[int] = []

    def ask(outputs: Tensor) -> Total:
        asked.append(len(outputs))
        return Total(outputs.sum(), 1)

    task = Plainly(ask)
    totals, _ = run(Line(), task, [micro([5.0])._replace(samples=0)])
    assert (asked, [*totals], totals["loss"].count) == ([], ["loss"], 0)


def test_sample_columns_are_skipped_in_training() -> None:
    totals, _ = run(Line(), Plainly(lambda outputs: SampleColumns(outputs)), [micro([1.0])])
    assert [*totals] == ["loss"]


def test_totals_do_not_change_when_a_cuda_graph_reuses_its_outputs() -> None:
    """All batches return the same float64 tensor, as with CUDA graphs: the sum is 1 + 2, not 2 + 2."""
    kept = torch.zeros((), dtype=torch.float64)
    totals, _ = run(
        Line(), Plainly(lambda outputs: Total(kept.copy_(outputs.detach().sum()), 1)), [micro([1.0]), micro([2.0])]
    )
    assert totals["it"].sum.item() == 3.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_is_the_mean_over_the_samples_of_a_step(ranks: int) -> None:
    """This rank has the samples 1 and 5 of eight: 6 / 8, times the number of ranks that the strategy averages over."""
    _, norm = run(Line(), Plainly(), [micro([1.0], step=8), micro([5.0], step=8)], Plain(ranks=ranks))
    assert norm.item() == pytest.approx(ranks * 6 / 8)


class Means(Plainly):
    """Task whose loss is a mean instead of a sum."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return outputs.mean(), outputs


def compared(task: Task) -> Line:
    model = Line()
    replica = Plain().holding(model, IDLE)
    first_checks = [partial(check_first_loss, replica.world, replica, task, model)]
    steps = Stepper(replica.world, replica, task, seed=0, first_checks=first_checks)
    for number in (0, 1):
        steps.train_step(1, first := micro([1.0, 2.0, 3.0, 4.0], number=number), [first], measure=False)
    return model


def test_a_mean_loss_is_refused_in_the_first_step() -> None:
    """Losses are 2.5 for all four samples, and 1.5 and 3.5 for their halves."""
    with pytest.raises(
        UsageError, match=r"Means\.loss returns a mean over the batch: 2.5 for 4 samples, and 1.5 and 3.5"
    ):
        compared(Means())


def test_the_check_of_the_first_loss_does_not_change_the_model() -> None:
    assert compared(Plainly()).modes == [True, True]


# ---------------------------------------------------------------------------------------------- multi-pass optimizers
class Perturbing(Plain):
    """Replica that records the calls of a multi-pass optimizer; perturbs the weights if the gradient is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def holding(self, model: nn.Module, optimizer: Any) -> Perturbing:
        super().holding(model, optimizer)
        self.weights.mark_changed = lambda: self.events.append("changed")  # type: ignore[method-assign]
        return self

    def perturb(self, optimizer: Any) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        self.norms.append(norm.item())
        if norm.isfinite():
            optimizer.perturb(norm.item())
        for parameter in self.module.parameters():
            parameter.grad = None
        return norm

    def step(self) -> Tensor:
        norm = super().step()
        self.norms.append(norm.item())
        return norm


class MultiPass:
    """Optimizer that computes `passes` gradients per step."""

    def __init__(self, passes: int, events: list[str]) -> None:
        self.passes, self.events = passes, events

    def perturb(self, norm: float) -> None:
        self.events.append("perturb")

    def restore(self) -> None:
        self.events.append("restore")

    def step(self) -> None:
        self.events.append("update")

    def zero_grad(self) -> None: ...


class Dropped(Normed):
    """Model that draws a random number per batch and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        super().forward(x)  # for the running mean
        return self.w * x


def update_of(replica: Any, optimizer: Any, stateful: nn.Module) -> Any:
    feature = MultiPassFeature(replica)
    feature.start(stateful)
    return feature.around_update(optimizer)


def passes(number: int, batches: list[MicroBatch], task: Task | None = None) -> tuple[Perturbing, Dropped, Any]:
    replica, model = Perturbing(), Dropped()
    optimizer: Any = MultiPass(number, replica.events)
    replica.holding(model, optimizer)
    update = update_of(replica, optimizer, model)
    steps = Stepper(replica.world, replica, task or Plainly(), update, seed=0)
    return replica, model, steps.train_step(1, batches[0], iter(batches), measure=True)


@pytest.mark.parametrize("number", [2, 3])
def test_every_pass_has_all_samples_and_the_same_random_numbers(number: int) -> None:
    measured: list[float] = []

    def metric(outputs: Tensor) -> Total:
        measured.append(outputs.sum().item())
        return Total(outputs.sum(), len(outputs))

    batches = [micro([1.0, 2.0], step=4), micro([3.0, 6.0], step=4, number=1)]
    replica, model, (totals, norm) = passes(number, batches, Plainly(metric))
    assert replica.events == ["perturb"] * (number - 1) + ["restore", "step", "update"]
    assert replica.norms == [3.0] * number
    assert norm.item() == 3.0
    assert model.drawn == model.drawn[:2] * number
    assert model.drawn[0] != model.drawn[1]
    assert (totals["it"].sum.item(), totals["it"].count) == (12.0, 4)  # only of the first pass
    assert measured == [3.0, 9.0]
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 2


@pytest.mark.parametrize("number", [2, 3])
def test_a_nonfinite_gradient_in_any_pass_ends_the_step_without_an_update(number: int) -> None:
    replica, _, (_, norm) = passes(number, [micro([float("nan"), 1.0])])
    assert replica.events == ["restore", "changed"]
    assert not norm.isfinite()


def test_a_single_pass_optimizer_does_not_perturb() -> None:
    replica, _, _ = passes(1, [micro([1.0, 2.0])])
    assert replica.events == ["step", "update"]


def test_a_strategy_without_perturb_refuses_a_multi_pass_optimizer() -> None:
    plain, model = Plain(), Line()
    optimizer: Any = MultiPass(2, [])
    with pytest.raises(
        StrategyError, match="MultiPass makes 2 passes per step, but the strategy supports only optimizers that make"
    ):
        update_of(plain.holding(model, optimizer), optimizer, model)


# ---------------------------------------------------------------------------------------------- padding samples
def test_a_padding_sample_adds_nothing() -> None:
    model = Line()
    totals, norm = run(model, Plainly(), [micro([3.0], step=1), micro([5.0], samples=0, step=1)])
    assert norm.item() == 3.0
    assert (totals["loss"].sum.item(), totals["loss"].count) == (3.0, 1)


def test_a_padding_sample_does_not_count_in_running_statistics() -> None:
    """Expects the mean of the batch with the samples 1 and 3."""
    model = Normed()
    run(model, Plainly(), [micro([1.0, 3.0]), micro([11.0, 13.0], samples=0)])
    assert model.norm.running_mean is not None
    assert model.norm.num_batches_tracked is not None
    assert model.norm.running_mean.item() == 2.0
    assert model.norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("nan", [False, True])
def test_a_skipped_step_does_not_change_buffers(nan: bool) -> None:
    model = Normed()
    run(model, Plainly(), [micro([1.0, 3.0])], skips=True)
    run(model, Plainly(), [micro([11.0, float("nan") if nan else 13.0])], skips=True)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.item() == (2.0 if nan else 12.0)


# ---------------------------------------------------------------------------------------------- random numbers
def test_every_micro_batch_of_every_virtual_rank_and_step_has_separate_random_numbers() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.drawn = nn.Parameter(torch.ones(())), list[float]()

        def forward(self, x: Tensor) -> Tensor:
            self.drawn.append(torch.rand(()).item())
            return self.w * x

    model = Draws()
    replica = Plain().holding(model, IDLE)
    steps = Stepper(replica.world, replica, Plainly(), seed=0)
    places = [(step, shard, number) for step in (1, 2) for shard in (0, 1) for number in (0, 1)]
    for _ in range(2):
        for step, shard, number in places:
            one = micro([1.0], shard=shard, number=number)
            steps.train_step(step, one, [one], measure=False)
    first, again = model.drawn[: len(places)], model.drawn[len(places) :]
    assert len(set(first)) == len(places)
    assert first == again
