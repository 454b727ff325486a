"""Sources of training data: one without a name or several with names, their weights, and errors for a mixture."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe, load_recipe, render
from ddpforge.runs.changes import recipe_changes

Load = Callable[..., LoadedRecipe]

SOURCES = """\
[data.train.web]
use = "digits"
split = "train"
weight = 0.8

[data.train.code]
use = "digits"
split = "test"
weight = { 0st = 0.2, 1000st = 1, 3ep = 0 }
"""


@pytest.fixture
def several(valid: str) -> str:
    """Returns a recipe with two sources."""
    return valid.replace('[data.train]\nuse = "digits"\nsplit = "train"\n', SOURCES)


def refused(load: Load, text: str, *sets: str, **files: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, *sets, **files)
    return render(caught.value)


# ---------------------------------------------------------------------------------------------- valid recipes
def test_a_single_source_has_no_name(load: Load) -> None:
    loaded = load()
    assert list(loaded.recipe.data.sources) == [""]
    assert ("data", "train") in loaded.recipe.components()


def test_tables_in_data_train_without_use_are_sources_in_alphabetical_order(load: Load, several: str) -> None:
    recipe = load(several).recipe
    assert {name: one.options for name, one in recipe.data.sources.items()} == {
        "code": {"split": "test", "limit": None},
        "web": {"split": "train", "limit": None},
    }
    assert [path for path in recipe.components() if path[:2] == ("data", "train")] == [
        ("data", "train", "code"),
        ("data", "train", "web"),
    ]
    assert [getattr(one, "weight", None) for one in recipe.data.sources.values()] == [
        {"0st": 0.2, "1000st": 1, "3ep": 0},
        0.8,
    ]


def test_the_resolved_recipe_loads_as_an_equal_recipe(load: Load, several: str, registry: Registry) -> None:
    loaded = load(several)
    Path("resolved.toml").write_text(loaded.dumps(), encoding="utf-8")
    assert load_recipe("resolved.toml", registry=registry).recipe == loaded.recipe
    assert tomllib.loads(loaded.dumps())["data"]["train"] == tomllib.loads(SOURCES)["data"]["train"]
    assert str(loaded.origins["data", "train", "code", "weight"]) == "recipe.toml:16"


def test_a_run_cannot_resume_with_other_sources_or_weights(load: Load, several: str) -> None:
    old, new = load(several), load(several, "data.train.web.weight=0.5", "~data.train.code.weight.1000st")
    assert sorted((change.path, change.policy) for change in recipe_changes(old.tables, new.tables)) == [
        ("data.train.code.weight.1000st", "fixed"),
        ("data.train.web.weight", "fixed"),
    ]


def test_sources_without_weights_may_have_a_temperature(load: Load, several: str) -> None:
    sets = "~data.train.web.weight", "~data.train.code.weight"
    assert load(several, *sets).recipe.data.temperature is None
    recipe = load(several, *sets, "data.temperature=3").recipe
    assert recipe.data.temperature == 3
    assert "temperature" not in load(several).tables["data"]


def test_another_component_keeps_the_weight_of_a_source(load: Load, several: str) -> None:
    child = 'extends = "base.toml"\n[data.train.web]\nuse = "folder"\nroot = "."\n'
    loaded = load(child, base=several)
    assert loaded.tables["data"]["train"]["web"] == {"use": "folder", "root": ".", "pattern": "*.png", "weight": 0.8}


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("sets", "complaint", "hint"),
    [
        (["data.train.web.weigth=1"], 'unknown key `weigth` in [data.train.web], which uses "digits"', "`weight`"),
        (["data.train.web.weight=0"], "cannot be 0: must be more than 0", "remove a source"),
        (["data.train.web.weight=-1"], "`data.train.web.weight` must be at least 0, not -1", ""),
        (["data.train.web.weight='much'"], "must be a number or a table, not a string", ""),
        (["data.train.web.weight={0st=-1}"], "`data.train.web.weight.0st` must be at least 0, not -1", ""),
        (["data.train.web.weight={5st=1}"], "must have a weight from the start, 0st", ""),
        (["data.train.web.weight={0st=0, 5st=0}"], "must be more than 0 from some step on", ""),
        (["data.train.web.weight={0st=1, '50%'=2}"], '"50%" is not a number of steps or epochs', ""),
        (["data.train.web.weight={0st=1, 7=2}"], "must be a duration", ""),
        (["~data.train.web.weight"], "[data.train.web] has no weight, but [data.train.code] has one", "or for none"),
        (["data.temperature=2"], "[data.train.code] has a weight", "remove `temperature`, or all weights"),
        (["~data.train.web.use"], "missing key `use` in [data.train.web]", "one of: digits, folder"),
        (
            ["data.train.limit=3"],
            "[data.train] contains several sources, but `limit` is not a table",
            'add `use = "…"`',
        ),
        (["data.train.'a/b'={use='digits', split='test', weight=1}"], "may contain only letters, digits, `_`", ""),
        (["data.train.loss={use='digits', split='test', weight=1}"], "`train/loss/loss` would be ambiguous", ""),
        (["data.train.time={use='digits', split='test', weight=1}"], "`train/time/loss` would be ambiguous", ""),
        (["data.train.use='digits'"], "unknown key `code` in [data.train]", 'unset = ["data.train"]'),
        (["data.sampler.use='sequential'"], "so [data.sampler] has no effect", "remove it"),
    ],
)
def test_an_error_in_a_source_names_its_key(
    load: Load, several: str, sets: list[str], complaint: str, hint: str
) -> None:
    message = " ".join(refused(load, several, *sets).split())
    assert complaint in message
    assert hint in message


def test_a_temperature_needs_several_sources(load: Load, valid: str) -> None:
    message = refused(load, valid, "data.temperature=2")
    assert "`data.temperature` has no effect with a single source [data.train]" in message


def test_a_missing_section_has_one_error(load: Load, valid: str) -> None:
    message = refused(load, valid, "~data.train")
    assert "missing section [data.train]" in message
    assert "1 error in the recipe" in message
