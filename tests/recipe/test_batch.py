"""Batch arithmetic: what a step is made of, and the nearest choices when it does not come out even."""

from collections.abc import Callable

import pytest

from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe, check_world, plan_batch
from ddpforge.recipe.schema import TrainSection

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
def test_elastic_shards_fix_the_micro_batch_whatever_the_ranks(ranks: int, accumulation: int) -> None:
    plan = plan_batch(_train(global_batch=64, micro_batch=8, elastic_shards=4), ranks)
    assert (plan.micro_batch, plan.accumulation) == (8, accumulation)
    assert plan_batch(_train(global_batch=64, elastic_shards=4), ranks).micro_batch == 16


@pytest.mark.parametrize(
    ("values", "ranks", "message", "hint"),
    [
        ({"global_batch": 64}, 3, "`train.elastic_shards` = 4 cannot be dealt out evenly to 3 ranks", "fit: 1, 2, 4"),
        ({"global_batch": 66}, 2, "cannot be dealt out evenly to 4 elastic shards", "nearest global_batch: 64 or 68"),
        (
            {"global_batch": 64, "micro_batch": 3},
            1,
            "not a multiple of `train.micro_batch` × `train.elastic_shards` = 3 × 4 = 12",
            "nearest global_batch: 60 or 72",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused(values: dict[str, int], ranks: int, message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_batch(_train(**values, elastic_shards=4), ranks)
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
