"""Evaluations by EleutherAI's lm-evaluation-harness, for `ddpforge eval --lm-eval`."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpforge.errors import SetupError, UsageError
from torch import nn

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include: Sequence[Path] = (),
    batch: int = 8,
    apply_chat_template: bool = False,
) -> dict[str, float]:
    """Returns the metrics of tasks of the harness, as {"TASK/METRIC": value}.

    Args:
        model: Causal model of transformers, in evaluation mode; the harness calls it on its device.
        tokenizer: Its tokenizer.
        tasks: Names of tasks, groups or tags.
        include: Folders with the files of own tasks (YAML). The harness's own tasks download their data.
        batch: Sequences per forward pass.
        apply_chat_template: Renders the prompts with the tokenizer's chat template.

    Raises SetupError if the harness is not installed, UsageError for unknown tasks and a missing chat template.
    """
    if find_spec("lm_eval") is None:
        raise SetupError("--lm-eval needs a package that is not installed", hints=["pip install lm-eval"])
    if apply_chat_template and not tokenizer.chat_template:
        raise UsageError(f"the tokenizer {tokenizer.name_or_path} has no chat template", hints=["omit --chat"])
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    device = str(next(model.parameters()).device)
    found: Any = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, device=device),
        tasks=list(tasks),
        task_manager=_manager(tasks, include),
        apply_chat_template=apply_chat_template,
        log_samples=False,
    )
    return {
        name: float(value)
        for task, results in found["results"].items()
        for name, value in _named(task, results).items()
        if isinstance(value, int | float)
    }


def _manager(tasks: Sequence[str], include: Sequence[Path]) -> Any:
    """Returns the harness's index of tasks: of the folders alone, if they have all `tasks`."""
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not folder.is_dir():
            raise UsageError(f"--include {folder} is not a folder", hints=["name a folder with YAML files of tasks"])
    missing, found = list(tasks), None
    for defaults in (False, True):
        if missing and (include or defaults):
            found = TaskManager(include_path=list(include) or None, include_defaults=defaults)
            missing = [task for task in tasks if not found.match_tasks([task])]
    if missing and found is not None:
        near = get_close_matches(missing[0], found.all_tasks, n=3)
        raise UsageError(
            f"--lm-eval {missing[0]}: the harness has no such task",
            hints=[f"similar names: {', '.join(near)}" if near else "add the folder of the task's file with --include"],
        )
    return found


def _named(task: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a task by "TASK/METRIC", or "TASK/METRIC/FILTER" if a filter chose the answers."""
    named = {}
    for key, value in results.items():
        metric, _, chosen = key.partition(",")
        if chosen:
            named[f"{task}/{metric}" + ("" if chosen == "none" else f"/{chosen}")] = value
    return named
