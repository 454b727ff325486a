"""The model `cnn`: size, inputs, accuracy on digits."""

import pytest
import torch
import torch.nn.functional as F

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.optim.optimizers import adamw


def test_number_of_parameters_follows_from_the_widths() -> None:
    convolutions = 9 * (1 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
    norms = 2 * (32 + 32 + 64 + 64)
    head = 64 * 10 + 10
    assert sum(p.numel() for p in CNN().parameters()) == convolutions + norms + head == 65_834


@pytest.mark.parametrize("size", [2, 8, 28, 32])
def test_cnn_accepts_images_of_any_size(size: int) -> None:
    assert CNN(channels_in=3, classes=7, width=4)(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_images_with_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"CNN\(channels_in = 1\) got a batch of shape \[2, 3, 8, 8\]"):
        CNN()(torch.zeros(2, 3, 8, 8))


def test_cnn_reaches_98_percent_on_digits_in_five_epochs() -> None:
    torch.manual_seed(0)
    train, test = Digits(split="train"), Digits(split="test")
    model = CNN()
    optimizer = adamw([{"params": list(model.parameters())}], lr=3e-3)

    for _ in range(5):
        for ids in torch.randperm(len(train)).chunk(23):
            images, labels = train.__getitems__(ids.tolist())
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        hits = (model(test.images).argmax(dim=1) == test.labels).sum().item()
    assert hits >= 0.98 * 360
