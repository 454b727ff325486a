"""Sets how torch computes in this process: in which form fp32 is multiplied, and whether always to the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ddpforge.errors import StrategyError

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["restored", "set_arithmetic", "told_of_determinism"]

_BACKENDS: Any = torch.backends
_PLACES: Sequence[Any] = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
_WITHOUT = ("does not have a deterministic implementation", "Deterministic behavior was enabled")  # torch's words


def set_arithmetic(train: TrainSection) -> None:
    """Sets torch's switches as the recipe asks; left alone, torch would multiply in TF32 in convolutions only.

    See https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html and …/notes/randomness.html.
    """
    for place in _PLACES:
        place.fp32_precision = "tf32" if train.tf32 else "ieee"
    torch.backends.cudnn.benchmark = train.cudnn_benchmark
    torch.use_deterministic_algorithms(train.deterministic)
    if train.deterministic:  # which cuBLAS reads when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def restored() -> Iterator[None]:
    """Sets torch's switches back in the end: the process may be somebody's notebook."""
    forms: list[Any] = [place.fp32_precision for place in _PLACES]
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        for place, form in zip(_PLACES, forms, strict=True):
            place.fp32_precision = form
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
