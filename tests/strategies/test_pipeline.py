"""Pipelines have the loss curve of DDP under every schedule."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import in_ranks, set_up
from support.small_gpt import BLOCK, BOTH, DDP, PIPELINE, RECIPE, SHARDED, shared, train
from support.torch_versions import needs_pipelines
from support.trained import Trained, trained
from torch import Tensor, nn
from torch.optim import SGD

from ddpforge.strategies.pipeline import Pipeline

pytestmark = needs_pipelines

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
HELD = {"ZBVZeroBubble": [384 + 2 * BLOCK + 32, 2 * BLOCK]}
"""Weights on each rank: 256 of the embedding, also used by the last step, 128 of positions, 32 of the last norm."""
EMA = "[callbacks.ema]\ndecay = 0.9\n"
STOP = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = {}\nrank = 0\n'


@cache
def of_ddp(length: str) -> Trained:
    """Returns the result of two DDP ranks. Steps have 16, 16 and 11 sequences of 3 to 8 tokens."""
    return train(DDP, 2, length=length)[0]


def assert_equal_curves(found: Trained, expected: Trained, rel: float = 1e-5) -> None:
    for key, tolerance in (("train/loss", rel), ("eval/loss", rel), ("train/grad_norm", 10 * rel), ("lr", 1e-12)):
        assert found.column(key) == pytest.approx(expected.column(key), rel=tolerance), key
    assert found.column()


# ---------------------------------------------------------------------------------------------- loss curves
@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=pytest.mark.full if s != "1F1B" else ()) for s in SCHEDULES]
)
def test_the_loss_curve_equals_that_of_ddp(schedule: str) -> None:
    """Covers accumulation, active clipping, tied embeddings and steps that end in a smaller micro-batch."""
    found = train(PIPELINE.format(schedule), 2)
    assert_equal_curves(found[0], of_ddp("20st"))
    assert [one.held for one in found] == HELD.get(schedule, [384 + 2 * BLOCK, 2 * BLOCK + 288])


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_curve_equals_that_of_ddp_with_two_ranks_per_stage(schedule: str) -> None:
    found = train(PIPELINE.format(schedule), 4)
    assert_equal_curves(found[0], of_ddp("20st"))
    assert sum(one.held for one in found) == 2 * (13_536 + 256 * (schedule != "ZBVZeroBubble"))


@pytest.mark.parametrize(
    ("schedule", "train_with"),
    [
        pytest.param("1F1B", "", marks=pytest.mark.full),
        pytest.param("GPipe", 'precision = "bf16"', marks=pytest.mark.full),
        pytest.param("Interleaved1F1B", "", marks=pytest.mark.full),
        pytest.param("1F1B", "activation_checkpointing = true", marks=pytest.mark.full),
        pytest.param("1F1B", 'freeze = ["blocks.2.*", "positions.*"]', marks=pytest.mark.full),
        pytest.param("1F1B", 'compile = "default"\ncompile_blocks = true', marks=pytest.mark.full),
    ],
)
def test_the_loss_curve_equals_that_of_ddp_with_sharded_stages(schedule: str, train_with: str) -> None:
    """Sequences are ragged: ranks of a stage have different shapes at a time, and gather weights together
    nevertheless."""
    found = train(f"{PIPELINE.format(schedule)}\n{SHARDED}", 4, train=train_with)
    expected = train(DDP, 2, length="20st", train=train_with)[0] if train_with else of_ddp("20st")
    assert_equal_curves(found[0], expected, 1e-3 if "bf16" in train_with else 1e-5)
    first, last = 384 + 2 * BLOCK, 288 + 2 * BLOCK
    if "freeze" in train_with:
        first, last = first - 128, last - BLOCK
    assert [one.held for one in found] == [first // 2, first // 2, last // 2, last // 2]


@pytest.mark.full
def test_the_loss_curve_equals_that_of_ddp_with_sharded_tensor_parallel_stages() -> None:
    """Combines stages, data and layers on eight ranks."""
    found = train(f"{PIPELINE.format('1F1B')}\n{SHARDED}tensor = 2\n{BOTH}", 8)
    assert_equal_curves(found[0], of_ddp("20st"))
    assert [one.held for one in found] == [shared("1F1B", rank // 4) // 2 for rank in range(8)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        (schedule, more)
        for schedule in SCHEDULES
        for more in ("", "sequence_parallel = true", "loss_parallel = true", BOTH)
        if schedule == "1F1B" or more in ("", BOTH)
    ],
)
def test_the_loss_curve_equals_that_of_ddp_with_tensor_parallel_stages(schedule: str, more: str) -> None:
    """`make test` runs whole runs of it in `tests/distributed/test_anywhere.py`."""
    found = train(f"{PIPELINE.format(schedule)}\ntensor = 2\n{more}", 4)
    assert_equal_curves(found[0], of_ddp("20st"))
    assert [one.held for one in found] == [shared(schedule, rank // 2) for rank in range(4)]


ODD = {
    "bfloat16": {"train": 'precision = "bf16"', "rel": 1e-3},
    "checkpointed": {"train": "activation_checkpointing = true"},
    "not tied": {"model": "tie_embeddings = false", "optimizer": "layer_decay = 0.7"},
    "frozen": {"train": 'freeze = ["blocks.2.*", "positions.*"]'},
    "one": {"micro": "16"},
    "seven": {"batch": "14"},
    "cut": {"strategy": '\nsplit_points = ["blocks.1"]'},
    "virtual ranks": {"train": "virtual_ranks = 4"},
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("odd", "schedule"),
    [
        (odd, schedule)
        for odd in ODD
        for schedule in SCHEDULES[::2] + SCHEDULES[3:4]
        if odd not in ("cut", "checkpointed") or schedule == "1F1B"
    ],
)
def test_the_loss_curve_equals_that_of_one_process_with(odd: str, schedule: str) -> None:
    text: dict[str, Any] = {"length": "6st"} | ODD[odd]
    more, rel = text.pop("strategy", ""), text.pop("rel", 1e-5)
    assert_equal_curves(train(PIPELINE.format(schedule) + more, 2, **text)[0], train(DDP, 1, **text)[0], rel)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [SHARDED, "tensor = 2\nsequence_parallel = true", 'tensor = 2\nschedule = "ZBVZeroBubble"'],
    ids=["shards", "1F1B", "ZBV"],
)
def test_nonfinite_steps_are_skipped_on_all_stages(more: str) -> None:
    text = {
        "recipe": RECIPE.replace('use = "language_modeling"', 'use = "./parts.py:Spoils"'),
        "train": 'on_nonfinite = "skip"',
    }
    expected = train(DDP, 2, **text)[0]
    found = train(f'use = "pipeline"\nstages = 2\n{more}', 4, **text)[0]
    assert found.column() == pytest.approx(expected.column(), rel=1e-5, nan_ok=True)
    assert found.column("train/skipped_steps") == expected.column("train/skipped_steps")
    assert 3 < expected.column("train/skipped_steps")[-1] < 12
    assert found.column("eval/loss") == pytest.approx(expected.column("eval/loss"), rel=1e-5)


UPHILL = 'use = "./exploring.py:Uphill"\nlr = 0.1\n'


@pytest.mark.parametrize(
    "more", ["", pytest.param("\ntensor = 2\nsequence_parallel = true\nloss_parallel = true", marks=pytest.mark.full)]
)
def test_a_multi_pass_optimizer_perturbs_all_stages(more: str) -> None:
    text = {"length": "4st", "recipe": RECIPE.replace('use = "adamw"\nlr = 3e-3\nweight_decay = 0.1\n', UPHILL)}
    found = train(PIPELINE.format("1F1B") + more, 4 if more else 2, **text)[0]
    assert_equal_curves(found, train(DDP, 1, **text)[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (PIPELINE.format("1F1B"), 2),
        (PIPELINE.format("ZBVZeroBubble"), 2),
        (f"{PIPELINE.format('Interleaved1F1B')}\n{SHARDED}", 4),
    ],
    ids=["1F1B", "ZBVZeroBubble", "shards"],
)
def test_a_resume_is_bit_identical(strategy: str, ranks: int, tmp_path: Path) -> None:
    """Traps 08, 09 and 36, with dropout and averaged weights."""
    options = {"model": "dropout = 0.2", "length": "6st"}
    whole = train(strategy, ranks, more=EMA, **options)[0]
    train(strategy, ranks, tmp_path, more=EMA + STOP.format(3), **options)
    rest = train(strategy, ranks, tmp_path, more=EMA, **options)[0]
    assert rest.column() == whole.column()[3:]
    assert rest.column("eval/loss")[-1] == whole.column("eval/loss")[-1]


IMAGES = (
    RECIPE.partition("[model]")[0]
    + """
[model]
use = "cnn"
width = 4
[data.train]
use = "digits"
split = "test"
[data.eval]
use = "digits"
split = "test"
[task]
use = "classification"
metrics = ["accuracy"]
[optimizer]
use = "sgd"
lr = 0.1
momentum = 0.9
[strategy]
{strategy}
[train]
length = "8st"
global_batch = 50
micro_batch = 5
seed = 3
device = "cpu"
eval_batch = 64
{train}
[track]
every = "1st"
"""
)


@pytest.mark.full
@pytest.mark.parametrize(("pipes", "schedule"), [(1, "1F1B"), (2, "1F1B"), (2, "ZBVZeroBubble")])
def test_batchnorm_statistics_equal_those_of_ddp(pipes: int, schedule: str, tmp_path: Path) -> None:
    """Each epoch of 359 images ends with 9: a rank has fewer than its micro-batches hold, or none."""
    ddp = trained(tmp_path, IMAGES.format(strategy=DDP, train=""), pipes)[0]
    found = trained(
        tmp_path, IMAGES.format(strategy=PIPELINE.format(schedule), train="").replace('"run"', '"other"'), 2 * pipes
    )[0]
    assert_equal_curves(found, ddp)
    assert found.column("eval/accuracy") == ddp.column("eval/accuracy")


class TwoNorms(nn.Module):
    """Two steps with a BatchNorm each; the second has a buffer that is not a statistic."""

    pipeline: Any = ("first", "second")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        self.second.register_buffer("scale", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


def test_buffers_are_synced_only_within_a_stage() -> None:
    """Ranks 0 and 1 hold the first stage, 2 and 3 the second. Buffers contain the rank, or ten to its power."""

    def action(rank: int) -> dict[str, float]:
        strategy = Pipeline(stages=2)
        set_up(strategy)
        held = strategy.wrap(TwoNorms(), ())
        replica = strategy.prepare(held, SGD([p for p in held.parameters() if not p.is_meta], lr=0.1))
        for name, buffer in replica.unwrapped.named_buffers():
            buffer.fill_(10.0**rank if name.endswith("mean") else rank)
        replica.sync_buffers()
        return {name: buffer.item() for name, buffer in replica.unwrapped.named_buffers()}

    first = {"first.running_mean": 5.5, "first.running_var": 0.5, "first.num_batches_tracked": 0.0}
    second = {"second.running_mean": 550.0, "second.running_var": 2.5, "second.num_batches_tracked": 2.0}
    assert in_ranks(4, action) == [first, first, *[{**second, "second.scale": 2.0}] * 2]


@pytest.mark.full
def test_initial_weights_may_come_from_other_layouts(tmp_path: Path) -> None:
    """One stage may find none or all of its weights there; missing weights are listed for the whole model."""
    first = train(DDP, 1, tmp_path, length="4st")[0]
    source = max(tmp_path.glob("runs/run/checkpoints/step-*"))
    init = f'init_from = "{source}"\ninit_ignore = ["positions.*"]'
    text = RECIPE.replace('name = "run"', 'name = "next"').replace('every = "2st"', 'every = "2st"\n' + init)
    blank = dict.fromkeys(("model", "optimizer", "train", "more"), "") | {"batch": "16", "micro": "2", "length": "3st"}
    found = [
        trained(tmp_path, text.replace("next", name).format(**blank, strategy=strategy), ranks)[0]
        for name, strategy, ranks in (("one", DDP, 1), ("two", PIPELINE.format("1F1B"), 2))
    ]
    assert_equal_curves(found[1], found[0])
    assert found[0].column()[0] < first.column()[0]


@pytest.mark.full
def test_compiled_blocks_have_the_same_loss_curve() -> None:
    compiled = train(PIPELINE.format("1F1B"), 2, train='compile = "default"\ncompile_blocks = true', length="3st")[0]
    assert_equal_curves(compiled, train(DDP, 1, length="3st")[0])
