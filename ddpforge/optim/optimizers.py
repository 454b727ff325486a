"""The two optimizers most recipes use, with torch's fused kernels where they exist.

Any other is named by its class, e.g. `use = "torch.optim:RMSprop"`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch.optim import SGD, AdamW
from torch.optim.optimizer import ParamsT

_LearningRate = Annotated[
    float, Field(gt=0, le=1000, description="Learning rate, which the schedule multiplies by its factor.")
]
_WeightDecay = Annotated[
    float,
    Field(ge=0, le=1000, description="Weight decay; parameters under `optimizer.no_decay` have none."),
]
