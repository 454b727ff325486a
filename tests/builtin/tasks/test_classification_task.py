"""The task `classification`: losses, ignored classes, metrics, refusals."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.metrics.classification import Accuracy, TopK
from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.mlp import MLP
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.distillation import Distillation
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.multilabel import Multilabel
from ddpforge.builtin.tasks.sequence_classification import SequenceClassification
from ddpforge.errors import UsageError
from ddpforge.interfaces import Total

BATCH = (torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]]), torch.tensor([1, 1]))  # probabilities 1/4, 3/4


def test_loss_is_the_sum_over_samples() -> None:
    loss, logits = Classification().loss(nn.Identity(), BATCH)
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(4))
    assert logits is BATCH[0]
    assert Classification().count(BATCH) is None  # one item per sample


def test_label_smoothing_spreads_probability_over_all_classes() -> None:
    """Uses one sample whose class has probability 3/4: with two classes a sum over both would hide an error."""
    one = (BATCH[0][:1], BATCH[1][:1])
    loss, _ = Classification(label_smoothing=0.2).loss(nn.Identity(), one)
    assert loss.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))


def test_loss_of_half_precision_logits_is_computed_in_float32() -> None:
    logits = torch.zeros(1000, 10, dtype=torch.bfloat16)
    loss, _ = Classification().loss(nn.Identity(), (logits, torch.zeros(1000, dtype=torch.int64)))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1000 * math.log(10), rel=1e-6)


HALF = (torch.zeros(4, 2), torch.tensor([0, 1, -100, -100]))
"""Four samples without preference, two of them without a class."""


def test_ignored_classes_count_neither_in_the_loss_nor_in_metrics() -> None:
    task = Classification(ignore_index=-100, metrics=[Accuracy()])
    loss, outputs = task.loss(nn.Identity(), HALF)
    count = task.count(HALF)
    assert count is not None
    assert (loss / count).item() == pytest.approx(math.log(2))
    (accuracy,) = task.metrics(outputs, HALF).values()
    assert isinstance(accuracy, Total)
    assert (float(accuracy.sum), accuracy.count) == (1, 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_ignore_index_may_be_any_class(smoothing: float) -> None:
    batch = (torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0]))
    task = Classification(ignore_index=2, label_smoothing=smoothing)
    kept = tuple(part[batch[1] != 2] for part in batch)
    whole = Classification(label_smoothing=smoothing).loss(nn.Identity(), kept)[0]  # type: ignore[arg-type]
    assert task.loss(nn.Identity(), batch)[0].item() == pytest.approx(whole.item())
    assert int(task.count(batch)) == 4  # type: ignore[arg-type]
    assert (task.items, Classification().items) == ("targets", "samples")


@pytest.mark.parametrize(
    ("task", "batch"),
    [
        (Classification(), HALF),
        (SequenceClassification(), (HALF[0].long(), HALF[1])),
        (SequenceClassification(), {"input_ids": HALF[0].long(), "labels": HALF[1]}),
        (Distillation(teacher=nn.Identity()), HALF),
    ],
)
def test_error_for_a_negative_class_names_ignore_index(task: Classification, batch: Any) -> None:
    with pytest.raises(UsageError, match=f"task {task.task_name}: a sample has the class -100") as refused:
        task.count(batch)
    assert "task.ignore_index = -100" in refused.value.hints[0]


def test_class_minus_one_is_refused() -> None:
    with pytest.raises(UsageError, match="a sample has the class -1, but classes start at 0"):
        Classification().count((torch.zeros(2, 2), torch.tensor([1, -1])))


def test_distillation_skips_samples_with_an_ignored_class() -> None:
    options: dict[str, Any] = {"teacher": nn.Linear(2, 2), "alpha": 0.5}
    inputs, classes = torch.randn(4, 2), HALF[1]
    loss, _ = Distillation(ignore_index=-100, **options).loss(nn.Identity(), (inputs, classes))
    alone, _ = Distillation(**options).loss(nn.Identity(), (inputs[:2], classes[:2]))
    assert loss.item() == pytest.approx(alone.item())


@pytest.mark.parametrize("filler", [-1, -100, 2])
def test_labels_outside_0_to_1_are_refused(filler: int) -> None:
    with pytest.raises(UsageError, match="task multilabel takes labels from 0 to 1"):
        Multilabel().count((torch.zeros(2, 2), torch.tensor([[0, 1], [filler, 1]])))
    assert Multilabel().count((torch.zeros(1, 2), torch.tensor([[0.5, 1]]))) is None  # type: ignore[func-returns-value]


def test_task_reports_its_metrics_by_name() -> None:
    task = Classification(metrics=[Accuracy(), TopK(k=2)])
    _, outputs = task.loss(nn.Identity(), BATCH)
    totals = task.metrics(outputs, BATCH)
    assert {name: (float(total.sum), total.count) for name, total in totals.items()} == {
        "accuracy": (1, 2),
        "top2": (2, 2),
    }
    assert Classification().metrics(outputs, BATCH) == {}


def test_two_metrics_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must differ by name, got \['top2', 'top2'\]"):
        Classification(metrics=[TopK(k=2), TopK(k=2)])


def test_data_with_more_classes_than_model_outputs_is_refused() -> None:
    task, data = Classification(), Digits(split="test")
    task.check(CNN(classes=10), data)
    task.check(nn.Identity(), data)
    with pytest.raises(UsageError, match="the data has 10 classes and the model 9 outputs"):
        task.check(CNN(classes=9), data)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Multilabel, "accuracy"),
        (lambda metrics: MaskedLM(mask_token=1, metrics=metrics), "perplexity"),
        (Classification, "loss"),
    ],
)
def test_metric_with_a_name_reported_by_the_task_is_refused(build: Any, name: str) -> None:
    metric = Accuracy()
    metric.name = name
    with pytest.raises(ValueError, match=f"metrics: the task already reports `{name}`"):
        build(metrics=[metric])


# ---------------------------------------------------------------------------------------------- class weights
@pytest.mark.parametrize("ignored", [None, 1])
def test_class_weights_weigh_the_samples_of_all_micro_batches_together(ignored: int | None) -> None:
    torch.manual_seed(0)
    model, inputs, classes = MLP(inputs=4, outputs=3), torch.randn(12, 4), torch.arange(12) % 3
    task = Classification(class_weights=[1.0, 5.0, 0.5], ignore_index=ignored)
    parts = [(inputs[:5], classes[:5]), (inputs[5:], classes[5:])]
    total = sum(task.loss(model, part)[0] for part in parts)
    count = sum(task.count(part) for part in parts)  # type: ignore[misc]
    options = {} if ignored is None else {"ignore_index": ignored}
    expected = F.cross_entropy(model(inputs), classes, torch.tensor([1.0, 5.0, 0.5]), **options)
    torch.testing.assert_close(total / count, expected)


@pytest.mark.parametrize(
    ("weights", "targets", "complaint"),
    [
        ([1.0, 2.0], torch.tensor([0, 2]), "has the class 2, but class_weights has 2 weights"),
        ([1.0, 2.0], torch.tensor([-1, 1]), "a sample has the class -1"),
        ([1.0, 2.0], torch.tensor([[0.5, 0.5]]), "no class can be ignored or weighted"),
    ],
)
def test_targets_without_a_weight_are_refused(weights: list[float], targets: Tensor, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Classification(class_weights=weights).count((torch.zeros(len(targets), 4), targets))


def test_class_weights_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="no sample would count"):
        Classification(class_weights=[0.0, 0.0])
