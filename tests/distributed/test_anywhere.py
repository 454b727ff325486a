"""Any checkpoint resumes under any strategy on any number of ranks, with the curve of an uninterrupted run."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
import torch
from support.launched import Ranks, Zygote
from support.sharding import CNN, DDP, FSDP, HSDP, RECIPE, ZERO, Bench
from support.torch_versions import needs_pipelines

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.errors import ExitCode


class Where(NamedTuple):
    """Strategy and number of ranks."""

    strategy: str
    ranks: int


TENSOR = f"{FSDP}\ntensor = 2"
PIPELINE = 'use = "pipeline"\nstages = 2'
LAYOUTS = {
    "ddp@1": Where(DDP, 1),
    "ddp@2": Where(DDP, 2),
    "fsdp@2": Where(FSDP, 2),
    "zero1@2": Where(ZERO[1], 2),
    "zero3@2": Where(ZERO[3], 2),
    "tensor@2": Where(TENSOR, 2),
    "tensor@4": Where(f"{TENSOR}\nsequence_parallel = true", 4),
    "pipeline@2": Where(PIPELINE, 2),
    "pipeline@4": Where(PIPELINE, 4),
    "pipeline+tensor@4": Where(f"{PIPELINE}\ntensor = 2\nsequence_parallel = true", 4),
    "pipeline+fsdp@4": Where(f'{PIPELINE}\ndata = "fsdp"', 4),
}
FURTHER = {"single": Where('use = "single"', 1), "hsdp@4": Where(HSDP, 4), "zero2@4": Where(ZERO[2], 4)}

HALF, WHOLE = 6, 12  # steps; an epoch has four, the last of them ragged
ELASTIC = "virtual_ranks = 4"
MORE = """
[callbacks.ema]
decay = 0.9
[callbacks.stop]
use = "./parts.py:StopAt"
step = {step}
rank = 0
[checkpoint]
every = "100st"
"""
SGD = RECIPE.replace('use = "adamw"', 'use = "sgd"\nmomentum = 0.9')


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def go(bench: Bench, name: str, where: Where, end: int = WHOLE, **text: Any) -> None:
    """Trains a run from its newest checkpoint up to step `end`; the recipe always plans for `WHOLE` steps."""
    asked = MORE.format(step=end - 1 if end < WHOLE else 100)  # a stop at the last step would skip the last evaluation
    options = {"model": "dropout = 0.2", "train": ELASTIC, "length": f"{WHOLE}st", "more": asked}
    ended = bench(name, where.strategy, nproc=where.ranks, fails=end < WHOLE, **options | text)
    assert set(ended.codes) == {ExitCode.PREEMPTED if end < WHOLE else ExitCode.DONE}, ended.stderr


def dropout(*layouts: str) -> str:
    """Returns the dropout option: 0 if ranks share a model, because they draw other random numbers than one rank."""
    shared = any(layout.startswith(("tensor", "pipeline")) for layout in layouts)
    return f"dropout = {0.0 if shared else 0.2}"


@pytest.fixture(scope="module")
def written(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    """Returns a function that trains up to a step under a layout, once, and returns the bench with this run."""
    benches: dict[tuple[str, str, int], Bench] = {}

    def train(layout: str, model: str, end: int) -> Bench:
        if (layout, model, end) not in benches:
            folder = tmp_path_factory.mktemp("written")
            bench = Bench(folder, lambda *words, nproc, **_: zygote.run(words, nproc=nproc, cwd=folder, watched=False))
            go(bench, "run", (LAYOUTS | FURTHER)[layout], end, model=model)
            benches[layout, model, end] = bench
        return benches[layout, model, end]

    return train


def assert_same_curve(bench: Bench, whole: Bench) -> None:
    """Asserts that a run has the curve of the uninterrupted run."""
    for key in ("train/loss", "eval/loss"):
        assert bench.column("run", key)[-1] == pytest.approx(whole.column("run", key)[-1], rel=5e-6)
    assert bench.column("run") == pytest.approx(whole.column("run"), rel=5e-6)
    assert len(bench.column("run")) == WHOLE


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), [*product(LAYOUTS, LAYOUTS)])
def test_run_resumes_under_any_layout(written: Callable[..., Bench], bench: Bench, source: str, target: str) -> None:
    """Covers traps 16, 17 and 19; with dropout, averaged weights, a schedule, clipping and ragged epochs."""
    model = dropout(source, target)
    copytree(written(source, model, HALF).folder / "runs", bench.folder / "runs")
    go(bench, "run", LAYOUTS[target], model=model)
    assert_same_curve(bench, written("single", model, WHOLE))


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(("zero3@2", "hsdp@4", "ddp@1", "zero1@2", "zero2@4", "fsdp@2"), marks=pytest.mark.full),
        pytest.param(
            ("tensor@4", "zero3@2", "pipeline+fsdp@4", "ddp@1", "pipeline+tensor@4", "fsdp@2"), marks=needs_pipelines
        ),
    ],
    ids=", ".join,
)
def test_six_layouts_after_each_other_train_one_curve(
    written: Callable[..., Bench], bench: Bench, layouts: tuple[str, ...]
) -> None:
    model = dropout(*layouts)
    for number, layout in enumerate(layouts, 1):
        go(bench, "run", (LAYOUTS | FURTHER)[layout], 2 * number, model=model)
    assert_same_curve(bench, written("single", model, WHOLE))


@pytest.mark.parametrize(
    "recipe", [pytest.param(RECIPE, id="adamw"), pytest.param(SGD, id="sgd", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("there", "back"),
    [
        pytest.param("hsdp@4", "zero3@2", marks=pytest.mark.full),
        ("zero2@4", "ddp@1"),
        pytest.param("pipeline+fsdp@4", "tensor@4", marks=pytest.mark.full),
        pytest.param("zero3@2", "fsdp@2", marks=pytest.mark.full),
        pytest.param("ddp@2", "zero1@2", marks=pytest.mark.full),
        pytest.param("zero1@2", "zero2@4", marks=pytest.mark.full),
        pytest.param("tensor@4", "pipeline@4", marks=pytest.mark.full),
    ],
)
def test_checkpoint_saved_again_by_another_layout_is_bitwise_equal(
    tmp_path: Path, ddpforge: Callable[..., Ranks], recipe: str, there: str, back: str
) -> None:
    """Saves with A, restores and saves with B, restores with A: five more steps are bitwise those of A alone."""
    bench = Bench(tmp_path, ddpforge, recipe)
    layouts = LAYOUTS | FURTHER
    go(bench, "alone", layouts[there], 7)
    copytree(tmp_path / "runs/alone", tmp_path / "runs/travelled")

    again = MORE.format(step=100) + '[callbacks.again]\nuse = "./parts.py:SaveAgain"'
    passed = bench("travelled", layouts[back].strategy, nproc=layouts[back].ranks, fails=True, model="dropout = 0.2",
                   train=ELASTIC, length=f"{WHOLE}st", more=again)  # fmt: skip
    assert set(passed.codes) == {ExitCode.PREEMPTED}, passed.stderr
    old, new = (CheckpointReader(checkpoint) for checkpoint in sorted_by_time(tmp_path / "runs/travelled/checkpoints"))
    assert (old.metadata.step, new.metadata.step) == (7, 7)
    assert old.metadata.recipe != new.metadata.recipe
    for section in ("model", "optimizer", "callbacks"):
        assert old.names(section)
        assert sorted(old.names(section)) == sorted(new.names(section))
        for name in old.names(section):
            assert torch.equal(old.read(section, name), new.read(section, name)), name
    assert old.state().optimizer.keys() == new.state().optimizer.keys()

    for name in ("alone", "travelled"):
        go(bench, name, layouts[there])
    assert bench.column("travelled") == bench.column("alone")
    assert bench.column("travelled", "eval/loss") == bench.column("alone", "eval/loss")


def sorted_by_time(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"), key=lambda path: CheckpointReader(path).manifest.created)


@pytest.mark.full  # tests/training/test_batchnorm.py has the averages, and a golden curve a run
def test_batchnorm_statistics_are_the_same_on_any_number_of_ranks(bench: Bench) -> None:
    """Uses virtual ranks; without them each rank's forward passes have other samples (trap 13)."""
    for name, where in (("one", LAYOUTS["ddp@1"]), ("two", LAYOUTS["ddp@2"]), ("four", FURTHER["hsdp@4"])):
        go(bench, name, where, parts=CNN, model="")
    one, *others = [CheckpointReader(bench.newest(name)) for name in ("one", "two", "four")]
    statistics = [name for name in one.names("model") if "running_" in name]
    assert statistics
    for other in others:
        for name in statistics:
            torch.testing.assert_close(other.read("model", name), one.read("model", name), rtol=1e-5, atol=1e-6)
    for name in ("two", "four"):
        for key in ("train/loss", "eval/loss"):
            assert bench.column(name, key) == pytest.approx(bench.column("one", key), rel=1e-4)
