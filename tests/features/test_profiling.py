"""Profiles of training steps: recorded steps, ranks and written files."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.doubles import Loop, Plain
from support.launched import Ranks

from ddpforge.errors import Diverged, UsageError
from ddpforge.features.profiling import Profile
from ddpforge.ranks import heartbeat
from ddpforge.recipe.run_plan import StepWindow

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "6st", global_batch = 8 }
"""


@pytest.mark.parametrize(
    ("text", "window"),
    [("20..25", StepWindow(20, 25)), ("3", StepWindow(3, 3)), ("1..2,all", StepWindow(1, 2, all=True))],
)
def test_a_profile_window_is_one_step_or_a_range(text: str, window: StepWindow) -> None:
    assert StepWindow.parse(text) == window


@pytest.mark.parametrize("text", ["", "0..3", "5..4", "5-9", "5..", "a..b", "5..9,some"])
def test_invalid_profile_windows_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"the window of the profile, .*, has no steps"):
        StepWindow.parse(text)


def test_a_window_after_the_end_is_refused() -> None:
    StepWindow(5, 9).reject_after(5)
    StepWindow(5, 9).reject_after(None)
    with pytest.raises(UsageError, match="begins at step 5, but the run ends at step 4"):
        StepWindow(5, 9).reject_after(4)


def profiled(window: StepWindow, folder: Path, *, steps: int = 4, rank: int = 0) -> list[Path]:
    loop = Loop(steps=steps, evaluation=False, replica=Plain(ranks=2, rank=rank))
    loop.trainer.fit(Profile(window, folder, loop.replica.world))
    return sorted(folder.glob("*")) if folder.exists() else []


def test_the_profile_table_has_the_phases_and_operators_of_a_step(tmp_path: Path) -> None:
    trace, table = profiled(StepWindow(2, 3), tmp_path / "profile")
    assert table.name == "steps-2-3-rank-0.txt"
    lines = table.read_text().splitlines()
    assert re.fullmatch(r"steps 2\.\.3 on rank 0: [\d.]+ ms a step", lines[0])
    shares = {line.split()[0]: float(line.split()[-1].rstrip("%")) for line in lines[2:8]}
    assert list(shares) == ["data", "forward", "backward", "optimizer", "reduce", "callbacks"]
    assert sum(shares.values()) == pytest.approx(100, abs=3)
    (multiplied,) = (line for line in lines if line.split()[0] == "aten::mul")
    assert float(multiplied.split()[1]) >= 1  # w·x, once a step
    assert heartbeat._follower is None

    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("phase: forward") == 2
    assert names.count("phase: backward") == 2


def test_a_run_that_ends_within_the_window_writes_the_recorded_steps(tmp_path: Path) -> None:
    found = profiled(StepWindow(3, 9), tmp_path / "profile")
    assert [path.name for path in found] == ["steps-3-4-rank-0.json.gz", "steps-3-4-rank-0.txt"]


def test_other_ranks_record_only_with_all(tmp_path: Path) -> None:
    assert not profiled(StepWindow(2, 3), tmp_path / "one", rank=1)
    assert len(profiled(StepWindow(2, 3, all=True), tmp_path / "all", rank=1)) == 2


def test_a_failed_step_writes_no_profile_and_allows_another_profile(tmp_path: Path) -> None:
    loop = Loop(steps=4, bad=[3], evaluation=False, callbacks={})
    with pytest.raises(Diverged):
        loop.trainer.fit(Profile(StepWindow(2, 4), tmp_path / "profile", loop.replica.world))
    assert heartbeat._follower is None
    assert not (tmp_path / "profile").exists()
    assert len(profiled(StepWindow(2, 3), tmp_path / "again")) == 2


def test_a_window_before_the_first_step_is_logged_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(steps=4, evaluation=False)
    loop.trainer.progress.step = 3
    with caplog.at_level("WARNING", "ddpforge"):
        loop.trainer.fit(Profile(StepWindow(1, 2), tmp_path / "profile", loop.replica.world))
    assert "this attempt trained none of the steps 1..2" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_a_run_writes_its_profile_into_the_run_folder(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    said = ddpforge("run", "tiny.toml", "--profile", "3..4")
    assert "steps 3..4 on rank 0" in said.stderr
    names = sorted(path.name for path in (tmp_path / "runs/tiny/profile").iterdir())
    assert names == ["steps-3-4-rank-0.json.gz", "steps-3-4-rank-0.txt"]

    late = ddpforge("run", "tiny.toml", "--fresh", "--profile", "7..9", fails=True)
    assert late.codes == [2]
    assert "the window of the profile begins at step 7, but the run ends at step 6" in late.stderr
