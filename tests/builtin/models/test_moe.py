"""Tokens go to their most probable experts up to the capacity; each sequence is routed separately."""

import pytest
import torch
from torch import Tensor, nn

from ddpforge.builtin.models.moe import Mixture, MoEGPT
from ddpforge.builtin.tasks.moe_language_modeling import MoELanguageModeling
from ddpforge.errors import UsageError


def mixture(capacity: float, active: int = 1) -> Mixture:
    """Returns two experts of one channel: times 2 and times 10. x > 0 goes to the first."""
    layer = Mixture(1, 0.0, 1.0, experts=2, top_k=active, capacity=capacity)
    layer.router.weight.data = torch.tensor([[5.0], [-5.0]])

    def compute(slots: Tensor) -> Tensor:
        return slots * torch.tensor([2.0, 10.0]).view(2, 1, 1)

    layer.experts._compute = compute  # type: ignore[method-assign]
    return layer


def test_token_goes_to_its_most_probable_expert() -> None:
    x = torch.tensor([[[1.0], [-1.0], [2.0], [-2.0]]])
    mixed, usage = mixture(capacity=1.0)(x)
    assert mixed.flatten().tolist() == [2.0, -10.0, 4.0, -20.0]
    assert usage[0].tolist() == pytest.approx([1.0, 0.0], abs=1e-4)  # even, and nothing dropped


def test_top_2_experts_are_weighted_by_probability() -> None:
    x = torch.full((1, 1, 1), 0.1)
    mixed, _ = mixture(capacity=2.0, active=2)(x)
    first = torch.tensor([0.5, -0.5]).softmax(0)[0].item()
    assert mixed.item() == pytest.approx(0.1 * (2 * first + 10 * (1 - first)))


def test_tokens_beyond_the_capacity_are_dropped_in_order_and_counted() -> None:
    x = torch.tensor([[[1.0], [2.0], [3.0], [-1.0]], [[1.0], [-1.0], [2.0], [-2.0]]])
    mixed, usage = mixture(capacity=1.0)(x)  # a capacity of two tokens per expert and sequence
    assert mixed.flatten(1).tolist() == [[2.0, 4.0, 0.0, -10.0], [2.0, -10.0, 4.0, -20.0]]
    assert usage[:, 1].tolist() == [0.25, 0.0]
    assert usage[0, 0].item() == pytest.approx(2 * (0.75 * 0.75 + 0.25 * 0.25), rel=1e-3)


def gpt(**options: int) -> MoEGPT:
    torch.manual_seed(0)
    return MoEGPT(vocab_size=16, block_size=8, layers=2, heads=2, width=16, experts=4, capacity_factor=1.0, **options)


def test_moe_is_causal_and_sequences_are_independent() -> None:
    model, tokens = gpt(), torch.randint(16, (3, 8))
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 16
    whole = model(tokens)
    assert torch.equal(whole.logits[:, :5], model(other).logits[:, :5])
    torch.testing.assert_close(whole.logits[1:2], model(tokens[1:2]).logits)
    torch.testing.assert_close(whole.balance[1:2], model(tokens[1:2]).balance)
    assert 0 < whole.dropped.mean() < 0.5


def test_batch_loss_is_the_sum_of_its_sequences_with_balance_weighted_by_targets() -> None:
    task, model = MoELanguageModeling(aux_loss_weight=0.5), gpt()
    tokens = torch.randint(16, (4, 8))
    targets = torch.where(torch.arange(8) < torch.tensor([[8], [3], [5], [1]]), tokens.roll(-1, 1), -100)
    loss, outputs = task.loss(model, (tokens, targets))
    parts = [task.loss(model, (tokens[i : i + 1], targets[i : i + 1]))[0].item() for i in range(4)]
    assert loss.item() == pytest.approx(sum(parts), rel=1e-6)
    balance = (outputs.balance * torch.tensor([8.0, 3.0, 5.0, 1.0])).sum()
    assert loss.item() == pytest.approx((outputs.cross_entropy + 0.5 * balance).item())
    found = {name: (total.sum / total.count).item() for name, total in task.metrics(outputs, (tokens, targets)).items()}
    finished = task.finish({"loss": loss.item() / 17, **found})
    assert finished["loss"] == pytest.approx(found["cross_entropy"] + 0.5 * found["balance"])
    assert finished["perplexity"] == pytest.approx(torch.tensor(found["cross_entropy"]).exp().item())


def test_model_without_experts_and_too_large_top_k_are_refused() -> None:
    with pytest.raises(UsageError, match="Linear does not return `balance` and `dropped`"):
        MoELanguageModeling().loss(nn.Linear(8, 8), (torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int64)))
    with pytest.raises(ValueError, match="top_k = 4 is not less than experts = 4"):
        gpt(top_k=4)
