"""Precision: updates that vanish, numbers that are not finite."""

from functools import partial

import torch
from torch import Tensor, nn

from museum.case import Case
from museum.training import Rows, Scalar, Training

THEME = "Precision"
SLOW = partial(torch.optim.SGD, lr=1e-3)


def ones(count: int) -> Rows:
    """Samples with the gradient 1."""
    return Rows(torch.ones(count, 1), torch.zeros(count, 1, dtype=torch.long))


def with_nan(count: int, *places: int) -> Rows:
    """Samples 1, 2, …; those at `places` are NaN."""
    inputs = torch.arange(1.0, count + 1).unsqueeze(1)
    inputs[list(places)] = float("nan")
    return Rows(inputs, torch.zeros(count, 1, dtype=torch.long))


class LowScalar(Scalar):
    """Scalar whose weight is bf16, as a checkpoint in bf16 is loaded."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.w = nn.Parameter(self.w.detach().bfloat16())

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns w × inputs."""
        return self.w * inputs.to(self.w.dtype)


CASES = [
    Case(
        name="bf16-updates",
        wrong="In mixed precision the weights themselves are bf16: small updates vanish.",
        references=["accelerate#3979", "accelerate#2624", "transformers#32265"],
        training=Training(
            model=partial(Scalar, 1.0), data=lambda: ones(100), micro=1, optimizer=SLOW, precision="bf16"
        ),
        tolerance=3e-3,
    ),
    Case(
        name="bf16-weights-given",
        wrong="A model that was loaded in bf16 is trained in bf16: small updates vanish.",
        references=["accelerate#3979", "transformers#32265", "instructlab/training#465"],
        training=Training(model=LowScalar, data=lambda: ones(100), micro=1, optimizer=SLOW, precision="bf16"),
        tolerance=3e-3,
    ),
    Case(
        name="nan-in-a-step",
        wrong="One step that is not finite makes all weights NaN, and training goes on.",
        references=["transformers#13619", "TRL#6702", "torchtitan#4226"],
        training=Training(data=lambda: with_nan(8, 3), micro=1, forge={"on_nonfinite": "skip"}),
    ),
    Case(
        name="nan-on-one-rank",
        wrong="A rank skips its step that is not finite, the others do not: ranks differ or wait for ever.",
        references=["WeatherGenerator#2724", "transformers#13619"],
        training=Training(data=lambda: with_nan(8, 3), micro=1, ranks=2, forge={"on_nonfinite": "skip"}),
    ),
]
