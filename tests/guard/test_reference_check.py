"""Comparison of the model that ranks compute together with the whole model, before the first step."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.pipelining
from support import small_gpt
from support.forked import in_ranks, set_up
from support.launched import Ranks
from support.sharding import Bench
from torch import Tensor, nn
from torch.optim import SGD

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.moe import MoEGPT
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.moe_language_modeling import MoELanguageModeling
from ddpforge.data import MicroBatch
from ddpforge.errors import UsageError
from ddpforge.guard import reference_check
from ddpforge.guard.reference_check import ReferenceCheck, prepare_reference_check
from ddpforge.interfaces import AttentionContext, Contract, Strategy, Task, World
from ddpforge.ranks.collectives import SingleRank
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.pipeline import Pipeline
from ddpforge.training.contract import contract_of, count_parameters

SIZES: dict[str, Any] = {"vocab_size": 31, "block_size": 16, "layers": 4, "heads": 4, "width": 32}
GPT_PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.attention.qkv": "colwise:3",
    "blocks.*.attention.projection": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "colwise_gather_output",
}


class Result:
    """Result of a comparison on one rank: the error message, if any, and lines of the log."""

    def __init__(self, words: str, lines: list[str]) -> None:
        self.words, self.lines = words, lines

    @property
    def distance(self) -> float:
        """Returns the difference of the gradients."""
        (line,) = [line for line in self.lines if line.startswith("together")] or self.lines
        assert "off by" in line, line
        return float(line.split("off by ")[1].split(",")[0])


def tokens() -> tuple[Tensor, Tensor]:
    found = torch.randint(31, (4, 16), generator=torch.Generator().manual_seed(5))
    return found, found.roll(-1, 1)


def compare(
    strategy: Strategy,
    build: Callable[[], nn.Module],
    task: Task,
    *,
    data: Callable[[], Any] = tokens,
    **options: Any,
) -> Result:
    """Shards a model of `build` over the calling ranks, as a run does, and compares it with the whole model."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddpforge")
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    world = set_up(strategy, **options)
    torch.manual_seed(1)
    model = build()
    blocks = list(getattr(model, "blocks", ()))
    strategy.check(model, task, blocks)
    whole = ReferenceCheck(model, task, contract_of(strategy).splits_forward)
    model = strategy.wrap(model, blocks)
    replica = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
    batch = data()
    first = MicroBatch(batch, len(batch[0]), len(batch[0]), last=True, shard=0, number=0)
    try:
        with_words = ""
        whole.compare(replica, world, first)
    except UsageError as error:
        with_words = " | ".join([error.message, *error.hints])
    finally:
        log.removeHandler(handler)
    return Result(with_words, lines)


def gpt(**sizes: Any) -> Callable[[], nn.Module]:
    return lambda: GPT(**SIZES | sizes)


def on_all_ranks(ranks: int, action: Callable[[], list[Result]]) -> list[Result]:
    """Returns the results of rank 0, after checking that all ranks have the same messages."""
    everyone = in_ranks(ranks, lambda _: [(one.words, one.lines) for one in action()])
    assert all([words for words, _ in one] == [words for words, _ in everyone[0]] for one in everyone)
    return [Result(*one) for one in everyone[0]]


# ---------------------------------------------------------------------------------------------- correct declarations
def test_correct_declarations_differ_only_by_rounding() -> None:
    def right() -> list[Result]:
        def moe() -> nn.Module:
            return MoEGPT(**SIZES, experts=4)

        lm = LanguageModeling
        return [
            compare(FSDP(tensor=2, sequence_parallel=True, loss_parallel=True), gpt(dropout=0.5), lm()),
            compare(FSDP(tensor=2, plan=GPT_PLAN), gpt(), lm()),
            compare(FSDP(context=2), gpt(dropout=0.5), lm(), precision="bf16"),
            compare(FSDP(experts=2), moe, MoELanguageModeling()),
            *(
                compare(Pipeline(schedule=schedule), gpt(), lm())
                for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
            ),
        ]

    for found in on_all_ranks(2, right):
        assert found.words == "", found.lines
        assert found.distance < 1e-5


@pytest.mark.full
def test_correct_declarations_in_several_dimensions_differ_only_by_rounding() -> None:
    def right() -> list[Result]:
        lm = LanguageModeling
        return [
            compare(FSDP(tensor=2, context=2, loss_parallel=True), gpt(), lm()),
            compare(FSDP(tensor=2, replicas=2, sequence_parallel=True), gpt(), lm()),
            compare(Pipeline(stages=2, data="fsdp"), gpt(), lm()),
            compare(Pipeline(stages=2, tensor=2), gpt(), lm()),
        ]

    for found in on_all_ranks(4, right):
        assert found.words == "", found.lines
        assert found.distance < 1e-5


# ---------------------------------------------------------------------------------------------- wrong declarations
class Net(nn.Module):
    """Two linear layers around a module without weights, on [B, T, 8]."""

    tensor_plan: ClassVar = {"up": "colwise", "down": "rowwise"}
    pipeline: ClassVar = ("up", "between", "down")

    def __init__(self, between: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, 16), between, nn.Linear(16, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.factor * self.between(self.up(x)))
        return found


class Attentive(nn.Module):
    """Model with attention through an AttentionContext, and a module `mix`."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.context = AttentionContext()
        self.up, self.mix, self.down = nn.Linear(8, 8), mix, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)[:, None]
        x = x + self.context.attention(x, x, x, causal=True)
        found: Tensor = self.down(self.mix(x[:, 0]))
        return found


class LessMean(nn.Module):
    """Subtracts the mean over a dimension: of positions, or of channels (-1) as norms do."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(self.dim, keepdim=True)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Squares(Task):
    """Task with the squared errors of all positions."""

    by_position = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        out = model(batch[0])
        return (out - batch[1]).square().sum(), out


class Pooled(Squares):
    """Task that declares a loss by position, but averages over positions."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        out = model(batch[0])
        return (out.mean(1) - batch[1].mean(1)).square().sum(), out


def with_zero_output(net: Net) -> Net:
    """Returns the net with a zero output layer: only its gradient differs from another net."""
    nn.init.zeros_(net.down.weight)
    return net


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 8, 8, generator=generator), torch.randn(4, 8, 8, generator=generator)


def test_wrong_declarations_are_refused_with_the_first_module_that_differs() -> None:
    """Cases: a fused qkv split as one weight, norm and softmax over split channels, mixed positions, missing steps."""

    def wrong() -> list[Result]:
        fused = GPT_PLAN | {"blocks.*.attention.qkv": "colwise"}
        plain = {"data": vectors}
        scaled = lambda: Net(nn.Identity(), factor=2.0)  # noqa: E731
        return [
            compare(FSDP(tensor=2, plan=fused), gpt(), LanguageModeling()),
            compare(FSDP(tensor=2), lambda: Net(nn.Softmax(-1)), Squares(), **plain),
            compare(FSDP(tensor=2), lambda: Net(LessMean(-1)), Squares(), **plain),
            compare(FSDP(tensor=2), lambda: Net(nn.LayerNorm(16)), Squares(), **plain),
            compare(FSDP(context=2), lambda: Attentive(LessMean()), Squares(), **plain),
            compare(FSDP(context=2), lambda: Attentive(Convolved()), Squares(), **plain),
            compare(FSDP(context=2), lambda: Attentive(nn.Identity()), Pooled(), **plain),
            compare(Pipeline(), scaled, Squares(), **plain),
            compare(FSDP(tensor=2), lambda: with_zero_output(Net(nn.Softmax(-1))), Squares(), **plain),
            compare(FSDP(tensor=2), lambda: Net(nn.GELU()), Squares(), **plain),
            compare(FSDP(context=2), lambda: Attentive(nn.GELU()), Squares(), **plain),
            compare(Pipeline(), lambda: Net(nn.GELU()), Squares(), **plain),
        ]

    fused, softmax, less, norm, mean, conv, pooled, steps, zero, *right = on_all_ranks(2, wrong)
    for found in right:
        assert found.words == ""
        assert found.distance < 1e-5
    everything = (fused, softmax, less, mean, conv, pooled, steps, zero)
    assert all(
        "do not compute the same as the whole model: for a few samples the loss is" in x.words for x in everything
    )
    assert "first module with a different output is `blocks.0.attention.projection`" in fused.words
    assert "before it, each rank has only a part of the output of `blocks.0.attention.qkv`" in fused.words
    assert '"colwise:3"' in fused.words
    assert "whole model: `between` fails, but does not fail in the whole model: RuntimeError: Given" in norm.words
    for found in (softmax, less):
        assert (
            "different output is `down`; before it, each rank has only a part of the output of `between`" in found.words
        )
    assert "different output is `mix` | the model must not mix positions" in mean.words
    assert "different output is `mix.conv`" in conv.words or "different output is `mix`" in conv.words
    assert "no module has a different output, and the gradient of `" in pooled.words
    assert "no module has a different output, and the gradient of `down.weight` differs most: check the" in zero.words
    assert "different output is `down` | the model's `pipeline` must name all steps of `forward`" in steps.words


# ---------------------------------------------------------------------------------------------- skipped comparisons
class Random(Squares):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return super().loss(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))


class Uncounted(Squares):
    def count(self, batch: Any) -> Tensor:
        return torch.zeros(())


class UnusedInEvaluation(Net):
    """Net that does not use a layer in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[..., :8] if not self.training else super().forward(x)


def test_models_that_cannot_be_compared_are_skipped_with_a_log_line() -> None:
    def skipped_comparisons() -> list[Result]:
        net = lambda: Net(nn.GELU())  # noqa: E731
        return [
            compare(FSDP(tensor=2), net, Random(), data=vectors),
            compare(FSDP(tensor=2), net, Uncounted(), data=vectors),
            compare(FSDP(tensor=2), lambda: UnusedInEvaluation(nn.GELU()), Squares(), data=vectors),
            compare(FSDP(tensor=2), net, Squares(), data=lambda: (*vectors(), lambda: "cannot be pickled")),
        ]

    for found, why in zip(
        on_all_ranks(2, skipped_comparisons),
        (
            "its loss is random, or rounding alone changes it",
            "no target counts in the first micro-batch",
            "its loss cannot be computed outside of training: ValueError: in evaluation mode it does not use "
            "`down.weight`",
            "its first micro-batch cannot be given to all ranks: ",
        ),
        strict=True,
    ):
        assert found.words == ""
        (line,) = found.lines
        assert line.startswith("the model on ranks together was not compared with the whole model: ")
        assert why in line


# ---------------------------------------------------------------------------------------------- no side effects
class Counting(Squares):
    """Task that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().loss(model, batch)


class Bumped(nn.Module):
    """Module that counts its calls in a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1), random.random(), np.random.rand()
        return x


def test_the_comparison_does_not_change_the_run() -> None:
    """Buffers, gradients, random numbers, training modes and the task are unchanged."""

    def after() -> Any:
        strategy, task = FSDP(tensor=2), Counting()
        world = set_up(strategy)
        model: Any = Net(Bumped())
        whole = ReferenceCheck(model, task, contract_of(strategy).splits_forward)
        model = strategy.wrap(model, [])
        replica = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        model.train()
        model.between.eval()
        before = {name: part.tensor.clone() for name, part in replica.weights.shards().items()}
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        batch = vectors()
        whole.compare(replica, world, MicroBatch(batch, 4, 4, last=True, shard=0, number=0))
        now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        return (
            torch.equal(states[0], now[0]) and states[1:] == now[1:],
            all(torch.equal(before[name], part.tensor) for name, part in replica.weights.shards().items()),
            [p.grad for p in model.parameters()],
            float(model.between.calls),
            task.calls,
            (model.training, model.between.training, model.up.training),
        )

    for found in in_ranks(2, lambda _: after()):
        assert found == (True, True, [None] * 4, 0.0, 0, (True, False, True))


@pytest.mark.parametrize(
    "strategy",
    [
        'use = "fsdp"\ntensor = 2\nsequence_parallel = true',
        pytest.param(small_gpt.PIPELINE.format("1F1B"), marks=pytest.mark.full),
        pytest.param('use = "fsdp"\ncontext = 2', marks=pytest.mark.full),
    ],
    ids=["tensor", "pipeline", "context"],
)
def test_loss_curves_are_bit_identical_with_and_without_the_comparison(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """With dropout, ragged targets and accumulation."""
    text = {"model": "dropout = 0.2", "length": "3st"}
    compared = small_gpt.train(strategy, 2, **text)
    monkeypatch.setattr(reference_check, "CHECKS", ())
    assert small_gpt.train(strategy, 2, **text)[0].column() == compared[0].column()


# ---------------------------------------------------------------------------------------------- whole runs
def prepared(*, build: Callable[[], nn.Module] = lambda: Net(nn.GELU()), trains: bool = True, **parts: Any) -> Any:
    """Returns the reference check of the given parts, for a strategy that splits layers."""
    model = build()
    off = SimpleNamespace(compile="off", fp8="off")
    given = {"updates": {}, "auxiliary": {}, "task": Squares(), "train": off} | parts
    recipe = SimpleNamespace(train=given.pop("train"))
    found = SimpleNamespace(model=model, size=count_parameters(model), recipe=recipe, trains=trains, **given)
    alone = SingleRank()
    cuts = Contract(clipping="", accumulation="", splits_forward=("layers",))
    return prepare_reference_check(
        found, cuts, World(global_ranks=alone, dp_ranks=alone, device=alone.device, local_rank=0)
    )  # type: ignore[arg-type]


def test_models_that_cannot_be_held_by_one_rank_are_skipped_with_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ddpforge")
    assert prepared() is not None
    assert not caplog.messages

    def meta() -> nn.Module:
        with torch.device("meta"):
            return Net(nn.GELU())

    assert prepared(trains=False) is None
    assert not caplog.messages
    for parts, why in (
        ({"build": meta}, "it is built without memory"),
        ({"train": SimpleNamespace(compile="default", fp8="off")}, "train.compile and train.fp8 change"),
        ({"updates": {"a": 1}}, "the task has several updates"),
        ({"auxiliary": {"a": 1}}, "the task uses auxiliary modules"),
    ):
        assert prepared(**parts) is None
        assert why in caplog.messages[-1]
    monkeypatch.setattr("ddpforge.guard.reference_check.SMALL", 100)
    assert prepared() is None
    assert "not compared with the whole model: its 280 parameters are too many for one rank" in caplog.messages[-1]


def test_a_run_with_a_wrong_plan_always_fails_before_its_first_step(
    tmp_path: Path, ddpforge: Callable[..., Ranks]
) -> None:
    bench = Bench(tmp_path, ddpforge)
    plan = "".join(f'"{name}" = "{style.partition(":")[0]}"\n' for name, style in GPT_PLAN.items())
    found = bench(
        "run", f'use = "fsdp"\ntensor = 2\n[strategy.plan]\n{plan}', more="[checkpoint]\nat_start = true", fails=True
    )
    assert found.codes == [2, 2]
    assert "first module with a different output is `blocks.0.attention.projection`" in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert bench.column("run") == []
    again = bench(
        "run", f'use = "fsdp"\ntensor = 2\n[strategy.plan]\n{plan}', more="[checkpoint]\nat_start = true", fails=True
    )
    assert again.codes == [2, 2]
