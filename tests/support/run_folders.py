"""Run folders in the state in which training leaves them, made without training."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import tomlkit

from ddpforge.runs.folder import RunFolder, Status

RECIPE = {
    "recipe": 2,
    "name": "digits",
    "model": {"use": "cnn", "classes": 10},
    "data": {"train": {"use": "digits"}},
    "optimizer": {"use": "adamw", "lr": 0.001},
    "train": {"length": "10st", "seed": 0},
}


def made(
    path: Path,
    *,
    state: str | None = "done",
    recipe: Mapping[str, Mapping[str, Any]] = {},
    rows: list[dict[str, Any]] | None = None,
    **facts: Any,
) -> RunFolder:
    """Creates a run at `path`, whose recipe is `RECIPE` with other values; without `state`, one that has not begun."""
    folder = RunFolder(path)
    tables: dict[str, Any] = json.loads(json.dumps(RECIPE)) | {"name": path.name}
    for section, values in recipe.items():
        tables[section] = tables.get(section, {}) | values
    resolved = tomlkit.dumps(tables)
    folder.create(text=resolved, resolved=resolved, local_files={})
    if state:
        folder.begin_attempt(step=0, text=resolved, resolved=resolved, local_files={})
        codes = {"done": 0, "running": None, "preempted": 75, "diverged": 4}
        status = {
            **{"state": state, "exit_code": codes.get(state, 1), "step": 10, "total_steps": 10, "samples": 80},
            **{"world_size": 1, "strategy": "ddp", "metrics": {}, "error": None},
        }
        folder.write_status(cast(Status, status | facts))
    if rows:
        lines = (json.dumps({"attempt": 1, "time": 1000.0 + row["step"]} | row) + "\n" for row in rows)
        folder.metrics.write_text("".join(lines))
    return folder


@contextmanager
def trained(folder: RunFolder) -> Iterator[None]:
    """Claims the folder in another process, as a training run does."""
    ready, tell = os.pipe()
    wait, done = os.pipe()
    if (child := os.fork()) == 0:
        os.close(done)
        with folder.claim():
            os.write(tell, b"!")
            os.read(wait, 1)  # until the test ends, however it does
        os._exit(0)
    try:
        os.close(tell)
        assert os.read(ready, 1) == b"!"
        yield
    finally:
        os.close(done)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(wait)
