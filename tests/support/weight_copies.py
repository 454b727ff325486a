"""Task that records how many copies of weights in lower precision are alive after a forward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ddpforge.builtin.tasks.regression import Regression

WIDTH = 24  # differs from every batch size


class Casts(TorchDispatchMode):
    """Records every copy of a weight of a `Net` in lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype.itemsize == 2 and result.shape[0] == WIDTH:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result

    def alive(self) -> int:
        return sum(not cast.expired() for cast in self.made)


class Counting(Regression):
    """Regression that appends a line per forward pass: class of the model, kind, copies made, copies alive."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        with Casts() as casts:
            result = super().loss(model, batch)
        with open("casts.txt", "a") as file:
            kind = "train" if torch.is_grad_enabled() else "eval"
            print(type(model).__name__, kind, len(casts.made), casts.alive(), file=file)
        return result


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(4), nn.Conv1d(1, WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.norm(x).unsqueeze(1)).transpose(1, 2)
        return x + self.down(self.up(y).relu()).mean(1)


class Net(nn.Module):
    """[B, 4] to [B, 1]; two weights of each of four blocks have `WIDTH` rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)
