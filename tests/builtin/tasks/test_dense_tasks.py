"""Multilabel classification and segmentation: sums computed by hand, and their data."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.datasets.views import TwoViews
from ddpforge.builtin.metrics.confusion import F1
from ddpforge.builtin.models.unet import UNet
from ddpforge.builtin.tasks.multilabel import Multilabel
from ddpforge.builtin.tasks.segmentation import Segmentation


def test_labels_are_averaged_within_a_sample_and_summed_over_samples() -> None:
    """Uses logits of zero, which cost ln 2 each."""
    logits = torch.zeros(3, 4)
    labels = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    loss, outputs = Multilabel().loss(nn.Identity(), (logits, labels))
    assert loss.item() == pytest.approx(3 * math.log(2))
    right: Any = Multilabel().metrics(outputs, (logits, labels))["accuracy"]
    assert (int(right.sum), right.count) == (3 + 4 + 0, 12)


def test_numbers_of_logits_and_labels_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"logits \[2, 3\], but the labels are \[2, 4\]"):
        Multilabel().loss(nn.Identity(), (torch.zeros(2, 3), torch.zeros(2, 4)))


def test_pixels_have_equal_weights_and_ignored_pixels_none() -> None:
    """Ignores three of 2 x 4 pixels; each other pixel costs ln 5."""
    logits, classes = torch.zeros(2, 5, 2, 2), torch.tensor([[[0, 255], [255, 255]], [[1, 2], [3, 4]]])
    task = Segmentation()
    loss, outputs = task.loss(nn.Identity(), (logits, classes))
    assert loss.item() == pytest.approx(5 * math.log(5))
    assert task.count((logits, classes)) == 5
    iou: Any = task.metrics(outputs, (logits, classes))["iou"]
    assert task.reports["iou"].finish(iou.sum, iou.count) == pytest.approx((1 / 5 + 0 + 0 + 0 + 0) / 5)


def test_pixel_metrics_skip_the_pixels_that_the_loss_ignores() -> None:
    """Ignores one of two pixels; the other one is right."""
    task = Segmentation(metrics=[F1(), F1(average="micro", ignore_index=7)])
    logits = torch.tensor([[[[9.0, 9.0]], [[0.0, 0.0]]]])
    classes = torch.tensor([[[0, 255]]])
    found: Any = task.metrics(logits, (logits, classes))
    assert task.reports["f1"].finish(found["f1"].sum, found["f1"].count) == 1.0
    assert found["f1_micro"].count == 2, "an option of the metric's own stays"


def test_digits_targets_traits() -> None:
    digits = Digits(split="test").labels.tolist()
    traits = Digits(split="test", targets="traits").labels.int().tolist()
    expected = {0: [0, 0, 0, 1], 1: [1, 0, 0, 0], 2: [0, 1, 0, 0], 7: [1, 1, 1, 0], 9: [1, 0, 1, 1]}
    assert all(traits[i] == expected[digit] for i, digit in enumerate(digits) if digit in expected)


def test_digits_targets_pixels_are_the_digit_or_background() -> None:
    plain, pixels = Digits(split="test"), Digits(split="test", targets="pixels")
    image, classes = pixels[3]
    assert set(classes.unique().tolist()) == {int(plain.labels[3]), 10}
    assert torch.equal(classes != 10, image[0] >= 0.5)
    assert (plain.classes, pixels.classes) == (10, 11)


def test_two_views_are_random_shifts_of_each_sample() -> None:
    data = TwoViews(of=Digits(split="test"), shift=1, noise=0.0)
    torch.manual_seed(0)
    first, second = data[0]
    image = data.data[0][0][0]
    moved = {
        tuple(torch.roll(image, (a, b), (0, 1))[1:-1, 1:-1].flatten().tolist()) for a in (-1, 0, 1) for b in (-1, 0, 1)
    }
    assert tuple(first[0, 1:-1, 1:-1].flatten().tolist()) in moved
    assert len(data) == 360
    assert not torch.equal(data[1][0], TwoViews(of=Digits(split="test"))[1][0])
    assert first.shape == second.shape == (1, 8, 8)


def test_unet_returns_logits_for_each_pixel() -> None:
    assert UNet(classes=5, width=4, depth=2)(torch.zeros(2, 1, 8, 12)).shape == (2, 5, 8, 12)
    with pytest.raises(ValueError, match=r"got a batch of shape \[2, 1, 6, 8\]; .* both divisible by 4"):
        UNet(classes=5)(torch.zeros(2, 1, 6, 8))
