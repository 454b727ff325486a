"""Curves of runs, and those of a loop by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

CASES = (
    ("one", "ddp", 1, ""),
    ("split", "ddp", 1, "micro_batch = 1"),
    ("two", "ddp", 2, ""),
    ("sharded", "fsdp", 2, ""),
)


def check_curves(
    ddpforge: Callable[..., str], folder: Path, recipe: str, wanted: Sequence[tuple[float, float]]
) -> list[dict[str, Any]]:
    """Checks loss and gradient norm of each step: 1 and 2 ranks, accumulation, fsdp, and a resume after three.

    Returns the rows of the last run.
    """
    rows: list[dict[str, Any]] = []
    for name, strategy, ranks, micro in CASES:
        text = recipe.replace("{micro}", micro).replace("{strategy}", strategy).replace('"tiny"', f'"{name}"')
        (folder / f"{name}.toml").write_text(text)
        if name == "sharded":
            ddpforge("run", f"{name}.toml", "train.length=3st", ranks=2)
        ddpforge("run", f"{name}.toml", ranks=ranks)
        rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        found = [(row["train/loss"], row["train/grad_norm"]) for row in rows if "train/loss" in row]
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), name
    return rows
