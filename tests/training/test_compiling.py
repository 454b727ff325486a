"""Losses that are compiled with the model."""

from typing import Any

import pytest
import torch
from support.forked import train
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.segmentation import Segmentation
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import Task
from ddpforge.training.assemble import compile_losses

TASKS = {
    "classification": (Classification(label_smoothing=0.1), (8, 10), (8,)),
    "language_modeling": (LanguageModeling(ignore_index=3), (2, 5, 10), (2, 5)),
    "segmentation": (Segmentation(ignore_index=3), (2, 10, 4, 4), (2, 4, 4)),
}


class Given(nn.Module):
    """Model whose outputs are its parameters."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(shape))

    def forward(self, _: Tensor) -> Tensor:
        return self.logits.to(torch.bfloat16)


def loss_and_gradient(task: Task, outputs: Given, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss, _ = task.loss(outputs, (targets, targets))
    (gradient,) = torch.autograd.grad(loss, outputs.logits)
    return loss.detach(), gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "language_modeling" else pytest.param(name, marks=pytest.mark.full) for name in TASKS]
)
def test_a_compiled_loss_is_the_same_and_saves_no_float32_logits(name: str) -> None:
    task, shape, places = TASKS[name]
    outputs, targets = Given(shape), torch.randint(10, places)
    eager = loss_and_gradient(task, outputs, targets)
    compile_losses(task, train(compile="default"))
    for ours, theirs in zip(loss_and_gradient(task, outputs, targets), eager, strict=True):
        torch.testing.assert_close(ours, theirs)

    def kept() -> set[torch.dtype]:
        found: set[torch.dtype] = set()

        def note(saved: Tensor) -> Tensor:
            found.add(saved.dtype) if saved.numel() >= outputs.logits.numel() else None
            return saved

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            task.loss(outputs, (targets, targets))
        return found

    assert torch.float32 not in kept()  # only the logits as the model returns them

    with pytest.raises(UsageError, match="do not fit together"):
        loss_and_gradient(task, outputs, torch.full(places, 99))


class Odd(Task):
    """Task that lists a missing method in `compiles`."""

    compiles = ("mean",)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        raise NotImplementedError


def test_compiles_with_an_unknown_method_is_refused() -> None:
    compile_losses(Odd(), train())  # nothing is compiled
    with pytest.raises(PluginError, match=r"Odd\.compiles names `mean`, which is not a method of the task"):
        compile_losses(Odd(), train(compile="default"))
