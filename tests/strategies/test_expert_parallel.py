"""Expert parallelism: experts per rank, results, and refusals."""

from typing import Any

import pytest
import torch
from support.forked import Training, in_ranks, refused, train
from torch import Tensor, nn

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.moe import ExpertLayers, MoEGPT
from ddpforge.builtin.tasks.moe_language_modeling import MoELanguageModeling
from ddpforge.errors import UsageError
from ddpforge.interfaces import Pass
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.pipeline import Pipeline
from ddpforge.strategies.single import Single


class Layer(nn.Module):
    """Four experts with two channels, and a weight `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ExpertLayers(4, 2, 0.5)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, slots: Tensor) -> Tensor:
        found: Tensor = self.inner(slots) * self.scale.view(4, 1, 1)
        return found


def build() -> Layer:
    torch.manual_seed(0)
    return Layer()


def stepped(training: Training, slots: Tensor) -> float:
    """Runs a step of one pass; returns its gradient norm."""

    def compute(module: nn.Module, one: Pass) -> Any:
        one.seed()
        return module(one.batch).sum(), None

    list(training.replica.run_microbatches([Pass(batch=slots, seed=lambda: None)], compute, trains=True))
    return float(training.replica.step())


@pytest.mark.parametrize(("ranks", "experts"), [(2, 2), (4, 2)])
def test_each_rank_holds_its_experts_and_steps_equal_those_of_one_process(ranks: int, experts: int) -> None:
    """Ranks have different numbers of slots; the gradient is the mean over ranks."""
    everyone = [torch.randn(4, 2 + rank, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]

    def rank(number: int) -> Any:
        training = Training(FSDP(experts=experts), build)
        norms = [stepped(training, everyone[number]) for _ in range(2)]
        parts = training.replica.weights.shards()
        held = {name: (part.shape, part.tensor.numel(), part.replicas) for name, part in parts.items()}
        up = parts["inner.up"]
        return norms, held, (up.region.start, up.tensor.flatten().tolist())

    def alone(_: int) -> Any:
        training = Training(Single(), build)
        norms = []
        for _ in range(2):
            for slots in everyone:
                training.replica.backward(training.model(slots).sum() / ranks)
            norms.append(float(training.replica.step()))
        return norms, training.model.inner.up.detach().flatten()

    ((norms, up),) = in_ranks(1, alone)
    for found, held, (start, values) in in_ranks(ranks, rank):
        assert found == pytest.approx(norms, rel=1e-5)
        assert held["inner.up"] == ((4, 2, 8), 64 // ranks, 1)
        assert held["inner.down"] == ((4, 8, 2), 64 // ranks, 1)
        torch.testing.assert_close(torch.tensor(values), up[start : start + 64 // ranks])


# ---------------------------------------------------------------------------------------------- refusals
def moe(experts: int = 4) -> MoEGPT:
    return MoEGPT(vocab_size=16, block_size=8, layers=1, heads=1, width=4, experts=experts)


def test_models_without_experts_or_with_too_few_are_refused_before_ranks_join() -> None:
    task = MoELanguageModeling()
    FSDP(experts=2).check(moe(), task, ())
    message = refused(UsageError, lambda: FSDP(experts=2).check(GPT(width=4, heads=1, layers=1), task, ()))
    assert message.startswith("strategy.experts = 2 spreads experts over ranks, but GPT has no such experts")
    message = refused(UsageError, lambda: FSDP(experts=3).check(moe(), task, ()))
    assert message == "strategy.experts = 3 does not divide the 4 experts of a layer | use one of 1, 2, 4"
    message = refused(UsageError, lambda: FSDP(context=2).check(moe(), task, ()))
    assert "the experts of MoEGPT need whole sequences" in message
    message = refused(UsageError, lambda: FSDP(tensor=2).check(moe(), task, ()))
    assert message.startswith("strategy.tensor = 2 needs a plan for cutting layers, but MoEGPT has none")
    message = refused(UsageError, lambda: Pipeline().check(moe(), task, ()))
    assert message.startswith("MoEGPT does not declare the steps of its forward pass")


@pytest.mark.parametrize(
    ("strategy", "options", "key", "says"),
    [
        (FSDP(experts=3), {}, "strategy.experts", "does not divide the 4 ranks"),
        (FSDP(experts=2, replicas=2), {}, "strategy.replicas", "do not work together"),
        (FSDP(experts=2, context=2), {}, "strategy.context", "do not work together"),
        (FSDP(experts=2, tensor=2), {}, "strategy.tensor", "do not work together"),
        (FSDP(experts=2), {"compile": "default"}, "train.compile", "within a layer, which cannot be compiled"),
    ],
)
def test_incompatible_settings_are_refused(strategy: FSDP, options: Any, key: str, says: str) -> None:
    (refusal,) = strategy.unsupported(train(**options), 4, "cpu")
    assert refusal.key == key
    assert says in refusal.message
