"""Sets how torch computes in this process: in which form fp32 is multiplied, and whether always to the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ddpforge.errors import StrategyError
from ddpforge.ranks.scheduling import policy_restored

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["set_arithmetic", "settings_restored", "told_of_determinism"]

_WITHOUT = ("does not have a deterministic implementation", "Deterministic behavior was enabled")  # torch's words


def set_arithmetic(train: TrainSection) -> None:
    """Sets torch's switches as the recipe asks, and else leaves what a model's or a plugin's code has chosen.

    Where nobody has chosen, torch would multiply in TF32 in convolutions, and only there: fp32 is fp32 in both. See
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices and
    …/notes/randomness.html.
    """
    if train.tf32 or _matmul() == "highest":
        _multiply("high" if train.tf32 else "highest", in_convolutions=train.tf32)
    if train.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when it is first used


@contextmanager
def settings_restored() -> Iterator[None]:
    """Sets torch's switches, and the policy of threads, back in the end."""
    matmul, convolutions = _matmul(), torch.backends.cudnn.allow_tf32
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with policy_restored():
            yield
    finally:
        if matmul:
            _multiply(matmul, in_convolutions=convolutions)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def told_of_determinism(error: BaseException) -> BaseException:
    """`error`, or where torch cannot compute something the same way every time, a StrategyError that says so."""
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in _WITHOUT):
        return error
    operation = str(error).partition(" does not have")[0] if _WITHOUT[0] in str(error) else "an operation"
    problem = StrategyError(
        f"train.deterministic = true, and torch cannot compute `{operation}` the same way every time",
        hints=["leave train.deterministic out", "or compute it otherwise in the model, the task or the metric"],
    )
    problem.__cause__ = error
    return problem


# torch's older switches: once one of its newer ones is set (`fp32_precision`), libraries that read these fail.
def _matmul() -> str:
    """The form of matrix products, in torch's words; empty where somebody has set the newer switches."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _multiply(matmul: str, *, in_convolutions: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = in_convolutions
