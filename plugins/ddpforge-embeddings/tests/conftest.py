"""Fixtures: ddpforge runs in the test's folder. Nothing is downloaded."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ddpforge.testing.ranks import preload, run_ddpforge

os.environ["HF_HUB_OFFLINE"] = "1"
preload("transformers.models.bert.modeling_bert", "peft", "ddpforge_embeddings.tasks", "ddpforge_embeddings.sampler")


@pytest.fixture
def ddpforge(tmp_path: Path) -> Callable[..., str]:
    """Runs e.g. `ddpforge("run", "x.toml", ranks=2)` in the test's folder; returns the output."""

    def run(*arguments: str, ranks: int = 1, code: int = 0) -> str:
        done = run_ddpforge(*arguments, cwd=tmp_path, ranks=ranks)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
