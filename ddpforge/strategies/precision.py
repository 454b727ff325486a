"""Forward, backward and update at each precision; a non-finite gradient never reaches the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddpforge import compat
from ddpforge.errors import StrategyError
from ddpforge.interfaces import device_kind
from ddpforge.strategies.composite_optimizer import CompositeOptimizer, member_optimizers

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["Precision", "check_float64", "precision_for", "recomputed_casts"]


class Precision:
    """Precisions fp32 and bf16: forward passes under autocast (bf16 only), gradients without scaling."""

    scales = False  # True if `unscale` must be called before gradients are read

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self.forward: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Wraps a forward pass and its loss in autocast; weights stay fp32 and are cast on use."""
        if dtype is not None:
            self.forward = partial(torch.autocast, device.type, dtype=dtype)
        kind = device_kind(device)
        self._fuses_on_device = kind.fuses_optimizers and not kind.is_host
        self._momenta = _Momenta()
        self._one: Tensor | None = None  # 1.0 on the device, in the dtype of the norm

    @contextmanager
    def sharded_forward(self, *, compiled: bool) -> Iterator[None]:
        """Wraps a forward pass with gathered weights: their copies in lower precision do not outlive their use.

        This does not hold for `compiled` code, which decides itself which tensors it keeps for the backward pass.
        """
        if self.dtype is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=False))
            if not compiled:
                stack.enter_context(recomputed_casts())
            yield

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        """Adds the gradients of `loss` (0-d) times `scale`."""
        # Passing `scale` as the gradient saves a product and its backward pass.
        if isinstance(scale, Tensor) and scale.device == loss.device:
            gradient = scale.to(loss)
        else:  # A copy would wait for the device. A kernel takes the number as an argument.
            gradient = torch.full_like(loss, float(scale))
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the loss scale, if there is one; called before they are read."""

    def update(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Steps `optimizer` unless `norm`, the norm of all gradients, is not finite."""
        if not isinstance(optimizer, CompositeOptimizer):
            return self._update(optimizer, norm)
        for _, member in member_optimizers(optimizer):
            self._update(member, norm)

    def _update(self, optimizer: Optimizer, norm: Tensor) -> None:
        # Fused optimizers on CUDA check the norm on the device. Others need it on the host: free on a CPU, one
        # synchronisation per step on a GPU. A fused SGD needs it on the host too, in the step in which momentum begins.
        beginning = self._momenta.beginning(optimizer) if isinstance(optimizer, SGD) else ()
        fused: Any = optimizer
        if self._fuses_on_device and not beginning and compat.decides_on_device(optimizer):
            fused.found_inf = self._is_nonfinite(norm)
            optimizer.step()
            fused.found_inf = None  # of this step only
        elif math.isfinite(norm.item()):
            with _unfused(beginning) if beginning else nullcontext():
                optimizer.step()

    def _is_nonfinite(self, norm: Tensor) -> Tensor:
        """Returns 1.0 if a norm is NaN or infinite, else 0.0 (float32, 0-d, on its device)."""
        if self._one is None or self._one.dtype != norm.dtype:
            self._one = torch.ones_like(norm)
        # The gradient of a threshold: 0 up to the largest finite number, else 1, also for NaN. It is one launch;
        # `~isfinite` and a cast are six.
        found: Tensor = torch.ops.aten.threshold_backward(self._one, norm, torch.finfo(norm.dtype).max)
        return found.float()

    def leave(self) -> None:
        """Ends a pass if its gradients were only read; called instead of `update`."""

    def overflowed(self) -> bool:
        """True if a non-finite norm only means that the loss scale was too high."""
        return False

    def state(self) -> dict[str, int | float]:
        """Returns the numbers to save for a resume."""
        return {}

    def load_state(self, state: Mapping[str, int | float]) -> None:
        """Restores the numbers from `state`."""


class LossScaling(Precision):
    """Precision fp16: scales the loss up so that small gradients survive.

    An overflow skips the step and lowers the scale.

    The order is that of Micikevicius et al., "Mixed Precision Training" (2018), and of torch's AMP examples: unscale,
    measure the norm, clip, step, update the scale.
    """

    scales = True

    def __init__(self, device: torch.device, gradients_on: torch.device | None = None) -> None:
        super().__init__(device, torch.float16)
        self.scaler = torch.amp.GradScaler(device.type)
        if gradients_on is not None and gradients_on.type == "cpu" != device.type:
            # GradScaler keeps its scale on the device of the first loss, and copies it to the gradients without
            # waiting: gradients on the host would be divided before the copy has arrived.
            self.scaler.scale(torch.zeros((), device=gradients_on))

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        super().backward(self.scaler.scale(loss), scale)

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def update(self, optimizer: Optimizer, norm: Tensor) -> None:
        super().update(optimizer, norm)
        self.scaler.update()

    def leave(self) -> None:
        self.scaler.update()

    def overflowed(self) -> bool:
        return self.scaler.get_scale() >= 1.0

    def state(self) -> dict[str, int | float]:
        return {"loss_scale": self.scaler.get_scale(), "loss_scale_growth_tracker": compat.growth_of(self.scaler)}

    def load_state(self, state: Mapping[str, int | float]) -> None:
        if "loss_scale" in state:
            compat.set_scale(self.scaler, state["loss_scale"], int(state["loss_scale_growth_tracker"]))


def precision_for(
    name: Literal["fp32", "bf16", "fp16"], device: torch.device, gradients_on: torch.device | None = None
) -> Precision:
    """Returns the precision for the recipe's `train.precision`.

    Args:
        name: Precision of the forward passes.
        device: Device of the forward passes.
        gradients_on: Device of the gradients that the optimizer reads; None: the same.
    """
    if name == "fp16":
        return LossScaling(device, gradients_on)
    return Precision(device, torch.bfloat16 if name == "bf16" else None)


def check_float64(model: nn.Module, train: TrainSection) -> None:
    """Raises StrategyError for a float64 parameter unless `train.precision` is "fp32"."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float64 and train.precision != "fp32":
            raise StrategyError(
                f"parameter `{name}` is float64, which autocast does not cast, but train.precision is "
                f'"{train.precision}"',
                hints=['set train.precision = "fp32", or build the model in float32'],
            )


class _Momenta:
    """Finds the groups of a fused SGD in which momentum begins."""

    # In the first step torch allocates momentum without initializing it. If `found_inf` makes the kernel skip that
    # step, the memory stays so: https://github.com/pytorch/pytorch/blob/main/torch/optim/sgd.py, `_fused_sgd`. The
    # kernel also refuses a group in which only some weights have momentum.

    def __init__(self) -> None:
        # Optimizer → number of weights in its state once all have momentum: no check is needed until that changes.
        self._complete: dict[int, int] = {}

    def beginning(self, optimizer: SGD) -> Sequence[dict[str, Any]]:
        """Returns the groups in which a weight gets its first momentum in this step."""
        if len(optimizer.state) == self._complete.get(id(optimizer)):
            return ()
        state = optimizer.state
        groups = [group for group in optimizer.param_groups if group["fused"] and group["momentum"]]
        bare = [[p for p in group["params"] if state.get(p, {}).get("momentum_buffer") is None] for group in groups]
        if not any(bare):
            self._complete[id(optimizer)] = len(state)
        return [group for group, weights in zip(groups, bare, strict=True) if any(p.grad is not None for p in weights)]


@contextmanager
def _unfused(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Disables the fused kernel for these groups within the block."""
    for group in groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = True


# ---------------------------------------------------------------------------------------------- casts
_VIEWS = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsqueezeBackward0"}


class _Cast(NamedTuple):
    """Copy of a weight in another dtype, or a view of that copy: the weight, the dtype and the strides."""

    weight: nn.Parameter
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def recomputed_casts() -> torch.autograd.graph.saved_tensors_hooks:
    """Returns hooks within which autograd saves a reference to a weight instead of its copy in another dtype.

    The backward pass casts the weight again. The weight must have its memory and the same values at that time.
    """
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Tensor | _Cast:
    made_by: Any = tensor.grad_fn
    if made_by is None or tensor.dtype.itemsize != 2:
        return tensor
    while made_by is not None and made_by.name() in _VIEWS:
        made_by = made_by.next_functions[0][0]
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return tensor
    weight = getattr(made_by.next_functions[0][0], "variable", None)  # only the node that accumulates a gradient has it
    if not isinstance(weight, nn.Parameter) or tensor.untyped_storage().nbytes() != weight.numel() * tensor.itemsize:
        return tensor
    return _Cast(weight, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Tensor | _Cast) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.weight.detach().to(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
