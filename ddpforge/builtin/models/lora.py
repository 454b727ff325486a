"""Low-rank adapters (LoRA) in any model, with peft."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ddpforge.builtin.models.quantized import QuantizedLinear
from ddpforge.errors import SetupError, UsageError, pip_install

X = TypeVar("X")

_Rank = Annotated[int, Field(ge=1, le=65536, description="Rank of the adapters.")]
_Alpha = Annotated[float, Field(gt=0, le=1e6, description="The adapters' output is multiplied by alpha / r.")]
_Dropout = Annotated[float, Field(ge=0, lt=1, description="Dropout before the adapters.")]
_Names = Annotated[Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
_Targets = Annotated[
    Literal["all-linear"] | _Names,
    Field(
        description='Linear layers to adapt, by the last parts of their names, e.g. ["q_proj"], or by globs of their'
        ' whole names, e.g. ["*.mlp.*"]; "all-linear": all but the output layer of a language model.'
    ),
]
_Train = Annotated[
    Sequence[str], Field(description='Globs of parameters to train without adapters, e.g. a new head: ["score.*"].')
]

_DoRA = Annotated[
    bool | None, Field(description="Also train the length of each row of the weight (DoRA: Liu et al., 2024).")
]
_RsLoRA = Annotated[
    bool | None,
    Field(description="Multiply by alpha / sqrt(r) instead of alpha / r (rsLoRA: Kalajdzievski, 2023)."),
]


_RankPattern = Annotated[
    Mapping[str, _Rank] | None,
    Field(
        description='Other ranks than `r`, by layers named as in `targets`, e.g. { "*.mlp.*" = 32 }; the last counts.'
    ),
]
_AlphaPattern = Annotated[
    Mapping[str, _Alpha] | None, Field(description="Other values than `alpha`, by layers as in `rank_pattern`.")
]
_Init = Annotated[
    Literal["pissa", "loftq"] | None,
    Field(
        description='Initial adapters; absent: no change of the model. "pissa": the largest singular values of the'
        ' weights, which lose them (Meng et al., 2024). "loftq": the error of a quantized weight, as far as the rank'
        " allows (Li et al., 2023)."
    ),
]


class Adapters(BaseModel):
    """Options of `lora` without the base model, for models that have adapters as an option."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    targets: _Targets
    r: _Rank = 8
    alpha: _Alpha = 16
    dropout: _Dropout = 0.0
    train: _Train = ()
    dora: _DoRA = None
    rslora: _RsLoRA = None
    rank_pattern: _RankPattern = None
    alpha_pattern: _AlphaPattern = None
    init: _Init = None

    def put_into(self, base: nn.Module, original: Mapping[str, Tensor] = {}) -> nn.Module:
        """Freezes `base` and inserts the adapters, as `lora` does; raises the same errors.

        `original`: for `init = "loftq"`, the weights of quantized layers before that, [outputs, inputs], by layer.
        """
        return _with_adapters(base, self, original)


class _OnMeta(UsageError, NotImplementedError):
    """Error for adapters on the meta device: initialized like other layers, they would not start at zero."""


def lora(
    *,
    base: Annotated[nn.Module, Field(description="Model to adapt, with its pretrained weights.")],
    r: _Rank = 8,
    alpha: _Alpha = 16,
    dropout: _Dropout = 0.0,
    targets: _Targets,
    train: _Train = (),
    dora: _DoRA = None,
    rslora: _RsLoRA = None,
    rank_pattern: _RankPattern = None,
    alpha_pattern: _AlphaPattern = None,
    init: _Init = None,
) -> nn.Module:
    """Returns the frozen base model with adapters: a linear layer W x becomes W x + alpha / r * B A x, A and B trained.

    The layer's weight is then called `….base_layer.weight`. `ddpforge export --merge` merges the adapters into the
    weight and restores its name. See Hu et al., "LoRA" (2021), and https://huggingface.co/docs/peft.

    Raises:
        ValueError: A target does not exist or is not linear, or a glob matches no parameter or a quantized one.
            `init` does not fit to the weights.
        UsageError: `base` is on the meta device.
        SetupError: peft is not installed.
    """
    how = Adapters(
        targets=targets,
        r=r,
        alpha=alpha,
        dropout=dropout,
        train=train,
        dora=dora,
        rslora=rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        init=init,
    )
    return how.put_into(base)


def _with_adapters(base: nn.Module, how: Adapters, original: Mapping[str, Tensor]) -> nn.Module:
    peft = _peft()
    if any(parameter.is_meta for parameter in base.parameters()):
        raise _OnMeta("the model `lora` cannot be built on the meta device", hints=["set strategy.meta = false"])
    adapted = _targets(base, how.targets)
    layers = [name for name, _ in base.named_modules() if any(f".{name}".endswith(f".{each}") for each in adapted)]
    _check_init(base, layers, how.init, original, dora=bool(how.dora))
    config = peft.LoraConfig(
        r=how.r,
        lora_alpha=how.alpha,
        lora_dropout=how.dropout,
        target_modules=adapted,
        use_dora=bool(how.dora),
        use_rslora=bool(how.rslora),
        rank_pattern=_by_layer("rank_pattern", how.rank_pattern, layers),
        alpha_pattern=_by_layer("alpha_pattern", how.alpha_pattern, layers),
        init_lora_weights="pissa" if how.init == "pissa" else True,
    )
    try:
        with _in_float32(base):
            model: nn.Module = peft.inject_adapter_in_model(config, base)
    except ValueError as error:
        raise ValueError(f"peft cannot adapt {', '.join(adapted)}: {error}") from error
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            _note_scaling(name, module)
            if how.init == "loftq":
                _approximate(module, original[name])
    quantized = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, QuantizedLinear)
        for name, parameter in module.named_parameters(recurse=False)
        if name != "bias"
    }
    for glob in how.train:
        named = {name: parameter for name, parameter in model.named_parameters() if fnmatchcase(name, glob)}
        if not named:
            raise ValueError(f"train: `{glob}` matches no parameter")
        if packed := sorted(name for name, parameter in named.items() if id(parameter) in quantized):
            raise ValueError(
                f"train: `{glob}` matches `{packed[0]}`, but quantized weights cannot be trained; match other"
                " parameters, or remove `quantize`"
            )
        for parameter in named.values():
            parameter.requires_grad_(True)
    return model


def _targets(base: nn.Module, targets: Literal["all-linear"] | Sequence[str]) -> list[str]:
    """Returns names of layers for peft: globs and "all-linear" as the whole names of the linear layers they match."""
    if targets != "all-linear" and not any(char in target for target in targets for char in "*?["):
        return list(targets)
    layers = [name for name, module in base.named_modules() if _is_linear(module)]
    if targets == "all-linear":
        body = getattr(base, "base_model_prefix", "")  # of transformers: outside of it are output layers
        inside = [name for name in layers if name.startswith(f"{body}.")] if body and hasattr(base, body) else layers
        get_output = getattr(base, "get_output_embeddings", None)
        output = get_output() if callable(get_output) else None
        found = [name for name in inside if base.get_submodule(name) is not output]
        if not found:
            raise ValueError('targets = "all-linear": the model has no linear layer besides its output layer')
        return found
    names: dict[str, None] = {}
    for target in targets:
        if not any(char in target for char in "*?["):
            names[target] = None
            continue
        matched = [name for name in layers if fnmatchcase(name, target)]
        if not matched:
            example = f", e.g. {layers[0]}" if layers else ""
            raise ValueError(f"targets: `{target}` matches no linear layer by its whole name{example}")
        names |= dict.fromkeys(matched)
    return list(names)


def _by_layer(key: str, pattern: Mapping[str, X] | None, layers: Sequence[str]) -> dict[str, X]:
    """Returns the values by regular expressions of peft, one for each layer that a name or a glob matches."""
    found: dict[str, X] = {}
    for glob, value in (pattern or {}).items():
        whole = any(char in glob for char in "*?[")
        matched = [name for name in layers if (fnmatchcase(name, glob) if whole else f".{name}".endswith(f".{glob}"))]
        if not matched:
            raise ValueError(f"{key}: `{glob}` matches no adapted layer, e.g. {layers[0] if layers else 'none'}")
        found |= dict.fromkeys(map(re.escape, matched), value)
    return found


def _check_init(
    base: nn.Module, layers: Sequence[str], init: str | None, original: Mapping[str, Tensor], *, dora: bool
) -> None:
    """Raises ValueError if the initial adapters do not fit to the adapted layers."""
    packed = [name for name in layers if isinstance(base.get_submodule(name), QuantizedLinear)]
    if init == "pissa" and packed:
        raise ValueError(
            f'init = "pissa" changes the weights of adapted layers, and `{packed[0]}` is quantized; set init = "loftq"'
        )
    if init != "loftq":
        return
    if dora:
        raise ValueError('init = "loftq" and `dora` cannot be used together: remove one of them')
    if missing := next((name for name in layers if name not in original or name not in packed), None):
        raise ValueError(
            f'init = "loftq" needs quantized layers, and `{missing}` is not; set `quantize`, adapt only quantized'
            " layers, or remove `init`"
        )


@torch.no_grad()
def _approximate(layer: Any, original: Tensor) -> None:
    """Sets an adapter to the best approximation of the quantization error by its rank: LoftQ with one iteration."""
    lost = original.float() - layer.get_base_layer().weight
    u, s, vh = torch.linalg.svd(lost, full_matrices=False)
    root = (s[: layer.r["default"]] / layer.scaling["default"]).sqrt()
    rank = len(root)  # a rank above that of the weight keeps the other rows as they are: B is zero there
    layer.lora_A["default"].weight[:rank] = root[:, None] * vh[:rank]
    layer.lora_B["default"].weight[:, :rank] = u[:, :rank] * root


def _is_linear(module: nn.Module) -> bool:
    # The output layer in torch's attention is read by a function; an adapter in it would be ignored.
    kind = type(module).__name__
    return (isinstance(module, nn.Linear) and kind != "NonDynamicallyQuantizableLinear") or (
        kind == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )


@contextmanager
def _in_float32(base: nn.Module) -> Iterator[None]:
    """Makes peft initialize the adapters of 16-bit layers in float32 within the block."""
    # peft gives adapters the dtype of a layer's weight, or `compute_dtype` if the layer has this attribute.
    layers: list[Any] = [module for module in base.modules() if _is_small(module._parameters.get("weight"))]
    for layer in layers:
        layer.compute_dtype = torch.float32
    try:
        yield
    finally:
        for layer in layers:
            del layer.compute_dtype


def _is_small(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype in (torch.bfloat16, torch.float16)


def _note_scaling(name: str, layer: Any) -> None:
    """Adds buffers that `ddpforge export --merge` needs to merge the adapter into the layer's weight."""
    if "default" not in layer.lora_A:
        raise ValueError(f"{name} is a {type(layer.get_base_layer()).__name__}, but only linear layers can be adapted")
    layer.register_buffer("lora_scaling", torch.tensor(float(layer.scaling["default"])))
    if getattr(layer, "fan_in_fan_out", False):  # the linear layers of GPT-2 have [inputs, outputs]
        layer.register_buffer("lora_transposed", torch.tensor(1, dtype=torch.uint8))


def _peft() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns of a kernel on the hub
    try:
        return import_module("peft")
    except ModuleNotFoundError as error:
        raise SetupError("the model `lora` needs peft, but it is not installed", hints=[pip_install("lora")]) from error
