"""Linear layers with frozen weights in 4 or 8 bits, as bases of adapters (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ddpforge.builtin.models.frozen_layers import packed_linear
from ddpforge.errors import SetupError, pip_install
from ddpforge.interfaces.state import PACKED

__all__ = ["Quantization", "QuantizedLinear", "quantize", "unpacked"]

Quantization = Literal["nf4", "int8"]
_BLOCK, _NESTED = 64, 256  # weights with one scale in NF4, and scales with one scale under double quantization
_INT8 = 127.0


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen weight [outputs, inputs] in NF4 or int8.

    It computes in the dtype of its input or of autocast, with the unpacked weight. All of its tensors are frozen
    parameters, so that each strategy holds, shards and saves them like others:

    - NF4 (Dettmers et al., "QLoRA", 2023), by bitsandbytes: `packed` uint8 [outputs, inputs / 2] and `absmax` float32
      [blocks], the scale of each 64 weights. With double quantization `absmax` is uint8, with `absmax_scale` float32
      and `absmax_offset` float32 [1].
    - int8: `packed` int8 [outputs, inputs] and `absmax` float32 [outputs], the scale of each row. Activations are not
      quantized.
    """

    def __init__(self, layer: nn.Linear, form: Quantization, *, double: bool = False) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would allocate the weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.form = form
        self.packs = {form: layer.weight.numel()}  # see `count_parameters`
        for name, tensor in _pack(layer.weight.detach(), form, double).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = layer.bias
        if double:
            self.register_buffer("absmax_code", _bitsandbytes().create_dynamic_map(), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Returns the unpacked weight, float32 [outputs, inputs]; peft reads it."""
        return self._unpack(torch.float32, *self._packed())

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + b."""
        return packed_linear(self._unpack, x, self.bias, *self._packed())

    def _packed(self) -> list[Tensor]:
        names = (PACKED, "absmax", "absmax_scale", "absmax_offset", "absmax_code")
        return [tensor for name in names if (tensor := getattr(self, name, None)) is not None]

    def _unpack(self, dtype: torch.dtype, *packed: Tensor) -> Tensor:
        return _unpack(dtype, *packed)


def quantize(model: nn.Module, layers: Iterable[str], form: Quantization, *, double: bool = False) -> list[str]:
    """Replaces linear layers by frozen QuantizedLinear ones; returns their names.

    A layer with an odd number of inputs stays as it is under NF4, which packs two weights into a byte.

    Args:
        model: on the CPU, with its pretrained weights.
        layers: names of layers of the class nn.Linear.
        form: "nf4", or "int8".
        double: quantize the scales of NF4, too: 0.13 bytes less for each 64 weights.

    Raises SetupError if bitsandbytes is missing, which NF4 needs.
    """
    found = []
    for name in layers:
        layer = cast(nn.Linear, model.get_submodule(name))
        if form == "nf4" and layer.in_features % 2:
            continue
        if layer.bias is not None:
            layer.bias.requires_grad_(False)
        model.set_submodule(name, QuantizedLinear(layer, form, double=double))
        found.append(name)
    return found


def unpacked(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the weight, float32 [outputs, inputs], from the saved tensors of a QuantizedLinear by their names."""
    names = (PACKED, "absmax", "absmax_scale", "absmax_offset")
    held = [tensors[name] for name in names if name in tensors]
    if "absmax_scale" in tensors:
        held.append(_bitsandbytes().create_dynamic_map())
    return _unpack(torch.float32, *held)


# ---------------------------------------------------------------------------------------------- formats
def _pack(weight: Tensor, form: Quantization, double: bool) -> dict[str, Tensor]:
    if form == "int8":
        absmax = weight.float().abs().amax(dim=1)
        scale = torch.where(absmax > 0, _INT8 / absmax, 0.0)
        return {PACKED: (weight.float() * scale[:, None]).round().to(torch.int8), "absmax": absmax}
    flat, state = _bitsandbytes().quantize_4bit(weight, blocksize=_BLOCK, compress_statistics=double, quant_type="nf4")
    found = {PACKED: flat.view(len(weight), -1), "absmax": state.absmax}
    if double:
        found |= {"absmax_scale": state.state2.absmax, "absmax_offset": state.offset.view(1)}
    return found


def _unpack(dtype: torch.dtype, packed: Tensor, absmax: Tensor, *nested: Tensor) -> Tensor:
    if packed.dtype == torch.int8:
        return (packed.float() * (absmax / _INT8)[:, None]).to(dtype)
    library = _bitsandbytes()
    state = partial(library.QuantState, shape=torch.Size((len(packed), 2 * packed.shape[1])), dtype=dtype)
    if nested:
        scale, offset, code = nested
        inner = library.QuantState(absmax=scale, code=code, blocksize=_NESTED, dtype=torch.float32)
        whole = state(absmax=absmax, blocksize=_BLOCK, quant_type="nf4", offset=offset, state2=inner)
    else:
        whole = state(absmax=absmax, blocksize=_BLOCK, quant_type="nf4")
    return library.dequantize_4bit(packed.reshape(-1, 1), whole)  # type: ignore[no-any-return]


def _bitsandbytes() -> Any:
    try:
        return import_module("bitsandbytes.functional")
    except ModuleNotFoundError as error:
        raise SetupError(
            'quantize = "nf4" needs bitsandbytes, but it is not installed', hints=[pip_install("quantize")]
        ) from error
