"""The model `mlp`: size, inputs, dropout."""

import pytest
import torch

from ddpforge.builtin.models.mlp import MLP


def test_mlp_has_a_weight_and_a_bias_per_pair_of_adjacent_widths() -> None:
    model = MLP(inputs=64, hidden=[32, 16], outputs=10)
    assert sum(p.numel() for p in model.parameters()) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10


def test_images_are_flattened() -> None:
    model = MLP(inputs=64, outputs=10).eval()
    images = torch.randn(3, 1, 8, 8)
    assert model(images).shape == (3, 10)
    assert torch.equal(model(images), model(images.flatten(1)))


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(inputs=4, hidden=[], outputs=2)
    zero, x, y = torch.zeros(1, 4), torch.randn(1, 4), torch.randn(1, 4)
    torch.testing.assert_close(model(x + y) + model(zero), model(x) + model(y))


def test_dropout_acts_in_training_only() -> None:
    model = MLP(inputs=4, hidden=[256], outputs=2, dropout=0.5)
    x = torch.randn(1, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_error_for_samples_of_another_size_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"got samples of 64 values.*\[2, 1, 8, 8\]; set model.inputs = 64"):
        MLP(inputs=784, outputs=10)(torch.zeros(2, 1, 8, 8))
