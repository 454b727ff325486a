"""Selection of a model's blocks; recomputing blocks changes no result."""

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from support.odd_models import NormedBlocks
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.gpt import GPT
from ddpforge.errors import UsageError
from ddpforge.features import activation_checkpointing, activation_offload
from ddpforge.features.block_forwards import rework_blocks
from ddpforge.features.memory_tracker import MemoryTracker
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.blocks import find_blocks

_BACKEND = "aot_eager_decomp_partition"  # all passes of torch.compile before code generation


def settings(**options: Any) -> TrainSection:
    return TrainSection.model_validate({"length": "1st", "global_batch": 1} | options)


def small() -> GPT:
    return GPT(vocab_size=8, block_size=4, layers=3, heads=1, width=4, dropout=0.5)


def names(model: nn.Module, *classes: str) -> list[str]:
    found = {id(block) for block in find_blocks(model, classes)}
    return [name for name, module in model.named_modules() if id(module) in found]


def test_blocks_that_the_model_declares_are_used() -> None:
    assert names(small()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_identical_container_members_with_children_are_blocks() -> None:
    assert names(resnet18()) == [f"layer{stage}.{number}" for stage in (1, 2, 3, 4) for number in (0, 1)]


def test_plain_layers_are_not_blocks() -> None:
    assert names(CNN()) == []


def test_block_classes_of_a_recipe_match_the_outermost_modules() -> None:
    assert names(small(), "Attention") == [f"blocks.{number}.attention" for number in range(3)]
    assert "blocks.0.mlp.0" in names(small(), "Linear")  # subclasses count


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["Attention", "Block"], "no Attention outside of the other blocks"),
        (["Blok"], "no Blok; similar names: Block"),
        (["GPT"], "no GPT; similar names:"),
    ],
)
def test_an_unknown_block_class_is_refused(classes: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_blocks(small(), classes)


@pytest.mark.parametrize("key", ["activation_checkpointing", "activation_offload", "compile_blocks"])
def test_block_options_are_refused_without_blocks(key: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.{key} needs repeated blocks"):
        rework_blocks([], settings(**{key: True}))


def test_recomputed_blocks_use_the_same_dropout_and_give_the_same_gradients() -> None:
    kept, recomputed = small(), small()
    recomputed.load_state_dict(kept.state_dict())
    rework_blocks(find_blocks(recomputed, []), settings(activation_checkpointing=True))

    tokens = torch.arange(8).view(2, 4)
    for model in (kept, recomputed):
        torch.manual_seed(0)
        model(tokens).square().sum().backward()
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert recomputed.state_dict().keys() == kept.state_dict().keys()


def test_selective_checkpointing_keeps_expensive_outputs_and_gives_the_same_gradients() -> None:
    """In the backward pass, half of a block's matrix products and no attention are recomputed."""
    tokens = torch.randint(8, (2, 64), generator=torch.Generator().manual_seed(0))
    gradients, work, memory = [], [], []
    for kind in (False, "selective", True):
        torch.manual_seed(0)
        model = GPT(vocab_size=8, block_size=64, layers=3, heads=2, width=32, dropout=0.1)
        rework_blocks(find_blocks(model, []), settings(activation_checkpointing=kind))
        with MemoryTracker(lambda: "step") as ledger, FlopCounterMode(display=False) as counter:
            torch.manual_seed(1)
            loss = model(tokens).square().sum()
            memory.append(sum(one.bytes for one in ledger.alive()))
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        work.append(counter.get_flop_counts()["Global"])
    for others in zip(*gradients, strict=True):
        for other in others[1:]:
            torch.testing.assert_close(other, others[0], rtol=0, atol=0)
    plain, selective, everything = (sum(each.values()) for each in work)
    assert plain < selective < everything
    # Products: qkv 3, projection of attention 1, MLP 4 and 4. Every second one is recomputed: 1 + 4 of 12.
    products = torch.ops.aten.addmm, torch.ops.aten.mm
    again, all_again = (sum(each[one] for one in products) - sum(work[0][one] for one in products) for each in work[1:])
    assert again / all_again == pytest.approx(5 / 12)
    assert memory[0] > 1.5 * memory[1] > 1.5 * memory[2]


# ---------------------------------------------------------------------------------------- activation offload
@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies also the small tensors of a test to the host."""
    monkeypatch.setattr(activation_offload, "SMALLEST", 1)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("kind", [False, True, "selective"])
def test_offloaded_activations_give_the_same_gradients(kind: bool | str) -> None:
    tokens = torch.randint(8, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = GPT(vocab_size=8, block_size=16, layers=4, heads=2, width=32, dropout=0.1)
        rework_blocks(find_blocks(model, []), settings(activation_checkpointing=kind, activation_offload=offload))
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            losses.append(model(tokens).square().sum())
        for loss in losses[::-1]:  # several forward passes may come before their backward passes
            loss.backward(retain_graph=not kind)
        if not kind:
            losses[0].backward()  # a second time: the tensors are still on the host
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("every_size")
def test_weights_and_shared_inputs_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[tuple[int, ...]] = []
    monkeypatch.setattr(activation_offload.BlockPass, "add", lambda _, one: packed.append(tuple(one._whole[0])))
    block, mask = nn.Linear(5, 7), torch.rand(3, 7)
    passes = activation_offload.PassesOnHost()
    forward = activation_offload.offloaded(block, lambda x, scale: block.forward(x).exp() * scale, passes)
    forward(torch.rand(3, 5, requires_grad=True), mask).sum()
    assert packed == [(3, 5), (3, 7)]  # the input, and the result of `exp`, which two operations save


@pytest.mark.usefixtures("every_size")
def test_an_offload_on_a_cpu_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    block, passes = nn.Linear(5, 5), activation_offload.PassesOnHost()
    forward = activation_offload.offloaded(block, block.forward, passes)
    for _ in range(2):
        forward(torch.rand(3, 5, requires_grad=True)).sum().backward()
    assert [record.message for record in caplog.records] == [
        "train.activation_offload: activations on a CPU are in host memory; here it only copies them"
    ]


def test_offloaded_activations_end_with_their_graph() -> None:
    """Checks it without a backward pass and without the garbage collector."""
    block = nn.Linear(5, 7)
    passes = activation_offload.PassesOnHost()
    output = activation_offload.offloaded(block, block.forward, passes)(torch.rand(3, 5, requires_grad=True))
    assert passes._last is not None
    assert passes._last() is not None
    gc.disable()
    try:
        del output
        assert passes._last() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("every_size")
def test_a_change_in_place_of_an_offloaded_tensor_is_named() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y += 1
            return y

    block = Changes()
    forward = activation_offload.offloaded(block, block.forward, activation_offload.PassesOnHost())
    with pytest.raises(UsageError, match=r"a tensor \[3\] that Changes needs in the backward pass is changed in place"):
        forward(torch.rand(3, requires_grad=True)).sum().backward()


# ---------------------------------------------------------------------------------------- in-place changes
class InPlace(nn.Module):
    """Model that changes products of all shapes in place, with all kinds of in-place operations; [B, T, 4]."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.norm = nn.LayerNorm(4)
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (self.change(product, self.bias) for product in (self.q(n), self.k(n), self.v(n)))
        attended = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return x + self.change(self.o(self.change(attended, self.bias)), self.bias).sin()


class _Linear(torch.autograd.Function):
    """Product with an in-place added bias, as ZeRO-3 computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        weight = torch.eye(4).roll(1, 0)
        ctx.weight, out = weight, x.matmul(weight.t())
        out += bias
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.matmul(ctx.weight), gradient.flatten(0, -2).sum(0)


def _data(product: Tensor, bias: Tensor) -> Tensor:
    product.data.add_(bias.detach())
    return product


def _out(product: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(product, bias, out=product)
    return product


def _part(product: Tensor, bias: Tensor) -> Tensor:
    product.transpose(-2, -1)[..., :2, :].add_(bias.mean())
    return product


def _together(product: Tensor, _: Tensor) -> Tensor:
    torch._foreach_add_([product], 0.5)
    return product


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda product, _: product.mul_(0.5),
    "with a bias": lambda product, bias: product.add_(bias),
    "by a function of its own": _Linear.apply,
    "through .data": _data,
    "as out": _out,
    "a part of it, through views": _part,
    "twice": lambda product, bias: product.add_(bias).mul_(2),
    "several at once": _together,
    "not at all": lambda product, bias: product + bias,
}


@pytest.mark.parametrize("kind", [True, "selective"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["2-d", "3-d"])
@pytest.mark.parametrize("change", CHANGES)
def test_products_changed_in_place_in_recomputed_blocks_give_the_same_gradients(
    change: str, shape: tuple[int, ...], kind: object
) -> None:
    def gradients(**options: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(*(InPlace(CHANGES[change]) for _ in range(2)))
        rework_blocks(list(model), settings(**options))
        for _ in range(2):
            model(torch.randn(shape)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, recomputed = gradients(), gradients(activation_checkpointing=kind)
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in plain)
    for one, other in zip(plain, recomputed, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_an_output_changed_in_place_after_a_recomputed_block_gives_the_same_gradients(bias: bool) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=bias)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            product = self.layer(x)
            return product, x * product.sign()

    gradients = []
    for how in (False, True, "selective"):
        torch.manual_seed(0)
        model = Gated()
        rework_blocks([model], settings(activation_checkpointing=how))
        x = torch.randn(2, 3, 4, requires_grad=True)
        product, gated = model(x)
        product.view(-1)[::2] *= -1
        (product + gated).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, *others in zip(*gradients, strict=True):
        for other in others:
            assert torch.equal(plain, other)  # type: ignore[arg-type]


class Rescales(nn.Module):
    """Block that changes its input in place before any other operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x *= 3
        return self.layer(x).sin()


@pytest.mark.parametrize("kind", [True, "selective"])
def test_a_recomputed_block_that_changes_its_input_in_place_gives_the_same_gradients(kind: object) -> None:
    gradients = []
    for how in (False, kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Rescales(), Rescales())
        rework_blocks(list(model)[1:], settings(activation_checkpointing=how))
        for _ in range(3):
            model(torch.randn(2, 3, 4)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def test_an_input_changed_in_place_after_a_recomputed_block_is_refused() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, more: Tensor) -> Tensor:
            return self.layer(torch.cat([x, more], -1))  # autograd keeps neither

    block, first = Joined(), nn.Linear(4, 4)
    rework_blocks([block], settings(activation_checkpointing=True))
    x = first(torch.randn(2, 4))
    y = block(x, more=torch.randn(2, 4))
    x += 1
    with pytest.raises(
        UsageError, match=r"an input of Joined \(a tensor \[2, 4\]\) is changed in place after the block"
    ):
        (x + y).sum().backward()


# ---------------------------------------------------------------------------------------- state changed in forward
class OldSpectralNorm(nn.Sequential):
    """Module whose hook keeps the power iteration in buffers, and the weight in a plain attribute."""

    def __init__(self) -> None:
        super().__init__(nn.utils.spectral_norm(nn.Linear(4, 4)))


class Codebook(nn.Module):
    """Module that writes to a buffer through `.data`: autograd does not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("codes", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.codes.clone()
        if self.training:
            self.codes.data.lerp_(x.detach().mean(0), 0.5)
        return x


class Shared(nn.Module):
    """Two modules with a common buffer: the second reads the values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Codebook(), Codebook()
        self.second.codes = self.first.codes

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """Frozen BatchNorm, whose statistics autograd saves, next to a BatchNorm that updates its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.eval()
        return self.frozen(self.norm(x)).sin()


class Dice(nn.Module):
    """Module that uses the random generators of python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * random.random()).sin() * float(np.random.random())


def train(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Trains for three steps of two micro-batches; returns the state dict."""
    rework_blocks(list(model.children()), settings(**options))
    for step in range(3):
        for micro in range(2):
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(10 * step + micro)
            model(torch.randn(8, 4)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return model.state_dict()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "spectral_norm of old": OldSpectralNorm,
    "written through .data": Codebook,
    "a buffer of two modules": Shared,
    "frozen BatchNorm": Frozen,
    "python's random numbers": Dice,
    "spectral_norm, replaced buffers, used twice": NormedBlocks,
}


def built(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(block())


@pytest.mark.parametrize("kind", [True, "selective"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_recomputing_gives_identical_results(block: Callable[[], nn.Module], kind: object) -> None:
    plain, recomputed = train(built(block)), train(built(block), activation_checkpointing=kind)
    for name, tensor in plain.items():
        assert torch.equal(recomputed[name], tensor), name


@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputing_restores_random_generators_afterwards(kind: object) -> None:
    model = built(Dice)
    rework_blocks(list(model.children()), settings(activation_checkpointing=kind))
    random.seed(3), np.random.seed(3)
    loss = model(torch.randn(2, 4)).sum()
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    loss.backward()
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    assert states[0] != random.Random(3).getstate()


def test_a_gradient_penalty_recomputes_from_the_same_buffers_twice() -> None:
    """Recomputes the block twice for one forward pass."""

    def penalised(**options: Any) -> list[Tensor]:
        model = built(NormedBlocks)
        rework_blocks(list(model.children()), settings(**options))
        x = torch.randn(8, 4, requires_grad=True)
        output = model(x).square().sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        (output + slope.square().sum()).backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    for kind in (True, "selective"):
        for one, other in zip(penalised(), penalised(activation_checkpointing=kind), strict=True):
            assert torch.equal(one, other)


def test_attention_with_dropout_is_recomputed_to_keep_later_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without recomputation it would draw no random numbers, and the next operation would draw its numbers."""

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.nn.functional.dropout(_attention(x.sin(), 0.5).cos(), 0.5)
            return x.exp()

    monkeypatch.setattr(activation_checkpointing, "_COSTLY", {torch.ops.test_blocks.attention.default})
    gradients = []
    for how in (False, "selective"):
        block = Attends()
        rework_blocks([block], settings(activation_checkpointing=how))
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        block(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@torch.library.custom_op("test_blocks::attention", mutates_args=())
def _attention(x: Tensor, dropout_p: float) -> Tensor:
    """Replaces the attention of a GPU, which draws random numbers within one operation."""
    return x * (torch.rand_like(x) > dropout_p)


_attention.register_autograd(
    lambda ctx, gradient: (gradient * ctx.kept, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "kept", (output != 0).float()),
)


def test_an_evaluation_copies_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(lambda: nn.BatchNorm1d(4))
    x = torch.randn(8, 4)
    wanted = model.eval()(x)
    rework_blocks(list(model.children()), settings(activation_checkpointing=True))
    monkeypatch.setattr(Tensor, "clone", lambda self: pytest.fail("a buffer was copied"))
    with torch.no_grad():
        assert torch.equal(model(x), wanted)


def test_device_rng_state_is_kept_for_blocks_called_with_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for devices in positional arguments only. On a CPU its generator is always kept."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", lambda *args: seen.append(args) or ([], []))
    monkeypatch.setattr(
        torch.utils.checkpoint, "_get_device_module", lambda _: type("cuda", (), {"_initialized": True})
    )
    model = built(NormedBlocks)
    rework_blocks(list(model[0].blocks), settings(activation_checkpointing=True))
    x = torch.randn(8, 4)
    model(x)
    found = [leaf for leaf in tree_leaves(seen) if isinstance(leaf, Tensor)]
    assert len(seen) == 3  # blocks, called by NormedBlocks with x = …
    assert found[0] is x


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_recomputing_blocks_with_buffers_in_cuda_graphs_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"`norm.num_batches_tracked`|`largest`.*set train.compile = \"default\""):
        rework_blocks(list(NormedBlocks().blocks), settings(activation_checkpointing=True, compile=mode))


@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputed_blocks_are_compiled_with_their_model(kind: object) -> None:
    """One graph: recomputing causes no graph break."""
    gradients = []
    for compiled in (False, True):
        model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        rework_blocks(list(model.children()), settings(activation_checkpointing=kind, compile="default"))
        if compiled:
            model.compile(backend=_BACKEND, fullgraph=True)
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("whole", [True, False], ids=["in a compiled model", "one by one"])
def test_compiled_blocks_change_their_buffers_once(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds with a graph break inside a block, too."""

    class Broken(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x.sin()

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, mode=None: compile_(forward, backend=_BACKEND))
    plain, model = train(built(lambda: Broken(4))), built(lambda: Broken(4))
    if whole:
        model.compile()
    compiled = train(model, activation_checkpointing=True, compile="default", compile_blocks=not whole)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor)
