"""Evaluations by EleutherAI's lm-evaluation-harness, for `ddpforge eval --lm-eval`."""

import re
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
    trust: bool = False,
    batch: int = 8,
    apply_chat_template: bool = False,
) -> dict[str, float]:
    """Returns the metrics of tasks of the harness, as {"TASK/METRIC": value}.

    Args:
        model: Causal model of transformers, in evaluation mode; the harness calls it on its device.
        tokenizer: Its tokenizer.
        tasks: Names of tasks, groups or tags.
        include: Folders with the files of own tasks (YAML). The harness's own tasks download their data.
        trust: Run the Python code that those files name. Without it, files that name code are refused.
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
        task_manager=_manager(tasks, include, trust=trust),
        apply_chat_template=apply_chat_template,
        log_samples=False,
    )
    return {
        name: float(value)
        for task, results in found["results"].items()
        for name, value in _named(task, results).items()
        if isinstance(value, int | float)
    }


def _manager(tasks: Sequence[str], include: Sequence[Path], *, trust: bool) -> Any:
    """Returns the harness's index of tasks: of the folders alone, if they have all `tasks`."""
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not folder.is_dir():
            raise UsageError(f"--include {folder} is not a folder", hints=["name a folder with YAML files of tasks"])
        if not trust:
            _reject_code(folder)
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


_CODE = re.compile(
    r"!function|^%TAG|^\s*include\s*:\s*[\"']?(?:/|~|\S*\.\.)|^\s*(?:unsafe_code|trust_remote_code)\s*:\s*[\"']?[Tt]rue",
    re.MULTILINE,
)


def _reject_code(folder: Path) -> None:
    """Raises UsageError for a YAML file that names Python code to run, or another file outside of the folder."""
    for file in sorted(one for one in folder.rglob("*") if one.suffix in (".yaml", ".yml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if found := _CODE.search(text):
            line = text.count("\n", 0, found.start() + len(found[0]) - len(found[0].lstrip())) + 1
            raise UsageError(
                f"{file}, line {line} names code or a file outside of the folder: {found[0].strip()}",
                hints=["read the files of the folder; if you trust them, add --trust"],
            )


def _named(task: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a task by "TASK/METRIC", or "TASK/METRIC/FILTER" if a filter chose the answers."""
    named = {}
    for key, value in results.items():
        metric, _, chosen = key.partition(",")
        if chosen:
            named[f"{task}/{metric}" + ("" if chosen == "none" else f"/{chosen}")] = value
    return named
