"""Optimizers that cannot train are found by building them over one small parameter."""

from collections.abc import Callable

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe
from ddpforge.training.optimizer_trial import check_optimizer

Load = Callable[..., LoadedRecipe]


def _problem(load: Load, registry: Registry, *sets: str) -> tuple[str, str]:
    loaded = load(None, *sets)
    with pytest.raises(RecipeError) as caught:
        check_optimizer(loaded, registry)
    (problem,) = caught.value.problems
    assert problem.place is not None
    return problem.key, problem.message


def test_a_usable_optimizer_passes(load: Load, registry: Registry) -> None:
    check_optimizer(load(None, "optimizer.use=torch.optim:AdamW", "optimizer.lr=0.1"), registry)


def test_the_optimizers_own_refusal_becomes_a_problem_of_its_table(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry, "optimizer.use=torch.optim:SGD", "optimizer.lr=-1.0")
    assert key == "optimizer"
    assert "Invalid learning rate: -1.0" in message


def test_a_learning_rate_of_nothing_trains_nothing(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry, "optimizer.use=torch.optim:SGD", "optimizer.lr=0")
    assert (key, message) == ("optimizer.lr", "`optimizer.lr` must be more than 0, not 0.0")


def test_an_optimizer_that_needs_a_closure_is_refused(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry, "optimizer.use=torch.optim:LBFGS")
    assert key == "optimizer.use"
    assert "computes the loss itself" in message


def test_what_makes_no_optimizer_is_refused(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry)  # the test double returns None
    assert (key, message) == ("optimizer.use", 'optimizer "adamw" makes a NoneType, not a torch.optim.Optimizer')
