"""`ddpforge eval --follow`: evaluates each checkpoint of a run once, during the run, with the numbers of the run."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from support.launched import Ranks, Zygote

from ddpforge.app.evaluate import Evaluation
from ddpforge.app.follow import _LOOKS, _Waiting
from ddpforge.errors import ExitCode
from ddpforge.runs.checkpoints import CheckpointFolder, choose, rows
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import read_evaluations, read_metrics
from ddpforge.runs.summary import summarize

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 0.1 }
train = { length = "8st", global_batch = 64, eval_by = "follower" }
checkpoint = { every = "2st", keep = { last = 1, best = 1, monitor = "eval/accuracy" } }
callbacks.ema = { decay = 0.5 }
"""
BY_RUN = ['train.eval_by="run"', 'train.eval_every="2st"', 'name="itself"']


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains one run that evaluates itself, and one that leaves it to a follower."""
    ranks = getattr(request, "param", 1)
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(RECIPE)
    zygote.run(["run", "tiny.toml"], nproc=ranks, cwd=folder).check()
    zygote.run(["run", "tiny.toml", *BY_RUN], nproc=ranks, cwd=folder).check()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Returns a copy of the run that waits for a follower: checkpoints of steps 2, 4, 6 and 8."""
    copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path("runs/tiny"))


def ranks_of(run: RunFolder) -> int:
    status = run.status()
    assert status is not None
    return status["world_size"]


def evaluations(run: RunFolder) -> dict[int, dict[str, float]]:
    """Returns the metrics of evaluations in the rows of a run, by step."""
    found = {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in read_metrics(run.path)}
    return {step: metrics for step, metrics in found.items() if metrics}


def checkpoint(run: RunFolder, step: int) -> Path:
    (path,) = run.checkpoints.glob(f"step-{step:09}-*")
    return path


def steps(run: RunFolder) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("step-*"))


def evaluate_all(run: RunFolder) -> None:
    """Records an evaluation of every checkpoint, as a follower does before the run has ended."""
    mine = _Waiting(run, wait=0)
    while path := mine.look().checkpoint:
        mine.publish(Evaluation(int(path.name.split("-")[1]), {"eval/loss": 1.0}, is_rank_zero=True))


def recorded(run: RunFolder) -> list[int]:
    return [row["step"] for row in read_evaluations(run.path).values()]


# ---------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("trained", [1, 2], indirect=True)
def test_numbers_are_those_of_the_run_to_the_last_bit(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    """With averaged weights of a callback, on as many ranks as the run."""
    assert evaluations(run) == {}
    assert steps(run) == [2, 4, 6, 8]  # none was removed, although `keep` keeps one

    said = ddpforge("eval", "--follow", "tiny", "--json", nproc=ranks_of(run))
    assert evaluations(run) == evaluations(RunFolder(Path("runs/itself")))
    assert [json.loads(line)["step"] for line in said.stdout.splitlines()] == [2, 4, 6, 8]
    assert "4 checkpoints were evaluated here" in " ".join(said.stderr.split())


def test_readers_of_the_run_show_the_evaluations_and_the_follower_prunes_at_the_end(
    run: RunFolder, ddpforge: Callable[..., Ranks]
) -> None:
    before = run.metrics.read_bytes()
    ddpforge("eval", "--follow", "tiny", nproc=ranks_of(run))
    found = evaluations(run)
    best = max(found, key=lambda step: found[step]["eval/accuracy"])

    assert run.metrics.read_bytes() == before  # the file has one writer: the run
    assert summarize(run).metrics["eval/accuracy"] == found[8]["eval/accuracy"]
    assert choose(run, best=True) == checkpoint(run, best)
    assert [row.metrics["eval/loss"] for row in rows(CheckpointFolder.find("tiny")) if row.step == 8] == [
        found[8]["eval/loss"]
    ]
    assert steps(run) == sorted({best, 8})


def test_a_second_follower_finds_nothing_left_to_do(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("eval", "--follow", "tiny")
    files = {path: path.stat().st_mtime_ns for path in (run.path / "evaluations").iterdir()}
    again = ddpforge("eval", "--follow", "tiny")
    assert again.stdout == ""
    assert {path: path.stat().st_mtime_ns for path in (run.path / "evaluations").iterdir()} == files


def test_checkpoints_that_the_run_has_evaluated_are_not_evaluated_again(
    run: RunFolder, ddpforge: Callable[..., Ranks]
) -> None:
    said = ddpforge("eval", "--follow", "itself")
    assert said.stdout == ""
    assert recorded(RunFolder(Path("runs/itself"))) == []


def test_evaluations_after_the_step_of_a_resume_are_superseded(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    """Damages the last checkpoint after its evaluation: the run goes back, and saves other weights at this step."""
    evaluate_all(run)
    (checkpoint(run, 8) / "COMMIT").unlink()
    ddpforge("run", "tiny.toml", "train.length=9st", nproc=ranks_of(run))
    assert recorded(run) == [2, 4, 6]
    superseded = [json.loads(line) for line in (run.path / "metrics.superseded.jsonl").read_text().splitlines()]
    assert any(row["step"] == 8 and "eval/loss" in row for row in superseded)


# ---------------------------------------------------------------------------------------------- claims
@contextmanager
def another(action: Callable[[], object]) -> Iterator[int]:
    """Runs `action` in a process that then holds its locks, until it is killed; yields the process id."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = action()  # noqa: F841
        os.write(write, b"1")
        time.sleep(600)
        os._exit(0)
    assert os.read(read, 1) == b"1"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_followers_share_checkpoints_and_take_over_those_of_a_killed_one(run: RunFolder) -> None:
    holder, mine = _Waiting(run, wait=0), _Waiting(run, wait=0)
    with another(holder.look):  # it has claimed step 2
        for step in (4, 6, 8):
            assert mine.look().checkpoint == checkpoint(run, step)
            mine.publish(Evaluation(step, {"eval/loss": 1.0}, is_rank_zero=True))
        assert mine.look() == (None, False)  # the run is done, but step 2 waits for the other one
    assert mine.look().checkpoint == checkpoint(run, 2)
    mine.publish(Evaluation(2, {"eval/loss": 1.0}, is_rank_zero=True))
    assert mine.look() == (None, True)
    assert recorded(run) == [2, 4, 6, 8]
    assert not list((run.path / "evaluations").glob("*.lock"))


def test_a_follower_waits_for_a_run_that_trains_and_ends_after_it_was_killed(run: RunFolder) -> None:
    status = run.status()
    assert status is not None
    run.write_status({**status, "state": "running", "exit_code": None})
    rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    mine = _Waiting(run, wait=0.2)

    def train() -> object:
        claim = run.claim()
        claim.__enter__()
        return claim

    with another(train):
        assert mine.look() == (None, False)
        time.sleep(0.3)
        assert mine.look() == (None, False)
    assert mine.look() == (None, False)  # a launcher may start it again
    time.sleep(0.3)
    assert mine.look() == (None, True)


def test_an_evaluation_of_a_run_that_was_started_from_scratch_meanwhile_is_dropped(
    run: RunFolder, ddpforge: Callable[..., Ranks]
) -> None:
    mine = _Waiting(run, wait=0)
    mine.look()
    ddpforge("run", "tiny.toml", "--fresh")
    assert not mine.publish(Evaluation(2, {"eval/loss": 1.0}, is_rank_zero=True))
    assert recorded(run) == []
    assert mine.look().checkpoint == checkpoint(run, 2)  # of the new run


# ---------------------------------------------------------------------------------------------- damage
def test_a_damaged_checkpoint_is_named_at_the_end_and_not_tried_again(
    run: RunFolder, ddpforge: Callable[..., Ranks]
) -> None:
    shard = next(checkpoint(run, 4).glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    name = checkpoint(run, 4).name
    for evaluated in (3, 0):
        said = ddpforge("eval", "--follow", "tiny", fails=True)
        assert said.codes == [ExitCode.ENVIRONMENT]
        assert f"damaged and have no evaluation: {name}" in " ".join(said.stderr.split())
        assert "Traceback" not in said.stderr
        assert len(said.stdout.splitlines()) == evaluated
    assert sorted(evaluations(run)) == [2, 6, 8]


def test_a_checkpoint_that_a_shared_folder_shows_late_is_not_damaged(run: RunFolder) -> None:
    path = checkpoint(run, 2) / "COMMIT"
    content = path.read_bytes()
    path.unlink()
    mine = _Waiting(run, wait=0)
    for _ in range(_LOOKS - 1):
        assert mine.look().checkpoint == checkpoint(run, 4)
    path.write_bytes(content)
    assert mine.look().checkpoint == checkpoint(run, 2)


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, gone = _Waiting(run, wait=0), checkpoint(run, 2)
    verify = mine._is_intact

    def removing(path: Path) -> bool:
        if path == gone:
            rmtree(path)
        return verify(path)

    monkeypatch.setattr(mine, "_is_intact", removing)
    assert mine.look().checkpoint == checkpoint(run, 4)
    assert recorded(run) == []


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        (["tidy"], "there is no run 'tidy'", "did you mean tiny?"),
        (["."], "there is no run '.'", "runs there"),
        (["tiny", "--step", "2"], "--step cannot be combined with --follow", "omit --step"),
        (["tiny", "--dataset", "x"], "--dataset cannot be combined with --follow", "omit --dataset"),
        (["tiny", "--wait", "5"], "--wait 5 is not a time with a unit", "90m"),
        (["tiny", "data.eval.split=train"], '--set changes the numbers: data.eval.split: "test"', "omit data"),
        (["tiny", "train.precision=bf16"], "--set changes the numbers: train.precision", "writes nothing"),
    ],
)
def test_usage_errors_come_with_a_hint_and_exit_code_2(
    run: RunFolder, ddpforge: Callable[..., Ranks], arguments: list[str], complaint: str, hint: str
) -> None:
    result = ddpforge("eval", "--follow", *arguments, fails=True)
    assert result.codes == [ExitCode.USAGE]
    said = " ".join(result.stderr.split())
    assert complaint in said
    assert hint in said
    assert "Traceback" not in said
    assert recorded(run) == []


def test_a_run_that_ended_without_a_checkpoint_is_an_error(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    result = ddpforge("eval", "--follow", "tiny", fails=True)
    assert result.codes == [ExitCode.USAGE]
    assert "has ended without a checkpoint (done)" in result.stderr


def test_a_folder_that_cannot_be_written_is_an_error(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    (run.path / "evaluations").write_text("")
    result = ddpforge("eval", "--follow", "tiny", fails=True)
    assert result.codes == [ExitCode.ENVIRONMENT]
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_link_in_place_of_the_folder_is_refused(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    (run.path / "evaluations").symlink_to("/tmp")
    result = ddpforge("eval", "--follow", "tiny", fails=True)
    assert result.codes == [ExitCode.ENVIRONMENT]
    assert "is a link or a special file" in result.stderr


def test_callbacks_that_need_evaluations_of_the_run_are_refused(run: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    added = 'callbacks.early_stopping={metric="eval/loss",patience=2}'
    result = ddpforge("run", "tiny.toml", "--fresh", added, fails=True)
    assert result.codes == [ExitCode.USAGE]
    assert "it needs the evaluations of the run, but another process evaluates" in " ".join(result.stderr.split())
