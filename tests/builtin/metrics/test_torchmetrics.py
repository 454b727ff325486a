"""Metrics that are not means, on a ragged evaluation set: equal to scikit-learn's on any number of ranks."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Plain
from torch import Tensor, nn

from ddpforge.builtin.metrics.calibration import CalibrationError
from ddpforge.builtin.metrics.confusion import F1, MeanIoU
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.components.errors import RefusedOptions
from ddpforge.components.options import Nested
from ddpforge.components.registry import Registry
from ddpforge.data import RankShare
from ddpforge.errors import UsageError
from ddpforge.interfaces import Metric, Ranks, SampleColumns, Total, World
from ddpforge.testing.doubles import in_threads
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.loaders import open_data

SAMPLES, CLASSES = 41, 5  # 41 samples in steps of 4 on each of 3 ranks: one rank has a padding sample at the end
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(SAMPLES, CLASSES, generator=GENERATOR)
TARGETS = torch.randint(CLASSES, (SAMPLES,), generator=GENERATOR)
PREDICTED = LOGITS.argmax(1)
PROBABILITIES = LOGITS.double().softmax(1)


def named(use: str, **options: Any) -> Metric:
    """Builds the metric with this name in a recipe."""
    registry = Registry.installed()
    model = registry.options_model("metric", use).model_validate_json(json.dumps(options))
    metric: Metric = registry.build(
        "metric", Nested(kind="metric", use=use, options=dict(model), base=Path(), plain=use)
    )
    return metric


class Samples:
    random = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return LOGITS[index], TARGETS[index]


def evaluated(ranks: int, metric: Metric) -> dict[str, float]:
    """Evaluates an identity model on `ranks` ranks; returns the metrics."""

    def run(one: Ranks) -> dict[str, float]:
        fetching: dict[str, Any] = {"seed": 0, "workers": 0, "prefetch": 2, "pin": False}
        share = RankShare(one.rank, ranks, 4)
        sets = {"": open_data(Samples(), global_batch=4 * ranks, share=share, drop_last=False, **fetching)}
        evaluator = Evaluator(
            world=World(global_ranks=one, dp_ranks=one, device=torch.device("cpu"), local_rank=one.rank),
            replica=Plain().holding(nn.Identity(), None),  # type: ignore[arg-type]
            task=Classification(metrics=[copy.deepcopy(metric)]),
            sets=sets,
            callbacks={},
            seed=0,
        )
        return {
            name.removeprefix("eval/"): value for name, value in evaluator.evaluate(0).items() if "loss" not in name
        }

    found, *others = in_threads(ranks, run)
    assert all(other == found for other in others)
    return found


def sklearn(score: str, *given: Tensor, **options: Any) -> Any:
    """Returns scikit-learn's score of all samples; imports scikit-learn only when called."""
    import sklearn.metrics

    return getattr(sklearn.metrics, score)(TARGETS, *given, **options)


f1 = partial(sklearn, "f1_score", PREDICTED)
auroc = partial(sklearn, "roc_auc_score", PROBABILITIES, multi_class="ovr")
recalls = partial(sklearn, "recall_score", PREDICTED, average=None)
confused = partial(sklearn, "confusion_matrix", PREDICTED)
multiclass = {"num_classes": CLASSES}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (F1, lambda: {"f1": f1(average="macro")}),
        (partial(F1, average="micro"), lambda: {"f1_micro": f1(average="micro")}),
        (partial(F1, average="weighted"), lambda: {"f1_weighted": f1(average="weighted")}),
        (MeanIoU, lambda: {"iou": sklearn("jaccard_score", PREDICTED, average="macro")}),
        (
            partial(named, "torchmetrics.classification:MulticlassF1Score", **multiclass),
            lambda: {"multiclass_f1_score": f1(average="macro")},
        ),
        (
            partial(named, "torchmetrics.classification:MulticlassAUROC", **multiclass),
            lambda: {"multiclass_auroc": auroc()},
        ),
        (
            partial(named, "torchmetrics:AUROC", task="multiclass", name="auc", **multiclass),
            lambda: {"auc": auroc()},
        ),
        (
            partial(named, "torchmetrics.classification:MulticlassRecall", average="none", name="recall", **multiclass),
            lambda: {f"recall/{i}": x for i, x in enumerate(recalls().tolist())},
        ),
        (
            partial(named, "torchmetrics.classification:MulticlassConfusionMatrix", name="confused", **multiclass),
            lambda: {f"confused/{i}_{j}": n for i, row in enumerate(confused().tolist()) for j, n in enumerate(row)},
        ),
    ],
    ids=["f1", "f1_micro", "f1_weighted", "iou", "multiclass_f1", "multiclass_auroc", "auroc", "recall", "confusion"],
)
def test_metrics_equal_scikit_learn_on_any_number_of_ranks(
    metric: Callable[[], Metric], expected: Callable[[], dict[str, float]], ranks: int
) -> None:
    assert evaluated(ranks, metric()) == pytest.approx(expected(), rel=1e-12)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    """Uses two bins: three samples below 0.5, two of them right, and two above it, one of them right."""
    confidences = torch.tensor([0.4, 0.45, 0.45, 0.9, 0.7], dtype=torch.float64)
    rest = (1 - confidences) / 2
    logits = torch.stack([confidences, rest, rest], 1).log()
    metric = CalibrationError(bins=2)
    total = metric(logits, torch.tensor([0, 0, 1, 0, 2]))
    assert metric.finish(total.sum, torch.as_tensor(total.count)) == pytest.approx((abs(1.3 - 2) + abs(1.6 - 1)) / 5)


def test_ignored_pixels_do_not_count() -> None:
    """Predicts two of three pixels correctly; the third class occurs only in ignored pixels."""
    logits = torch.eye(3)[torch.tensor([[0, 0, 1, 2]])].movedim(-1, 1)
    metric = MeanIoU(ignore_index=255)
    total = metric(logits, torch.tensor([[0, 1, 1, 255]]))
    assert total.count == 3
    assert metric.finish(total.sum, total.count) == pytest.approx((1 / 2 + 1 / 2) / 2)  # type: ignore[arg-type]


def test_target_that_is_not_a_class_counts_as_a_miss() -> None:
    total = F1()(torch.eye(2), torch.tensor([0, -1]))
    assert total.sum.tolist() == [[1, 0], [1, 1], [1, 0]]


def test_weighted_f1_averages_over_targets_that_are_classes() -> None:
    """Averages an F1 of 2/3 and of 0, with one target each; the third target is not a class."""
    metric = F1(average="weighted")
    total = metric(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, -1]))
    assert metric.finish(total.sum, total.count) == pytest.approx(1 / 3)  # type: ignore[arg-type]


def test_error_for_mismatched_shapes_names_them() -> None:
    with pytest.raises(
        ValueError, match=r"f1 takes logits \[B, C, ...\] and classes \[B, ...\], not \[2, 3\] and \[3\]"
    ):
        F1()(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))


def test_direction_is_that_of_torchmetrics() -> None:
    assert named("torchmetrics:MeanSquaredError").lower_is_better is True
    assert named("torchmetrics:R2Score").lower_is_better is False
    assert named("torchmetrics:MeanSquaredError").name == "mean_squared_error"


def test_torchmetrics_sums_become_totals_and_lists_become_columns() -> None:
    """Returns a Total for sums, which so have columns in training rows, too."""
    assert isinstance(named("torchmetrics:MeanSquaredError")(LOGITS, LOGITS + 1), Total)
    assert isinstance(named("torchmetrics:SpearmanCorrCoef")(LOGITS[:, 0], LOGITS[:, 1]), SampleColumns)


def test_psnr_range_is_that_of_all_samples() -> None:
    """Applies the range of both batches: 10 log10(4² / 1)."""
    metric = named("torchmetrics.image:PeakSignalNoiseRatio", data_range=4.0)
    rows: Any = metric(torch.zeros(2, 3), torch.ones(2, 3))
    rows += metric(torch.zeros(1, 3), torch.ones(1, 3))
    assert metric.finish(*rows.columns) == pytest.approx(12.041199826559248, rel=1e-12)


def test_bleu_counts_are_summed_over_batches() -> None:
    """Sums BLEU's n-grams; the mean of two batches' scores would be another number."""
    metric = named("torchmetrics.text:BLEUScore", n_gram=2)
    batches: list[Any] = [(["a b c"], [["a b d"]]), (["a b c d"], [["a b c d"]])]
    one, other = (metric(*batch) for batch in batches)
    total: Any = one
    total += other
    precision = (6 / 7 * 4 / 5) ** 0.5
    assert metric.finish(total.sum, torch.tensor(2.0)) == pytest.approx(precision, rel=1e-12)


def test_metric_without_additive_states_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"PearsonCorrCoef of torchmetrics has the states mean_x, .* cannot be combined exactly over ranks",
    ):
        named("torchmetrics:PearsonCorrCoef")


def test_metric_that_returns_a_curve_is_refused() -> None:
    metric = named("torchmetrics.classification:BinaryROC")
    rows = metric(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    with pytest.raises(UsageError, match="binary_roc of torchmetrics returns a tuple, not numbers"):
        metric.finish(*rows.columns)  # type: ignore[union-attr]


def test_options_refused_by_torchmetrics_are_recipe_errors() -> None:
    with pytest.raises(RefusedOptions, match=r"Expected argument `num_classes`|num_classes"):
        named("torchmetrics.classification:MulticlassF1Score", num_classes=1)


def test_default_dtype_of_other_threads_is_unchanged() -> None:
    evaluated(3, named("torchmetrics.classification:MulticlassAUROC", num_classes=CLASSES))
    assert torch.get_default_dtype() == torch.float32


def test_error_for_a_binary_metric_names_the_number_of_classes() -> None:
    for kind in ("AUROC", "Accuracy"):
        with pytest.raises(UsageError, match=r"is a binary metric .* \[41, 5\] are scores of 5 classes") as caught:
            named(f"torchmetrics.classification:Binary{kind}")(LOGITS, TARGETS)
        assert caught.value.hints == (f"use Multiclass{kind} with num_classes = 5",)
    assert isinstance(named("torchmetrics.classification:BinaryAUROC")(LOGITS[:, 0], TARGETS % 2), SampleColumns)
