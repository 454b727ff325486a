"""Linear layers that compute in float8: selection, numerics, unchanged weights.

A CPU emulates float8 in fp32, as torchao's own tests do; tests/gpu compares with tensor cores.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked import train as train_section
from support.small_gpt import DDP, train
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.mlp import MLP
from ddpforge.features import float8
from ddpforge.features.float8 import check_float8, float8_layers, put_float8
from ddpforge.guard import static
from ddpforge.guard.static import check_float8 as check_float8_of
from ddpforge.interfaces import Contract
from ddpforge.recipe.schema import Component, OptimizerComponent, Recipe, TrainSection
from ddpforge.strategies.ddp import DDP as Ddp
from ddpforge.strategies.fsdp import FSDP as Fsdp
from ddpforge.strategies.fsdp.wrap_units import materialise
from ddpforge.strategies.pipeline import Pipeline
from ddpforge.strategies.single import Single
from ddpforge.training.blocks import find_blocks

IN_A_BLOCK = ("attention.qkv", "attention.projection", "mlp.0", "mlp.2")
FSDP = 'use = "fsdp"'


def settings(fp8: str = "tensorwise", **options: Any) -> TrainSection:
    return train_section(fp8=fp8, precision="bf16", compile="default", **options)


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 32, "block_size": 8, "layers": 2, "heads": 2, "width": 32, "dropout": 0.0} | options)


def float8_names(model: nn.Module, train: TrainSection) -> list[str]:
    return list(float8_layers(model, find_blocks(model, train.blocks), train)[0])


def with_float8(model: nn.Module, train: TrainSection) -> nn.Module:
    put_float8(model, find_blocks(model, train.blocks), train, emulate=True)
    return model


# ---------------------------------------------------------------------------------------------- which layers
def test_layers_of_blocks_use_float8_and_the_output_layer_does_not(caplog: pytest.LogCaptureFixture) -> None:
    model = small(tie_embeddings=False)
    assert float8_names(model, settings()) == [f"blocks.{n}.{name}" for n in range(2) for name in IN_A_BLOCK]
    with caplog.at_level("INFO", "ddpforge"):
        with_float8(model, settings())
    summary = "8 of 9 linear layers; the others stay in bf16: outside of the blocks: `head`"
    assert caplog.messages[-1] == f"float8 (tensorwise): {summary}"


def test_without_compilation_the_log_warns(caplog: pytest.LogCaptureFixture) -> None:
    with_float8(small(), settings().model_copy(update={"compile": "off"}))
    (warning,) = [one.message for one in caplog.records if one.name == "ddpforge" and one.levelname == "WARNING"]
    assert "train.fp8 without train.compile" in warning


def test_layers_with_sizes_unsupported_by_tensor_cores_stay_in_bf16() -> None:
    model = small(width=24)  # 72, 24 and 96
    assert float8_names(model, settings()) == []
    model = small(width=48, heads=3)
    assert len(float8_names(model, settings())) == 8


def test_fp8_skip_excludes_layers() -> None:
    assert float8_names(small(), settings(fp8_skip=("*.mlp.*", "blocks.0.*"))) == [
        "blocks.1.attention.qkv",
        "blocks.1.attention.projection",
    ]
    with pytest.raises(ValueError, match=r"fp8_skip: `\*\.mpl\.\*` matches no linear layer; similar names: blocks"):
        check_float8(small(), [], settings(fp8_skip=("*.mpl.*",)))


def test_layers_with_a_custom_forward_stay_in_bf16() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x)

    model = nn.Sequential(nn.MultiheadAttention(16, 2), Own(16, 16), weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    found, others = float8_layers(model, [model], settings())
    assert list(found) == ["2", "3"]
    assert set(others) == {"0.out_proj", "1"}
    assert set(others.values()) == {"a custom forward pass"}


def test_a_model_without_a_float8_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r'fp8 = "tensorwise" applies to no layer .*name the classes of the blocks'):
        check_float8(MLP(inputs=16, outputs=16), [], settings())
    model = small(width=24)
    with pytest.raises(ValueError, match=r"multiples of 16: `blocks\.0\.attention\.qkv`.* and 4 more$"):
        check_float8(model, find_blocks(model, ()), settings())
    check_float8(model, [], settings(fp8="off"))


# ---------------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_gradients_are_close_to_those_of_bf16(fp8: str, precision: torch.dtype | None) -> None:
    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        tokens = torch.arange(5 * 7).view(5, 7) % 32  # 35 tokens: not a multiple of 16
        with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
            logits = model(tokens)
        nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, float8 = gradients(small()), gradients(with_float8(small(), settings(fp8)))
    assert plain.keys() == float8.keys()
    differences = {name: ((plain[name] - float8[name]).norm() / plain[name].norm()).item() for name in plain}
    assert max(differences.values()) < 0.15
    assert min(differences[f"blocks.{n}.{layer}.weight"] for n in range(2) for layer in IN_A_BLOCK) > 0.001


def test_float8_keeps_the_parameter_objects_and_names() -> None:
    model = small()
    before = dict(model.named_parameters())
    called: list[str] = []
    model.blocks[0].mlp[0].register_forward_hook(lambda *_: called.append("hook"))
    with_float8(model, settings())
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert model.state_dict().keys() == small().state_dict().keys()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model(torch.zeros(2, 8, dtype=torch.int64))
    assert called == ["hook"]


def test_a_float8_model_on_meta_is_initialized_by_its_own_layers() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = small()
    with_float8(model, settings())
    torch.manual_seed(0)
    materialise(model, then={})
    # as the layer itself initializes it
    assert model.blocks[0].mlp[2].weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)


# ---------------------------------------------------------------------------------------------- refusals
@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def complaints(contract: Contract, device: str = "cuda", fp8: str = "rowwise") -> list[str]:
    recipe = Recipe(
        recipe=2,
        name="run",
        model=Component(use="gpt"),
        data={"train": Component(use="text")},
        task=Component(use="language_modeling"),
        optimizer=OptimizerComponent(use="adamw"),
        train=settings(fp8),
    )
    strategy = SimpleNamespace(contract=contract)
    found = list(check_float8_of(SimpleNamespace(recipe=recipe, device=device, strategy=strategy)))
    assert {one.key for one in found} <= {"train.fp8"}
    return [one.message for one in found]


@pytest.mark.usefixtures("_gpu")
def test_float8_requires_compute_capability_8_9(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaints(Single.contract) == []
    assert complaints(Single.contract, "cpu", "off") == []
    (message,) = complaints(Single.contract, "cpu")
    assert message == 'train.fp8 = "rowwise" multiplies in float8, which needs a GPU, but this run is on cpu'
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    (message,) = complaints(Single.contract)
    assert message.endswith("needs a GPU of compute capability 8.9 (L4, RTX 40, H100), but this one has 8.6")


@pytest.mark.usefixtures("_gpu")
def test_strategies_that_split_layers_are_refused() -> None:
    for strategy in (Ddp(), Fsdp(), Fsdp(replicas=2, context=2)):
        assert complaints(strategy.contract) == []
    for strategy in (Fsdp(tensor=2), Pipeline()):
        (message,) = complaints(strategy.contract)
        assert "needs whole layers" in message


@pytest.mark.usefixtures("_gpu")
def test_torchao_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.guard.static.find_spec", lambda name: None)
    assert complaints(Single.contract) == ['train.fp8 = "rowwise" needs torchao, which is not installed']


# ---------------------------------------------------------------------------------------------- whole runs
@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "CHECKS", [one for one in static.CHECKS if one[1] is not static.check_float8])
    monkeypatch.setattr(float8, "put_float8", partial(put_float8, emulate=True))


FLOAT8, BF16 = 'precision = "bf16"\nfp8 = "tensorwise"', 'precision = "bf16"'


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param(DDP, 2, marks=pytest.mark.full),
        (FSDP, 2),
        pytest.param(f"{FSDP}\nmeta = true", 1, marks=pytest.mark.full),
    ],
)
def test_multi_rank_runs_have_the_loss_curve_of_one_process(strategy: str, ranks: int) -> None:
    one, *_ = train('use = "single"', 1, train=FLOAT8, length="6st")
    for rank in train(strategy, ranks, train=FLOAT8, length="6st"):
        assert rank.column() == pytest.approx(one.column(), rel=2e-3)
    bf16, *_ = train('use = "single"', 1, train=BF16, length="6st")
    assert one.column() == pytest.approx(bf16.column(), rel=2e-2)
    assert one.column() != bf16.column()


@pytest.mark.usefixtures("_emulated")
def test_runs_resume_with_and_without_float8(tmp_path: Path) -> None:
    whole, *_ = train(DDP, 2, train=BF16, length="8st")
    first, *_ = train(DDP, 2, tmp_path, train=FLOAT8, length="4st")
    second, *_ = train(FSDP, 2, tmp_path, train=BF16, length="6st")
    third, *_ = train('use = "single"', 1, tmp_path, train=FLOAT8, length="8st")
    found = [*first.column(), *second.column(), *third.column()]
    assert len(found) == 8
    assert found == pytest.approx(whole.column(), rel=2e-2)
