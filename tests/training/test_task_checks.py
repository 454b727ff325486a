"""Checks of the first loss in training and in evaluation. An error in it describes the batch."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Classification
from ddpforge.errors import UsageError
from ddpforge.interfaces import Task, Total
from ddpforge.training.task_checks import CheckedTask

BATCH = (torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))


class Returning(Task):
    """Task that returns or raises `returned`, in this order."""

    def __init__(self, *returned: Any) -> None:
        self.returned = list(returned)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        found = self.returned.pop(0)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        return outputs  # type: ignore[no-any-return]


def good() -> tuple[Tensor, None]:
    return torch.ones((), requires_grad=True) * 2, None


def test_the_first_loss_of_each_use_is_checked() -> None:
    wrong = (torch.ones(3), None)
    look = CheckedTask(Returning(good(), wrong), "training")
    model = nn.Linear(2, 1)
    look.loss(model, BATCH)
    assert look.loss(model, BATCH) is wrong
    with pytest.raises(UsageError, match=r"Returning\.loss returns a loss of shape \[3\], not one number"):
        CheckedTask(Returning(wrong), "evaluation").loss(model, BATCH)


def test_an_evaluation_needs_no_gradients() -> None:
    found = CheckedTask(Returning((torch.ones(()), None)), "evaluation").loss(nn.Linear(2, 1), BATCH)
    assert found[0] == 1
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        CheckedTask(Returning((torch.ones(()), None)), "training").loss(nn.Linear(2, 1), BATCH)


def test_an_error_in_metrics_is_reported_as_a_usage_error() -> None:
    class Tops(Returning):
        def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
            raise ValueError("top11 needs at least 11 classes")

    with pytest.raises(UsageError, match=r"Tops\.metrics: top11 needs at least 11 classes"):
        CheckedTask(Tops(), "training").metrics(None, BATCH)


def test_an_error_in_the_first_forward_pass_describes_the_batch() -> None:
    look = CheckedTask(Returning(RuntimeError("mat1 and mat2"), RuntimeError("again")), "training")
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        look.loss(nn.Linear(2, 1), BATCH)
    assert caught.value.__notes__ == [
        "in the first forward pass of training (Returning.loss), with the batch (float32 [3, 2], int64 [3])"
    ]
    look = CheckedTask(Returning(RuntimeError("no attribute 'flatten'")), "training")
    with pytest.raises(RuntimeError, match="flatten") as caught:
        look.loss(nn.Linear(2, 1), [("one", "two"), BATCH[1]])
    assert caught.value.__notes__ == [
        "in the first forward pass of training (Returning.loss), with the batch (a tuple of 2 texts, int64 [3])",
        "the batch holds text; if the model receives it, make tensors of it in the dataset or its `collate(samples)`",
    ]
    look = CheckedTask(Returning(good(), RuntimeError("later")), "training")
    look.loss(nn.Linear(2, 1), BATCH)
    with pytest.raises(RuntimeError, match="later") as caught:
        look.loss(nn.Linear(2, 1), BATCH)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("softmax", [True, False])
def test_probabilities_in_place_of_logits_are_a_warning(
    softmax: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]], requires_grad=True)

    class Outputs(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return logits.softmax(1) if softmax else logits

    checked = CheckedTask(Classification(), "training")
    checked.loss(Outputs(), (torch.zeros(2, 3), torch.tensor([0, 1])))
    assert ("returns probabilities" in caplog.text) == softmax


def test_a_forward_pass_with_other_parameters_has_a_hint() -> None:
    class Masked(nn.Module):
        def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
            return inputs

    checked = CheckedTask(Classification(), "training")
    with pytest.raises(TypeError, match="mask") as caught:
        checked.loss(Masked(), (torch.zeros(2, 3), torch.tensor([0, 1])))
    assert any("passes the inputs as one argument" in note for note in caught.value.__notes__)


def test_classes_must_be_whole_numbers() -> None:
    with pytest.raises(UsageError, match="takes whole numbers as classes") as caught:
        Classification().loss(nn.Linear(2, 3), (torch.ones(2, 2), torch.zeros(2)))
    assert caught.value.hints[-1] == 'for numbers, set task.use = "regression"'
