"""Sets torch's switches for fp32 multiplication (TF32) and for deterministic algorithms in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ddpforge.errors import StrategyError
from ddpforge.ranks.environment import environment

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["explain_determinism_error", "restored_backend_flags", "set_backend_flags"]

_WITHOUT = ("does not have a deterministic implementation", "Deterministic behavior was enabled")  # torch's messages


def set_backend_flags(train: TrainSection) -> None:
    """Sets torch's switches according to the recipe; keeps other settings of a model's or plugin's code.

    See https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices and
    …/notes/randomness.html.
    """
    # By default torch uses TF32 in convolutions but not in matrix products. Without `train.tf32`, both use fp32.
    if train.tf32 or _matmul() == "highest":
        _multiply("high" if train.tf32 else "highest", in_convolutions=train.tf32)
    if train.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at first use


@contextmanager
def restored_backend_flags() -> Iterator[None]:
    """Restores torch's switches on exit, and changes of this process by its environment."""
    matmul, convolutions = _matmul(), torch.backends.cudnn.allow_tf32
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with environment().running():
            yield
    finally:
        if matmul:
            _multiply(matmul, in_convolutions=convolutions)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def explain_determinism_error(error: BaseException) -> BaseException:
    """Returns a StrategyError if `error` is torch's about a nondeterministic operation, else `error` itself."""
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in _WITHOUT):
        return error
    operation = str(error).partition(" does not have")[0] if _WITHOUT[0] in str(error) else "an operation"
    problem = StrategyError(
        f"train.deterministic = true, but torch has no deterministic implementation of `{operation}`",
        hints=["remove train.deterministic", "or use another operation in the model, the task or the metric"],
    )
    problem.__cause__ = error
    return problem


# torch's older switches. If ddpforge set the newer ones (`fp32_precision`), libraries that read the older would fail.
def _matmul() -> str:
    """Returns torch's fp32 matmul precision; "" if other code has set the newer switches."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _multiply(matmul: str, *, in_convolutions: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = in_convolutions
