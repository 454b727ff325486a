"""Rings of the package and the path of one step, read from the code: for tests, and for docs/architecture.py."""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ddpforge

__all__ = ["HOLDS", "PACKAGE", "RINGS", "path_of_a_step", "ring", "sizes"]

PACKAGE = Path(ddpforge.__file__).parent
_TABLES = tomllib.loads((PACKAGE.parent / "tests/rings.toml").read_text(encoding="utf-8"))
RINGS = {name: table["modules"] for name, table in _TABLES.items()}
HOLDS = {name: table["holds"] for name, table in _TABLES.items()}
RECIPE = {
    "recipe": 2,
    "name": "path",
    "model": {"use": "mlp", "inputs": 64, "outputs": 10},
    "data": {"train": {"use": "digits", "split": "train"}},
    "task": {"use": "classification"},
    "optimizer": {"use": "adamw", "lr": 1e-3},
    "train": {"length": "8st", "global_batch": 32},
    "track": {"every": "100st"},
}
OBSERVED = 6  # a step that neither logs nor saves, nor computes the order of the next samples
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # no calls since Python 3.12


def ring(module: str) -> str:
    """Returns the ring of a module, by its full name."""
    name = module.removeprefix("ddpforge").removeprefix(".")
    return next((ring for ring, pattern in RINGS.items() if re.match(rf"({pattern})(\.|$)", name)), "kernel")


def sizes() -> dict[str, tuple[int, int]]:
    """Returns the number of files and of lines of each ring."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        files, lines = found.get(ring(module), (0, 0))
        found[ring(module)] = files + 1, lines + path.read_text(encoding="utf-8").count("\n")
    return found


def path_of_a_step(folder: Path) -> list[tuple[int, str]]:
    """Returns the depth, from 0, and the name of each call of a function of the package in one step of a run.

    The run is in `folder`, which becomes the current one.
    """
    calls: list[tuple[int, str]] = []
    depth = steps = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal depth, steps
        code = frame.f_code
        if not code.co_filename.startswith(f"{PACKAGE}{os.sep}") or code.co_name in COMPREHENSIONS:
            return
        if event == "return":
            depth -= 1
        elif event == "call":
            depth += 1
            steps += code.co_qualname == "Stepping.take"
            if steps == OBSERVED:
                calls.append((depth, f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"))

    os.chdir(folder)
    seldom = patch("ddpforge.training.consensus._AGREE_SECONDS", 1e9)  # on a slow machine ranks agree at more steps
    with seldom:
        sys.setprofile(profile)
        try:
            ddpforge.run(RECIPE, out=folder / "runs")
        finally:
            sys.setprofile(None)
    top = min(depth for depth, _ in calls)
    return [(depth - top, name) for depth, name in calls]
