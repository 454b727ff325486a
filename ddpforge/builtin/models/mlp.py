"""Multi-layer perceptron for flat or flattened inputs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

from torch import Tensor, nn

_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """Model `mlp`; `builders.mlp` documents its options."""

    pipeline: ClassVar = ("enter", "layers")

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        hidden: Sequence[int] = (128,),
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs

        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), _ACTIVATIONS[activation](), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, …] → [B, outputs]; raises ValueError if a sample does not have `inputs` values."""
        logits: Tensor = self.layers(self.enter(x))
        return logits

    def enter(self, x: Tensor) -> Tensor:
        """Flattens [B, …] → [B, inputs]; raises ValueError if a sample does not have `inputs` values."""
        flat = x.flatten(1)
        if flat.shape[1] != self.inputs:
            raise ValueError(
                f"MLP(inputs = {self.inputs}) got samples of {flat.shape[1]} values, a batch of shape"
                f" {list(x.shape)}; set model.inputs = {flat.shape[1]}"
            )
        return flat
