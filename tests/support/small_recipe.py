"""Small recipe with local code, and the errors in it under some settings."""

from support.stages import Staged

RECIPE = """
recipe = 2
name = "run"
[model]
use = "./mine.py:Net"
[data.train]
use = "./mine.py:Data"
[task]
use = "classification"
metrics = ["accuracy"]
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "4st"
global_batch = 8
[checkpoint]
every = "4st"
"""


CODE = """
import torch
from torch import nn
from torch.utils.data import IterableDataset
from ddpforge.interfaces import SampleColumns, Task, Total

class Net(nn.Module):
    def __init__(self, inputs: int = 4, outputs: int = 3, gives: str = "logits") -> None:
        super().__init__()
        self.layer, self.gives = nn.Linear(inputs, outputs), gives
    def forward(self, x):
        y = self.layer(x)
        return {"logits": y} if self.gives == "dict" else y

class Data:
    def __init__(self, gives: str = "pair", top: int = 2) -> None:
        self.gives, self.top = gives, top
    def __len__(self):
        return 16
    def __getitem__(self, i):
        x, y = torch.full((4,), float(i)) / 16, i % (self.top + 1)
        return {"x": x, "y": y} if self.gives == "dict" else (x, "text") if self.gives == "text" else (x, y)

class Stream(IterableDataset):
    def __iter__(self):
        data = Data()
        yield from (data[i] for i in range(16))

class Odd(Task):
    def __init__(self, how: str) -> None:
        self.how = how
    def loss(self, model, batch):
        y = model(batch[0])
        losses = nn.functional.cross_entropy(y, batch[1], reduction="none")
        if self.how == "derives":
            torch.autograd.grad(losses.sum(), y, create_graph=True)
        found = {"mean": losses.mean(), "unreduced": losses, "detached": losses.sum().detach()}.get(self.how)
        found = losses.sum() if found is None else found
        return found if self.how == "alone" else (found.item(), y) if self.how == "float" else (found, y)
    def metrics(self, outputs, batch):
        if self.how == "list":
            return [1.0]
        if self.how == "rows":
            return {"it": SampleColumns(batch[1])}
        if self.how == "listed":
            return {"it": SampleColumns([0.5] * 8, batch[1])}
        if self.how == "by turns":
            self.calls = getattr(self, "calls", 0) + 1
            return {"it": SampleColumns(batch[1]) if self.calls % 2 else Total(batch[1].sum(), 8)}
        return {"it": 0.5} if self.how == "floats" else {"it": Total(torch.zeros(3), 3)} if self.how == "wide" else {}
"""


def told(parts: Staged, *, strict: bool = False) -> dict[str, str]:
    """Returns the errors by key: those of a run or, if `strict`, those of a check."""
    return parts.errors(strict=strict)


SETS = ["data.eval.one.use=./mine.py:Data", "data.eval.two={use='./mine.py:Data', top=1}"]

CALLBACKS = """
from ddpforge.interfaces import Callback

class Old(Callback):
    def on_start(self, model, world, weights): ...

class Reads(Callback):
    def on_gradient(self, step, norm): ...

class Calls(Callback):
    calls_model = True

class Measures(Callback):
    def while_evaluating(self, step):
        return {"fid": 1.0}
"""
