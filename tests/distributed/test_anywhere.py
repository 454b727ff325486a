"""Any checkpoint goes on under any strategy on any number of ranks, as if nothing had happened."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
import torch
from launched import Ranks, Zygote
from sharding import CNN, DDP, FSDP, RECIPE, ZERO, Bench

from ddpforge.checkpoint.reader import Reader
from ddpforge.errors import ExitCode


class Where(NamedTuple):
    """A strategy, and a number of ranks."""

    strategy: str
    ranks: int


FROM = {
    "single": Where('use = "single"', 1),
    "ddp": Where(DDP, 2),
    "fsdp": Where(FSDP, 4),
    "zero1": Where(ZERO[1], 2),
    "zero2": Where(ZERO[2], 4),
    "zero3": Where(ZERO[3], 2),
}
TO = {name: where._replace(ranks={1: 1, 2: 4, 4: 2}[where.ranks]) for name, where in FROM.items()}

# A cycle through all of them in every run of the suite; the other pairs are for `make test-all`.
_NEXT = dict(zip(FROM, [*FROM][1:] + [*FROM][:1], strict=True))
PAIRS = [
    pytest.param(*pair, id="-".join(pair), marks=() if _NEXT[pair[0]] == pair[1] else pytest.mark.full)
    for pair in product(FROM, TO)
]

HALF, WHOLE = 6, 12  # steps; an epoch has four, of which the last is ragged
ELASTIC = "elastic_shards = 4"
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
    """Trains a run from where it stands up to a step; the recipe always plans for all of them."""
    asked = MORE.format(step=end - 1 if end < WHOLE else 100)  # at the last step it would cost the last evaluation
    options = {"model": "dropout = 0.2", "train": ELASTIC, "length": f"{WHOLE}st", "more": asked}
    ended = bench(name, where.strategy, nproc=where.ranks, fails=end < WHOLE, **options | text)
    assert set(ended.codes) == {ExitCode.STOPPED if end < WHOLE else ExitCode.DONE}, ended.stderr


@pytest.fixture(scope="module")
def written(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """A bench with a run `whole` that nothing interrupted, and one that has come half the way under a strategy."""
    folder = tmp_path_factory.mktemp("written")

    def ddpforge(*arguments: str, nproc: int, **_: Any) -> Ranks:
        return zygote.run(arguments, nproc=nproc, cwd=folder)

    bench = Bench(folder, ddpforge)
    go(bench, "whole", FROM["single"])

    def half(name: str) -> Bench:
        if not (bench.folder / f"{name}.toml").exists():
            go(bench, name, FROM[name], HALF)
        return bench

    return half


def alike(bench: Bench, name: str, whole: Bench) -> None:
    """Asserts that a run has the curve of the one that nothing interrupted."""
    for key in ("train/loss", "eval/loss"):
        assert bench.column(name, key)[-1] == pytest.approx(whole.column("whole", key)[-1], rel=5e-6)
    assert bench.column(name) == pytest.approx(whole.column("whole"), rel=5e-6)
    assert len(bench.column(name)) == WHOLE


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_run_goes_on_anywhere(written: Callable[[str], Bench], bench: Bench, source: str, target: str) -> None:
    """Traps 16 and 17; with dropout, averaged weights, a schedule, clipping and ragged epochs."""
    before = written(source)
    copytree(before.folder / "runs" / source, bench.folder / "runs" / source)
    go(bench, source, TO[target])
    alike(bench, source, before)


def test_five_strategies_in_turn_train_one_curve(written: Callable[[str], Bench], bench: Bench) -> None:
    hops = (("zero3", 2, 2), ("fsdp", 4, 5), ("ddp", 1, 7), ("zero1", 2, 10), ("zero2", 4, WHOLE))
    for name, ranks, end in hops:
        go(bench, "chain", FROM[name]._replace(ranks=ranks), end)
    alike(bench, "chain", written("single"))


@pytest.mark.parametrize(
    "recipe", [pytest.param(RECIPE, id="adamw"), pytest.param(SGD, id="sgd", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("there", "back"),
    [("fsdp", "zero3"), ("zero3", "fsdp"), ("ddp", "zero1"), ("zero1", "zero2"), ("zero2", "ddp")],
)
def test_there_and_back_again_not_a_bit_is_lost(
    tmp_path: Path, ddpforge: Callable[..., Ranks], recipe: str, there: str, back: str
) -> None:
    """A saves, B restores and saves, A restores: five more steps are those of A alone, bitwise."""
    bench = Bench(tmp_path, ddpforge, recipe)
    go(bench, "alone", FROM[there], 7)
    copytree(tmp_path / "runs/alone", tmp_path / "runs/travelled")

    again = MORE.format(step=100) + '[callbacks.again]\nuse = "./parts.py:SaveAgain"'
    passed = bench("travelled", TO[back].strategy, nproc=TO[back].ranks, fails=True, model="dropout = 0.2",
                   train=ELASTIC, length=f"{WHOLE}st", more=again)  # fmt: skip
    assert set(passed.codes) == {ExitCode.STOPPED}, passed.stderr
    old, new = (Reader(checkpoint) for checkpoint in sorted_by_time(tmp_path / "runs/travelled/checkpoints"))
    assert (old.facts.step, new.facts.step) == (7, 7)
    assert old.facts.recipe != new.facts.recipe
    for section in ("model", "optimizer", "callbacks"):
        assert old.names(section)
        assert sorted(old.names(section)) == sorted(new.names(section))
        for name in old.names(section):
            assert torch.equal(old.read(section, name), new.read(section, name)), name
    assert old.state().optimizer.keys() == new.state().optimizer.keys()

    for name in ("alone", "travelled"):
        go(bench, name, FROM[there])
    assert bench.column("travelled") == bench.column("alone")
    assert bench.column("travelled", "eval/loss") == bench.column("alone", "eval/loss")


def sorted_by_time(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"), key=lambda path: Reader(path).manifest.created)


def test_batchnorm_statistics_do_not_depend_on_the_ranks(bench: Bench) -> None:
    """With elastic shards; without them each rank's forward passes are of other samples (trap 13)."""
    for name, where in (("one", FROM["single"]), ("two", FROM["ddp"]), ("four", FROM["fsdp"])):
        go(bench, name, where, parts=CNN, model="")
    one, *others = [Reader(bench.newest(name)) for name in ("one", "two", "four")]
    statistics = [name for name in one.names("model") if "running_" in name]
    assert statistics
    for other in others:
        for name in statistics:
            torch.testing.assert_close(other.read("model", name), one.read("model", name), rtol=1e-5, atol=1e-6)
    for name in ("two", "four"):
        for key in ("train/loss", "eval/loss"):
            assert bench.column(name, key) == pytest.approx(bench.column("one", key), rel=1e-4)
