"""Checks before training. `CHECKS` lists all of them by stage, each with its key of the recipe.

A check is a function of a stage. It yields, or raises, an error for each setting that cannot work; the error may name
another key. A check that needs a component that could not be built is skipped. The checks of the first samples are
separate functions in `samples`, because they return results.

The list has the names of functions. Their modules are imported when a check runs: the checks of `Chosen` need no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from ddpforge.errors import ForgeError
from ddpforge.training.problems import Problems
from ddpforge.training.stages import MISSING, Built, Chosen

__all__ = ["CHECKS", "Problems", "check", "check_built", "check_optimizer", "function_of"]

Check = tuple[str, str]

CHECKS: dict[type | str, Sequence[Check]] = {
    Chosen: (
        ("optimizer", "static.check_optimizer_options"),
        ("optimizer", "static.check_optimizers"),
        ("task", "static.check_updates"),
        ("task", "static.check_metrics"),
        ("checkpoint.keep.monitor", "static.check_metric_direction"),
        ("task", "static.check_evaluation_loss"),
        ("task", "static.check_whole_batch"),
        ("task", "static.check_fused_loss"),
        ("train.max_tokens", "static.check_max_tokens"),
        ("callbacks", "static.check_callbacks"),
        ("train", "static.check_device"),
        ("train.compile", "static.check_compile"),
        ("train.fp8", "static.check_float8"),
        ("strategy", "static.check_strategy"),
        ("data.train", "static.check_stream"),
        ("checkpoint.init_from", "static.check_initial_weights"),
    ),
    "model": (
        ("", "model.check_compiled"),
        ("", "model.check_uninitialised"),
        ("", "model.check_max_norm"),
        ("", "model.check_forms"),
        ("", "model.check_overlap"),
        ("", "model.check_savable"),
    ),
    Built: (
        ("data.train", "sources.check_sources"),
        ("data", "sources.check_names"),
        ("data", "fit.check_batches"),
        ("task", "fit.check_auxiliary"),
        ("task", "fit.check_own_parameters"),
        ("task", "fit.check_task"),
        ("strategy", "fit.check_strategy_data"),
        ("train.blocks", "fit.check_blocks"),
        ("train.fp8", "fit.check_layers"),
        ("train.device", "fit.check_float64"),
        ("model", "fit.check_master_dtype"),
        ("optimizer", "fit.check_parameter_groups"),
    ),
}
"""The checks of every run: of its chosen components, of its model, and of all parts together."""


def check(stage: object, problems: Problems, checks: Sequence[Check] = (), *, key: str = "") -> bool:
    """Adds the errors of a stage's checks to `problems`; returns True if all checks could run and found no error.

    `checks` replaces those of `CHECKS`; `key` replaces their keys.
    """
    passed = True
    for own, name in checks or CHECKS[type(stage)]:
        path, before, made = tuple((key or own).split(".")), len(problems), False
        with problems.at(*path):
            for error in function_of(name)(stage) or ():
                problems.add(path, error)
            made = True
        passed = passed and made and len(problems) == before
    return passed


def function_of(name: str) -> Callable[[Any], Iterator[ForgeError] | None]:
    """Returns the function of a check: for "static.check_device", `check_device` in `guard/static.py`."""
    module, _, function = name.partition(".")
    found: Callable[[Any], Iterator[ForgeError] | None] = getattr(import_module(f"{__name__}.{module}"), function)
    return found


def check_optimizer(built: Built, problems: Problems) -> None:
    """Builds the optimizer over the model's parameters, if these have memory, and adds its errors to `problems`.

    A run builds its optimizer anyway, and needs no such check.
    """
    check(built, problems, (("optimizer", "fit.check_optimizer"),))


def check_built(built: Built, problems: Problems) -> bool:
    """Runs the checks of built components; returns True if a batch of the data can be tried with task and model."""
    passed = check(built, problems, [one for one in CHECKS[Built] if one[1] == "fit.check_task"]) and bool(built.data)
    check(built, problems, [one for one in CHECKS[Built] if one[1] != "fit.check_task"])
    parts = (built.task, built.model, built.auxiliary)
    return passed and not any(part is MISSING for part in parts)
