"""The way of one optimizer step through the package, recorded by `sys.setprofile`: `pytest -s` prints it."""

import os
import sys
from pathlib import Path
from typing import Any

from support.forked import in_ranks

import ddpforge

PACKAGE = f"{Path(ddpforge.__file__).parent}{os.sep}"
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


def path_of_a_step(folder: Path) -> list[tuple[int, str]]:
    """Returns the depth and the name of each call of a function of the package in one step of a run."""
    calls: list[tuple[int, str]] = []
    depth = steps = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal depth, steps
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        if event == "return":
            depth -= 1
        elif event == "call":
            depth += 1
            steps += code.co_qualname == "Trainer._step"
            if steps == OBSERVED:
                calls.append((depth, f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"))

    os.chdir(folder)
    sys.setprofile(profile)
    try:
        ddpforge.run(RECIPE, out=folder / "runs")
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_takes_sixty_calls_and_nine_frames(tmp_path: Path) -> None:
    """Bounds with room: they fail if every run begins to walk through the parts that only some runs use."""
    (calls,) = in_ranks(1, lambda _: path_of_a_step(tmp_path))
    top = min(depth for depth, _ in calls)
    print("\n".join(f"{'  ' * (depth - top)}{name}" for depth, name in calls))
    assert len(calls) <= 66
    assert max(depth for depth, _ in calls) - top <= 9
    assert len({name.partition(":")[0] for _, name in calls}) <= 26
