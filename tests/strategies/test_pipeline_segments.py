"""Steps that models declare for pipelines, the splits between them, and refusals."""

from typing import Any

import pytest
import torch
from support.forked import refused, train
from support.torch_versions import needs_pipelines
from torch import Tensor, nn

from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.mlp import MLP
from ddpforge.builtin.models.moe import MoEGPT
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.errors import StrategyError, UsageError
from ddpforge.strategies.pipeline import Pipeline, schedules
from ddpforge.strategies.pipeline.schedules import SCHEDULES, ScheduleKind, StageLayout, schedule_for
from ddpforge.strategies.pipeline.segments import cut_evenly, cut_where, declared_segments, held_by

pytestmark = needs_pipelines


class Tower(nn.Module):
    """Linear layers of the given sizes in a row."""

    def __init__(self, *sizes: int, pipeline: object = ("layers",)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, size, bias=False) for size in sizes)
        self.scale = nn.Parameter(torch.ones(1))
        self.pipeline = pipeline

    def enter(self, x: Tensor) -> Tensor:
        return x * self.scale


def begins(model: nn.Module, parts: int) -> list[str]:
    steps = declared_segments(model)
    return [steps[number].name for number in cut_evenly(model, steps, parts)]


# ---------------------------------------------------------------------------------------------- steps
def test_module_lists_become_steps_and_methods_use_their_declared_modules() -> None:
    steps = declared_segments(GPT(vocab_size=4, block_size=4, layers=2, heads=1, width=4))
    assert [step.name for step in steps] == ["enter", "blocks.0", "blocks.1", "leave"]
    assert [step.uses for step in steps] == [
        ("tokens", "positions"),
        ("blocks.0",),
        ("blocks.1",),
        ("norm", "tokens"),
    ]


def test_a_step_holds_the_tensors_of_its_modules_except_deleted_ones() -> None:
    model = GPT(vocab_size=4, block_size=4, layers=1, heads=1, width=4)
    enter, block, leave = declared_segments(model)
    assert {id(t) for t in held_by(model, enter)} == {id(model.tokens.weight), id(model.positions.weight)}
    assert {id(t) for t in held_by(model, block)} == {id(t) for t in model.blocks[0].parameters()}
    del model.norm  # as on a rank that has no part of it
    assert [id(t) for t in held_by(model, leave)] == [id(model.tokens.weight)]


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (GPT(vocab_size=4, block_size=4, layers=2, heads=1, width=4), torch.tensor([[0, 3, 1]])),
        (GPT(vocab_size=4, block_size=4, layers=1, heads=1, width=4, tie_embeddings=False), torch.tensor([[2, 3]])),
        (GPT(vocab_size=4, block_size=4, layers=1, heads=1, width=4, classes=3), torch.tensor([[2, 3]])),
        (CNN(width=2).eval(), torch.ones(2, 1, 8, 8)),
        (MLP(inputs=4, outputs=2, hidden=[3]), torch.ones(2, 2, 2)),
    ],
    ids=["gpt", "not tied", "classes", "cnn", "mlp"],
)
def test_the_steps_compute_the_forward_pass(model: nn.Module, batch: Tensor) -> None:
    found = batch
    for step in declared_segments(model):
        found = step.call(found)
    assert torch.equal(found, model(batch))


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (None, "Tower does not declare the steps of its forward pass"),
        (("layers",), "no step in Tower.pipeline uses `scale`"),
        (("enter", "layers"), 'add its module to the method that uses it: pipeline = (…, ("method", "scale"))'),
        (
            (("enter", "scale"), "layer"),
            "names `layer`, which is neither a module nor a method of the model | near it are layers",
        ),
        ((("enter", "scala"), "layers"), "`enter` lists `scala`, which has no weights"),
    ],
)
def test_steps_that_do_not_match_the_model_are_refused_before_ranks_join(pipeline: object, said: str) -> None:
    check = lambda: Pipeline().check(Tower(2, 2, pipeline=pipeline), Classification(), ())  # noqa: E731
    assert said in refused(UsageError if pipeline is None else StrategyError, check)


def test_a_class_that_overrides_forward_must_declare_its_steps() -> None:
    """Steps of its base class would compute another model."""

    class Doubled(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    said = refused(UsageError, lambda: declared_segments(Doubled(inputs=4, outputs=2)))
    assert "Doubled does not declare the steps of its forward pass" in said
    experts = MoEGPT(vocab_size=4, block_size=4, layers=1, heads=1, width=4)
    assert "MoEGPT does not declare" in refused(UsageError, lambda: declared_segments(experts))


# ---------------------------------------------------------------------------------------------- splits
def tower(*sizes: int) -> Tower:
    return Tower(*sizes, pipeline=(("enter", "scale"), "layers"))


def test_the_split_minimizes_the_cost_of_the_largest_part() -> None:
    assert begins(tower(4, 4, 4, 4), 2) == ["enter", "layers.2"]
    assert begins(tower(9, 1, 1, 1, 9), 2) == ["enter", "layers.2"]
    assert begins(tower(1, 1, 1, 9), 2) == ["enter", "layers.3"]
    assert begins(tower(9, 9), 3) == ["enter", "layers.0", "layers.1"]


def test_embedding_lookups_cost_nothing_and_a_tied_head_counts() -> None:
    model = GPT(vocab_size=96, block_size=8, layers=5, heads=1, width=8)  # a block has 872 weights, the head 784
    assert begins(model, 2) == ["enter", "blocks.3"]


def test_buffers_cost_nothing() -> None:
    """Only parameters take a multiplication per position."""
    model = tower(1, 1, 1, 1)
    model.layers[0].register_buffer("table", torch.zeros(1000))
    assert begins(model, 2) == begins(tower(1, 1, 1, 1), 2)


def test_too_few_steps_are_refused() -> None:
    assert "has 3 steps, too few for 4 parts" in refused(UsageError, lambda: begins(tower(1, 1), 4))


def test_the_recipe_may_set_the_split_points() -> None:
    steps = declared_segments(tower(9, 1, 1))
    assert cut_where(steps, ["layers.1", "layers.2"], 3) == [0, 2, 3]
    assert "near it are layers.0" in refused(UsageError, lambda: cut_where(steps, ["layer.0"], 2))
    for split in (["layers.2", "layers.1"], ["layers.1"], ["layers.1", "layers.1"]):
        assert "must name 2 steps" in refused(UsageError, lambda: cut_where(steps, split, 3))  # noqa: B023


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("1F1B", [[0], [1], [2]]),
        ("Interleaved1F1B", [[0, 3], [1, 4], [2, 5]]),
        ("ZBVZeroBubble", [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_each_rank_has_its_stages(schedule: str, held: list[list[int]]) -> None:
    assert [StageLayout(here, 3, SCHEDULES[schedule]).mine for here in range(3)] == held


def test_interleaved_schedules_run_full_rounds_and_then_the_rest() -> None:
    runs = {name: list(map(len, StageLayout(0, 3, kind).runs(range(8)))) for name, kind in SCHEDULES.items()}
    assert runs == {
        "1F1B": [8],
        "GPipe": [8],
        "Interleaved1F1B": [6, 2],
        "InterleavedZeroBubble": [6, 2],
        "ZBVZeroBubble": [8],
    }


@pytest.mark.parametrize(("micro_batches", "made"), [(1, "GPipe"), (2, "GPipe"), (3, "1F1B"), (4, "1F1B"), (7, "1F1B")])
def test_fewer_micro_batches_than_stages_run_as_gpipe(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, made: str
) -> None:
    monkeypatch.setattr(schedules, "ScheduleGPipe", lambda *given, **options: ("GPipe", given[1]))
    kind = ScheduleKind(lambda *given, **options: ("1F1B", given[1]))
    stages: Any = [None]
    assert schedule_for(StageLayout(0, 3, kind), stages, micro_batches, sum) == (made, micro_batches)


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "ranks", "settings", "key"),
    [
        ({}, 1, {}, "strategy.stages"),
        ({"stages": 3}, 4, {}, "strategy.stages"),
        ({"tensor": 2}, 2, {}, "strategy.stages"),
        ({"tensor": 2, "stages": 3}, 8, {}, "strategy.stages"),
        ({"tensor": 3}, 4, {}, "strategy.tensor"),
        ({"sequence_parallel": True}, 2, {}, "strategy.sequence_parallel"),
        ({"tensor": 2}, 4, {"compile": "default", "compile_blocks": True}, "train.compile"),
        ({}, 2, {"precision": "fp16"}, "train.precision"),
        ({}, 2, {"sync_batchnorm": True}, "train.sync_batchnorm"),
        ({}, 2, {"compile": "default"}, "train.compile"),
        ({"schedule": "ZBVZeroBubble"}, 2, {"compile": "default", "compile_blocks": True}, "train.compile"),
        ({"schedule": "ZBVZeroBubble"}, 2, {"activation_checkpointing": True}, "train.activation_checkpointing"),
    ],
)
def test_unsupported_settings_are_refused_with_their_key(
    options: dict[str, object], ranks: int, settings: dict[str, object], key: str
) -> None:
    assert [each.key for each in Pipeline(**options).unsupported(train(**settings), ranks, "cpu")] == [key]  # type: ignore[arg-type]


def test_an_older_torch_is_refused_with_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def step(self, *args: object) -> None: ...

    monkeypatch.setattr("torch.distributed.pipelining.ScheduleGPipe", Older)
    (found,) = Pipeline(stages=2).unsupported(train(), 2, "cpu")
    assert (found.key, found.hints[0]) == ("strategy.use", "pip install 'torch>=2.14'")
    assert found.message == f"pipelines need torch 2.14 or newer, but this is torch {torch.__version__}"


def test_data_parallel_ranks_are_counted() -> None:
    assert [Pipeline().data_ranks(4), Pipeline(stages=2).data_ranks(4), Pipeline(stages=4).data_ranks(12)] == [1, 2, 3]
    assert [Pipeline(tensor=2).data_ranks(4), Pipeline(stages=2, tensor=2).data_ranks(16)] == [1, 4]
    assert list(Pipeline(stages=2).unsupported(train(), 4, "cpu")) == []
