"""The task `distillation`: loss, temperature, teacher."""

import math

import pytest
import torch
from torch import nn

from ddpforge.builtin.metrics.classification import Accuracy
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.distillation import Distillation

BATCH = (torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]]), torch.tensor([1, 1]))  # probabilities 1/4, 3/4


class Swapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


def test_loss_mixes_true_classes_and_teacher_probabilities() -> None:
    """Expects KL((3/4, 1/4) ‖ (1/4, 3/4)) = 1/2 ln 3 for each sample."""
    teacher = Distillation(teacher=Swapped(), temperature=1.0, alpha=1.0)
    assert teacher.loss(nn.Identity(), BATCH)[0].item() == pytest.approx(math.log(3))
    true = Classification().loss(nn.Identity(), BATCH)[0].item()
    assert Distillation(teacher=Swapped(), alpha=0.0).loss(nn.Identity(), BATCH)[0].item() == pytest.approx(true)
    both = Distillation(teacher=Swapped(), temperature=1.0, alpha=0.25).loss(nn.Identity(), BATCH)[0].item()
    assert both == pytest.approx(0.75 * true + 0.25 * math.log(3))


def test_temperature_divides_logits_and_its_square_scales_the_loss() -> None:
    """Uses a temperature of log2(3), at which odds of 3 become odds of 2."""
    heat = math.log(3) / math.log(2)  # logits of ln 2: probabilities 1/3, 2/3
    loss, _ = Distillation(teacher=Swapped(), temperature=heat, alpha=1.0).loss(nn.Identity(), BATCH)
    assert loss.item() == pytest.approx(heat**2 * 2 * (2 / 3 - 1 / 3) * math.log(2))


def test_teacher_is_an_auxiliary_module_and_metrics_are_those_of_classification() -> None:
    teacher = nn.Linear(2, 2)
    task = Distillation(teacher=teacher, weights="runs/big", metrics=[Accuracy()])
    declared = task.auxiliary_modules(nn.Identity())["teacher"]
    assert (declared.module, declared.weights, declared.is_saved) == (teacher, "runs/big", False)
    assert task.metrics(BATCH[0], BATCH)["accuracy"].sum.item() == 1


def test_teacher_with_other_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the teacher returns \[2, 3\] for a batch, but the model returns \[2, 2\]"):
        Distillation(teacher=nn.Linear(2, 3)).loss(nn.Identity(), BATCH)
