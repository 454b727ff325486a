"""Linear layers with frozen weights in NF4 and int8."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.doubles import checkpoint_of, write
from safetensors.torch import load_file
from torch import Tensor, nn

from ddpforge.builtin.models import quantized
from ddpforge.builtin.models.quantized import QuantizedLinear, quantize, unpacked
from ddpforge.errors import SetupError
from ddpforge.interfaces import CanonicalState
from ddpforge.interop.export import export
from ddpforge.training.contract import ParameterCount, count_parameters

FORMS = [("nf4", False), ("nf4", True), ("int8", False)]


def linear(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 192, bias=bias, dtype=dtype)


def results(layer: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns the output and the gradient of the input."""
    x = torch.randn(4, 5, 256, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    output = layer(x)
    output.float().square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def theirs(layer: nn.Linear, *, double: bool, dtype: torch.dtype) -> Any:
    """Returns bitsandbytes' own NF4 layer with the weights of `layer`."""
    nn4 = pytest.importorskip("bitsandbytes").nn
    found = nn4.Linear4bit(256, 192, compress_statistics=double, quant_type="nf4", compute_dtype=dtype)
    found.weight = nn4.Params4bit(
        layer.weight.detach().clone(), requires_grad=False, compress_statistics=double, quant_type="nf4"
    )
    found.bias = nn.Parameter(layer.bias.detach().clone().to(dtype))
    return found.to("cpu")  # quantizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
def test_nf4_equals_the_layer_of_bitsandbytes(double: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    layer = linear(dtype)
    output, gradient = results(QuantizedLinear(layer, "nf4", double=double), dtype)
    wanted, of_input = results(theirs(layer, double=double, dtype=dtype), dtype)
    assert torch.equal(output, wanted)
    assert torch.equal(gradient, of_input)


def test_int8_equals_the_rows_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    layer = linear(torch.float16)
    packed, absmax, _ = functional.int8_vectorwise_quant(layer.weight.detach())
    found: Any = QuantizedLinear(layer, "int8")
    assert torch.equal(found.packed, packed)
    assert torch.equal(found.absmax, absmax)
    torch.testing.assert_close(found.weight, functional.int8_vectorwise_dequant(packed, absmax), rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero_in_int8() -> None:
    layer = linear(torch.float32)
    with torch.no_grad():
        layer.weight[3] = 0
    assert not QuantizedLinear(layer, "int8").weight[3].any()


@pytest.mark.parametrize(("form", "double"), FORMS)
def test_a_layer_computes_with_its_unpacked_weight_and_takes_less_memory(form: Any, double: bool) -> None:
    pytest.importorskip("bitsandbytes")
    layer = linear()
    found = QuantizedLinear(layer, form, double=double)
    error = (found.weight - layer.weight.float()).abs().max().item() * 16  # of weights in ±1/16
    assert error < {"nf4": 0.16, "int8": 0.005}[form]
    assert error > 1e-4
    whole = nn.Linear(256, 192)
    with torch.no_grad():
        whole.weight.copy_(found.weight)
        whole.bias.copy_(layer.bias)
    for one, other in zip(results(found), results(whole), strict=True):
        assert torch.equal(one, other)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = found(torch.ones(1, 256)), whole(torch.ones(1, 256))
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, other)

    held = {name: x.numel() * x.element_size() for name, x in found.state_dict().items() if name != "bias"}
    bits = 8 * sum(held.values()) / whole.weight.numel()
    assert bits == pytest.approx(
        {("nf4", False): 4.5, ("nf4", True): 4.128, ("int8", False): 8.125}[form, double], 1e-3
    )
    kept: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        found(torch.ones(1, 256, requires_grad=True))
    assert sum(x.numel() * x.element_size() for x in kept) <= sum(held.values()) + 1024  # the codebook of scales


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(63, 64, bias=False), nn.Linear(64, 2))


def test_named_layers_are_replaced_and_count_with_their_weights() -> None:
    pytest.importorskip("bitsandbytes")
    net = model()
    before = net[0].bias
    assert quantize(net, ["0", "1"], "nf4") == ["0"]  # 63 inputs do not fill bytes
    assert net[0].bias is before
    assert [type(layer) for layer in net] == [QuantizedLinear, nn.Linear, nn.Linear]
    net[1].requires_grad_(False)
    plain = 64 + 63 * 64
    size = 64 * 32 + 64 * 4 + 4 * plain
    assert count_parameters(net) == ParameterCount(
        all=64 * 64 + plain + 130, trainable=130, frozen={"nf4": 64 * 64, "fp32": plain}, frozen_bytes=size
    )


@pytest.mark.parametrize(("form", "double"), FORMS)
def test_state_is_loaded_and_copied_and_unpacked_by_name(form: Any, double: bool) -> None:
    pytest.importorskip("bitsandbytes")
    layer, other = QuantizedLinear(linear(), form, double=double), QuantizedLinear(linear(), form, double=double)
    with torch.no_grad():
        other.packed.zero_()  # type: ignore[operator, union-attr]
    copied = copy.deepcopy(other)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
    assert not torch.equal(copied.weight, layer.weight)
    assert torch.equal(unpacked(layer.state_dict()), layer.weight)


def test_a_missing_bitsandbytes_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(quantized, "import_module", missing)
    with pytest.raises(SetupError, match="needs bitsandbytes, but it is not installed") as caught:
        QuantizedLinear(linear(), "nf4")
    assert caught.value.hints == ("pip install 'bitsandbytes>=0.50'",)
    QuantizedLinear(linear(), "int8")


# ---------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize("magnitude", [None, 2.0])
def test_merged_export_unpacks_weights_folds_adapters_and_writes_bfloat16(
    magnitude: float | None, tmp_path: Path
) -> None:
    """With DoRA the rows of the merged weight have the trained length."""
    layer, other = (QuantizedLinear(linear(torch.float32), "int8") for _ in range(2))
    a, b = torch.randn(4, 256), torch.randn(192, 4)
    state = {f"l.base_layer.{name}": x for name, x in layer.state_dict().items()}
    state |= {"l.lora_A.default.weight": a, "l.lora_B.default.weight": b, "l.lora_scaling": torch.tensor(0.5)}
    if magnitude:
        state["l.lora_magnitude_vector.default.weight"] = torch.full((192,), magnitude)
    state |= {f"m.{name}": x for name, x in other.state_dict().items()}
    checkpoint = write(tmp_path / "checkpoints", checkpoint_of(7, state=CanonicalState(state, {})))
    merged = load_file(export(checkpoint, tmp_path / "merged.safetensors", merge=True).file)
    assert sorted(merged) == ["l.bias", "l.weight", "m.bias", "m.weight"]
    wanted = layer.weight + 0.5 * b @ a
    if magnitude:
        wanted *= magnitude / wanted.norm(dim=1, keepdim=True)
    assert torch.equal(merged["l.weight"], wanted.bfloat16())
    assert torch.equal(merged["m.weight"], other.weight.bfloat16())
