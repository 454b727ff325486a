"""Label smoothing of every task with a cross-entropy equals that of torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.segmentation import Segmentation
from ddpforge.builtin.tasks.sequence_classification import SequenceClassification

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(9, (4, 6), generator=GENERATOR)
TARGETS = torch.randint(9, (4, 6), generator=GENERATOR).index_put(
    (torch.tensor(1), torch.tensor(2)), torch.tensor(-100)
)


class Scores(nn.Module):
    """Returns fixed logits."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(*shape, generator=GENERATOR))

    def forward(self, inputs: Any) -> Tensor:
        return self.scores


def expected(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2, **options)


def test_language_modeling() -> None:
    task, model = LanguageModeling(label_smoothing=0.2), Scores(4, 6, 9)
    loss, logits = task.loss(model, (TOKENS, TARGETS))
    torch.testing.assert_close(loss, expected(model.scores.flatten(0, 1), TARGETS.flatten()))
    assert logits is model.scores
    assert task.finish({"loss": 1.0}) == {"loss": 1.0}, "a smoothed loss has no perplexity"
    assert not task.takes_split_logits
    assert LanguageModeling().takes_split_logits


def test_masked_lm() -> None:
    task, model = MaskedLM(mask_token=0, label_smoothing=0.2), Scores(4, 6, 9)
    loss, (_, targets) = task.loss(model, TOKENS)
    torch.testing.assert_close(loss, expected(model.scores.flatten(0, 1), targets.flatten()))
    assert task.finish({"loss": 1.0}) == {"loss": 1.0}


def test_segmentation() -> None:
    task, model = Segmentation(label_smoothing=0.2), Scores(2, 3, 4, 4)
    classes = torch.randint(3, (2, 4, 4), generator=GENERATOR)
    classes[0, 0] = 255
    loss, _ = task.loss(model, (torch.zeros(2, 1, 4, 4), classes))
    torch.testing.assert_close(loss, expected(model.scores, classes, ignore_index=255))


def test_sequence_classification() -> None:
    task, model = SequenceClassification(label_smoothing=0.2), Scores(4, 3)
    classes = torch.tensor([0, 1, 2, 0])
    loss, _ = task.loss(model, (TOKENS, classes))
    torch.testing.assert_close(loss, expected(model.scores, classes))
