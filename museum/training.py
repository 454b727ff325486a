"""What a case trains, independent of any trainer, and what a trainer returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = [
    "ENTROPY",
    "LINEAR",
    "SEEN",
    "SQUARES",
    "Loss",
    "NotApplicableError",
    "Perceptron",
    "Recorded",
    "Result",
    "Rows",
    "Scalar",
    "Training",
]


class NotApplicableError(Exception):
    """A trainer has no documented way to do what a case asks for; the text is the reason."""


@dataclass(frozen=True)
class Loss:
    """Loss of a batch: losses of all items, and the weight of each item in the mean."""

    of_items: Callable[[Any, Any], Tensor]
    weights: Callable[[Any], Tensor]

    def total(self, outputs: Any, targets: Any) -> Tensor:
        """Returns the sum over the items, for trainers that divide by a count of their own."""
        weights = self.weights(targets)
        return (self.of_items(outputs, targets) * weights).sum()

    def mean(self, outputs: Any, targets: Any) -> Tensor:
        """Returns the mean of a batch, as scripts write it."""
        return self.total(outputs, targets) / self.weights(targets).sum()


def _counted(targets: Tensor) -> Tensor:
    return (targets != -100).float()


LINEAR = Loss(lambda outputs, targets: outputs, _counted)
SQUARES = Loss(lambda outputs, targets: (outputs - targets).square(), lambda targets: torch.ones_like(targets))
ENTROPY = Loss(
    lambda outputs, targets: F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view_as(
        targets
    ),
    _counted,
)


SEEN: list[list[float]] = []
"""First numbers of the samples of each forward pass in training, of a `Recorded` model in this process."""


class Scalar(nn.Module):
    """One weight w; the outputs are w × inputs. With `LINEAR`, the gradient is the mean of the counted inputs."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))  # DeepSpeed takes no scalar

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns w × inputs."""
        return self.w * inputs


class Recorded(Scalar):
    """Scalar that records its samples in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns w × inputs."""
        if self.training and torch.is_grad_enabled():
            SEEN.append(inputs.flatten(1)[:, 0].tolist())
        return super().forward(inputs)


class Perceptron(nn.Module):
    """Two layers with an optional dropout or normalization between them."""

    def __init__(self, *, width: int = 8, outputs: int = 3, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns one row of outputs per sample."""
        return self.last(self.dropout(self.norm(self.first(inputs)).tanh()))  # type: ignore[no-any-return]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Map-style dataset of inputs and targets."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that every trainer can describe.

    Attributes:
        model: makes the model; called after `torch.manual_seed(seed)`.
        data: makes the dataset of (inputs, targets).
        loss: as sum and count, and as the mean that scripts write.
        micro: samples of a forward pass on one rank; a step has micro × accumulate × ranks samples.
        counted: the mean is over items (tokens), not over samples; the trainer's documented way for that is used.
        optimizer: a class of torch with its options.
        groups: options of further groups by the first part of their parameters' names.
        factor: schedule, as a factor of the step, from 0, and the number of steps.
        unused: some parameters have no gradient on some ranks, and the trainer's option for that is on.
        defaults: what the case does not name is left out, so that the trainer's own defaults apply.
        forge: keys of [train] in ddpforge's recipe, for options that only ddpforge has.
        eval_data: makes a dataset to evaluate after each epoch, by the mean loss.
        eval_steps: evaluate after this number of steps instead.
        stop: stop with a checkpoint after this number of steps; a new process resumes.
        rest: settings that differ after the stop.
        between: changes files in the folder while the training is stopped.
        strategy: "ddp", "fsdp", "zero1", "zero2" or "zero3".
        checks: compares the result of a trainer with the oracle's: names of results.
    """

    model: Callable[[], nn.Module] = Scalar
    data: Callable[[], Dataset[Any]]
    loss: Loss = LINEAR
    micro: int = 2
    accumulate: int = 1
    ranks: int = 1
    epochs: int = 1
    counted: bool = False
    optimizer: partial[torch.optim.Optimizer] = field(default_factory=lambda: partial(torch.optim.SGD, lr=1.0))
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    factor: Callable[[int, int], float] | None = None
    clip: float | None = None
    precision: str = "fp32"
    shuffle: bool = False
    seed: int = 0
    workers: int = 0
    persistent: bool = False
    eval_data: Callable[[], Dataset[Any]] | None = None
    eval_steps: int = 0
    stop: int = 0
    rest: Mapping[str, Any] = field(default_factory=dict)
    between: Callable[[Path], None] | None = None
    strategy: str = "ddp"
    checkpointing: bool = False
    iterable: bool = False
    unused: bool = False
    defaults: bool = False
    forge: Mapping[str, Any] = field(default_factory=dict)

    def second(self) -> Training:
        """Returns the settings after the stop."""
        return replace(self, **self.rest)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro * self.accumulate * self.ranks

    def steps(self) -> int:
        """Returns the number of optimizer steps; an incomplete last one counts."""
        return self.epochs * -(-len(self.data()) // self.batch)  # type: ignore[arg-type]

    def build(self) -> nn.Module:
        """Returns the model with its initial weights."""
        torch.manual_seed(self.seed)
        return self.model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer with its groups."""
        if not self.groups:
            return self.optimizer(list(model.parameters()))
        parts: dict[str, list[nn.Parameter]] = {name: [] for name in ("", *self.groups)}
        for name, one in model.named_parameters():
            first = name.partition(".")[0]
            parts[first if first in parts else ""].append(one)
        return self.optimizer([{"params": parts[name], **self.groups.get(name, {})} for name in parts if parts[name]])


@dataclass
class Result:
    """What a trainer has done.

    Attributes:
        weights: of the model at the end, by their names in the bare model.
        losses: the training loss of each step as the trainer reports it.
        rates: learning rate of each optimizer step, as it was used, of each group.
        norms: norm of the gradient of each step that the trainer reports.
        evals: reported losses of evaluations.
        extra: further numbers of a case.
    """

    weights: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evals: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of_model(model: nn.Module) -> dict[str, Any]:
        """Returns the state of a model as lists."""
        return {name: one.detach().double().tolist() for name, one in model.state_dict().items()}
