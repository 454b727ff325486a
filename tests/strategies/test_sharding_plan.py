"""Splits of a tensor-parallel plan, element by element, and plans that are refused before any split."""

from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.doubles import Elsewhere
from support.forked import refused
from torch import nn

from ddpforge.builtin.models.gpt import GPT
from ddpforge.errors import StrategyError, UsageError
from ddpforge.interfaces import FlatRange, TensorShard
from ddpforge.interfaces.regions import copy, find_gap
from ddpforge.interfaces.regions import whole as all_of
from ddpforge.strategies.tensor.sharding_plan import ShardingPlan, Style, resolve
from ddpforge.strategies.tensor.split_spec import SplitSpec
from ddpforge.strategies.tensor.tensor_parallel import TensorParallel


def plan_of(model: Any, given: dict[str, str] | None = None, ranks: int = 2, **options: Any) -> ShardingPlan:
    options = {"sequence": False, "split_logits": False} | options
    return resolve(model, given, list(getattr(model, "blocks", ())), ranks=ranks, **options)


def gpt(**sizes: Any) -> GPT:
    with torch.device("meta"):
        return GPT(**{"vocab_size": 31, "block_size": 16, "layers": 2, "heads": 4, "width": 32} | sizes)


# ---------------------------------------------------------------------------------------------- splits
@st.composite
def cuts(draw: Any) -> list[SplitSpec]:
    """Draws the splits of a random tensor, one for each rank."""
    ranks, parts, ndim = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dim = draw(st.integers(0, min(1, ndim - 1)))
    parts = parts if dim == 0 else 1
    shape = [draw(st.integers(1, 7)) for _ in range(ndim)]
    shape[dim] = parts * draw(st.integers(1, 9))
    return [SplitSpec(tuple(shape), dim, rank, ranks, parts) for rank in range(ranks)]


@given(cuts(), st.integers(1, 4))
def test_shards_of_splits_cover_each_element_once_at_the_place_of_their_region(
    ranks: list[SplitSpec], shards: int
) -> None:
    shape = ranks[0].shape
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    regions = []
    for cut in ranks:
        share = cut.take(whole)
        each = -(-len(share) // shards)
        for start in range(0, shards * each, each or 1):
            first, last = min(start, len(share)), min(start + each, len(share))
            part = TensorShard(share[first:last], shape, cut.region(first, last))
            for simple in part.as_boxes():
                expected = torch.full_like(simple.tensor, -1)
                held = expected.view(-1) if isinstance(simple.region, FlatRange) else expected
                copy(shape, all_of(shape), whole.view(-1), simple.simple_region, held)
                assert torch.equal(simple.tensor, expected)
                regions.append(simple.simple_region)
    assert find_gap(shape, regions) is None


def test_the_plan_of_gpt_splits_queries_keys_and_values_by_heads() -> None:
    cut = plan_of(gpt()).cuts["blocks.0.attention.qkv.weight"]
    assert [cut.of(rank).spans() for rank in range(2)] == [
        [(0, 16), (32, 48), (64, 80)],
        [(16, 32), (48, 64), (80, 96)],
    ]


def test_the_plan_of_gpt_splits_these_weights() -> None:
    cuts = {name: (cut.dim, cut.parts) for name, cut in plan_of(gpt()).cuts.items() if "blocks.1" not in name}
    assert cuts == {
        "tokens.weight": (0, 1),
        "blocks.0.attention.qkv.weight": (0, 3),
        "blocks.0.attention.qkv.bias": (0, 3),
        "blocks.0.attention.projection.weight": (1, 1),
        "blocks.0.mlp.0.weight": (0, 1),
        "blocks.0.mlp.0.bias": (0, 1),
        "blocks.0.mlp.2.weight": (1, 1),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_a_module_has_the_first_style_that_matches_its_name(order: int) -> None:
    styles = {"blocks.0.up": "replicated", "blocks.*.up": "colwise"}
    plan = dict([*styles.items()][::order]) | {"blocks.*.down": "replicated"}
    first = next(iter(plan.values()))
    assert plan_of(Blocks(), plan).styles["blocks.0.up"].word == first


def test_styles_of_transformers_plans_are_supported() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.up, self.gates, self.down, self.out = (
                nn.Linear(4, 8),
                nn.Linear(4, 8),
                nn.Linear(8, 4),
                nn.Linear(4, 8),
            )
            self._tp_plan = {
                "embed": "embedding_rowwise",
                "up": "colwise",
                "gates": "packed_colwise",
                "down": "rowwise",
                "out": "colwise_gather_output",
            }

    ours = {
        "embed": "embedding_rowwise",
        "up": "colwise",
        "gates": "colwise:2",
        "down": "rowwise",
        "out": "colwise_gather_output",
    }
    assert plan_of(Theirs()) == plan_of(Theirs(), ours)


# ---------------------------------------------------------------------------------------------- refusals
class Blocks(nn.Module):
    tensor_plan: ClassVar[dict[str, str]] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, width: int = 8, **more: nn.Module) -> None:
        super().__init__()
        block = nn.Module()
        block.up, block.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList([block])
        for name, module in more.items():
            block.add_module(name, module)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def tied() -> Any:
    model = Blocks(out=nn.Linear(4, 8, bias=False), table=nn.Embedding(8, 4))
    model.blocks[0].out.weight = model.blocks[0].table.weight
    return model


WRONG: list[tuple[Any, dict[str, str] | None, dict[str, Any], str]] = [
    (Bare, None, {}, "strategy.tensor = 2 needs a plan for cutting layers, but Bare has none"),
    (Blocks, {"blocks.*.upp": "colwise"}, {}, "strategy.plan names `blocks.*.upp`, but no module of the model has"),
    (
        Blocks,
        {"blocks.*.up": "colums"},
        {},
        'strategy.plan: `blocks.*.up` has the style "colums", which tensor parallelism does not',
    ),
    (
        Blocks,
        {"blocks.*.up": "colwise:0"},
        {},
        'strategy.plan: `blocks.*.up` has the style "colwise:0", which tensor parallelism does not',
    ),
    (
        Blocks,
        {"blocks.*.up": "colwise"},
        {},
        "strategy.plan has no style for `blocks.0.down` (Linear): every rank would",
    ),
    (lambda: Blocks(extra=nn.Linear(4, 4)), None, {}, "Blocks.tensor_plan has no style for `blocks.0.extra` (Linear)"),
    (lambda: Blocks(9), None, {}, "strategy.tensor = 2 does not divide `blocks.0.up.weight`: it has 9 rows | use"),
    (
        Blocks,
        {"blocks.*.up": "colwise:3", "blocks.*.down": "rowwise"},
        {},
        "strategy.tensor = 2 does not divide `blocks.0.up.weight`: it has 8 rows in 3 parts | use",
    ),
    (
        Blocks,
        {"blocks.*.down": "rowwise", "blocks.*.up": "replicated"},
        {"ranks": 3},
        "strategy.tensor = 3 does not divide `blocks.0.down.weight`: it has 8 columns | use",
    ),
    (
        lambda: gpt(heads=3, width=48),
        None,
        {},
        "strategy.tensor = 2 does not divide `blocks.0.attention.qkv.weight`: it has 3 heads of 16 | use",
    ),
    (
        Blocks,
        {"blocks.*": "rowwise"},
        {},
        '`blocks.0` (Module) cannot be cut as "rowwise", which needs a torch.nn.Linear with torch\'s own forward',
    ),
    (
        lambda: Blocks(table=nn.Embedding(8, 4, max_norm=1.0)),
        Blocks.tensor_plan | {"blocks.*.table": "embedding_rowwise"},
        {},
        '`blocks.0.table` (Embedding) cannot be cut as "embedding_rowwise"',
    ),
    (
        tied,
        Blocks.tensor_plan | {"blocks.*.out": "colwise_gather_output"},
        {},
        "`blocks.0.out.weight` and `blocks.0.table.weight` are one parameter, but the plan cuts it in two ways",
    ),
    (Blocks, None, {"sequence": True}, 'strategy.sequence_parallel = true needs one module with the style "scatter"'),
    (
        Blocks,
        None,
        {"split_logits": True},
        'strategy.loss_parallel = true needs one layer with the style "colwise_gather_output", but',
    ),
    (
        gpt,
        {"blocks.*.*.*": "replicated", "head": "colwise_gather_output"},
        {},
        'strategy.plan has "colwise_gather_output" for `head`, which has no weights, and "embedding_rowwise" for 0 emb',
    ),
]


@pytest.mark.parametrize(("build", "plan", "options", "said"), WRONG, ids=[wrong[-1][:60] for wrong in WRONG])
def test_invalid_plans_are_refused(build: Any, plan: Any, options: Any, said: str) -> None:
    # the plan of a model is not part of the recipe
    kind = StrategyError if said.startswith("Blocks.tensor_plan") else UsageError
    assert refused(kind, lambda: plan_of(build(), plan, **options)).startswith(said)


@pytest.mark.parametrize("word", ["grouped_gemm", "moe_tp_experts", "rowwise_split_input"])
def test_unsupported_styles_of_transformers_plans_are_refused(word: str) -> None:
    said = refused(UsageError, lambda: plan_of(Blocks(), {"blocks.*.up": word}))
    assert f'has the style "{word}", which tensor parallelism does not have' in said


def test_heads_of_each_part_of_a_joint_weight_must_divide_among_ranks() -> None:
    """Queries, keys and values have 4 heads each: 12 heads divide by 3, but no rank would have whole heads of each."""
    message = refused(UsageError, lambda: plan_of(gpt(heads=4, width=12), ranks=3))
    assert message.startswith("strategy.tensor = 3 does not divide `blocks.0.attention.qkv.")
    assert "it has 4 heads of 3" in message
    assert plan_of(gpt(heads=4, width=12), ranks=2).cuts["blocks.0.attention.qkv.weight"].parts == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_sequence_is_split_at_exactly_one_module(number: int) -> None:
    norms = {f"norm{place}": nn.LayerNorm(4) for place in range(2)}
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    plan |= {f"blocks.*.norm{place}": "scatter" for place in range(number)}
    if number == 1:
        assert plan_of(Blocks(**norms), plan, sequence=True).owned("scatter") == ["blocks.0.norm0"]
        return
    message = refused(UsageError, lambda: plan_of(Blocks(**norms), plan, sequence=True))
    assert 'needs one module with the style "scatter"' in message
    assert f"strategy.plan has {number}" in message


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_output_layer_without_weights_needs_exactly_one_embedding_that_is_cut(number: int) -> None:
    more = {f"table{place}": nn.Embedding(8, 4) for place in range(2)} | {"out": nn.Identity()}
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.*.out": "colwise_gather_output"}
    plan |= {f"blocks.*.table{place}": "embedding_rowwise" for place in range(number)}
    if number == 1:
        assert plan_of(Blocks(**more), plan).owned("embedding_rowwise") == ["blocks.0.table0"]
        return
    message = refused(UsageError, lambda: plan_of(Blocks(**more), plan))
    assert f'"embedding_rowwise" for {number} embeddings' in message


@pytest.mark.parametrize(
    ("sequence", "modules", "split"),
    [
        (False, ["up"], True),
        (False, ["up", "middle"], True),
        (False, ["up", "middle", "down"], False),
        (False, ["up", "middle", "down", "middle"], False),
        (True, ["first"], True),
        (True, ["first", "up", "middle", "down"], True),
        (True, ["first", "up", "last"], False),
        (True, ["first", "up", "last", "middle"], False),
        (True, ["up", "down"], False),
    ],
)
def test_activations_stay_split_until_a_module_that_joins_them(sequence: bool, modules: list[str], split: bool) -> None:
    words = {"first": "scatter", "up": "colwise", "middle": "replicated", "down": "rowwise", "last": "gather"}
    plan = ShardingPlan({name: Style(word, 1) for name, word in words.items()})
    ranks: Any = Elsewhere(2)
    shares = TensorParallel(plan, ranks, torch.device("cpu"), sequence=sequence, logits=None)
    assert shares.splits_behind(modules) is split
