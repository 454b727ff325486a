"""Fixtures: ddpforge runs. Nothing is downloaded."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ddpforge.testing.ranks import preload, run_ddpforge

os.environ["HF_HUB_OFFLINE"] = "1"
preload("peft", "ddpforge_diffusers.tasks", "ddpforge_diffusers.latents", "diffusers.models.unets.unet_2d")
preload("diffusers.models.transformers.dit_transformer_2d")


@pytest.fixture
def ddpforge(tmp_path: Path) -> Callable[..., str]:
    """Runs e.g. `ddpforge("run", "x.toml", ranks=2)` in the test's folder; returns the output."""

    def run(*arguments: str, ranks: int = 1, code: int = 0) -> str:
        done = run_ddpforge(*arguments, cwd=tmp_path, ranks=ranks, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Returns the rows of the training steps of a run."""

    def read(name: str) -> list[dict[str, float]]:
        found = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        return [row for row in found if "train/loss" in row]

    return read
