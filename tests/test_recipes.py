"""The recipes that come with ddpforge: they load, their headers tell the story, and the story is true."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Ranks

from ddpforge.recipe import bundled, load_recipe


def header(recipe: str) -> str:
    """The comment that a recipe begins with."""
    lines = bundled()[recipe].read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def test_the_recipes_of_the_repository_are_the_ones_that_ship() -> None:
    folder = Path(__file__).parent.parent / "recipes"
    assert bundled() == {path.stem: path for path in sorted(folder.glob("*.toml"))}
    assert {"digits", "stdlib-lm"} <= set(bundled())


@pytest.mark.parametrize("recipe", bundled())
def test_a_recipe_loads_under_the_name_of_its_file(recipe: str) -> None:
    assert load_recipe(recipe).recipe.name == recipe


@pytest.mark.parametrize("recipe", bundled())
def test_a_recipe_says_what_it_trains_how_to_launch_it_and_what_to_expect(recipe: str) -> None:
    text = header(recipe)
    assert len(text.partition("\n")[0]) > 40
    launches = re.findall(r"ddpforge (?:run|launch) (\S+)", text)
    assert {recipe, f"recipes/{recipe}.toml"} & set(launches)
    assert "\nExpect: " in text


def rows(folder: Path, key: str) -> list[Any]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


@pytest.mark.slow
def test_digits_does_what_its_header_promises(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    assert "97.5 % or more of the 360 test scans" in header("digits")
    ddpforge("run", "digits", nproc=2)
    assert rows(tmp_path / "runs/digits", "eval/accuracy")[-1] >= 0.975


@pytest.mark.slow
def test_distil_digits_learns_without_labels(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """From a teacher that was trained for a shorter time than the header's."""
    assert "97 % or more of the 360 test scans" in header("distil-digits")
    ddpforge("run", "digits", "--set", "train.length=3ep")
    ddpforge("run", "distil-digits", "--set", "train.length=10ep")
    assert rows(tmp_path / "runs/distil-digits", "eval/accuracy")[-1] >= 0.9


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "promise", "metric", "least"),
    [
        ("contrastive-digits", "70 % or more of the 360 test scans", "eval/accuracy", 0.70),
        ("multilabel-digits", "94 % or more of the labels", "eval/accuracy", 0.94),
        ("segment-digits", "a mean intersection over union of 0.75 or more", "eval/iou", 0.75),
    ],
)
def test_a_recipe_on_digits_does_what_its_header_promises(
    tmp_path: Path, ddpforge: Callable[..., Ranks], recipe: str, promise: str, metric: str, least: float
) -> None:
    assert promise in header(recipe)
    ddpforge("run", recipe, nproc=2)
    assert rows(tmp_path / "runs" / recipe, metric)[-1] >= least


def test_the_text_of_shakespeare_char_is_the_users(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """A text of 65 characters, told by the variable that the header names."""
    (tmp_path / "mine.txt").write_text("".join(map(chr, range(32, 97))) * 60)
    quick = ("train.length=2st", "train.eval_every=2st", "schedule.warmup=1st")
    ddpforge("run", "shakespeare-char", *(f"--set={one}" for one in quick), env={"TEXT": "mine.txt"})
    assert rows(tmp_path / "runs/shakespeare-char", "eval/loss")[-1] < 4.2  # not knowing anything is ln 65 = 4.17


@pytest.mark.slow
def test_the_language_model_learns_to_compress(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """A small piece of what the header promises: from 8 bits per byte, which is knowing nothing, downwards."""
    sets = [
        *("train.length=40st", "train.eval_every=10st", "schedule.warmup=5st", "model.layers=2", "model.width=64"),
        "data.eval.eval_fraction=0.01",
    ]
    ddpforge("run", "stdlib-lm", *(f"--set={one}" for one in sets), nproc=2)

    run = tmp_path / "runs/stdlib-lm"
    bits = rows(run, "eval/bits_per_byte")
    assert rows(run, "train/bits_per_byte")[0] > 7.5
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 5.0
