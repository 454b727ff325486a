"""Actor-critic model: a policy and a value function."""

from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor, nn

__all__ = ["ActorCritic", "Judgement"]

_Size = Annotated[int, Field(ge=1, le=2**16)]


class Judgement(NamedTuple):
    """Logits [N, actions] and values [N] of N observations."""

    logits: Tensor
    values: Tensor


class ActorCritic(nn.Module):
    """Two MLPs on flat observations [N, inputs]: logits of the actions, and the expected return."""

    def __init__(
        self,
        *,
        inputs: Annotated[_Size, Field(description="Numbers in an observation.")],
        outputs: Annotated[_Size, Field(description="Actions to choose from.")],
        width: Annotated[_Size, Field(description="Units of a hidden layer.")] = 64,
        layers: Annotated[int, Field(ge=1, le=64, description="Hidden layers.")] = 2,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.policy = _mlp(inputs, width, layers, outputs)
        self.value = _mlp(inputs, width, layers, 1)

    def forward(self, observations: Tensor) -> Judgement:
        """Returns logits and values."""
        return Judgement(self.policy(observations), self.value(observations).squeeze(-1))


def _mlp(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Builds an MLP. The last layer is initialized to zero, so that all actions are equally likely at first."""
    sizes = [inputs, *[width] * layers]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*hidden, head)
