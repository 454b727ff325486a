"""The tasks `masked_lm` and `sequence_classification`: masks, losses, batches, refusals."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.datasets.text import TextClasses
from ddpforge.builtin.metrics.classification import Accuracy
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.sequence_classification import SequenceClassification
from ddpforge.errors import UsageError

TOKENS = torch.randint(16, (5, 20), generator=torch.Generator().manual_seed(0))
MASK = 16


class Guesses(nn.Module):
    """Stores its input tokens; returns zero logits, in the form of transformers if called with keywords."""

    vocab_size = 17

    def forward(self, tokens: Any = None, *, input_ids: Any = None, attention_mask: Any = None) -> Any:
        self.shown = tokens if input_ids is None else input_ids
        logits = torch.zeros(*self.shown.shape, 17)
        return logits if input_ids is None else SimpleNamespace(logits=logits)


def test_mlm_probability_is_the_share_of_masked_tokens_per_sample() -> None:
    model, task = Guesses(), MaskedLM(mask_token=MASK, mlm_probability=0.25, keep=0)
    loss, (_, targets) = task.loss(model, TOKENS)
    chosen = targets != -100
    assert chosen.sum(dim=1).tolist() == [5] * 5
    assert torch.equal(model.shown, TOKENS.masked_fill(chosen, MASK))
    assert torch.equal(targets[chosen], TOKENS[chosen])
    assert task.count(TOKENS) == 25
    assert loss.item() == pytest.approx(25 * math.log(17))


def test_keep_is_the_share_of_chosen_tokens_that_stay_unmasked() -> None:
    torch.manual_seed(0)
    model, task = Guesses(), MaskedLM(mask_token=MASK, mlm_probability=0.5, keep=0.2)
    tokens = torch.zeros(100, 100, dtype=torch.int64)
    _, (_, targets) = task.loss(model, tokens)
    hidden = (model.shown == MASK).sum().item()
    assert (targets != -100).sum() == 5000
    assert hidden == pytest.approx(4000, abs=4 * math.sqrt(5000 * 0.2 * 0.8))


def test_padding_is_never_chosen_and_every_sample_has_a_chosen_token() -> None:
    mask = (torch.arange(20) < torch.tensor([[1], [2], [10], [19], [20]])).long()
    batch = {"input_ids": TOKENS, "attention_mask": mask}
    task = MaskedLM(mask_token=MASK, mlm_probability=0.2)
    _, (_, targets) = task.loss(Guesses(), batch)
    assert (targets != -100).sum(dim=1).tolist() == [1, 1, 2, 4, 4]
    assert not ((targets != -100) & (mask == 0)).any()
    assert task.count(batch) == 12


def test_metrics_count_only_chosen_tokens() -> None:
    task = MaskedLM(mask_token=MASK, mlm_probability=0.25, metrics=[Accuracy()])
    targets = TOKENS.masked_fill(torch.arange(20) >= 5, -100)
    found = task.metrics((F.one_hot(TOKENS, 17).float(), targets), TOKENS)["accuracy"]
    assert (float(found.sum), int(found.count)) == (25.0, 25)
    assert task.finish({"loss": math.log(3)})["perplexity"] == pytest.approx(3)


def test_mask_token_outside_the_vocabulary_is_refused() -> None:
    task = MaskedLM(mask_token=MASK)
    task.check(Guesses(), [])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"mask_token = 16 is not among the model's 16 tokens; set model.vocab_size = 17"
    ):
        task.check(GPT(vocab_size=16, layers=1, heads=1, width=4), [])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"masked_lm takes tokens \[B, T\]"):
        task.loss(Guesses(), torch.zeros(2, 3))


# ---------------------------------------------------------------------------------------------- classes
class Counts(nn.Module):
    """Logits of two classes: the number of tokens 0, and the number of tokens 1."""

    def forward(self, tokens: Tensor | None = None, **more: Any) -> Any:
        shown = more["input_ids"] * more["attention_mask"] if tokens is None else tokens
        logits = torch.stack([(shown == value).sum(dim=1).float() for value in (0, 1)], dim=1)
        return logits if tokens is not None else SimpleNamespace(logits=logits)


def test_tuple_and_dict_batches_have_the_same_loss() -> None:
    tokens, classes = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([1, 0])
    task = SequenceClassification(metrics=[Accuracy()])
    loss, logits = task.loss(Counts(), (tokens, classes))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3)))
    whole = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": classes}
    assert torch.equal(task.loss(Counts(), whole)[0], loss)
    for batch in ((tokens, classes), whole):
        assert float(task.metrics(logits, batch)["accuracy"].sum) == 1


def test_model_with_too_few_classes_or_positions_is_refused() -> None:
    data = TextClasses(split="eval", block_size=64)
    task = SequenceClassification()
    task.check(GPT(classes=10, block_size=64, layers=1, heads=1, width=4), data)
    for options, complaint in (
        ({"classes": 9}, "the data has 10 classes and the model 9 outputs"),
        ({"classes": 10, "block_size": 63}, "64 tokens per sample, but the model takes 63; set model.block_size = 64"),
    ):
        model = GPT(**{"block_size": 64, "layers": 1, "heads": 1, "width": 4, **options})  # type: ignore[arg-type]
        with pytest.raises((UsageError, ValueError), match=complaint):
            task.check(model, data)
