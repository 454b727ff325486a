"""Checks of optimizer options, which build the optimizer over one small parameter."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.guard.static import check_optimizer_options
from ddpforge.recipe import LoadedRecipe
from ddpforge.training.problems import Problems

Load = Callable[..., LoadedRecipe]

OWN = """
import torch

class Own(torch.optim.Optimizer):
    def __init__(self, params, *, lr: float = 0.1, common: int = 1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure=None): ...
"""


def _checked(loaded: LoadedRecipe, registry: Registry) -> None:
    stage, problems = SimpleNamespace(trains=True, recipe=loaded.recipe, registry=registry), Problems(loaded)
    with problems.at("optimizer"):
        check_optimizer_options(stage)
    problems.raise_if_any()


def _problem(load: Load, registry: Registry, *sets: str) -> tuple[str, str]:
    loaded = load(None, *sets)
    with pytest.raises(RecipeError) as caught:
        _checked(loaded, registry)
    (problem,) = caught.value.problems
    assert problem.place is not None
    return problem.key, problem.message


def test_a_usable_optimizer_passes(load: Load, registry: Registry) -> None:
    _checked(load(None, "optimizer.use=torch.optim:AdamW", "optimizer.lr=0.1"), registry)


def test_an_error_of_the_optimizers_constructor_is_a_problem_of_its_table(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry, "optimizer.use=torch.optim:SGD", "optimizer.lr=-1.0")
    assert key == "optimizer"
    assert "Invalid learning rate: -1.0" in message


def test_a_learning_rate_of_zero_is_refused(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry, "optimizer.use=torch.optim:SGD", "optimizer.lr=0")
    assert (key, message) == ("optimizer.lr", "`optimizer.lr` must be more than 0, not 0.0")


def test_an_optimizer_that_needs_a_closure_is_refused(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry, "optimizer.use=torch.optim:LBFGS")
    assert key == "optimizer.use"
    assert "computes the loss itself" in message


def test_a_component_that_returns_no_optimizer_is_refused(load: Load, registry: Registry) -> None:
    key, message = _problem(load, registry)  # the test double returns None
    assert (key, message) == ("optimizer.use", 'optimizer "adamw" returns a NoneType, not a torch.optim.Optimizer')


def test_a_group_cannot_set_an_option_shared_by_all_parameters(load: Load, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    sets = ["optimizer.use=./own.py:Own", "optimizer.lr=0.1", "optimizer.groups.a.parameters=['*']"]
    _checked(load(None, *sets, "optimizer.groups.a.lr=0.2"), registry)
    key, message = _problem(load, registry, *sets, "optimizer.groups.a.common=3")
    assert key == "optimizer.groups.a.common"
    assert message == "`common` of Own cannot differ between groups of parameters"


@pytest.mark.parametrize("table", ["groups.a", "updates.a"])
def test_optimizers_of_groups_and_updates_are_checked(load: Load, registry: Registry, table: str) -> None:
    sets = ["optimizer.use=torch.optim:SGD", "optimizer.lr=0.1", f"optimizer.{table}.parameters=['*']"]
    key, _ = _problem(load, registry, *sets, f"optimizer.{table}.use=torch.optim:Adam", f"optimizer.{table}.lr=-1.0")
    assert key == f"optimizer.{table}"
