"""Gives memory and initial weights to a model that was built on the meta device, a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from ddpforge.errors import StrategyError

__all__ = ["materialise"]


def materialise(model: nn.Module, *, then: Mapping[int, Callable[[nn.Module], None]]) -> None:
    """Initialises every layer on the CPU in the model's order; `then[id(module)]` is called when a module is complete.

    A layer initialises itself with `reset_parameters`, as torch's own do and as it does when it is built. Where
    layers are built in the order in which the model lists them, the random numbers, and so the weights, are those of
    a model that was built on the CPU. Raises StrategyError for a layer that cannot initialise itself.
    """
    _visit("", model, then, set())


def _visit(name: str, module: nn.Module, then: Mapping[int, Callable[[nn.Module], None]], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    if any(tensor.is_meta for tensor in _own(module)):
        _reset(name, module)
    for child_name, child in module.named_children():
        _visit(f"{name}.{child_name}".lstrip("."), child, then, seen)
    if id(module) in then:
        then[id(module)](module)


def _reset(name: str, module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise StrategyError(
            f"`{name or 'the model'}` ({type(module).__name__}) has parameters or buffers and no reset_parameters: it "
            "cannot be initialised after it was built on the meta device",
            hints=["give that class a reset_parameters method", "or set strategy.meta = false"],
        )
    module.to_empty(device="cpu", recurse=False)
    for tensor in _own(module):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)  # what is forgotten must show
    reset()
    forgotten = [key for key, tensor in module.named_parameters(recurse=False) if tensor.isnan().any()]
    if forgotten:
        raise StrategyError(f"reset_parameters of `{name}` ({type(module).__name__}) leaves `{forgotten[0]}` as it is")


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
