"""AdamW and SGD, with torch's fused kernels if possible, and L-BFGS.

Recipes name any other optimizer by its class, e.g. `use = "torch.optim:RMSprop"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.interfaces import device_kind

if TYPE_CHECKING:
    from torch.optim import SGD, AdamW

    from ddpforge.builtin.optim.lbfgs import LBFGS

_LearningRate = Annotated[
    float,
    Field(examples=[0.001], ge=1e-15, le=1000, description="Learning rate; the schedule multiplies it by its factor."),
]
_WeightDecay = Annotated[
    float, Field(ge=0, le=1000, description="Weight decay of all parameters except those in `no_decay`.")
]
_Fused = Annotated[
    Literal["auto"] | bool,
    Field(description='Update all weights in one kernel; "auto": if torch supports it (CPU and CUDA).'),
]
_Fraction = Annotated[float, Field(ge=0, lt=1)]


def adamw(
    params: list[dict[str, Any]],
    *,
    lr: _LearningRate,
    betas: Annotated[
        tuple[_Fraction, _Fraction],
        Field(description="Decay rates of the running averages of the gradient and of its square."),
    ] = (0.9, 0.999),
    eps: Annotated[float, Field(ge=1e-30, le=1, description="Added to the denominator.")] = 1e-8,
    weight_decay: _WeightDecay = 0.01,
    amsgrad: Annotated[
        bool, Field(description="Divide by the largest average of the square so far (Reddi et al., 2018).")
    ] = False,
    fused: _Fused = "auto",
) -> AdamW:
    """Returns `torch.optim.AdamW` (Loshchilov and Hutter, 2019); `params` are parameter groups."""
    from torch.optim import AdamW

    fused = _can_fuse(params) if fused == "auto" else fused
    return AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=fused)


def sgd(
    params: list[dict[str, Any]],
    *,
    lr: _LearningRate,
    momentum: Annotated[_Fraction, Field(description="Momentum factor.")] = 0.0,
    nesterov: Annotated[bool, Field(description="Nesterov's momentum; needs `momentum`.")] = False,
    weight_decay: _WeightDecay = 0.0,
    fused: _Fused = "auto",
) -> SGD:
    """Returns `torch.optim.SGD`; `params` are parameter groups.

    Raises ValueError for `fused = true` with sharded weights, because torch has no fused kernel for them.
    """
    from torch import Tensor
    from torch.optim import SGD

    sharded = any(type(parameter.data) is not Tensor for group in params for parameter in group["params"])  # DTensor
    if fused is True and sharded:
        raise ValueError("torch has no fused SGD for sharded weights; remove `fused`")
    fused = (_can_fuse(params) and not sharded) if fused == "auto" else fused
    return SGD(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, fused=fused)


def lbfgs(
    params: list[dict[str, Any]],
    *,
    lr: _LearningRate,
    history_size: Annotated[
        int,
        Field(ge=1, le=1000, description="Steps to estimate the curvature from; each needs two copies of the model."),
    ] = 10,
) -> LBFGS:
    """Returns L-BFGS (Nocedal, 1980) without a line search; `params` are parameter groups.

    A step is one iteration of `torch.optim.LBFGS`, so its `max_iter = 20` are 20 steps here. Use it for small models,
    with a global batch of the whole dataset: noise in the gradients spoils the estimate of the curvature. All ranks
    compute the same update from all weights, so strategies that divide the weights refuse it.

    Raises:
        ValueError: Weights are sharded.
    """
    from torch import Tensor

    from ddpforge.builtin.optim.lbfgs import LBFGS

    if any(type(parameter.data) is not Tensor for group in params for parameter in group["params"]):  # DTensor
        raise ValueError('lbfgs needs all weights on every rank, but they are sharded; set strategy.use = "ddp"')
    return LBFGS(params, lr, history_size)


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(p.is_floating_point() and not p.is_meta and device_kind(p.device).fuses_optimizers for p in parameters)
