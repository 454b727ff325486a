"""Policies for changed recipe keys when a run resumes."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ddpforge.errors import UsageError
from ddpforge.recipe.schema import Recipe, Resume, Section, declared, resume_policy
from ddpforge.runs.changes import recipe_changes, reject_finished, reject_fixed, reject_unknown
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.resume import open_folder

OLD = {
    "name": "digits",
    "model": {"use": "cnn", "depth": 4},
    "data": {"train": {"use": "digits"}, "workers": 2},
    "optimizer": {"use": "adamw", "lr": 1e-3, "no_decay": ["bias"]},
    "train": {"seed": 0, "length": "5ep", "eval_every": "1ep"},
    "callbacks": {},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    new: dict[str, Any] = json.loads(json.dumps(OLD))
    *tables, key = path.split(".")
    inner = new
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[key] = value
    return new


def keys(section: type[BaseModel], at: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every key of a recipe that has a value or names components."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys(field.annotation, f"{at}{name}.")
        else:
            yield f"{at}{name}", field


@pytest.mark.parametrize(("path", "field"), [*keys(Recipe)])
def test_every_recipe_key_declares_a_resume_policy(path: str, field: FieldInfo) -> None:
    assert declared(field) is not None, f"declare `{path}` in recipe/schema.py: Annotated[…, Resume.…]"
    assert resume_policy(path) is declared(field)


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        ("data.train.workers", Resume.FIXED),  # an option of the dataset, not of [data]
        ("data.eval.split", Resume.FIXED),
        ("optimizer.momentum", Resume.TUNABLE),
        ("callbacks.ema.use", Resume.TUNABLE),
        ("track.wandb.every", Resume.NOT_TRAINING),
        ("checkpoint.keep.last", Resume.NOT_TRAINING),
        ("checkpoint.init_from", Resume.FREE),
        ("strategy.stage", Resume.FREE),
        ("train.long_gone", Resume.TUNABLE),
        ("long_gone.key", Resume.TUNABLE),
    ],
)
def test_an_option_has_the_policy_of_its_components_table(path: str, policy: Resume) -> None:
    assert resume_policy(path) is policy


@pytest.mark.parametrize(
    ("path", "value", "policy"),
    [
        ("model.depth", 6, "fixed"),
        ("model.use", "mlp", "fixed"),
        ("data.train.split", "test", "fixed"),
        ("data.eval.use", "digits", "fixed"),
        ("task.use", "regression", "fixed"),
        ("optimizer.use", "sgd", "fixed"),
        ("train.seed", 1, "fixed"),
        ("train.global_batch", 64, "fixed"),
        ("train.drop_last", "drop", "fixed"),
        ("train.virtual_ranks", 4, "fixed"),
        ("optimizer.lr", 1e-4, "tunable"),
        ("optimizer.no_decay", [], "tunable"),
        ("schedule.use", "cosine", "tunable"),
        ("train.length", "9ep", "tunable"),
        ("train.precision", "bf16", "tunable"),
        ("train.micro_batch", 8, "tunable"),
        ("callbacks.ema.decay", 0.9, "tunable"),
        ("name", "other", "free"),
        ("output_dir", "other", "free"),
        ("track.every", "5st", "free"),
        ("data.workers", 0, "free"),
        ("data.prefetch", 4, "free"),
        ("strategy.use", "ddp", "free"),
        ("checkpoint.keep.last", 1, "free"),
        ("train.collective_timeout", "1m", "free"),
        ("train.compile", "default", "free"),
        ("train.eval_every", "2ep", "free"),
        ("train.eval_batch", 9, "free"),
    ],
)
def test_every_changed_key_has_a_policy(path: str, value: Any, policy: str) -> None:
    (change,) = recipe_changes(OLD, changed(path, value))

    assert (change.path, change.new, change.policy) == (path, value, policy)
    (back,) = recipe_changes(changed(path, value), OLD)
    assert (back.path, back.old, back.policy) == (path, value, policy)


def test_equal_recipes_have_no_changes() -> None:
    assert recipe_changes(OLD, json.loads(json.dumps(OLD))) == []


def test_a_fixed_change_is_refused_with_the_difference_and_a_hint() -> None:
    new = changed("model.depth", 6) | {"name": "other", "task": {"use": "regression"}}

    with pytest.raises(UsageError) as caught:
        reject_fixed(recipe_changes(OLD, new), allowed=[])

    assert "model.depth: 4 → 6" in caught.value.message
    assert 'task.use: absent → "regression"' in caught.value.message
    assert "name" not in caught.value.message
    assert caught.value.hints[-1].endswith("--allow-change model.depth --allow-change task.use")


@pytest.mark.parametrize("allowed", ["model.depth", "model"])
def test_a_fixed_change_may_be_allowed_by_key_or_by_table(allowed: str) -> None:
    changes = recipe_changes(OLD, changed("model.depth", 6))

    reject_fixed(changes, [allowed])
    with pytest.raises(UsageError):
        reject_fixed(changes, ["model.dep"])


def test_a_finished_run_refuses_changes_that_affect_its_result(
    tmp_path: Path,
) -> None:
    reject_finished(tmp_path, recipe_changes(OLD, changed("data.workers", 5)), [])
    for path, value, line in (
        ("train.eval_every", "2ep", '  train.eval_every: "1ep" → "2ep"'),
        ("train.seed", 1, "  train.seed: 0 → 1"),
    ):
        with pytest.raises(UsageError) as refused:
            reject_finished(tmp_path, recipe_changes(OLD, changed(path, value)), [])
        assert line in refused.value.message.splitlines()
    with pytest.raises(UsageError, match=r"  the code in mine\.py"):
        reject_finished(tmp_path, [], ["mine.py"])


def test_a_key_that_no_recipe_has_cannot_be_allowed_to_change() -> None:
    recipes = {"model": {"use": "mlp", "width": 3}}, {"model": {"use": "mlp", "depth": 2}}
    reject_unknown(["model", "model.width", "model.depth", "train.clip_norm", "run"], *recipes)
    with pytest.raises(UsageError, match=r"--allow-change model\.widht: the recipe has no such key") as caught:
        reject_unknown(["model.widht"], *recipes)
    assert caught.value.hints[0] == "did you mean `model.width`?"


@pytest.mark.parametrize(
    ("checkpoints", "refused"), [("none", False), ("empty", False), ("one", True), ("not mounted", True)]
)
def test_a_fixed_change_is_refused_if_the_run_may_have_checkpoints(
    tmp_path: Path, checkpoints: str, refused: bool
) -> None:
    """Includes a link to a disk that is not mounted: its checkpoints would be lost."""
    folder = RunFolder(tmp_path / "run")
    before, after = ({"text": "", "resolved": f"[train]\nseed = {seed}\n", "local_files": {}} for seed in (0, 1))
    folder.create(**before)  # type: ignore[arg-type]
    if checkpoints == "not mounted":
        folder.checkpoints.rmdir()
        folder.checkpoints.symlink_to(tmp_path / "gone")
    elif checkpoints == "one":
        (folder.checkpoints / "step-000000001-0000").mkdir(parents=True)
    elif checkpoints == "none":
        folder.checkpoints.rmdir()
    expected = pytest.raises(UsageError, match="these keys must not change") if refused else nullcontext()
    with ExitStack() as claims, expected:
        open_folder(folder, after, claims, fresh=False, allow_change=())  # type: ignore[arg-type]
