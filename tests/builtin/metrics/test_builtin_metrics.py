"""Built-in metrics: sums and counts that can be added up over batches and ranks."""

from typing import Any

import pytest
import torch

from ddpforge.builtin.metrics.classification import Accuracy, Top5, TopK
from ddpforge.builtin.metrics.confusion import F1, MeanIoU
from ddpforge.builtin.metrics.regression import MeanAbsoluteError
from ddpforge.interfaces import Metric

LOGITS = torch.tensor([[0.1, 0.9, 0.0, 0.5, 0.2, 0.3], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("metric", "name", "targets", "hits"),
    [
        (Accuracy(), "accuracy", [1, 0], 2),
        (Accuracy(), "accuracy", [3, 0], 1),
        (Accuracy(), "accuracy", [-1, -1], 0),
        (TopK(k=1), "top1", [3, 0], 1),
        (TopK(k=2), "top2", [3, 1], 2),
        (TopK(k=2), "top2", [5, 2], 0),
        (Top5(), "top5", [2, 5], 0),
        (Top5(), "top5", [0, 4], 2),
    ],
)
def test_metrics_sum_hits_and_count_targets(metric: Metric, name: str, targets: list[int], hits: int) -> None:
    total: Any = metric(LOGITS, torch.tensor(targets))
    assert metric.name == name
    assert (float(total.sum), int(total.count)) == (hits, 2)


def test_targets_may_have_any_shape() -> None:
    total = Accuracy()(LOGITS.expand(3, 2, 6), torch.tensor([[1, 0], [1, 1], [0, 0]]))
    assert (float(total.sum), total.count) == (4, 6)


def test_more_guesses_than_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="top5 needs at least 5 classes, but the outputs have 3"):
        Top5()(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_absolute_errors_are_averaged_within_a_sample_and_summed_over_samples() -> None:
    outputs, targets = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 10.0]])
    total = MeanAbsoluteError()(outputs, targets)
    assert (float(total.sum), total.count) == ((1 + 3) / 2 + 10 / 2, 2)

    total = MeanAbsoluteError()(torch.tensor([1.0, -1.0, 2.0]), torch.zeros(3))
    assert (float(total.sum), total.count) == (4, 3)


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[3, 1\] and \[3\]"):
        MeanAbsoluteError()(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize("metric", [Accuracy(), TopK(k=2)])
def test_totals_of_parts_add_up_to_the_total_of_the_whole(metric: Metric) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 6, generator=generator)
    targets = torch.randint(6, (30,), generator=generator)
    whole: Any = metric(logits, targets)
    parts: list[Any] = [metric(logits[a:b], targets[a:b]) for a, b in ((0, 1), (1, 8), (8, 30))]
    assert sum(float(part.sum) for part in parts) == float(whole.sum)
    assert sum(part.count for part in parts) == whole.count == 30


def test_no_gradient_flows_through_a_metric() -> None:
    outputs = torch.randn(2, 6, requires_grad=True)
    for total in (Accuracy()(outputs, torch.tensor([0, 1])), MeanAbsoluteError()(outputs, torch.zeros(2, 6))):
        assert isinstance(total.sum, torch.Tensor)
        assert not total.sum.requires_grad


@pytest.mark.parametrize(("metric", "value"), [(F1(average="each"), 2 / 3), (MeanIoU(), 1 / 2)])
@pytest.mark.parametrize("outside", [-1, 7])
def test_a_target_outside_of_the_classes_is_wanted_by_no_class(metric: Metric, value: float, outside: int) -> None:
    """Class 0 has one hit and one wrong prediction: F1 is 2 · 1 / (2 + 1), IoU is 1 / 2."""
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    total: Any = metric(logits, torch.tensor([0, outside]))
    assert total.sum.tolist() == [[1.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    found: Any = metric.finish(total.sum, total.count)
    assert (found["0"] if isinstance(found, dict) else found) == pytest.approx(value)
