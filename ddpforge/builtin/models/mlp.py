"""A multi-layer perceptron: the smallest model for flat or flattened inputs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

_Size = Annotated[int, Field(ge=1, le=2**24)]

_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """Linear layers with an activation and dropout between them.

    Takes [B, …] with `inputs` values per sample, gives [B, outputs]. Initial weights are nn.Linear's.
    """

    pipeline: ClassVar = ("enter", "layers")

    def __init__(
        self,
        *,
        inputs: Annotated[_Size, Field(description="Values per sample, after flattening.")],
        outputs: Annotated[_Size, Field(description="Values per sample that come out, e.g. classes.")],
        hidden: Annotated[
            Sequence[_Size],
            Field(max_length=1000, description="Width of each hidden layer; empty for a linear model."),
        ] = (128,),
        activation: Annotated[
            Literal["relu", "gelu", "silu", "tanh"], Field(description="What follows each hidden layer.")
        ] = "relu",
        dropout: Annotated[
            float, Field(ge=0, lt=1, description="Probability of zeroing a hidden unit in training.")
        ] = 0.0,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs

        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), _ACTIVATIONS[activation](), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, …] → [B, outputs]; raises ValueError when a sample does not hold `inputs` values."""
        logits: Tensor = self.layers(self.enter(x))
        return logits

    def enter(self, x: Tensor) -> Tensor:
        """[B, …] → [B, inputs]."""
        flat = x.flatten(1)
        if flat.shape[1] != self.inputs:
            raise ValueError(
                f"MLP(inputs = {self.inputs}) got samples of {flat.shape[1]} values, a batch of shape"
                f" {list(x.shape)}; set model.inputs = {flat.shape[1]}"
            )
        return flat
