"""Notes the sharded parameters that a backward pass gives a gradient to, on this rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["Used"]


class Used:
    """The names of parameters of `model` that got a gradient since `clear`, before gradients are reduced over ranks.

    Every trained parameter must get one, on every rank: ranks that used different ones would have added up gradients
    that do not belong together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: set[str] = set()
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.clear = self._found.clear
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # not in torch 2.11
            # Ranks that used different parameters then come to the end of backward, where that is reported.
            cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        for prefix, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                _at_first_forward(cast(nn.Module, unit), partial(self._watch, prefix))

    def all_of(self, parameters: int) -> bool:
        """True if as many parameters got one; costs nothing."""
        return len(self._found) == parameters

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def _watch(self, prefix: str, unit: nn.Module) -> None:
        """Called while the unit's parameters are gathered: what backward gives gradients to are these, not shards."""
        for name, parameter in unit.named_parameters(prefix):
            if name in self._trained and not isinstance(parameter, DTensor):

                def note(_: Tensor, name: str = name) -> None:
                    self._found.add(name)

                trains = parameter.requires_grad  # not in a turn of others, and there are no hooks without
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trains)


def _at_first_forward(unit: nn.Module, action: Callable[[nn.Module], None]) -> None:
    """Calls `action(unit)` once, when the unit's forward begins and FSDP has gathered its parameters."""

    def hook(module: nn.Module, _: Any) -> None:
        handle.remove()
        action(module)

    handle = unit.register_forward_pre_hook(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]
