"""A run in numbers: batches, length and cadences, from a recipe and the steps of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from ddpforge.errors import RecipeError, UsageError
from ddpforge.interfaces.durations import Duration, Horizon
from ddpforge.recipe import LoadedRecipe, check_world
from ddpforge.recipe.plan import Plan, in_steps, plan_batch
from ddpforge.recipe.schema import CheckpointSection, Component, DataSection, OptimizerComponent, Recipe, TrainSection

PART = Component(use="x")


def recipe(train: dict[str, Any], checkpoint: dict[str, Any] | None = None, *, evaluates: bool = True) -> Recipe:
    return Recipe(
        recipe=2,
        name="run",
        model=PART,
        data=DataSection(train=PART, eval=PART if evaluates else None),
        task=PART,
        optimizer=OptimizerComponent(use="x"),
        train=TrainSection.model_validate({"length": "2ep", "global_batch": 64} | train),
        checkpoint=CheckpointSection.model_validate(checkpoint or {}),
    )


def planned(train: dict[str, Any], per_epoch: int | None = 10, ranks: int = 2, **more: Any) -> Plan:
    made = recipe(train, **more)
    plan = Plan.of(made, plan_batch(made.train, ranks), per_epoch)
    assert plan is not None
    return plan


def test_durations_become_steps_and_the_batch_is_dealt_to_ranks() -> None:
    plan = planned({"micro_batch": 8, "eval_every": "0.5ep"}, checkpoint={"every": "7st", "keep": {"every": "1ep"}})
    assert plan.horizon == Horizon(20, 10)
    assert plan.every == {
        "track.every": 10,
        "checkpoint.every": 7,
        "checkpoint.keep.every": 10,
        "train.eval_every": 5,
    }
    assert plan.facts() == {"total_steps": 20, "steps_per_epoch": 10, "micro_batch": 8, "accumulation": 4}


def test_the_micro_batch_is_that_of_a_shard() -> None:
    """256 samples in 8 shards on 2 ranks: 4 passes of 32 on each."""
    facts = planned({"global_batch": 256, "virtual_ranks": 8}).facts()
    assert (facts["micro_batch"], facts["accumulation"]) == (32, 4)


def test_what_goes_by_the_clock_is_counted_nowhere() -> None:
    plan = planned({"length": "1h", "eval_every": "10m"}, checkpoint={"every": "5m"})
    assert plan.horizon == Horizon(None, 10)
    assert plan.every == {"track.every": 10}


def test_percent_are_of_the_whole_run() -> None:
    plan = planned({"eval_every": "25%"}, checkpoint={"every": "50%", "keep": {"every": "100%"}})
    shares = {"train.eval_every": 5, "checkpoint.every": 10, "checkpoint.keep.every": 20}
    assert plan.every == {"track.every": 10} | shares
    with pytest.raises(UsageError, match=r"train\.eval_every: 25% needs to know how many steps the run has"):
        planned({"length": "1h", "eval_every": "25%"})
    with pytest.raises(ValidationError, match="it is what 100% means"):
        planned({"length": "50%"})


def test_a_run_that_does_not_evaluate_has_no_cadence_of_evaluations() -> None:
    assert "train.eval_every" not in planned({}, evaluates=False).every


def test_epochs_of_data_without_a_length_are_refused_by_the_key_that_asks_for_them() -> None:
    with pytest.raises(UsageError, match=r"train\.eval_every: 1ep needs to know how long an epoch is") as caught:
        in_steps("train.eval_every", Duration.parse("1ep"), Horizon(100, steps_per_epoch=None))
    assert "in steps" in caught.value.hints[0]


def test_all_that_cannot_be_counted_is_noted_in_one_pass() -> None:
    noted: list[str] = []

    @contextmanager
    def noting(*path: str) -> Iterator[None]:
        try:
            yield
        except UsageError:
            noted.append(".".join(path))

    made = recipe({"eval_every": "1ep"}, {"every": "1ep"})
    assert Plan.of(made, plan_batch(made.train, 1), None, noting=noting) is None
    assert noted == ["train.length", "checkpoint.every", "train.eval_every"]


@pytest.mark.parametrize(("length", "total"), [("2ep", 17), ("1.5ep", 15)])
def test_whole_epochs_of_no_one_length_end_where_their_order_says(length: str, total: int) -> None:
    made = recipe({"length": length}, evaluates=False)
    plan = Plan.of(made, plan_batch(made.train, 2), 10, ends={1: 8, 2: 17}.get)
    assert plan is not None
    assert plan.horizon.total == total


Load = Callable[..., LoadedRecipe]


def _train(**values: int) -> TrainSection:
    return TrainSection.model_validate({"length": "1ep", **values})


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "expected_micro", "accumulation"),
    [(256, 32, 1, 32, 8), (256, 32, 2, 32, 4), (256, 32, 8, 32, 1), (6, 1, 3, 1, 2), (1, 1, 1, 1, 1)],
)
def test_the_global_batch_does_not_depend_on_the_ranks(
    batch: int, micro: int, ranks: int, expected_micro: int, accumulation: int
) -> None:
    plan = plan_batch(_train(global_batch=batch, micro_batch=micro), ranks)
    assert (plan.micro_batch, plan.accumulation) == (expected_micro, accumulation)
    assert plan.micro_batch * plan.accumulation * plan.data_ranks == plan.global_batch == batch


def test_without_a_micro_batch_each_rank_takes_its_share_at_once() -> None:
    plan = plan_batch(_train(global_batch=256), 4)
    assert (plan.micro_batch, plan.accumulation) == (64, 1)
    assert str(plan) == "256 per step = 64 per forward pass × 1 accumulation × 4 ranks"


@pytest.mark.parametrize(
    ("values", "ranks", "hints"),
    [
        ({"global_batch": 256}, 3, ("nearest global_batch: 255 or 258",)),
        ({"global_batch": 2}, 4, ("nearest global_batch: 4",)),
        ({"global_batch": 256, "micro_batch": 32}, 3, ("nearest global_batch: 192 or 288, with micro_batch = 32",)),
        (
            {"global_batch": 240, "micro_batch": 32},
            2,
            (
                "nearest global_batch: 192 or 256, with micro_batch = 32",
                "nearest micro_batch: 30 or 40, with global_batch = 240",
            ),
        ),
        (
            {"global_batch": 18, "micro_batch": 2},
            2,
            (
                "nearest global_batch: 16 or 20, with micro_batch = 2",
                "nearest micro_batch: 1 or 3, with global_batch = 18",
            ),
        ),
    ],
)
def test_an_uneven_batch_is_refused_with_the_nearest_even_ones(
    values: dict[str, int], ranks: int, hints: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_batch(_train(**values), ranks)
    assert caught.value.problems[0].hints == hints
    assert caught.value.problems[0].key == "train.global_batch"


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_virtual_ranks_fix_the_micro_batch_whatever_the_ranks(ranks: int, accumulation: int) -> None:
    plan = plan_batch(_train(global_batch=64, micro_batch=8, virtual_ranks=4), ranks)
    assert (plan.micro_batch, plan.accumulation) == (8, accumulation)
    assert plan_batch(_train(global_batch=64, virtual_ranks=4), ranks).micro_batch == 16


@pytest.mark.parametrize(
    ("values", "ranks", "message", "hint"),
    [
        ({"global_batch": 64}, 3, "`train.virtual_ranks` = 4 cannot be dealt out evenly to 3 ranks", "fit: 1, 2, 4"),
        ({"global_batch": 66}, 2, "cannot be dealt out evenly to 4 virtual ranks", "nearest global_batch: 64 or 68"),
        (
            {"global_batch": 64, "micro_batch": 3},
            1,
            "not a multiple of `train.micro_batch` × `train.virtual_ranks` = 3 × 4 = 12",
            "nearest global_batch: 60 or 72",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused(values: dict[str, int], ranks: int, message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_batch(_train(**values, virtual_ranks=4), ranks)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert hint in problem.hints[0]


def test_the_error_for_a_loaded_recipe_points_at_the_global_batch(load: Load) -> None:
    loaded = load()
    assert check_world(loaded, 2).accumulation == 4
    with pytest.raises(RecipeError) as caught:
        check_world(loaded, 3)
    place = caught.value.problems[0].place
    assert place is not None
    assert place.text == "global_batch = 256"
    assert place.column == len("global_batch = ") + 1
