"""Fixture with a small recipe, built as `check` builds it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.small_recipe import CODE, RECIPE
from support.stages import Staged, staged


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Staged]:
    """Returns a builder of a small recipe with local code: `parts("model.inputs=5", …)`, as `check --build` builds
    it."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)
    Path("mine.py").write_text(CODE)

    return lambda *sets: staged("run.toml", *sets)
