"""Writes the log-probabilities of answers under the reference model of a recipe, once for a whole training.

    python -m ddpforge_transformers.reference dpo.toml -o reference.jsonl

The reference is the recipe's model as it is built, with its adapters switched off. The file has a line {"logps": [a,
b], "sample": N} for each sample of [data.train], in its order; N is a checksum of its tokens. The first line has a
checksum of the others. Training refuses a damaged file, and the file of other samples or of another model. Training
then reads it, and needs neither memory nor time for a reference model: set `reference = "reference.jsonl"` under
[data.train], and `reference = "data"` under [task].
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from ddpforge import disk
from ddpforge.app.build import build
from ddpforge.app.choose import choose
from ddpforge.components.registry import Registry
from ddpforge.errors import ForgeError, UsageError
from ddpforge.recipe import load_recipe
from ddpforge.training.problems import Problems
from torch import nn

from ddpforge_transformers.preference_data import FeedbackData, PreferenceData, reference_lines
from ddpforge_transformers.preferences import DPO, KTO, LogProbabilities
from ddpforge_transformers.reference_model import without_adapters


def write_reference(recipe: str, out: Path, sets: Sequence[str] = (), batch: int = 8) -> int:
    """Writes the file for a recipe, and returns its number of lines. Raises ForgeError."""
    if out.is_dir() or not out.parent.is_dir():
        fault = "is a folder" if out.is_dir() else f"cannot be written: there is no folder {out.parent}"
        raise UsageError(f"{out} {fault}", hints=["give the path of a new .jsonl file in a folder that exists"])
    registry = Registry.installed()
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    if loaded.recipe.checkpoint.init_from is not None:
        raise UsageError(
            "checkpoint.init_from would load other weights at the start of the training",
            hints=["export that run to a folder, and set model.pretrained to it"],
            key="checkpoint.init_from",
        )
    if isinstance(loaded.recipe.data.train, Mapping):
        raise UsageError(
            "the file is for one source, but [data.train] has several",
            hints=["write a file for each source, with a recipe in which [data.train] is this source"],
            key="data.train",
        )
    reads = [f"~{key}" for key in ("data.train.reference", "task.reference") if _has(loaded.recipe, key)]
    loaded = load_recipe(recipe, sets=[*sets, *reads], registry=registry)
    problems = Problems(loaded)
    built = build(choose(loaded, registry, problems, ranks=1), problems)
    problems.raise_if_any()
    data = built.data.get("train")
    if not isinstance(data, PreferenceData | FeedbackData):
        raise UsageError("[data.train] has no answers to compare", hints=['set data.train.use = "preferences"'])
    if not isinstance(built.task, DPO | KTO):
        raise UsageError("the task compares nothing with a reference", hints=['set task.use = "dpo" or "kto"'])
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    low = loaded.recipe.train.precision == "bf16"
    context = torch.autocast(device.type, torch.bfloat16) if low else nullcontext()
    with context:
        found = list(_log_probabilities(built.model.to(device), data, batch, device))
    text = "".join(reference_lines(found, data.marks()))
    with disk.appearing(out) as draft:
        disk.write_new(draft, [text.encode()])
    return len(data)


def _has(recipe: Any, key: str) -> bool:
    component = recipe.task if key.startswith("task") else recipe.data.train
    return component.options.get("reference") is not None


@torch.no_grad()
def _log_probabilities(model: nn.Module, data: Any, batch: int, device: torch.device) -> Iterator[list[float]]:
    model.eval()
    with without_adapters(model):
        for start in range(0, len(data), batch):
            rows = data.collate([data[number] for number in range(start, min(start + batch, len(data)))])
            yield from LogProbabilities()(model, {name: x.to(device) for name, x in rows.items()})[0].tolist()


@click.command()
@click.argument("recipe")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The .jsonl file to write.")
@click.option("-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a value of the recipe; repeatable.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Samples of a forward pass.")
def main(recipe: str, out: Path, sets: tuple[str, ...], batch: int) -> None:
    """Write the log-probabilities of RECIPE's answers under its reference model."""
    try:
        lines = write_reference(recipe, out, sets, batch)
    except ForgeError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(f"{out}: {lines} samples")


if __name__ == "__main__":
    main()
