"""Label smoothing of every task with a cross-entropy equals that of torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.models.gpt import GPT
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


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("z_loss", [None, 0.3])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_smoothing_ignored_targets_and_z_loss_together_are_the_sum_of_their_formulas(
    ignored: int, smoothing: float, z_loss: float | None, chunk: int | None
) -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=7, block_size=8, layers=1, heads=1, width=8)
    tokens, targets = torch.randint(7, (2, 2, 8))
    targets[0, :3] = ignored
    task = LanguageModeling(label_smoothing=smoothing, ignore_index=ignored, z_loss=z_loss, loss_chunk=chunk)
    loss, _ = task.loss(model, (tokens, targets))
    logits = model(tokens).float().flatten(0, 1)
    flat, counts = targets.flatten(), (targets != ignored).flatten()
    true = logits.log_softmax(-1).gather(1, flat.where(counts, 0)[:, None])[:, 0]
    rows = -(1 - smoothing) * true - smoothing * logits.log_softmax(-1).mean(-1)
    rows = rows + (z_loss or 0.0) * logits.logsumexp(-1).square()
    assert loss.item() == pytest.approx(rows[counts].sum().item(), rel=1e-5)
    assert task.count((tokens, targets)) == counts.sum()
