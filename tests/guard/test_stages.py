"""Parts built from a recipe: lengths, samplers, and the stages of an evaluation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.doubles import Plain
from support.small_recipe import SETS, told
from support.stages import Staged, staged

from ddpforge.app.build import short_steps
from ddpforge.app.evaluate import check_sets
from ddpforge.errors import UsageError
from ddpforge.interfaces import Shuffled
from ddpforge.recipe import load_recipe


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        (
            ["data.train.use=./mine.py:Stream", "data.sampler={use='sequential'}"],
            "data.sampler",
            "Stream is an iterable dataset and yields samples in its own order",
        ),
        (
            ["data.sampler={use='balanced', by='label'}"],
            "data.sampler.by",
            "by: Data has no attribute or method `label`",
        ),
        (
            ["data.sampler={use='batch_size_warmup', start=1, until='4ep'}"],
            "data.sampler.until",
            "until: 4ep must be in steps",
        ),
        (
            ["data.sampler={use='batch_size_warmup', start=1, until='4st'}", "train.length=1.5ep"],
            "train.length",
            "train.length: 1.5ep needs the length of an epoch, but this data has no epochs of a fixed length",
        ),
        (["data.sampler={use='collections:Counter'}"], "data.sampler", "must be a ddpforge.interfaces.BatchSampler"),
    ],
)
def test_sampler_errors_are_reported_before_training(
    parts: Callable[..., Staged], sets: list[str], key: str, said: str
) -> None:
    problems = told(parts(*sets))
    assert said in problems[key]
    assert len(problems) == 1


@pytest.mark.parametrize(("length", "steps"), [("1ep", 5), ("2ep", 7), ("10ep", 23)])
def test_a_length_in_epochs_works_with_a_sampler_whose_steps_grow(
    parts: Callable[..., Staged], length: str, steps: int
) -> None:
    """16 samples in steps of 1, 2, 4, 6 and 3 (the rest), then of 8."""
    built = parts("data.sampler={use='batch_size_warmup', start=1, until='4st'}", f"train.length={length}")
    assert told(built) == {}
    assert built.stage.plan.horizon.total == steps


def test_the_sampler_determines_the_length_of_an_epoch(parts: Callable[..., Staged]) -> None:
    assert parts("train.length=2ep").stage.plan.horizon.total == 4
    assert parts("train.length=2ep", "data.sampler={use='reuse_batches', times=3}").stage.plan.horizon.total == 12


def evaluated(*only: str, sets: Sequence[str] = SETS) -> Staged:
    """Returns the parts of an evaluation. The constructors of all other parts raise."""
    Path("gone.py").write_text(
        "def gone(seed: int = 0, params: object = None, horizon: object = None):\n    raise OSError('gone')\n"
    )
    lost = [f"{kind}={{use='./gone.py:gone'}}" for kind in ("data.train", "optimizer", "schedule", "track.lost")]
    # 3 ranks, which do not divide a batch of 8
    built = staged("run.toml", *lost, *sets, ranks=3, meta=False, trains=False, only=only)
    built.problems.raise_if_any()
    return built


@pytest.mark.usefixtures("parts")
def test_an_evaluation_needs_no_training_data_optimizer_schedule_or_tracker() -> None:
    built = evaluated()
    assert built.stage.data.keys() == {"eval.one", "eval.two"}
    built.deal(Plain(ranks=3).world)
    assert [len(micro.data[0]) for micro in built.stage.evaluation["one"].evaluation()] == [2, 2, 1]  # of 16


@pytest.mark.usefixtures("parts")
def test_an_evaluation_may_use_some_of_the_sets() -> None:
    assert evaluated("two").stage.data.keys() == {"eval.two"}
    recipe = load_recipe("run.toml", sets=SETS).recipe
    with pytest.raises(UsageError, match=r"no evaluation set \[data\.eval\.tow\]") as caught:
        check_sets(recipe, ["tow"])
    assert caught.value.hints == ("did you mean `two`?", "it has one, two")


@pytest.mark.usefixtures("parts")
def test_an_unnamed_set_cannot_be_selected_by_name() -> None:
    recipe = load_recipe("run.toml", sets=["data.eval.use=./mine.py:Data"]).recipe
    with pytest.raises(UsageError, match=r"no evaluation set \[data\.eval\.one\]") as caught:
        check_sets(recipe, ["one"])
    assert caught.value.hints == ("its only evaluation set [data.eval] has no name",)
    with pytest.raises(UsageError, match=r"the recipe has no evaluation set: add \[data\.eval\]"):
        check_sets(load_recipe("run.toml").recipe, [])


def test_first_returns_the_first_micro_batch_of_training() -> None:
    from ddpforge.data import RankShare
    from ddpforge.interfaces import Shuffled
    from ddpforge.training.loaders import open_data

    fetching = {"seed": 3, "drop_last": False, "workers": 0, "prefetch": 2, "pin": False}
    order = Shuffled(torch.arange(10), 3, 4, False)
    batches = open_data(torch.arange(10), order=order, global_batch=4, share=RankShare(0, 1, 4), **fetching)  # type: ignore[arg-type]
    wanted = [next(batches.training(start)).data.tolist() for start in (0, 1)]
    assert batches.first().data.tolist() == wanted[0]
    source = batches.training(0)
    assert [next(source).data.tolist() for _ in (0, 1)] == wanted
    batches.first()
    assert next(batches.training(1)).data.tolist() == wanted[1]
    assert next(batches.training(0)).data.tolist() == wanted[0]


@pytest.mark.parametrize(("samples", "note"), [(3, "every step has 3 samples, not train.global_batch = 8"), (8, "")])
def test_steps_smaller_than_the_global_batch_are_described(samples: int, note: str) -> None:
    order = Shuffled(range(samples), 0, 8, False)
    parts: Any = SimpleNamespace(sampler=order, recipe=SimpleNamespace(train=SimpleNamespace(global_batch=8)))
    assert short_steps(parts).startswith(note)
    assert bool(short_steps(parts)) == bool(note)
