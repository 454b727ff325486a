"""Tensor parallelism: results of one process, and the predicted number of elements per rank."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.forked import Training, in_ranks, refused, set_up, train
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.errors import StrategyError, UsageError
from ddpforge.features.activation_checkpointing import checkpointed
from ddpforge.interfaces import Pass, Strategy
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.training.contract import contract_of, count_parameters, verify_contract

VOCABULARY = 31  # two ranks cannot share it equally
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "block_size": 16, "layers": 2, "heads": 4, "width": 32}


class Run:
    """Small GPT that trains on steps of 8 sequences, in micro-batches of 2 per rank. Some targets do not count."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        optimizer: Any = None,
        sizes: Any = None,
        dtype: torch.dtype = torch.float32,
        task: type[LanguageModeling] = LanguageModeling,
        **options: Any,
    ) -> None:
        settings: Any = {"clip_norm": 0.5, "global_batch": 8} | options
        self.world, self.strategy, self.task = set_up(strategy, **settings), strategy, task()
        torch.manual_seed(1)
        with strategy.init_context():
            model = GPT(**SIZES | (sizes or {})).to(dtype)
        size = count_parameters(model)
        strategy.check(model, self.task, list(model.blocks))
        model = strategy.wrap(model, list(model.blocks))
        self.model, self.step = model, 0
        self.replica = strategy.prepare(model, (optimizer or (lambda p: AdamW(p, lr=1e-2)))(model.parameters()))
        verify_contract(contract_of(strategy), type(strategy).__name__, self.world, self.replica.weights, size)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (8, 16), generator=generator)
        uncounted = torch.rand(8, 16, generator=generator) < torch.arange(8)[:, None] / 8
        return tokens, tokens.roll(-1, 1).masked_fill(uncounted, -100)

    def _passes(self, step: int) -> tuple[list[Pass], int]:
        data = self.world.dp_ranks
        batch = self.batch(step)
        items = int((batch[1] != -100).sum())
        mine = zip(*(part.chunk(data.size)[data.rank].split(2) for part in batch), strict=True)
        found = list(mine)
        return [
            Pass(
                batch=self.replica.local_batch(micro),
                seed=lambda n=n: torch.manual_seed(100 * step + n),  # type: ignore[misc]
                scale=lambda: data.size / items,
                last=n == len(found) - 1,
            )
            for n, micro in enumerate(found)
        ], items

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Trains the next steps; returns loss and gradient norm of each."""
        found = []
        for _ in range(steps):
            self.step += 1
            loss = self.loss(self.step, trains=True)
            found.append((loss, float(self.replica.step())))
        return found

    def loss(self, step: int, *, trains: bool = False) -> float:
        passes, items = self._passes(step)

        def compute(model: nn.Module, one: Pass) -> tuple[Tensor, Any]:
            one.seed()
            return self.task.loss(model, one.batch)

        results = self.replica.run_microbatches(passes, compute, trains=trains)
        total = sum((result[0].detach().double() for result in results if result), torch.zeros((), dtype=torch.float64))
        same = self.world.global_ranks.size / self.world.dp_ranks.size  # ranks with the same samples
        return float(self.world.global_ranks.all_reduce_sum(total)) / same / items

    def held(self) -> int:
        return sum(part.tensor.numel() for part in self.replica.weights.shards().values())


def worst(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Returns the largest relative difference of losses and norms."""
    return max(abs(a - b) / abs(b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def curve(strategy: Callable[[], Strategy], ranks: int, steps: int, **options: Any) -> list[Any]:
    """Returns the results of each rank."""
    return in_ranks(ranks, lambda _: Run(strategy(), **options).train(steps))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return curve(DDP, 1, 8)[0]


# ---------------------------------------------------------------------------------------------- loss curve
SAME = [
    (2, {"sequence_parallel": True, "loss_parallel": True}),
    (4, {"sequence_parallel": True, "no_sync": True}),
    pytest.param(2, {}, marks=pytest.mark.full),
    pytest.param(2, {"sequence_parallel": True}, marks=pytest.mark.full),
    pytest.param(2, {"loss_parallel": True}, marks=pytest.mark.full),
    pytest.param(2, {"reshard_after_forward": False}, marks=pytest.mark.full),
    pytest.param(4, {"loss_parallel": True}, marks=pytest.mark.full),
    pytest.param(4, {"replicas": 2}, marks=pytest.mark.full),
    pytest.param(4, {"replicas": 2, "sequence_parallel": True, "loss_parallel": True}, marks=pytest.mark.full),
    pytest.param(4, {"tensor": 4}, marks=pytest.mark.full),
    pytest.param(4, {"context": 2, "sequence_parallel": True, "loss_parallel": True}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("ranks", "options"), SAME, ids=str)
def test_losses_and_norms_equal_those_of_one_process(ranks: int, options: Any, expected: list[Any]) -> None:
    for found in curve(lambda: FSDP(**{"tensor": 2} | options), ranks, 8):
        assert worst(found, expected) < 1e-5


def momentum(weights: Any) -> SGD:
    return SGD(weights, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({"meta": True}, {"sizes": {"tie_embeddings": False, "bias": False}, "optimizer": momentum}),
        pytest.param({"meta": True, "loss_parallel": True}, {}, marks=pytest.mark.full),
        pytest.param({}, {"optimizer": momentum}, marks=pytest.mark.full),
    ],
    ids=["untied, on meta", "vocabulary, on meta", "momentum"],
)
def test_other_models_and_options_equal_one_process(strategy: Any, options: Any) -> None:
    (one,) = curve(DDP, 1, 3, **options)
    for found in curve(lambda: FSDP(tensor=2, sequence_parallel=True, **strategy), 2, 3, **options):
        assert worst(found, one) < 1e-5


class Exact(LanguageModeling):
    """Computes the loss in the model's own precision."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="sum"), logits


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "loss_parallel": True}], ids=str
)
def test_results_in_float64_differ_only_by_rounding(options: Any) -> None:
    """20 steps in float64 would show the error of a wrong formula."""
    sizes: Any = {"dtype": torch.float64, "task": Exact}
    (one,) = curve(DDP, 1, 20, **sizes)
    for found in curve(lambda: FSDP(tensor=2, **options), 2, 20, **sizes):
        assert worst(found, one) < 1e-12


def test_a_classifier_averages_over_the_whole_sequence() -> None:
    """For `gpt` with classes, the sequence is gathered before the mean over it."""

    def rank(_: int, strategy: Strategy) -> Any:
        training = Training(strategy, lambda: GPT(**SIZES, classes=3), lambda w: SGD(w, lr=0.1))
        return [training.step(torch.arange(32).view(2, 16) % VOCABULARY) for _ in range(3)]

    (expected,) = in_ranks(1, lambda number: rank(number, DDP()))
    assert (
        in_ranks(2, lambda number: rank(number, FSDP(tensor=2, sequence_parallel=True)))
        == [pytest.approx(expected, rel=1e-5)] * 2
    )


@pytest.mark.parametrize(("precision", "close"), [("bf16", 5e-3), pytest.param("fp16", 2e-3, marks=pytest.mark.full)])
def test_losses_in_low_precision_differ_by_its_rounding(precision: str, close: float) -> None:
    (one,) = curve(DDP, 1, 3, precision=precision)
    for found in curve(lambda: FSDP(tensor=2, sequence_parallel=True, loss_parallel=True), 2, 3, precision=precision):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in one], rel=close)


# ---------------------------------------------------------------------------------------------- elements per rank
def elements(shards: int, shard: int, tensor: int, rank: int) -> int:
    """Returns the predicted number of elements: the rank's share of each weight, and of that its rows among shards."""

    def rows(count: int) -> int:
        each = -(-count // shards)
        return min(each, max(0, count - shard * each))

    width, vocabulary = 32, min(-(-VOCABULARY // tensor), VOCABULARY - rank * -(-VOCABULARY // tensor))
    block = [
        *[(width, 1)] * 4,  # two norms
        (3 * width // tensor, width),
        (3 * width // tensor, 1),
        (width, width // tensor),
        (width, 1),
        (4 * width // tensor, width),
        (4 * width // tensor, 1),
        (width, 4 * width // tensor),
        (width, 1),
    ]
    return sum(rows(n) * m for n, m in [(vocabulary, width), (16, width), *block * 2, (width, 1), (width, 1)])


@pytest.mark.parametrize(("ranks", "tensor"), [(4, 2), pytest.param(4, 4, marks=pytest.mark.full)])
def test_a_rank_holds_the_predicted_number_of_elements(ranks: int, tensor: int) -> None:
    found = in_ranks(ranks, lambda _: Run(FSDP(tensor=tensor)).held())
    assert found == [elements(ranks // tensor, rank // tensor, tensor, rank % tensor) for rank in range(ranks)]


# ---------------------------------------------------------------------------------------------- random numbers
def test_random_numbers_differ_between_ranks_exactly_if_activations_are_split() -> None:
    """Compares dropout of attention heads and of the residual stream."""

    def draws(sequence: bool) -> Any:
        run = Run(FSDP(tensor=2, sequence_parallel=sequence), sizes={"dropout": 0.5})
        block: Any = run.model.get_submodule("blocks.0")
        seen: list[list[float]] = [[], []]

        def draw(where: int) -> Callable[..., None]:
            return lambda *_: seen[where].extend(torch.rand(2).tolist())

        block.attention.projection.register_forward_pre_hook(draw(0))
        block.attention.dropout.register_forward_hook(draw(1))
        block.mlp.get_submodule("2").register_forward_pre_hook(draw(0))
        run.replica.module.train()
        before = run.train(2)
        return seen, before

    mine, others = in_ranks(2, lambda _: [draws(sequence) for sequence in (False, True)])
    for sequence, (one, first), (other, second) in zip((False, True), mine, others, strict=True):
        assert len(one[0]) == len(other[0]) > 8
        assert not set(one[0]) & set(other[0])
        assert set(one[1]).isdisjoint(other[1]) if sequence else one[1] == other[1]
        assert first == second


def test_a_recomputed_block_uses_the_same_random_numbers() -> None:
    def steps(twice: bool) -> Any:
        strategy = FSDP(tensor=2)
        wrap = strategy.wrap

        def rework(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
            for block in blocks if twice else ():
                block.forward = checkpointed(block, block.forward)  # type: ignore[method-assign]
            return wrap(model, blocks)

        strategy.wrap = rework  # type: ignore[method-assign]
        return Run(strategy, sizes={"dropout": 0.5}).train(3)

    for once, again in in_ranks(2, lambda _: [steps(twice) for twice in (False, True)]):
        assert once == again


# ---------------------------------------------------------------------------------------------- errors
def test_options_without_tensor_parallelism_and_compilation_with_it_are_refused() -> None:
    def keys(strategy: FSDP, **options: Any) -> list[str]:
        return [refusal.key for refusal in strategy.unsupported(train(**options), 2, "cpu")]

    assert keys(FSDP(sequence_parallel=True, loss_parallel=True, plan={"a": "rowwise"})) == [
        "strategy.plan",
        "strategy.sequence_parallel",
        "strategy.loss_parallel",
    ]
    assert keys(FSDP(tensor=2), compile="default") == ["train.compile"]
    assert keys(FSDP(tensor=2, cpu_offload=True))[0] == "strategy.cpu_offload"
    assert keys(FSDP(tensor=3)) == ["strategy.tensor"]


def test_loss_parallel_is_refused_for_a_loss_that_needs_whole_logits() -> None:
    task = LanguageModeling()
    task.takes_split_logits = False
    said = refused(UsageError, lambda: FSDP(tensor=2, loss_parallel=True).check(GPT(**SIZES), task, []))
    assert said.startswith("strategy.loss_parallel = true keeps logits split, but LanguageModeling needs whole logits")


class Halves(nn.Module):
    """Each rank multiplies its half of the channels with a weight that all ranks hold."""

    tensor_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)  # type: ignore[no-any-return]


def test_a_whole_weight_with_different_gradients_on_ranks_is_refused_before_the_first_update() -> None:
    def rank(_: int) -> str:
        training = Training(FSDP(tensor=2), Halves)
        training.backward(torch.ones(4, 4))
        return refused(StrategyError, training.replica.step)

    for said in in_ranks(2, rank):
        assert said.startswith(
            "parameter `scale` is whole on every rank, but the ranks that share layers have different grad"
        )


def test_each_rank_of_a_group_that_shares_layers_has_its_own_copy_of_a_whole_weight() -> None:
    """Checks the numbers of the copies, which divide the writing of a checkpoint."""

    def rank(_: int) -> Any:
        model = Training(FSDP(tensor=2), Halves).state().model
        return {name: (part.replica, part.replicas) for name, part in model.items()}

    cut = dict.fromkeys(("up.weight", "up.bias", "down.weight"), (0, 1))
    whole = ("down.bias", "scale")
    assert in_ranks(2, rank) == [cut | dict.fromkeys(whole, (number, 2)) for number in range(2)]


def test_replicated_with_grad_allreduce_sums_gradients_over_ranks() -> None:
    """Uses a separate module for the weight, because the plan names modules."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    class Scaled(nn.Sequential):
        tensor_plan: ClassVar[dict[str, str]] = {"0": "colwise", "1": "replicated_with_grad_allreduce", "2": "rowwise"}

        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Linear(4, 8), Scale(), nn.Linear(8, 4))

    def rank(_: int, strategy: Strategy) -> Any:
        training = Training(strategy, Scaled, clip_norm=1.0)
        norms = [training.step(torch.arange(16.0).view(4, 4)) for _ in range(2)]
        return norms, training.weights()["1.by"]

    ((norms, weight),) = in_ranks(1, lambda number: rank(number, DDP()))
    for found in in_ranks(2, lambda number: rank(number, FSDP(tensor=2))):
        assert found == (pytest.approx(norms, rel=1e-5), pytest.approx(weight, rel=1e-5))


@pytest.mark.parametrize("padding", [1, 3])
def test_padding_has_no_gradient_on_any_rank(padding: int) -> None:
    """Rank 0 has the first two of four embeddings, rank 1 the others."""

    class Tokens(nn.Sequential):
        tensor_plan: ClassVar[dict[str, str]] = {"0": "embedding_rowwise", "1": "colwise", "2": "rowwise"}

        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Embedding(4, 4, padding_idx=padding), nn.Linear(4, 8), nn.Linear(8, 4))

    def rank(_: int, strategy: Strategy) -> float:
        return Training(strategy, Tokens).step(torch.tensor([[0, 1, 2, 3], [3, 3, 1, 1]]))

    (norm,) = in_ranks(1, lambda number: rank(number, DDP()))
    assert in_ranks(2, lambda number: rank(number, FSDP(tensor=2))) == [pytest.approx(norm, rel=1e-5)] * 2


def test_an_optimizer_that_needs_whole_weights_is_refused() -> None:
    def rank(_: int) -> str:
        return refused(StrategyError, lambda: Run(FSDP(tensor=2), optimizer=Muonlike))

    for said in in_ranks(2, rank):
        assert "Muonlike updates a share of a weight differently from the whole" in said


class Muonlike(SGD):
    """Optimizer that divides each gradient by its norm."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                gradient = weight.grad
                norm = gradient.norm()
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                weight.add_(gradient, alpha=-group["lr"] / float(norm))


def test_a_sequence_length_that_does_not_divide_is_refused() -> None:
    def rank(_: int) -> str:
        run = Run(FSDP(tensor=2, sequence_parallel=True))
        return refused(UsageError, lambda: run.replica.module(torch.zeros(2, 15, dtype=torch.int64)))

    said = "strategy.sequence_parallel needs 2 equal parts, but a sequence has 15 positions"
    assert all(found.startswith(said) for found in in_ranks(2, rank))
    blocks = SimpleNamespace(block_size=15)
    assert refused(UsageError, lambda: FSDP(tensor=2, sequence_parallel=True).check_data(blocks)).startswith(said)
