"""`ddpforge.api`: a light module with all that tools read; recipes, stages, runs and checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest

import ddpforge
from ddpforge import api
from ddpforge.errors import UsageError

PAGE = Path(__file__).parents[1] / "docs/reference/api.md"
SNIPPET = PAGE.read_text().partition("```python\n")[2].partition("```")[0]


def test_the_import_is_light_and_every_name_exists() -> None:
    code = "import sys, ddpforge.api; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False False\n"
    assert [name for name in api.__all__ if not hasattr(api, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        api.nothing  # noqa: B018


def test_the_stages_of_a_recipe_are_built_without_training_it(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SNIPPET, {})
    assert capsys.readouterr().out == "16794 parameters, 345 steps\n"


def test_a_run_and_its_checkpoints_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ddpforge.run(
        "digits",
        sets=["name=a", "train.length=4st", "checkpoint.every=2st", "checkpoint.keep.last=2", "train.device=cpu"],
    )
    run = api.open_run("a")
    assert [row["step"] for row in api.read_metrics(run.path) if "train/loss" in row][-1] == 4
    assert api.open_checkpoint("a").metadata.step == 4
    assert api.open_checkpoint("a", step=2).metadata.step == 2
    weights = api.open_checkpoint(run.path).state().model
    assert weights.keys() == ddpforge.load("a").model().state_dict().keys()
    with pytest.raises(UsageError):
        api.open_run("b")
