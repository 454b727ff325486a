"""How a step updates the weights at each precision, without ever letting a non-finite gradient reach them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Precision", "precision_for"]


class Precision:
    """fp32 and bf16: forward passes under autocast (bf16 only), gradients used as they are."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype

    def forward(self) -> AbstractContextManager[Any]:
        """Wraps a forward pass and its loss; weights stay fp32 and are cast on use."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Makes the gradients true gradients, before anything looks at them."""

    def update(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Steps `optimizer` unless `norm`, the norm of all gradients, is not finite.

        Fused optimizers on CUDA decide on the device. Others need the answer on the host: free on a CPU, one
        synchronisation per step on a GPU.
        """
        if self.device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            optimizer.step()
        elif math.isfinite(norm.item()):
            optimizer.step()

    def leave(self) -> None:
        """Instead of an update, where the gradients were only looked at."""

    def overflowed(self) -> bool:
        """True when a non-finite norm only says that the loss was scaled too high."""
        return False

    def state(self) -> dict[str, int | float]:
        """What a resume needs."""
        return {}

    def load_state(self, state: Mapping[str, int | float]) -> None:
        """Takes back what `state` gave."""


class LossScaling(Precision):
    """fp16: the loss is scaled up so that small gradients survive; an overflow skips the step and lowers the scale.

    The order is that of Micikevicius et al., "Mixed Precision Training" (2018), and of torch's AMP examples:
    unscale, look at the norm, clip, step, update the scale.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.float16)
        self.scaler = torch.amp.GradScaler(device.type)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def update(self, optimizer: Optimizer, norm: Tensor) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def leave(self) -> None:
        self.scaler.update()

    def overflowed(self) -> bool:
        return self.scaler.get_scale() >= 1.0

    def state(self) -> dict[str, int | float]:
        state = self.scaler.state_dict()
        return {"loss_scale": state["scale"], "loss_scale_growth_tracker": state["_growth_tracker"]}

    def load_state(self, state: Mapping[str, int | float]) -> None:
        if "loss_scale" in state:
            current = self.scaler.state_dict()
            growth = int(state["loss_scale_growth_tracker"])
            self.scaler.load_state_dict(current | {"scale": state["loss_scale"], "_growth_tracker": growth})


def precision_for(name: Literal["fp32", "bf16", "fp16"], device: torch.device) -> Precision:
    """The precision that a recipe's `train.precision` names."""
    if name == "fp16":
        return LossScaling(device)
    return Precision(device, torch.bfloat16 if name == "bf16" else None)
