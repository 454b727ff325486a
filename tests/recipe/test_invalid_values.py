"""Invalid values are refused before training, and the error names the key."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe, load_recipe
from ddpforge.recipe.layers import Layers
from ddpforge.recipe.toml import Source

Load = Callable[..., LoadedRecipe]


@pytest.mark.parametrize(
    ("key", "sets"),
    [
        ("optimizer.lr", ["optimizer.lr=-1e-3"]),
        ("optimizer.lr", ["optimizer.lr=0"]),
        ("optimizer.lr", ["optimizer.lr=nan"]),
        ("optimizer.lr", ["optimizer.lr='1e-3'"]),
        ("optimizer.betas[1]", ["optimizer.betas=[0.9, 1.5]"]),
        ("optimizer.no_decay", ["optimizer.no_decay=bias"]),
        ("model.dropout", ["model.dropout=1.5"]),
        ("model.classes", ["model.classes=0"]),
        ("train.length", ["train.length=5"]),
        ("train.length", ["train.length=0ep"]),
        ("train.length", ["train.length=-5ep"]),
        ("train.global_batch", ["train.global_batch=0"]),
        ("train.global_batch", ["train.global_batch=256.5"]),
        ("train.micro_batch", ["train.micro_batch=512"]),
        ("train.micro_batch", ["train.micro_batch=48"]),
        ("train.eval_batch", ["train.eval_batch=-1"]),
        ("train.clip_norm", ["train.clip_norm=0"]),
        ("train.precision", ["train.precision=int8"]),
        ("train.seed", ["train.seed=-1"]),
        ("train.collective_timeout", ["train.collective_timeout=5ep"]),
        ("train.collective_timeout", ["train.collective_timeout=9999999h"]),
        ("train.gradient_accumulation_steps", ["train.gradient_accumulation_steps=4"]),
        ("train.num_processes", ["train.num_processes=8"]),
        ("schedule.warmup", ["schedule.use=cosine", "schedule.warmup=6ep"]),
        ("schedule.warmup", ["schedule.use=cosine", "schedule.warmup=5ep", "train.length=5ep"]),
        ("schedule.warmup", ["schedule.use=cosine", "schedule.warmup=100%"]),
        ("train.length", ["schedule.use=cosine", "train.length=2h"]),
        ("track.every", ["track.every=10s"]),
        ("checkpoint.keep.last", ["checkpoint.keep.last=0"]),
        ("checkpoint.keep.best", ["checkpoint.keep.best=1"]),
        ("checkpoint.keep.monitor", ["checkpoint.keep.monitor=eval/loss"]),
        ("checkpoint.keep.monitor", ["checkpoint.keep.best=1", "checkpoint.keep.monitor=loss"]),
        ("checkpoint.keep.mode", ["checkpoint.keep.mode=min"]),
        ("data.workers", ["data.workers=-1"]),
        ("data.train.split", ["data.train.split=trian"]),
        ("name", ["name=../escape"]),
        ("name", [f"name={'é' * 150}"]),
        ("output_dir", ["output_dir=/abs"]),
        ("recipe", ["recipe=3"]),
        ("recipe", ["recipe=true"]),
        ("callbacks.ema.decay", ["callbacks.ema.decay=1"]),
        ("track.wandb.project", ["track.wandb.project=3"]),
        ("task.metrics[0].top", ["task.metrics=[{use='accuracy', top=0}]"]),
    ],
)
def test_the_error_of_an_invalid_value_has_its_key(load: Load, key: str, sets: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(None, *sets)
    problem = caught.value.problems[0]
    assert len(caught.value.problems) == 1
    assert problem.key == key
    assert key.rpartition(".")[2].partition("[")[0] in problem.message
    assert problem.place is not None
    assert problem.place.file == "--set"


@pytest.mark.parametrize("key", ["eval_batch = 32", 'eval_every = "1ep"', 'eval_by = "follower"'])
def test_evaluation_settings_need_an_evaluation_set(load: Load, valid: str, key: str) -> None:
    text = valid.replace('[data.eval]\nuse = "digits"\nsplit = "test"\n', "") + key
    with pytest.raises(RecipeError, match=r"has no effect without a section \[data\.eval\]"):
        load(text)


def test_a_run_that_does_not_evaluate_has_no_cadence_of_evaluations(load: Load, valid: str) -> None:
    recipe = load(valid + 'eval_by = "follower"').recipe
    assert recipe.train.eval_by == "follower"
    with pytest.raises(RecipeError, match=r"`train.eval_every` has no effect with `train.eval_by = \"follower\"`"):
        load(valid + 'eval_by = "follower"\neval_every = "1ep"')


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('compile = "default"', "`train.activation_offload` copies tensors between blocks"),
        ('compile = "reduce-overhead"\ncompile_blocks = true', "`train.activation_offload` copies tensors between"),
        (
            'compile = "default"\ncompile_blocks = true\nactivation_checkpointing = "selective"',
            'compiled blocks cannot be recomputed by `"selective"`',
        ),
    ],
)
def test_activation_offload_needs_blocks_that_python_calls(load: Load, valid: str, more: str, said: str) -> None:
    text = f"{valid}activation_offload = true\n{more}"
    with pytest.raises(RecipeError, match=re.escape(said)):
        load(text)


def test_keeping_the_best_by_an_evaluation_metric_needs_an_evaluation_set(load: Load, valid: str) -> None:
    text = valid.replace('[data.eval]\nuse = "digits"\nsplit = "test"\n', "")
    with pytest.raises(RecipeError, match=r"but there is no section \[data\.eval\]"):
        load(text + '[checkpoint]\nkeep = { best = 1, monitor = "eval/loss" }')


def test_an_error_inside_an_inline_table_or_an_array_is_at_its_value() -> None:
    text = '[optimizer]\nbetas = [0.9, 0.99]\ngroups = { head = { lr = "x", parameters = ["a", 7] } }\n'
    layers = Layers.of(tomllib.loads(text), Source("r.toml", text))
    wanted = {
        ("optimizer", "betas", 1): (2, 15),
        ("optimizer", "groups", "head", "lr"): (3, 26),
        ("optimizer", "groups", "head", "parameters", 1): (3, 50),
    }
    for path, place in wanted.items():
        origin = layers.origin(path)
        assert origin.path == path
        found = origin.place()
        assert found is not None
        assert (found.line, found.column) == place, path


DIGITS = {"use": "digits", "split": "train"}


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        (
            {"data": {"train": {"use": "csv", "path": "a.csv", "target": "y", "delimiter": ";;"}}},
            'delimiter: Character between columns, e.g. ";" or "\\t".',
        ),
        ({"data": {"train": {"use": "part", "of": DIGITS, "share": 0.9}}}, 'Share of the samples, e.g. "90%".'),
        ({"data": DIGITS}, "the keys of a dataset are in [data.train], or in [data.eval] for evaluations"),
    ],
)
def test_a_value_that_cannot_be_mended_by_quotes_is_answered_with_the_meaning_of_its_key(
    recipe: dict[str, Any], hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    hints = [one for problem in caught.value.problems for one in problem.hints]
    assert any(hint in one for one in hints)
    assert not any("add quotes" in one for one in hints)


def test_a_function_as_a_metric_is_answered_with_the_form_of_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "met.py").write_text("def score(outputs, targets):\n    return 1\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe({"task": {"use": "classification", "metrics": ["./met.py:score"]}})
    found = [problem for problem in caught.value.problems if "missing key `outputs`" in problem.message]
    assert "a metric is a class" in found[0].hints[0]
