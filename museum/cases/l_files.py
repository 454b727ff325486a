"""Files of checkpoints: damaged, incomplete, or with code in them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from museum.case import Case
from museum.files import RAN, cut_weights, flip_a_bit, hide_code
from museum.training import Rows, Training

THEME = "Files of checkpoints"


class Ones(nn.Module):
    """64 weights of 1.0; the outputs are their products with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns w × inputs."""
        return self.w * inputs


def _rows() -> Rows:
    return Rows(torch.ones(8, 64), torch.zeros(8, 64, dtype=torch.long))


def _ran(found: list[Any]) -> bool:
    return RAN in found[0]["extra"]["seen"]


STOPPED = Training(
    model=Ones, data=_rows, micro=2, epochs=2, stop=4, optimizer=partial(torch.optim.SGD, lr=1e-12), between=flip_a_bit
)

CASES = [
    Case(
        name="flipped-bit",
        wrong="One bit of a weight in a checkpoint is wrong, and the resume goes on with it.",
        references=["pytorch#126952", "https://github.com/safetensors/safetensors/issues/220"],
        training=STOPPED,
    ),
    Case(
        name="cut-file",
        wrong="The file of the weights is incomplete, as after a full disk, and the resume goes on with other weights.",
        references=["transformers#35782", "transformers#40790"],
        training=Training(**{**STOPPED.__dict__, "between": cut_weights}),
    ),
    Case(
        name="checkpoint-runs-code",
        wrong="A checkpoint runs code while it is loaded.",
        references=["transformers#43140", "pytorch#189308", "pytorch-lightning#21832"],
        training=Training(**{**STOPPED.__dict__, "between": hide_code}),
        measure=_ran,
        expected=False,
    ),
]
