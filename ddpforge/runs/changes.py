"""Compares the recipes of two attempts of a run, and refuses changes that would make it another run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddpforge.errors import UsageError

__all__ = ["Change", "flattened", "recipe_changes", "reject_finished", "reject_fixed", "reject_unknown"]


@dataclass(frozen=True)
class Change:
    """Recipe key with different values in two resolved recipes. A missing value is None.

    "fixed" keys define the run, and must not change. "tunable" keys may change when a run resumes. "free" keys do not
    affect the result.
    """

    path: str
    old: Any
    new: Any
    policy: Literal["fixed", "tunable", "free"]

    def __str__(self) -> str:
        old, new = (
            "absent" if x is None else json.dumps(x, ensure_ascii=False, default=str) for x in (self.old, self.new)
        )
        return f"{self.path}: {old} → {new}"


def recipe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns every key that differs between two resolved recipes, in the order of the recipe."""
    before, after = flattened(old), flattened(new)
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [Change(path, before.get(path), after.get(path), _policy(path)) for path in paths]


def reject_fixed(changes: Sequence[Change], allowed: Sequence[str]) -> None:
    """Raises UsageError with old and new values if a fixed key changed and `allowed` does not cover it.

    `allowed` holds keys ("model.depth") and whole tables ("model").
    """
    refused = [change for change in changes if change.policy == "fixed" and not _under(change.path, allowed)]
    if refused:
        raise UsageError(
            "this recipe cannot resume the run, because these keys must not change:\n"
            + "\n".join(f"  {change}" for change in refused),
            hints=[
                "to start from scratch, pass --fresh; the earlier run is kept under another name",
                "to resume anyway, pass " + " ".join(f"--allow-change {change.path}" for change in refused),
            ],
        )


def reject_unknown(allowed: Sequence[str], *recipes: Mapping[str, Any]) -> None:
    """Raises UsageError for a key in `allowed` that no recipe has; "run" allows another run's checkpoint."""
    from ddpforge.recipe.report import did_you_mean
    from ddpforge.recipe.vocabulary import Vocabulary

    keys = {key for recipe in recipes for key in flattened(recipe)}
    tables = {key[:at] for key in keys for at, letter in enumerate(key) if letter == "."}
    for key in allowed:
        is_known = key == "run" or key in keys | tables or Vocabulary().field(tuple(key.split("."))) is not None
        if not is_known:
            hints = [*did_you_mean(key, keys | tables), "name a key or a table, e.g. model.depth or model"]
            raise UsageError(f"--allow-change {key}: the recipe has no such key", hints=hints)


def reject_finished(folder: Path, changes: Sequence[Change], edited: Sequence[str]) -> None:
    """Raises UsageError if a finished run had another recipe or other local code.

    `edited` are the names of local files with changed code.
    """
    from ddpforge.recipe.schema import Resume, resume_policy

    named = [str(x) for x in changes if resume_policy(x.path) is not Resume.NOT_TRAINING]
    named += [f"the code in {name}" for name in edited]
    if named:
        raise UsageError(
            f"{folder} is finished, with another recipe:\n" + "\n".join(f"  {each}" for each in named),
            hints=[
                "give the new run another name: --set name=NAME",
                "or replace the old run with --fresh; the old run is kept under another name",
                "or continue the old run with a longer train.length",
            ],
        )


def flattened(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of nested tables by dotted keys."""
    return dict(_leaves(table))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _policy(path: str) -> Literal["fixed", "tunable", "free"]:
    from ddpforge.recipe.schema import Resume, resume_policy

    policy = resume_policy(path)
    return "free" if policy in (Resume.FREE, Resume.NOT_TRAINING) else "fixed" if policy is Resume.FIXED else "tunable"


def _under(path: str, tables: Sequence[str]) -> bool:
    return any(path == table or path.startswith(f"{table}.") for table in tables)
