"""Bundled recipes: they load, and their headers describe them correctly."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks

from ddpforge.app.build import build_without_ranks
from ddpforge.components.registry import Registry
from ddpforge.recipe import bundled, load_recipe


def header(recipe: str) -> str:
    """Returns the comment at the beginning of a recipe."""
    lines = bundled()[recipe].read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def test_bundled_recipes_are_the_recipes_of_the_repository() -> None:
    folder = Path(__file__).parent.parent / "recipes"
    assert bundled() == {path.stem: path for path in sorted(folder.glob("*.toml"))}
    assert {"digits", "stdlib-lm"} <= set(bundled())


@pytest.mark.parametrize("recipe", bundled())
def test_a_recipe_loads_under_the_name_of_its_file(recipe: str) -> None:
    assert load_recipe(recipe).recipe.name == recipe


@pytest.mark.parametrize("recipe", bundled())
def test_header_has_a_description_a_launch_command_and_the_expected_result(recipe: str) -> None:
    text = header(recipe)
    assert len(text.partition("\n")[0]) > 40
    launches = re.findall(r"ddpforge (?:run|launch) (\S+)", text)
    assert {recipe, f"recipes/{recipe}.toml"} & set(launches)
    assert "\nExpect: " in text


def rows(folder: Path, key: str) -> list[Any]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


@pytest.mark.slow
def test_digits_reaches_the_accuracy_in_its_header(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    assert "97.5 % or more of the 360 test scans" in header("digits")
    ddpforge("run", "digits", nproc=2)
    assert rows(tmp_path / "runs/digits", "eval/accuracy")[-1] >= 0.975


@pytest.mark.slow
def test_distil_digits_learns_without_labels(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """Uses a teacher that was trained for a shorter time than in the header."""
    assert "97 % or more of the 360 test scans" in header("distil-digits")
    ddpforge("run", "digits", "--set", "train.length=3ep")
    ddpforge("run", "distil-digits", "--set", "train.length=10ep")
    assert rows(tmp_path / "runs/distil-digits", "eval/accuracy")[-1] >= 0.9


@pytest.mark.full
def test_fine_tuning_reaches_the_accuracies_on_its_page(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    page = (Path(__file__).parents[1] / "docs/guides/fine-tuning.md").read_text()
    (shares,) = re.findall(r"([0-9.]+) % are right after fine-tuning, and ([0-9.]+) % from scratch", page)
    said = {name: float(share) / 100 for name, share in zip(("fine-tuned", "from scratch"), shares, strict=True)}
    (scratch,) = re.findall(r"^ddpforge (run finetune-digits name=from-scratch .*)$", page, re.MULTILINE)
    for command in ("run digits", "run finetune-digits", scratch):
        ddpforge(*command.split())
    found = {
        "fine-tuned": rows(tmp_path / "runs/finetune-digits", "eval/accuracy")[-1],
        "from scratch": rows(tmp_path / "runs/from-scratch", "eval/accuracy")[-1],
    }
    assert found == pytest.approx(said, abs=0.007)
    assert found["fine-tuned"] > max(0.975, found["from scratch"] + 0.01)
    assert "97.5 % or more of the labels" in header("finetune-digits")


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "promise", "metric", "least"),
    [
        ("contrastive-digits", "70 % or more of the 360 test scans", "eval/accuracy", 0.70),
        ("multilabel-digits", "94 % or more of the labels", "eval/accuracy", 0.94),
        ("mixture-digits", "95 % or more of the 360 test scans", "eval/accuracy", 0.95),
        ("segment-digits", "a mean intersection over union of 0.75 or more", "eval/iou", 0.75),
    ],
)
def test_recipe_on_digits_reaches_the_result_in_its_header(
    tmp_path: Path, ddpforge: Callable[..., Ranks], recipe: str, promise: str, metric: str, least: float
) -> None:
    assert promise in header(recipe)
    ddpforge("run", recipe, nproc=2)
    assert rows(tmp_path / "runs" / recipe, metric)[-1] >= least


def test_shakespeare_char_reads_the_users_text(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """Passes a text with 65 characters in the variable that the header names."""
    (tmp_path / "mine.txt").write_text("".join(map(chr, range(32, 97))) * 60)
    quick = ("train.length=2st", "train.eval_every=2st", "schedule.warmup=1st")
    ddpforge("run", "shakespeare-char", *(f"--set={one}" for one in quick), env={"TEXT": "mine.txt"})
    assert rows(tmp_path / "runs/shakespeare-char", "eval/loss")[-1] < 4.2  # a uniform prediction has ln 65 = 4.17


@pytest.mark.full
def test_the_language_model_learns_to_compress(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """Checks a small part of the header's result: bits per byte fall from 8, the value of a uniform prediction."""
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


@pytest.mark.parametrize(
    ("recipe", "ranks", "promise", "data_ranks", "copies"),
    [("gpt-1-node", 8, "2.4 GB", 8, 1), ("gpt-2-nodes", 16, "2.5 GB", 8, 2)],
)
def test_large_gpt_has_the_memory_and_groups_in_its_header(
    recipe: str, ranks: int, promise: str, data_ranks: int, copies: int
) -> None:
    assert f"{promise} of weights, gradients and optimizer state on each GPU" in header(recipe)
    registry = Registry.installed()
    parts = build_without_ranks(load_recipe(recipe, registry=registry), registry, ranks=ranks, device="cuda")
    assert f"{16 * parts.size.all * copies / ranks / 1e9:.1f} GB" == promise
    assert parts.strategy.data_ranks(ranks) == data_ranks
    assert parts.batch.accumulation == 1


@pytest.mark.full
def test_gpt_recipes_of_one_and_two_nodes_train_the_same_curve(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    """Trains a small model with short sequences on two and four ranks."""
    small = (
        "model.layers=2",
        "model.heads=2",
        "model.width=16",
        "train.precision=fp32",
    )
    sizes = ("model.block_size=32", "data.train.block_size=32", "data.eval.block_size=32")
    length = ("train.global_batch=8", "train.micro_batch=2", "train.length=6st", "track.every=1st")
    few = ("schedule.warmup=2st", "data.eval.eval_fraction=0.001")
    sets = [f"--set={one}" for one in (*small, *sizes, *length, *few)]
    for recipe, ranks in (("gpt-1-node", 2), ("gpt-2-nodes", 4)):
        ddpforge("run", recipe, *sets, nproc=ranks)
    one, two = (rows(tmp_path / "runs" / recipe, "train/loss") for recipe in ("gpt-1-node", "gpt-2-nodes"))
    assert len(one) == 6
    assert two == pytest.approx(one, rel=1e-5)
