"""The first loss of each use is looked at closely, later ones are not; an error in it says what was given."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import UsageError
from ddpforge.interfaces import Task, Total
from ddpforge.training.first_look import FirstLook

BATCH = (torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))


class Returning(Task):
    """Returns what it is told to, in this order."""

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


def test_each_use_is_looked_at_once() -> None:
    wrong = (torch.ones(3), None)
    look = FirstLook(Returning(good(), wrong, wrong))
    model = nn.Linear(2, 1)
    look.loss(model, BATCH, "training")
    assert look.loss(model, BATCH, "training") is wrong
    with pytest.raises(UsageError, match=r"Returning\.loss returns a loss of shape \[3\], not one number"):
        look.loss(model, BATCH, "evaluation")


def test_an_evaluation_needs_no_gradients() -> None:
    found = FirstLook(Returning((torch.ones(()), None))).loss(nn.Linear(2, 1), BATCH, "evaluation")
    assert found[0] == 1
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        FirstLook(Returning((torch.ones(()), None))).loss(nn.Linear(2, 1), BATCH, "training")


def test_a_metric_that_cannot_take_the_outputs_says_so_in_words() -> None:
    class Tops(Returning):
        def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
            raise ValueError("top11 needs at least 11 classes")

    with pytest.raises(UsageError, match=r"Tops\.metrics: top11 needs at least 11 classes"):
        FirstLook(Tops()).metrics(None, BATCH, "training")


def test_an_error_of_the_model_says_which_batch_it_was_given() -> None:
    look = FirstLook(Returning(RuntimeError("mat1 and mat2"), RuntimeError("again")))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        look.loss(nn.Linear(2, 1), BATCH, "training")
    assert caught.value.__notes__ == [
        "in the first forward pass of training (Returning.loss), of a batch of a tuple (float32 [3, 2], int64 [3])"
    ]
    look = FirstLook(Returning(RuntimeError("no attribute 'flatten'")))
    with pytest.raises(RuntimeError, match="flatten") as caught:
        look.loss(nn.Linear(2, 1), [("one", "two"), BATCH[1]], "training")
    assert caught.value.__notes__ == [
        "in the first forward pass of training (Returning.loss), of a batch of a list (a tuple of 2 texts, int64 [3])",
        "the batch holds text; if the model was given it, make tensors of it in the dataset or its `collate(samples)`",
    ]
    look = FirstLook(Returning(good(), RuntimeError("later")))
    look.loss(nn.Linear(2, 1), BATCH, "training")
    with pytest.raises(RuntimeError, match="later") as caught:
        look.loss(nn.Linear(2, 1), BATCH, "training")
    assert not hasattr(caught.value, "__notes__")
