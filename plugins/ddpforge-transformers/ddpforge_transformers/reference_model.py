"""Reference models: a frozen copy of the model, or the model with its adapters switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ddpforge.errors import UsageError
from ddpforge.interfaces import Callback, RunContext, Weights
from torch import nn

__all__ = ["Beginning", "adapted_layers", "check_adapters", "evaluating", "without_adapters"]


class Beginning(Callback):
    """Checks the adapters before the first step, and knows whether the weights are still those of the start."""

    def __init__(self) -> None:
        self.kind = ""  # of the reference
        self._run: RunContext | None = None
        self._sums: dict[str, float] = {}

    def on_start(self, run: RunContext) -> None:
        """Raises UsageError for adapters that change the model before the first step: they are not the reference's."""
        if self.kind not in ("adapters", "data"):
            return
        self._run, self._sums = run, _sums(run.weights)
        changed = [name for name, total in self._sums.items() if "lora_B" in name and total]
        if changed and self.kind == "adapters":
            raise UsageError(
                "the reference would be the model without its adapters, but training starts with trained ones:"
                f" checkpoint.init_from loads `{changed[0]}`, which is not 0",
                hints=['set task.reference = "copy": the reference is then the model that training starts from'],
                key="task.reference",
            )

    def is_first(self) -> bool:
        """Returns True once, if no step and no checkpoint has changed the weights since `on_start`. Collective."""
        run, self._run = self._run, None
        if run is None:
            return False
        changed = torch.tensor(float(_sums(run.weights) != self._sums), device=run.world.device)
        return not run.world.global_ranks.all_reduce_sum(changed).item()


def _sums(weights: Weights) -> dict[str, float]:
    """Returns the sum of absolute values of this rank's part of each trained parameter."""
    return {
        name: float(torch.linalg.vector_norm(part.tensor.detach(), 1, dtype=torch.float64))
        for name, part in weights.shards().items()
    }


def adapted_layers(model: nn.Module) -> list[Any]:
    """Returns the layers with adapters of peft."""
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]


def check_adapters(model: nn.Module) -> None:
    """Raises ValueError if the model with its adapters switched off is not the initial model."""
    layers = adapted_layers(model)
    if not layers:
        raise ValueError('reference = "adapters" needs a model with adapters: set model.lora, or reference = "copy"')
    if any(any(getattr(layer, "use_dora", {}).values()) for layer in layers):
        raise ValueError('DoRA changes weights also if its adapters are switched off; set reference = "copy"')
    adapted = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in adapted:
            raise ValueError(
                f'`{name}` is trained without adapters, so the reference would change; set reference = "copy"'
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode within the block."""
    modes = [(one, one.training) for one in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Multiplies the output of all adapters by 0, and sets evaluation mode, within the block."""
    layers = adapted_layers(model)
    before = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
    try:
        with evaluating(model):
            yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling.update(scaling)
