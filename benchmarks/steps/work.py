"""Work of all contenders: models, samples, batches, and the equivalent recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LR = 1e-3
LOG_EVERY = 10  # steps

RECIPE = """
recipe = 2
name = "bench"
{model}
[data.train]
use = "work:{data}"
work = "{name}"
[task]
use = "{task}"
[optimizer]
use = "adamw"
lr = {lr}
[train]
length = "{steps}st"
global_batch = {batch}
micro_batch = {micro_batch}
device = "cpu"
{clip}
[track]
every = "{log_every}st"
memory_check = "off"
[checkpoint]
every = "1000000st"
[strategy]
{strategy}
[callbacks.turns]
use = "contenders:Turns"
"""


@dataclass(frozen=True)
class Work:
    """Model, data, global batch, and number of steps per turn."""

    title: str
    model: str  # table [model] of the recipe
    task: str
    batch: int
    samples: int  # a multiple of the batch, so all steps have the same size
    steps: int  # per turn; a multiple of LOG_EVERY, so every turn logs equally often
    turns: int  # timed turns of every contender
    data: str = "Samples"  # or "Batches"


_MLP = Work(
    "MLP, 64 to 64 to 10, batch of 64 digits",
    '[model]\nuse = "mlp"\ninputs = 64\nhidden = [64]\noutputs = 10\n',
    "classification",
    batch=64,
    samples=64_000,
    steps=200,
    turns=32,
)
MODELS = {
    "mlp": _MLP,
    "mlp-batched": replace(_MLP, title="the same, with a dataset that fetches a whole batch", data="Batches"),
    "gpt": Work(
        "GPT, 4 layers, 4 heads, width 128, batch of 12 x 64 bytes of text",
        '[model]\nuse = "gpt"\nvocab_size = 256\nblock_size = 64\nlayers = 4\nheads = 4\nwidth = 128\n',
        "language_modeling",
        batch=12,
        samples=48_000,
        steps=20,
        turns=20,
    ),
    "resnet18": Work(
        "ResNet-18, batch of 32 images of 3 x 32 x 32",
        '[model]\nuse = "torchvision"\narch = "resnet18"\nclasses = 10\n',
        "classification",
        batch=32,
        samples=3_200,
        steps=10,
        turns=12,
    ),
}


class Samples:
    """Dataset of a model's samples in memory, fetched one by one, as in tutorials."""

    random = False

    def __init__(self, *, work: str) -> None:
        import torch

        found = MODELS[work]
        if work.startswith("mlp"):
            from ddpforge.builtin.datasets.digits import Digits

            digits = Digits(split="train")
            rows = torch.arange(found.samples) % len(digits)
            self.inputs, self.targets = digits.images[rows], digits.labels[rows]
        elif work == "gpt":
            library = sorted(Path(os.__file__).parent.glob("*.py"))
            text = bytearray(b"".join(file.read_bytes() for file in library))
            tokens = torch.frombuffer(text, dtype=torch.uint8).long()
            apart = (len(tokens) - 65) // found.samples
            self.inputs, self.targets = (part.unfold(0, 64, apart)[: found.samples] for part in (tokens, tokens[1:]))
        else:
            generator = torch.Generator().manual_seed(0)
            self.inputs = torch.randn(found.samples, 3, 32, 32, generator=generator)
            self.targets = torch.randint(10, (found.samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.targets[index]


class Batches(Samples):
    """The same dataset, fetched one batch at a time."""

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        import torch

        rows = torch.tensor(indices)
        return self.inputs[rows], self.targets[rows]

    def collate(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return batch


def make_data(work: str) -> Samples:
    """Builds the dataset of a recipe."""
    return {"Samples": Samples, "Batches": Batches}[MODELS[work].data](work=work)


def make_model(work: str) -> Any:
    """Builds the model of a recipe with its constructor."""
    import tomllib

    from ddpforge.builtin.models.gpt import GPT
    from ddpforge.builtin.models.mlp import MLP
    from ddpforge.builtin.models.vision import torchvision_model

    options = tomllib.loads(MODELS[work].model)["model"]
    makers: dict[str, Any] = {"gpt": GPT, "mlp": MLP, "torchvision": torchvision_model}
    return makers[options.pop("use")](**options)
