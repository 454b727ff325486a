"""Chunked cross-entropy, which never stores all logits, has the loss and gradients of whole logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.forked import refused
from support.small_gpt import DDP, RECIPE, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.lora import lora
from ddpforge.builtin.models.moe import MoEGPT
from ddpforge.builtin.tasks import forms, large_logits
from ddpforge.builtin.tasks.chunked import chunked_cross_entropy, log_probabilities_in_chunks
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.errors import UsageError
from ddpforge.features.memory_tracker import MemoryTracker

IGNORED = -100
CHUNKS = [1, 7, 16, 35, 1000]


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 50, "block_size": 8, "layers": 2, "heads": 2, "width": 16} | options)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, targets = torch.randint(50, (2, 5, 7))
    targets[1, 3:] = targets[4] = IGNORED
    return tokens, targets


def gradients(task: LanguageModeling, model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss, _ = task.loss(model, batch())
    assert loss.dtype == torch.float32
    (loss * 0.5).backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_those_of_whole_logits(chunk: int, tied: bool) -> None:
    whole = gradients(LanguageModeling(), small(tie_embeddings=tied))
    found = gradients(LanguageModeling(loss_chunk=chunk), small(tie_embeddings=tied))
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_weight_gradients_accumulate_in_fp32_under_bf16(chunk: int) -> None:
    exact = gradients(LanguageModeling(), small())
    whole = gradients(LanguageModeling(), small(), torch.bfloat16)
    found = gradients(LanguageModeling(loss_chunk=chunk), small(), torch.bfloat16)
    torch.testing.assert_close(found["loss"], whole["loss"], rtol=1e-6, atol=0)
    for name, gradient in whole.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - exact[name]).norm() <= 1.2 * (gradient - exact[name]).norm() + 1e-6


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    hidden, weight = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 4), (9, 4))]
    targets = torch.tensor([[1, IGNORED, 8], [0, 0, 3]])
    loss = partial(chunked_cross_entropy, targets=targets, chunk=4, ignore_index=IGNORED, task="own")
    assert torch.autograd.gradcheck(loss, (hidden, weight))
    with torch.no_grad():
        assert loss(hidden, weight).requires_grad is False
    weight.requires_grad_(False)
    loss(hidden, weight).backward()
    assert hidden.grad is not None


def test_nonfinite_logits_of_ignored_targets_have_zero_gradients() -> None:
    hidden = torch.tensor([[torch.inf, 1.0], [1.0, 2.0]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    loss = chunked_cross_entropy(
        hidden, weight, targets=torch.tensor([IGNORED, 0]), chunk=2, ignore_index=IGNORED, task="language_modeling"
    )
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad[0].tolist() == [0.0, 0.0]


def test_only_one_chunk_of_logits_is_in_memory() -> None:
    """Uses 512 targets and 4,096 tokens in fp32: 8 MiB of logits."""

    def peak(task: LanguageModeling) -> int:
        model = small(vocab_size=4096, block_size=512, layers=1)
        tokens = torch.zeros(1, 512, dtype=torch.int64)
        with (ledger := MemoryTracker(lambda: "forward", real=True)):
            loss, _ = task.loss(model, (tokens, tokens))
            loss.backward()
        return ledger.peak

    logits = 512 * 4096 * 4
    assert peak(LanguageModeling()) > 2 * logits
    assert peak(LanguageModeling(loss_chunk=32)) < logits / 4


def test_evaluation_allocates_no_gradients() -> None:
    model, task = small(vocab_size=4096, width=64), LanguageModeling(loss_chunk=8)
    with torch.no_grad(), (ledger := MemoryTracker(lambda: "forward", real=True)):
        task.loss(model, batch())
    assert ledger.peak < 4096 * 64 * 4  # the size of the weight's gradient alone


@pytest.mark.full  # tests/training/test_compiling.py compiles another loss
def test_chunked_loss_compiles_with_the_model() -> None:
    whole = gradients(LanguageModeling(), small())
    model = small()
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    task = LanguageModeling(loss_chunk=16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            model.zero_grad()
            found = gradients(task, model)
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- refusals
def test_error_for_targets_out_of_range_names_them() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    said = refused(UsageError, lambda: LanguageModeling(loss_chunk=4).loss(small(), (tokens, tokens + 50)))
    assert "float32 [2, 3, 50] and the targets int64 [2, 3] from 50 to 50 do not fit together" in said
    assert "there are 50 classes, from 0 to 49" in said


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Linear(2, 2),
        lambda: MoEGPT(layers=1, width=8, heads=1),
        lambda: small(classes=4, bias=False),
        lambda: lora(base=small(tie_embeddings=False), targets=["head"]),
    ],
    ids=["linear", "moe", "classes", "lora"],
)
def test_model_without_support_for_loss_chunk_is_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        ValueError, match=r"task\.loss_chunk = 4 computes the loss within .* takes_loss_function = True"
    ):
        LanguageModeling(loss_chunk=4).check(model(), object())
    LanguageModeling().check(model(), object())
    LanguageModeling(loss_chunk=4).check(lora(base=small(tie_embeddings=False), targets=["qkv"]), object())


# ---------------------------------------------------------------------------------------------- whole runs
_ZERO = """use = "deepspeed"
stage = 3
extra = { zero_optimization = { stage3_param_persistence_threshold = 0 } }"""
_CHUNKED = RECIPE.replace('use = "language_modeling"', 'use = "language_modeling"\nloss_chunk = 5')


def curve(strategy: str, ranks: int, recipe: str = _CHUNKED, **text: str) -> list[float]:
    one, *_ = train(strategy, ranks, recipe=recipe, length="4st", **text)
    return [*one.column(), *one.column("eval/loss")]


@pytest.fixture(scope="module", params=["", "tie_embeddings = false"], ids=["tied", "untied"])
def whole(request: pytest.FixtureRequest) -> tuple[str, list[float]]:
    return request.param, curve('use = "single"', 1, RECIPE, model=request.param)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ('use = "single"', 1),
        pytest.param(DDP, 2, marks=pytest.mark.full),  # "single" has whole weights, "zero3" two ranks
        pytest.param('use = "fsdp"', 2, marks=pytest.mark.full),
        pytest.param('use = "fsdp"\ncontext = 2', 2, marks=pytest.mark.full),
        ('use = "fsdp"\nmeta = true\nno_sync = true', 2),
        (_ZERO, 2),
    ],
    ids=["single", "ddp", "fsdp", "context", "whole", "zero3"],
)
def test_curve_equals_that_of_whole_logits(whole: tuple[str, list[float]], strategy: str, ranks: int) -> None:
    model, expected = whole
    assert curve(strategy, ranks, model=model) == pytest.approx(expected, rel=1e-5)


def test_averaged_weights_are_evaluated_with_chunked_loss() -> None:
    more = "[callbacks.ema]\ndecay = 0.5"
    expected = curve('use = "single"', 1, RECIPE, more=more)
    assert curve('use = "fsdp"', 2, more=more) == pytest.approx(expected, rel=1e-5)


def test_output_layer_as_a_separate_block_is_refused() -> None:
    blocks = {"model": "tie_embeddings = false", "train": 'blocks = ["Block", "_Linear"]'}
    with pytest.raises(AssertionError, match="a block that is gathered separately"):
        curve('use = "fsdp"', 2, **blocks)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [('use = "fsdp"\ntensor = 2', 2), ('use = "fsdp"\ntensor = 2\nloss_parallel = true', 2)]
)
def test_tensor_parallelism_is_refused(strategy: str, ranks: int) -> None:
    with pytest.raises(AssertionError, match="computes its loss within the model's forward"):
        curve(strategy, ranks)


def test_pipeline_is_refused() -> None:
    with pytest.raises(AssertionError, match="computes its loss within the model's forward"):
        curve('use = "pipeline"\nstages = 2', 2)


# ---------------------------------------------------------------------------------------------- large bf16 logits
@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats all bf16 logits as large, and computes seven rows of 11 classes at a time."""
    monkeypatch.setattr(forms, "_LARGE", 1)
    monkeypatch.setattr(large_logits, "_CHUNK", 80)


@pytest.mark.usefixtures("in_parts")
def test_cross_entropy_of_large_bf16_logits_is_that_of_float32() -> None:
    logits = (torch.randn(20, 11) * 5).bfloat16().requires_grad_()
    targets = torch.randint(11, (20,)).index_fill(0, torch.tensor([3, 19]), -100)
    wide = logits.detach().float().requires_grad_()

    found = forms.cross_entropy(logits, targets)
    expected = F.cross_entropy(wide, targets, reduction="sum")
    for loss in (found, expected):
        loss.backward(torch.tensor(0.3), retain_graph=True)
        loss.backward(torch.tensor(0.3))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad is not None
    assert wide.grad is not None
    assert not logits.grad[[3, 19]].any()
    torch.testing.assert_close(logits.grad.float(), wide.grad, rtol=0.02, atol=1e-6)


@pytest.mark.usefixtures("in_parts")
def test_nearly_certain_target_of_large_bf16_logits_keeps_its_gradient() -> None:
    """In bf16, 0.9995 - 1 is 0."""
    logits = torch.tensor([[7.6, 0.0]]).bfloat16().requires_grad_()
    forms.cross_entropy(logits, torch.tensor([0])).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].item() == pytest.approx(-logits.grad[0, 1].item(), rel=0.01)
    assert logits.grad[0, 0].item() < 0


@pytest.mark.usefixtures("in_parts")
def test_large_bf16_logits_need_no_gradient_in_evaluations() -> None:
    logits, targets = torch.randn(9, 11).bfloat16(), torch.full((9,), -100)
    assert forms.cross_entropy(logits, targets).item() == 0
    with torch.no_grad():
        found = forms.cross_entropy(logits.requires_grad_(), targets.fill_(4))
    assert not found.requires_grad


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("extra", [{"label_smoothing": 0.2}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_label_smoothing_and_z_loss_equal_those_of_whole_logits(chunk: int, extra: dict[str, float]) -> None:
    whole = gradients(LanguageModeling(**extra), small())
    found = gradients(LanguageModeling(**extra, loss_chunk=chunk), small())
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_z_loss_is_the_weighted_square_of_the_softmax_denominator() -> None:
    logits, targets = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([3, IGNORED, 0, 8, 8])
    counted = targets != IGNORED
    wanted = F.cross_entropy(logits, targets, reduction="sum") + 0.01 * logits.logsumexp(1)[counted].square().sum()
    torch.testing.assert_close(forms.cross_entropy(logits, targets, z_loss=0.01), wanted)
    assert LanguageModeling(z_loss=0.01).finish({"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize("extra", [{"label_smoothing": 0.2}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_large_bf16_logits_have_label_smoothing_and_z_loss_without_a_copy_in_float32(
    extra: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_logits, "_CHUNK", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    values, targets = torch.randn(8, 50, generator=generator).bfloat16(), torch.randint(50, (8,), generator=generator)
    targets[2] = IGNORED
    found = {}
    for most in (0, 2**24):
        monkeypatch.setattr(forms, "_LARGE", most)
        logits = values.clone().requires_grad_()
        loss = forms.cross_entropy(logits, targets, **extra)
        (loss * 0.5).backward()
        found[most] = loss.detach(), logits.grad
    torch.testing.assert_close(found[0][0], found[2**24][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[0][1], found[2**24][1], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_log_probabilities_in_chunks_have_the_values_and_gradients_of_log_softmax(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(11, (2, 5), generator=generator)
    targets[0, 3] = IGNORED
    factors, found = torch.randn(2, 5, generator=generator), {}
    for chunked in (True, False):
        hidden, weight, bias = (
            torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for shape in ((2, 5, 6), (11, 6), (11,))
        )
        if chunked:
            each = log_probabilities_in_chunks(
                hidden, weight, bias, targets=targets, chunk=chunk, ignore_index=IGNORED, task="dpo"
            )
        else:
            known = targets.clamp(min=0)[..., None]
            each = F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, known).squeeze(-1) * (targets != IGNORED)
        (each * factors).sum().backward()
        found[chunked] = each.detach(), hidden.grad, weight.grad, bias.grad
    for mine, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Shapes(TorchDispatchMode):
    """Records the shapes of the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made += [tuple(found.shape)] if isinstance(found, Tensor) and not found.is_inference() else []
        return found


@pytest.mark.parametrize("trained", ["hidden", "hidden weight", "hidden bias", "hidden weight bias"])
def test_only_trained_tensors_of_the_output_layer_cost_a_gradient(trained: str) -> None:
    """Looks for results of the shape [V, C] = [50, 16], the weight's gradient, and [50], the bias's."""
    torch.manual_seed(0)
    tensors = {"hidden": torch.randn(9, 16), "weight": torch.randn(50, 16), "bias": torch.randn(50)}
    for name in trained.split():
        tensors[name].requires_grad_()
    targets = torch.randint(50, (9,))
    with Shapes() as shapes:
        loss = chunked_cross_entropy(**tensors, targets=targets, chunk=4, ignore_index=IGNORED, task="x")
    loss.backward()  # type: ignore[no-untyped-call]
    made = [shape for shape in shapes.made if shape in ((50, 16), (50,))]
    assert ((50, 16) in made) is ("weight" in trained)
    assert ((50,) in made) is ("bias" in trained)
    assert {name for name, tensor in tensors.items() if tensor.grad is not None} == set(trained.split())
