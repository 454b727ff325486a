"""Weights of convolutions lie with channels last where the recipe asks for it, and numbers stay what they were."""

from pathlib import Path

import pytest
import torch
from forked import refused
from torch import nn
from trained import Trained, trained

from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.mlp import MLP
from ddpforge.errors import StrategyError
from ddpforge.training.memory_format import check_channels_last, put_channels_last

RECIPE = """
recipe = 1
name = "run"
model = {{ use = "cnn", width = 4 }}
data.train = {{ use = "digits", split = "test" }}
data.eval = {{ use = "digits", split = "test" }}
task = {{ use = "classification", metrics = ["accuracy"] }}
optimizer = {{ use = "sgd", lr = 0.1, momentum = 0.9 }}
strategy = {{ use = "{strategy}" }}
train = {{ length = "{length}st", global_batch = 48, eval_batch = 60, device = "cpu"{train} }}
checkpoint.every = "4st"
track.every = "1st"
"""


def run(folder: Path, train: str = "", strategy: str = "ddp", length: int = 8) -> Trained:
    return trained(folder, RECIPE.format(strategy=strategy, train=train, length=length), 2)[0]


def test_activations_follow_the_weights() -> None:
    model = CNN(width=4)
    put_channels_last(model)
    check_channels_last(model, "ddp")
    seen: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, __, out: seen.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    model(torch.randn(2, 1, 8, 8))
    assert seen
    assert all(seen)


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(ValueError, match="is about 2-D convolutions, of which the model has none"):
        put_channels_last(MLP(inputs=4, outputs=2))


def test_weights_that_were_laid_out_otherwise_are_refused() -> None:
    said = refused(StrategyError, lambda: check_channels_last(CNN(width=4), "fsdp"))
    assert 'train.channels_last has no effect under strategy.use = "fsdp"' in said


def test_the_curve_is_the_same_and_a_run_may_resume_without(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "last").mkdir()
    plain = run(tmp_path / "plain")
    first = run(tmp_path / "last", ", channels_last = true", length=4)
    rest = run(tmp_path / "last")
    found = first.column() + rest.column()
    assert found == pytest.approx(plain.column(), rel=1e-5)
    assert rest.column("eval/accuracy")[-1] == plain.column("eval/accuracy")[-1]


def test_a_strategy_that_shards_says_that_it_has_no_effect(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has no effect under"):
        run(tmp_path, ", channels_last = true", "fsdp")
