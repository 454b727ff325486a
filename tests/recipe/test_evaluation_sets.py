"""Evaluation sets: one without a name or several with names, and errors for a mixture."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe, load_recipe, render
from ddpforge.runs.changes import recipe_changes

Load = Callable[..., LoadedRecipe]

TWO = """\
[data.eval.clean]
use = "digits"
split = "test"

[data.eval.seen]
use = "digits"
split = "train"
limit = 100
"""
BEST = "\n[checkpoint]\nkeep = {{ best = 1, monitor = {} }}\n"


@pytest.fixture
def several(valid: str) -> str:
    """Returns a recipe with two evaluation sets."""
    return valid.replace('[data.eval]\nuse = "digits"\nsplit = "test"\n', TWO)


def refused(load: Load, text: str, *sets: str, **files: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, *sets, **files)
    return render(caught.value)


# ---------------------------------------------------------------------------------------------- valid recipes
def test_a_single_set_has_no_name(load: Load) -> None:
    loaded = load()
    assert list(loaded.recipe.data.evaluations) == [""]
    assert ("data", "eval") in loaded.recipe.components()


def test_tables_in_data_eval_without_use_are_sets(load: Load, several: str) -> None:
    recipe = load(several).recipe
    options = {name: component.options for name, component in recipe.data.evaluations.items()}
    assert options == {"clean": {"split": "test", "limit": None}, "seen": {"split": "train", "limit": 100}}
    assert [path for path in recipe.components() if path[:2] == ("data", "eval")] == [
        ("data", "eval", "clean"),
        ("data", "eval", "seen"),
    ]


def test_tables_in_data_eval_with_use_are_options(load: Load, valid: str) -> None:
    """`labels` looks like a set, but [data.eval] has a `use`."""
    recipe = load(valid, "data.eval={use = 'folder', root = '.', labels = {cat = 0, dog = 1}}").recipe
    assert recipe.data.evaluations[""].options["labels"] == {"cat": 0, "dog": 1}


def test_the_resolved_recipe_loads_as_an_equal_recipe(load: Load, several: str, registry: Registry) -> None:
    loaded = load(several)
    Path("resolved.toml").write_text(loaded.dumps(), encoding="utf-8")
    assert load_recipe("resolved.toml", registry=registry).recipe == loaded.recipe
    assert tomllib.loads(loaded.dumps())["data"]["eval"] == tomllib.loads(TWO)["data"]["eval"]
    assert str(loaded.origins["data", "eval", "seen", "limit"]) == "recipe.toml:19"


def test_options_of_one_set_can_be_changed_on_the_command_line(load: Load, several: str) -> None:
    loaded = load(several, "data.eval.seen.limit=7", "~data.eval.clean")
    assert [(name, one.options["limit"]) for name, one in loaded.recipe.data.evaluations.items()] == [("seen", 7)]


def test_a_set_with_another_component_drops_the_options_of_the_old_one(load: Load, several: str) -> None:
    child = 'extends = "base.toml"\n[data.eval.seen]\nuse = "folder"\nroot = "."\n'
    loaded = load(child, base=several)
    assert loaded.tables["data"]["eval"]["seen"] == {"use": "folder", "root": ".", "pattern": "*.png"}


@pytest.mark.parametrize("by", ["eval/clean/loss", "eval/seen/accuracy", "train/loss"])
def test_the_best_checkpoint_can_use_a_metric_of_one_set(load: Load, several: str, by: str) -> None:
    assert load(several + BEST.format(f'"{by}"')).recipe.checkpoint.keep.monitor == by


def test_a_run_cannot_resume_with_changed_evaluation_sets(load: Load, several: str) -> None:
    old, new = load(several), load(several, "data.eval.seen.limit=7")
    assert [(change.path, change.policy) for change in recipe_changes(old.tables, new.tables)] == [
        ("data.eval.seen.limit", "fixed")
    ]


def test_options_of_a_set_may_be_secret_but_its_component_may_not(load: Load, several: str) -> None:
    assert load(several, "data.eval.new={use='folder', root='${secret:HOME}'}")
    message = refused(load, several, "data.eval.new={use='${secret:HOME}'}")
    assert "`data.eval.new.use` cannot be a secret" in message


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("sets", "complaint", "hint"),
    [
        (["data.eval.seen.splt='test'"], 'unknown key `splt` in [data.eval.seen], which uses "digits"', "`split`"),
        (["data.eval.seen.limit='x'"], "`data.eval.seen.limit` must be an integer, not a string", ""),
        (["~data.eval.seen.use"], "missing key `use` in [data.eval.seen]", "one of: digits, folder"),
        (["data.eval.seen.use='digit'"], "`digit`", "did you mean `digits`?"),
        (["data.eval.limit=3"], "[data.eval] contains several sets, but `limit` is not a table", 'add `use = "…"`'),
        (["data.eval.'a/b'={use='digits', split='test'}"], "may contain only letters, digits, `_` and `-`", ""),
        (["data.eval.top5={use='digits', split='test'}"], "`eval/top5/loss` would be ambiguous", ""),
        (["data.eval.use='digits'"], "unknown key `clean` in [data.eval]", 'unset = ["data.eval"]'),
    ],
)
def test_an_error_in_a_set_names_its_key(load: Load, several: str, sets: list[str], complaint: str, hint: str) -> None:
    message = refused(load, several, *sets)
    assert complaint in message
    assert hint in message


def test_named_sets_cannot_be_added_to_a_base_with_a_single_set(load: Load, valid: str) -> None:
    message = refused(load, 'extends = "base.toml"\n' + TWO, base=valid)
    assert 'unknown key `clean` in [data.eval], which uses "digits"' in message
    assert 'unset = ["data.eval"]' in message
    assert load('extends = "base.toml"\nunset = ["data.eval"]\n' + TWO, base=valid).recipe.data.evaluations.keys() == {
        *("clean", "seen")
    }


@pytest.mark.parametrize("by", ["eval/loss", "eval/dirty/loss", "eval/clean", "eval/clean/"])
def test_monitor_must_name_one_of_the_sets(load: Load, several: str, by: str) -> None:
    message = refused(load, several + BEST.format(f'"{by}"'))
    assert "it must name one of the evaluation sets" in message
    assert "one of: eval/clean/" in message


def test_the_hint_for_a_missing_monitor_names_a_set(load: Load, several: str) -> None:
    message = refused(load, several + "\n[checkpoint]\nkeep = { best = 1 }\n")
    assert 'name the metric, e.g. monitor = "eval/clean/loss"' in message
