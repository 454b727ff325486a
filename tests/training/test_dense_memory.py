"""Weights are dense, or in channels-last format on request, and results stay the same."""

from pathlib import Path

import pytest
import torch
from support.forked import refused
from support.odd_models import Gapped
from support.trained import Trained, trained
from torch import nn

from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.mlp import MLP
from ddpforge.errors import StrategyError
from ddpforge.features.channels_last import check_channels_last, put_channels_last
from ddpforge.guard.model import check_overlap
from ddpforge.training.dense_memory import is_dense, make_dense

RECIPE = """
recipe = 2
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


def test_activations_have_the_memory_format_of_the_weights() -> None:
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
    with pytest.raises(ValueError, match="applies to 2-D convolutions, and the model has none"):
        put_channels_last(MLP(inputs=4, outputs=2))


def test_a_strategy_that_changes_the_layout_is_refused() -> None:
    said = refused(StrategyError, lambda: check_channels_last(CNN(width=4), "fsdp"))
    assert 'train.channels_last has no effect under strategy.use = "fsdp"' in said


def test_channels_last_keeps_the_loss_curve_and_runs_resume_without_it(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "last").mkdir()
    plain = run(tmp_path / "plain")
    first = run(tmp_path / "last", ", channels_last = true", length=4)
    rest = run(tmp_path / "last")
    found = first.column() + rest.column()
    assert found == pytest.approx(plain.column(), rel=1e-5)
    assert rest.column("eval/accuracy")[-1] == plain.column("eval/accuracy")[-1]


def test_channels_last_is_refused_for_a_sharding_strategy(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has no effect under"):
        run(tmp_path, ", channels_last = true", "fsdp")


# ------------------------------------------------------------------------------------------------------ gaps
GAPPED = """
recipe = 2
name = "run"
model = {{ use = "./odd_models.py:Gapped" }}
data.train = {{ use = "./parts.py:Points", samples = 24 }}
task = {{ use = "regression" }}
optimizer = {{ {optimizer} }}
strategy = {{ {strategy} }}
train = {{ length = "5st", global_batch = 8, device = "cpu", clip_norm = 1.0{train} }}
track.every = "1st"
"""
FORMS = {
    "adamw": ('use = "adamw", lr = 0.1', 'use = "adamw", lr = 0.1, fused = false'),
    "sgd": ('use = "sgd", lr = 0.1, momentum = 0.9', 'use = "sgd", lr = 0.1, momentum = 0.9, fused = false'),
    "torch's AdamW": ('use = "torch.optim:AdamW", lr = 0.1, fused = true', 'use = "torch.optim:AdamW", lr = 0.1'),
    "torch's Adagrad": ('use = "torch.optim:Adagrad", lr = 0.1, fused = true', 'use = "torch.optim:Adagrad", lr = 0.1'),
    "foreach": (
        'use = "torch.optim:NAdam", lr = 0.1, foreach = true',
        'use = "torch.optim:NAdam", lr = 0.1, foreach = false',
    ),
}


STRATEGIES = {
    "single": ('use = "single"', "", 1),
    "ddp": ('use = "ddp"', "", 2),
    "virtual ranks": ('use = "ddp"', ", virtual_ranks = 4", 2),
    "fsdp": ('use = "fsdp"', "", 2),
}
ONCE = {"ddp": "torch's Adagrad", "virtual ranks": "foreach", "fsdp": "adamw"}  # in `make test`; "single" has each


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[pytest.mark.full] * (ONCE.get(name, form) != form), id=f"{name}-{form}")
        for name in STRATEGIES
        for form in FORMS
    ],
)
def test_fused_optimizers_train_weights_with_gaps_in_memory(tmp_path: Path, name: str, form: str) -> None:
    strategy, train, ranks = STRATEGIES[name]
    if "Adagrad" in form and "fsdp" in strategy:
        pytest.skip("torch has no fused Adagrad for sharded weights")
    fused, plain = FORMS[form]
    for folder in ("fused", "plain"):
        (tmp_path / folder).mkdir()
    found = trained(tmp_path / "fused", GAPPED.format(optimizer=fused, strategy=strategy, train=train), ranks)[0]
    wanted = trained(tmp_path / "plain", GAPPED.format(optimizer=plain, strategy='use = "single"', train=train), 1)[0]
    for key in ("train/loss", "train/grad_norm"):
        assert found.column(key) == pytest.approx(wanted.column(key), rel=1e-5), key


def test_weights_with_gaps_are_made_dense_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters and ties stay the same objects. Dense tensors keep their memory and strides."""
    model = Gapped()
    before = {name: (tensor, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    place, strides = model.conv.bias.data_ptr(), model.conv.bias.stride()
    check_overlap(model)
    with caplog.at_level("INFO", "ddpforge"):
        make_dense(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        was, values = before[name]
        assert tensor is was
        assert torch.equal(tensor, values)
        assert is_dense(tensor), name
    assert model.turned_again is model.turned
    assert (model.conv.bias.data_ptr(), model.conv.bias.stride()) == (place, strides)
    assert caplog.messages == [
        "parameters `left`, `right`, `rows`, `turned`, `column`, `frozen`, `conv.weight` had gaps in memory (slices of "
        "a larger tensor): made dense",
        "buffers `scale`, `shift` repeated numbers in memory (`expand`): made dense",
    ]


@pytest.mark.parametrize(
    "tensor", [torch.randn(3, 4).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
)
def test_dense_weights_with_other_strides_are_unchanged(tensor: torch.Tensor) -> None:
    module = nn.ParameterList([tensor])
    place, strides = tensor.data_ptr(), tensor.stride()
    make_dense(module)
    assert (module[0].data_ptr(), module[0].stride()) == (place, strides)


@pytest.mark.parametrize(
    ("strategy", "ranks", "form"),
    [
        ('use = "ddp"', 2, "torch's AdamW"),
        pytest.param('use = "ddp"', 2, "adamw", marks=pytest.mark.full),
        pytest.param('use = "deepspeed", stage = 2', 2, "torch's AdamW", marks=pytest.mark.full),
        ('use = "deepspeed", stage = 2', 2, "adamw"),
    ],
)
def test_fused_optimizers_resume_weights_with_other_strides(
    tmp_path: Path, form: str, strategy: str, ranks: int
) -> None:
    """Optimizer state has the strides of the weights. A checkpoint is read in row-major order."""
    recipe = GAPPED.replace("Gapped", "Odd").format(optimizer=FORMS[form][0], strategy=strategy, train="")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = trained(tmp_path / "whole", recipe.replace('"5st"', '"6st"'), ranks)[0]
    first = trained(tmp_path / "parts", recipe.replace('"5st"', '"3st"'), ranks)[0]
    rest = trained(tmp_path / "parts", recipe.replace('"5st"', '"6st"'), ranks)[0]
    assert first.column() + rest.column() == pytest.approx(whole.column(), rel=1e-6)
    assert len(rest.column()) == 3
