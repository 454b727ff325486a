"""Context parallelism: attention over the whole sequence, positions of each rank, and refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.doubles import Elsewhere
from support.forked import in_ranks, refused, train
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.mlp import MLP
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.errors import UsageError
from ddpforge.interfaces import Pass
from ddpforge.ranks.collectives import ProcessGroup
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.fsdp.context_parallel import ContextParallel


def attended(causal: bool) -> tuple[Tensor, ...]:
    """Computes attention over 12 positions in one process; returns inputs, result, and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 3, 12, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mixed = scaled_dot_product_attention(q, k, v, is_causal=causal)
    mixed.backward(gradient)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return q.detach(), k.detach(), v.detach(), gradient, mixed.detach(), q.grad, k.grad, v.grad


# ---------------------------------------------------------------------------------------------- attention
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_and_its_gradients_equal_those_of_the_whole_sequence(ranks: int) -> None:
    def rank(number: int) -> Any:
        dist.init_process_group("gloo")
        cut = ContextParallel(ProcessGroup(dist.group.WORLD))  # type: ignore[arg-type]
        worst = []
        for causal in (True, False):
            whole = attended(causal)
            mine = [cut.local_batch(tensor.transpose(1, 2)).transpose(1, 2) for tensor in whole]
            q, k, v = (tensor.clone().requires_grad_() for tensor in mine[:3])
            mixed = cut.attention(q, k, v, causal=causal)
            mixed.backward(mine[3])
            found: Any = (mixed.detach(), q.grad, k.grad, v.grad)
            worst.append(max((a - b).abs().max().item() for a, b in zip(found, mine[4:], strict=True)))
        return worst

    for worst in in_ranks(ranks, rank):
        assert max(worst) < 1e-13


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_has_the_dropout_of_the_model(monkeypatch: pytest.MonkeyPatch, causal: bool, dropout: float) -> None:
    used: list[float] = []

    def attend(q: Tensor, *_: Any, dropout_p: float = 0.0, **__: Any) -> Tensor:
        used.append(dropout_p)
        return q

    cut = ContextParallel(Elsewhere(1))
    monkeypatch.setattr(cut, "_whole", lambda both: both)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    q = torch.zeros(1, 1, 4, 2)
    cut.attention(q, q, q, causal=causal, dropout=dropout)
    assert set(used) == {dropout}


def test_positions_are_split_once_with_equal_attention_cost() -> None:
    cuts = [ContextParallel(Elsewhere(4, rank)) for rank in range(4)]
    positions = [cut.positions(4, torch.device("cpu")).tolist() for cut in cuts]
    assert positions == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert {sum(position + 1 for position in mine) for mine in positions} == {34}
    batch = {"tokens": torch.arange(16).repeat(2, 1), "more": [torch.arange(32).reshape(1, 16, 2)], "name": "x"}
    own = cuts[1].local_batch(batch)
    assert own["tokens"].tolist() == [[2, 3, 12, 13]] * 2
    assert own["more"][0][0, :, 0].tolist() == [4, 6, 24, 26]
    assert own["name"] == "x"
    assert cuts[1].length(4) == 16


def test_ranks_use_different_random_numbers() -> None:
    seeds = []
    for rank in range(3):
        ContextParallel(Elsewhere(3, rank)).seed(
            Pass(batch=None, seed=lambda: torch.default_generator.manual_seed(5) and None)
        )
        seeds.append(torch.initial_seed())
    assert seeds[0] == 5
    assert len({*seeds}) == 3


# ---------------------------------------------------------------------------------------------- refusals
class Sequences:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


def gpt() -> GPT:
    return GPT(vocab_size=16, block_size=16, layers=1, heads=1, width=4)


def test_model_and_task_are_checked_before_ranks_join() -> None:
    task = LanguageModeling()
    FSDP(context=2).check(gpt(), task, ())
    FSDP().check(MLP(inputs=4, outputs=2), task, ())
    cases: list[tuple[nn.Module, Any, str]] = [
        (MLP(inputs=4, outputs=2), task, "the attention of MLP does not support that"),
        (gpt(), MaskedLM(mask_token=15), "MaskedLM does not declare that its loss is a sum over posit"),
    ]
    for model, asked, says in cases:
        message = refused(UsageError, lambda m=model, a=asked: FSDP(context=2).check(m, a, ()))
        assert message.startswith("strategy.context = 2 cuts ")
        assert says in message

    FSDP(context=2).check_data(Sequences(16))
    FSDP().check_data(Sequences(15))
    message = refused(UsageError, lambda: FSDP(context=2).check_data(Sequences(14)))
    assert "into 4 chunks, which does not divide its length, 14 | give sequences 16 tokens" in message


def test_batches_that_cannot_be_split_are_refused_with_their_shapes() -> None:
    cut = ContextParallel(Elsewhere(2, 0))
    message = refused(UsageError, lambda: cut.local_batch((torch.zeros(2, 8), torch.zeros(2))))
    assert "a batch has a tensor of shape [2], not [B, T, …]" in message
    message = refused(UsageError, lambda: cut.local_batch((torch.zeros(2, 8), torch.zeros(2, 4))))
    assert "a batch has tensors of 2 lengths: 4, 8" in message
    assert "which does not divide its length, 6" in refused(UsageError, lambda: cut.local_batch([torch.zeros(2, 6)]))


@pytest.mark.parametrize(
    ("options", "ranks", "key", "says"),
    [
        ({}, 3, "strategy.context", "strategy.context = 2 does not divide the 3 ranks"),
        ({"compile": "default"}, 2, "train.compile", "within attention, which cannot be compiled"),
    ],
)
def test_incompatible_settings_are_refused(options: Any, ranks: int, key: str, says: str) -> None:
    (refusal,) = FSDP(context=2).unsupported(train(**options), ranks, "cpu")
    assert refusal.key == key
    assert says in refusal.message
    assert FSDP(context=2).data_ranks(4) == 2
