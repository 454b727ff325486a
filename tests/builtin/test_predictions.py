"""Predictions of each task: one row per sample, computed by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.contrastive import Contrastive
from ddpforge.builtin.tasks.diffusion import Diffusion
from ddpforge.builtin.tasks.gan import Adversarial
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.multilabel import Multilabel
from ddpforge.builtin.tasks.regression import Regression
from ddpforge.builtin.tasks.segmentation import Segmentation
from ddpforge.builtin.tasks.sequence_classification import SequenceClassification
from ddpforge.errors import UsageError
from ddpforge.interfaces import Task


class Gives(nn.Module):
    """Returns the same output for any input."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any) -> Any:
        return self.output


LOGITS = torch.tensor([[0.0, 1.0986123], [1.0986123, 0.0]])  # ln 3: probabilities 1/4 and 3/4
INPUTS = torch.zeros(2, 3)


def predicted(task: Task, output: Any, batch: Any) -> dict[str, Any]:
    columns = task.predict(Gives(output), batch)
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in columns.items()}


@pytest.mark.parametrize("task", [Classification(), SequenceClassification()])
def test_classification_predicts_classes_and_probabilities(task: Task) -> None:
    inputs = INPUTS.long()
    chosen = {"class": [1, 0], "probability": pytest.approx([0.75, 0.75])}
    assert predicted(task, LOGITS, inputs) == chosen  # data without classes
    assert predicted(task, LOGITS, (inputs, torch.tensor([0, 0]))) == chosen | {"target": [0, 0]}


def test_multilabel_regression_and_segmentation_predictions() -> None:
    labels = predicted(Multilabel(), LOGITS - 0.5, INPUTS)
    assert labels["labels"] == [[0, 1], [1, 0]]
    assert labels["probability"][0] == pytest.approx([0.37754, 0.64534], abs=1e-5)
    batch = (INPUTS, torch.tensor([3.0, 4.0]))
    assert predicted(Regression(), torch.tensor([[1.0], [2.0]]), batch) == {"prediction": [1, 2], "target": [3, 4]}
    pixels = torch.zeros(2, 3, 1, 2)
    pixels[0, 2], pixels[1, 1] = 1, 1
    assert predicted(Segmentation(), pixels, INPUTS) == {"classes": [[[2, 2]], [[1, 1]]]}


def test_language_models_predict_losses_of_tokens_that_count() -> None:
    targets = torch.tensor([[1, -100], [1, 0]])
    found = predicted(LanguageModeling(), LOGITS.expand(2, 2, 2), (targets, targets))
    assert found["tokens"] == [1, 2]
    assert found["losses"] == [pytest.approx([0.28768, 0], abs=1e-5), pytest.approx([0.28768, 0.28768], abs=1e-5)]
    assert found["loss"] == pytest.approx([0.28768, 0.28768], abs=1e-5)

    masked = predicted(MaskedLM(mask_token=1, mlm_probability=0.5), torch.zeros(2, 4, 5), torch.zeros(2, 4).long())
    assert masked["tokens"] == [2, 2]
    assert masked["loss"] == pytest.approx([1.60944, 1.60944], abs=1e-5)  # ln 5
    assert [sum(loss > 0 for loss in row) for row in masked["losses"]] == [2, 2]


def test_contrastive_embeddings_have_unit_length() -> None:
    found = predicted(Contrastive(), torch.tensor([[3.0, 4.0], [0.0, 2.0]]), (INPUTS, INPUTS))
    assert found["embedding"] == [pytest.approx([0.6, 0.8]), [0.0, 1.0]]


def test_task_without_predict_returns_its_outputs() -> None:
    class Doubles(Task):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            return torch.zeros(()), model(batch)

    assert predicted(Doubles(), LOGITS, INPUTS) == {"output": LOGITS.tolist()}
    assert predicted(Doubles(), {"a": LOGITS}, INPUTS) == {"a": LOGITS.tolist()}


@pytest.mark.parametrize(
    ("task", "way"), [(Diffusion(), "sample(ddpforge.load(RUN)"), (Adversarial(latent=7), "torch.randn(16, 7)")]
)
def test_generative_tasks_refuse_to_predict(task: Task, way: str) -> None:
    with pytest.raises(UsageError, match="cannot predict") as refusal:
        task.predict(Gives(None), INPUTS)
    assert way in refusal.value.hints[0]
