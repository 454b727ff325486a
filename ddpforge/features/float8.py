"""Makes linear layers in a model's blocks multiply in float8, with torchao; weights keep their names and dtype."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

from ddpforge.recipe.schema import TrainSection
from ddpforge.training.features import Feature
from ddpforge.training.stages import Built

__all__ = ["Float8", "check_float8", "float8_layers", "put_float8"]

log = logging.getLogger("ddpforge")

_MULTIPLE = 16  # divides both sizes of a weight, as tensor cores require: torch._scaled_mm
_MOST = 4  # names in the log for each reason


def float8_layers(
    model: nn.Module, blocks: Sequence[nn.Module], train: TrainSection
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Returns the linear layers that `train.fp8` applies to, and the reasons against all others, by full name.

    Raises ValueError for an entry of `train.fp8_skip` that matches no linear layer.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for glob in train.fp8_skip:
        if glob not in TrainSection.model_fields["fp8_skip"].default and not _names(glob, linear):
            near = ", ".join(get_close_matches(glob, linear, n=3, cutoff=0))
            raise ValueError(f"train.fp8_skip: `{glob}` matches no linear layer; similar names: {near or 'none'}")
    skipped = {name for glob in train.fp8_skip for name in _names(glob, linear)}
    inside = {id(module) for block in blocks for module in block.modules()}

    def reason(name: str, module: nn.Linear) -> str:
        if id(module) not in inside:
            return "outside of the blocks"
        if name in skipped:
            return "in train.fp8_skip"
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            return f"sizes that are not multiples of {_MULTIPLE}"
        # nn.MultiheadAttention reads the weights of a NonDynamicallyQuantizableLinear in its own forward pass.
        if type(module).forward is not nn.Linear.forward or isinstance(module, NonDynamicallyQuantizableLinear):
            return "a custom forward pass"
        return ""

    why = {name: reason(name, module) for name, module in linear.items()}
    return {name: linear[name] for name in why if not why[name]}, {name: text for name, text in why.items() if text}


def check_float8(model: nn.Module, blocks: Sequence[nn.Module], train: TrainSection) -> None:
    """Raises ValueError if the recipe sets float8 and it applies to no layer."""
    if train.fp8 == "off":
        return
    found, others = float8_layers(model, blocks, train)
    if not found:
        there = _summed_up(others) if others else "the model has no linear layers"
        name_them = "; name the classes of the blocks in train.blocks" if not blocks else ""
        raise ValueError(f'train.fp8 = "{train.fp8}" applies to no layer of this model: {there}{name_them}')


class Float8(Feature):
    """Linear layers that compute in float8."""

    @staticmethod
    @override
    def rework(parts: Built, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        put_float8(model, blocks, parts.recipe.train)
        return model


def put_float8(model: nn.Module, blocks: Sequence[nn.Module], train: TrainSection, *, emulate: bool = False) -> None:
    """Makes the layers compute in float8 if the recipe sets it, and logs which layers do.

    A weight stays the same fp32 parameter, under its name. It is scaled and cast at each use, like inputs and gradients
    (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). `emulate` computes with the same numbers on any
    device, slowly. Raises the errors of `check_float8`.
    """
    check_float8(model, blocks, train)
    if train.fp8 == "off":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # takes seconds

    # The product for the gradient of a weight sums over the tokens of a pass, which need not be a multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name(train.fp8), pad_inner_dim=True, emulate=emulate)
    sample = convert_to_float8_training(nn.Linear(_MULTIPLE, _MULTIPLE, device="meta"), config=config)
    given = vars(sample).keys() - vars(nn.Linear(_MULTIPLE, _MULTIPLE, device="meta")).keys()
    layers, others = float8_layers(model, blocks, train)
    for layer in layers.values():
        # In place, and as a subclass of its own class: hooks, tied weights and `reset_parameters` do not change.
        layer.__class__ = type(type(layer).__name__, (type(sample), type(layer)), {})
        vars(layer).update({name: vars(sample)[name] for name in given})
    log.info(
        "float8 (%s): %d of %d linear layers; the others stay in bf16%s",
        train.fp8,
        len(layers),
        len(layers) + len(others),
        f": {_summed_up(others)}" if others else "",
    )
    if train.compile == "off":
        log.warning('train.fp8 without train.compile: casts take longer than float8 saves; set compile = "default"')


def _names(glob: str, linear: Mapping[str, nn.Linear]) -> list[str]:
    return [name for name in linear if fnmatchcase(name, glob)]


def _summed_up(others: Mapping[str, str]) -> str:
    """Lists the other layers by their reason, in one line."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in others.items():
        by_reason[reason].append(f"`{name}`" if name else "the model itself")
    return "; ".join(
        f"{reason}: {', '.join(names[:_MOST])}{f' and {len(names) - _MOST} more' * (len(names) > _MOST)}"
        for reason, names in by_reason.items()
    )
