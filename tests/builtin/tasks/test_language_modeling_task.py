"""The task `language_modeling`: token weights, ignored targets, perplexity, refusals."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddpforge.builtin.datasets.text import Text
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.tasks.language_modeling import LanguageModeling

IGNORED = -100


class OneWeight(nn.Module):
    """Logits (0, w·x) for a token x, so that the loss of target 0 has the gradient x / 2 at w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.stack([torch.zeros(tokens.shape), self.w * tokens], dim=-1)


def batch(lengths: list[int], first: int) -> tuple[Tensor, Tensor]:
    """Returns sequences of the given lengths, whose tokens count up from `first`; the rest is ignored padding."""
    tokens = torch.full((len(lengths), 8), 99)
    targets = torch.full((len(lengths), 8), IGNORED)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.arange(first, first + length)
        targets[row, :length] = 0
        first += length
    return tokens, targets


def test_tokens_have_equal_weights_for_any_split_of_a_batch() -> None:
    """Covers trap 01: 1 + 3 + 5 + 7 tokens numbered 0 to 15, as one batch or in micro-batches of uneven weight."""
    whole = [batch([1, 3, 5, 7], first=0)]
    micro = [batch([1, 3], first=0), batch([5, 7], first=4)]
    single = [batch([1], 0), batch([3], 1), batch([5], 4), batch([7], 9)]
    task = LanguageModeling()

    for batches in (whole, micro, single):
        model = OneWeight()
        count = sum(int(task.count(each)) for each in batches)
        for each in batches:
            loss, _ = task.loss(model, each)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        assert count == 16
        assert model.w.grad is not None
        assert model.w.grad.item() == pytest.approx(sum(range(16)) / 16 / 2)


def test_ignored_targets_are_neither_summed_nor_counted() -> None:
    task = LanguageModeling(ignore_index=0)
    tokens, targets = torch.ones(1, 4, dtype=torch.int64), torch.tensor([[1, 0, 1, 0]])
    loss, logits = task.loss(OneWeight(), (tokens, targets))
    assert loss.item() == pytest.approx(2 * math.log(2))
    assert logits.shape == (1, 4, 2)

    count = task.count((tokens, targets))
    assert (count.item(), count.shape, count.dtype) == (2, (), torch.int64)


def test_perplexity_and_bits_are_computed_from_the_mean_loss() -> None:
    assert LanguageModeling().finish({"loss": math.log(8), "other": 1.0}) == pytest.approx(
        {"loss": math.log(8), "other": 1.0, "perplexity": 8.0, "bits_per_token": 3.0}
    )


@pytest.mark.parametrize(("loss", "perplexity"), [(1e9, math.inf), (math.inf, math.inf), (math.nan, math.nan)])
def test_perplexity_of_a_diverged_loss_does_not_overflow(loss: float, perplexity: float) -> None:
    assert LanguageModeling().finish({"loss": loss})["perplexity"] == pytest.approx(perplexity, nan_ok=True)


def test_bits_are_per_byte_if_tokens_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100)
    model, task = GPT(layers=1, width=8, heads=1, block_size=8), LanguageModeling()
    for level, name in (("bytes", "bits_per_byte"), ("characters", "bits_per_token")):
        data = Text(path=tmp_path / "text.txt", split="train", block_size=8, level=level, seed=0)  # type: ignore[arg-type]
        task.check(model, data)
        assert task.finish({"loss": math.log(2)})[name] == 1.0


def test_error_for_data_that_exceeds_the_model_names_the_option() -> None:
    data, task = Text(split="eval", block_size=64, seed=0), LanguageModeling()
    task.check(nn.Identity(), data)
    with pytest.raises(ValueError, match=r"256 different tokens, but the model takes 100; set model.vocab_size = 256"):
        task.check(GPT(vocab_size=100, layers=1, width=8), data)
    with pytest.raises(ValueError, match=r"64 tokens per sample, but the model takes 32; set model.block_size = 64"):
        task.check(GPT(block_size=32, layers=1, width=8), data)
