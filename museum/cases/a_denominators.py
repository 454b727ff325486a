"""Losses and denominators: a mean over the wrong set."""

import torch
import torch.nn.functional as F

from museum.case import Case
from museum.training import ENTROPY, Loss, Perceptron, Rows, Training

THEME = "Losses and denominators"


def numbered(count: int) -> Rows:
    """Samples 1, 2, …, one number each: the gradient of w is the mean of the numbers."""
    return Rows(torch.arange(1.0, count + 1).unsqueeze(1), torch.zeros(count, 1, dtype=torch.long))


def ragged(*counts: int) -> Rows:
    """Samples with these numbers of counted tokens; the tokens are 1, 2, … through all samples."""
    width, token = max(counts), 1.0
    inputs, targets = torch.zeros(len(counts), width), torch.full((len(counts), width), -100)
    for row, count in enumerate(counts):
        inputs[row, :count] = torch.arange(token, token + count)
        targets[row, :count] = 0
        token += count
    return Rows(inputs, targets)


def classes(count: int, *, ignored: tuple[int, ...] = ()) -> Rows:
    """Points of three classes; the classes of the samples `ignored` are -100."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(count) % 3
    targets[list(ignored)] = -100
    return Rows(inputs, targets)


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
WEIGHTED = Loss(
    lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
    lambda targets: CLASS_WEIGHTS[targets].to(torch.get_default_dtype()),
)

CASES = [
    Case(
        name="accumulation-equal",
        wrong="Accumulated losses are added and not averaged, or averaged twice.",
        references=["verl#7200", "VeOmni#963"],
        training=Training(data=lambda: numbered(8), micro=1, accumulate=4),
    ),
    Case(
        name="accumulation-last-window",
        wrong="The last, incomplete window of an epoch is divided by the full accumulation.",
        references=["LlamaFactory#10705"],
        training=Training(data=lambda: numbered(5), micro=1, accumulate=4),
    ),
    Case(
        name="accumulation-last-micro-batch",
        wrong="A smaller last micro-batch has the same weight as the others: its samples count more.",
        references=["verl#6957", "SkyRL#1504"],
        training=Training(data=lambda: numbered(7), micro=4, accumulate=2, counted=True),
    ),
    *(
        Case(
            name=f"tokens-{name}",
            wrong=f"A mean of means over {where}: tokens of short samples count more.",
            references=["verl#7913", "verl#5614", "SkyRL#1504"],
            training=Training(data=lambda counts=counts: ragged(*counts), micro=1, counted=True, **layout),
        )
        for name, where, counts, layout in (
            ("over-micro-batches", "micro-batches", (1, 3, 5, 7), {"accumulate": 2}),
            ("over-ranks", "ranks", (1, 3, 5, 7), {"ranks": 2}),
            ("over-both", "micro-batches and ranks", (1, 3, 5, 7), {"accumulate": 2, "ranks": 2}),
        )
    ),
    Case(
        name="targets-all-masked",
        wrong="A micro-batch without any counted target gives 0 / 0, or counts as a micro-batch.",
        references=["Megatron-LM#7452"],
        training=Training(
            model=Perceptron, data=lambda: classes(8, ignored=(2, 3)), loss=ENTROPY, micro=2, accumulate=2, counted=True
        ),
    ),
    Case(
        name="class-weights",
        wrong="The mean of a weighted loss divides by the weights of its micro-batch, not of the step.",
        references=["https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html"],
        notes={"hf": "num_items_in_batch counts labels and not their weights"},
        training=Training(
            model=Perceptron, data=lambda: classes(8), loss=WEIGHTED, micro=2, accumulate=2, counted=True
        ),
    ),
]
