"""What the task `classification` promises."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.metrics.classification import Accuracy, TopK
from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.multilabel import Multilabel

BATCH = (torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]]), torch.tensor([1, 1]))  # probabilities 1/4, 3/4


def test_the_loss_is_the_sum_over_samples_not_their_mean() -> None:
    loss, logits = Classification().loss(nn.Identity(), BATCH)
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(4))
    assert logits is BATCH[0]
    assert Classification().count(BATCH) is None  # one item per sample


def test_label_smoothing_spreads_probability_over_all_classes() -> None:
    """Of one sample whose class has probability 3/4: with two classes the sum over both would not show it."""
    one = (BATCH[0][:1], BATCH[1][:1])
    loss, _ = Classification(label_smoothing=0.2).loss(nn.Identity(), one)
    assert loss.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))


def test_the_loss_of_half_precision_logits_is_computed_in_float32() -> None:
    logits = torch.zeros(1000, 10, dtype=torch.bfloat16)
    loss, _ = Classification().loss(nn.Identity(), (logits, torch.zeros(1000, dtype=torch.int64)))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1000 * math.log(10), rel=1e-6)


def test_it_reports_the_metrics_that_it_is_given_by_name() -> None:
    task = Classification(metrics=[Accuracy(), TopK(k=2)])
    _, outputs = task.loss(nn.Identity(), BATCH)
    totals = task.metrics(outputs, BATCH)
    assert {name: (float(total.sum), total.count) for name, total in totals.items()} == {
        "accuracy": (1, 2),
        "top2": (2, 2),
    }
    assert Classification().metrics(outputs, BATCH) == {}


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must differ by name, got \['top2', 'top2'\]"):
        Classification(metrics=[TopK(k=2), TopK(k=2)])


def test_data_with_more_classes_than_the_model_is_refused() -> None:
    task, data = Classification(), Digits(split="test")
    task.check(CNN(classes=10), data)
    task.check(nn.Identity(), data)
    with pytest.raises(ValueError, match="the data has 10 classes and the model 9 outputs"):
        task.check(CNN(classes=9), data)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Multilabel, "accuracy"),
        (lambda metrics: MaskedLM(mask_token=1, metrics=metrics), "perplexity"),
        (Classification, "loss"),
    ],
)
def test_a_metric_does_not_replace_what_the_task_reports_itself(build: Any, name: str) -> None:
    metric = Accuracy()
    metric.name = name
    with pytest.raises(ValueError, match=f"metrics: the task reports `{name}` by itself"):
        build(metrics=[metric])
