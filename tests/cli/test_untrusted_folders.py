"""Untrusted run folders: files replaced by links, pipes, devices, endless or invalid contents.

A folder received from another user may contain anything. Every command ends quickly, with a result or an error without
traceback. It follows no link, does not block on a pipe, and prints no escape sequence.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner
from support.launched import Zygote

from ddpforge.cli import main

SECRET = "the secret of another folder"

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "./parts.py:Net" }
data.train = { use = "digits", split = "test" }
data.eval = { use = "digits", split = "test", samples = 16 }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "4st", global_batch = 8, eval_every = "2st" }
checkpoint = { every = "2st" }
track = { every = "1st", csv = {} }
"""
PARTS = """\
from torch import nn


class Net(nn.Sequential):
    outputs = 10

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""
ROW = {"rank": 0, "host": "h", "pid": 1, "phase": "forward", "step": 2, "marks": 3, "seconds": 1.0}
FAILURE = {"rank": 0, "error": "rank 0: x", "exit_code": 1, "told_by": "rank", "phase": "forward", "step": 2}
REPORT = {"token": "t", "rank": 0, "error": "x", "exit_code": 1, "symptom": False}
MORE = {
    "failure.json": json.dumps({**FAILURE, "ranks": [ROW]}),
    "memory.json": json.dumps({"measured": {"peak": 1}, "planned": None, "difference": None}),
    "logs/failure-rank-0.json": json.dumps(REPORT),
    "logs/phase-rank-0.json": json.dumps({"attempt": "t", "row": ROW}),
    "logs/stacks-rank-0.txt": "stacks",
    "shown/inputs/step-000000002.txt": "text",
    "shown/table/step-000000002.json": json.dumps([{"a": 1, "b": "c"}]),
    "shown/weights/step-000000002.json": json.dumps({"counts": [1, 2], "edges": [0.0, 1.0, 2.0], "nonfinite": 0}),
    "metrics.superseded.jsonl": json.dumps({"step": 3, "attempt": 1, "time": 1.0, "train/loss": 1.0}) + "\n",
}


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run to step 4 of 6, and adds every file that a run folder can have."""
    place = tmp_path_factory.mktemp("whole")
    (place / "parts.py").write_text(PARTS)
    (place / "tiny.toml").write_text(RECIPE)
    zygote.run(["run", "tiny.toml"], nproc=1, cwd=place).check()
    for name, text in MORE.items():
        (place / "runs/tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "runs/tiny" / name).write_text(text)
    from PIL import Image

    (place / "runs/tiny/shown/picture").mkdir()
    Image.new("RGB", (2, 2)).save(place / "runs/tiny/shown/picture/step-000000002.png")
    return place


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies the run; adds a folder `elsewhere` with a secret that no command may read."""
    shutil.copytree(whole, tmp_path / "work")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text(SECRET)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


# ---------------------------------------------------------------------------------------------- kinds of odd files
def changed(path: Path, change: Callable[[Any], Any]) -> None:
    """Applies `change` to every value of a JSON or TOML file, or to the whole text of another file."""
    text = path.read_text(errors="replace")
    if path.suffix == ".json" or path.name in ("COMMIT",):
        path.write_text(json.dumps(everywhere(json.loads(text), change)))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(everywhere(json.loads(line), change)) + "\n" for line in text.splitlines()))
    else:
        path.write_text(str(change(text)))


def everywhere(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: everywhere(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [everywhere(one, change) for one in value]
    return change(value)


def another_type(value: Any) -> Any:
    return {"x": [1]} if isinstance(value, str) else "text" if isinstance(value, int | float) else 7


def with_escapes(value: Any) -> Any:
    return f"\x1b[31m{value}\x1b]0;title\x07" if isinstance(value, str) else value


def link(path: Path) -> None:
    path.symlink_to(path.parents[len(path.relative_to(Path.cwd()).parts)] / "elsewhere" / "secret")


def dangling(path: Path) -> None:
    path.symlink_to(path.parents[len(path.relative_to(Path.cwd()).parts)] / "elsewhere" / "new")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 38)


ODD: dict[str, Callable[[Path], Any]] = {
    "link": link,
    "dangling": dangling,
    "pipe": lambda path: os.mkfifo(path),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "absent": lambda path: None,
    "empty": lambda path: path.touch(),
    "huge": sparse,
    "deep": lambda path: path.write_text('{"a":' * 200_000),
    "deep list": lambda path: path.write_text("[" * 200_000 + "]" * 200_000),
    "digits": lambda path: path.write_text('{"step": ' + "9" * 100_000 + "}\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "null": lambda path: path.write_text("null\n"),
}
CHANGED = {
    "types": another_type,
    "escapes": with_escapes,
    "large": lambda value: 10**400 if isinstance(value, int | float) else value,
    "negative": lambda value: -(2**70) if isinstance(value, int | float) else value,
    "not finite": lambda value: float("nan") if isinstance(value, int | float) else value,
}
KINDS = [*ODD, *CHANGED]
FILES = [
    *("recipe.toml", "recipe.resolved.toml", "env.json", "run.json", "status.json", "metrics.jsonl", "metrics.csv"),
    *(
        "code/parts.py",
        "logs/lock",
        "logs/rank-0.log",
        "checkpoints/latest.json",
        *MORE,
        "shown/picture/step-000000002.png",
    ),
    *("checkpoints/*4-*/COMMIT", "checkpoints/*4-*/manifest.json", "checkpoints/*4-*/*.safetensors"),
    *("logs", "shown", "shown/table", "code", "STOP", "metrics.tmp"),
]


def make(file: str, kind: str) -> None:
    """Replaces a file of the run by one of the odd kind."""
    run = Path.cwd() / "runs/tiny"
    path = next(run.glob(file), run / file)
    if kind in CHANGED:
        if path.is_file():
            changed(path, CHANGED[kind])
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    ODD[kind](path)


def check(place: Path, *said: str) -> None:
    """Asserts that outputs have no secret, escape sequence or traceback, and that `elsewhere` is unchanged."""
    for text in said:
        assert SECRET not in text
        assert "\x1b" not in text
        assert "Traceback" not in text
    assert [path.name for path in (place.parent / "elsewhere").iterdir()] == ["secret"]
    assert (place.parent / "elsewhere" / "secret").read_text() == SECRET


@contextmanager
def time_limit(seconds: int = 20) -> Iterator[None]:
    """Raises AssertionError if the block takes longer than `seconds`, even during a system call."""

    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError("it takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


READERS = [
    *(
        ["status", "tiny"],
        ["status", "tiny", "--json"],
        ["runs", "ls"],
        ["runs", "ls", "--json"],
        ["ckpt", "ls", "tiny"],
    ),
    *(["report", "tiny", "-o", "report.html"], ["runs", "compare", "tiny", "other", "--curve", "train/loss", "--json"]),
]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_readers_end_quickly_without_a_traceback_for_odd_files(place: Path, number: int) -> None:
    """Tests every seventh file with each kind, so that each file is covered; `full` tests all pairs."""
    reads(place, FILES[number % 7 :: 7], KINDS[number])


@pytest.mark.full  # the test above covers each file and each kind
@pytest.mark.parametrize("kind", KINDS)
def test_readers_end_quickly_for_all_pairs_of_file_and_kind(place: Path, kind: str) -> None:
    reads(place, FILES, kind)


def reads(place: Path, files: Sequence[str], kind: str) -> None:
    shutil.copytree("runs/tiny", "runs/other")
    shutil.copytree("runs", "whole")
    for file in files:
        make(file, kind)
        for command in READERS:
            Path("report.html").unlink(missing_ok=True)
            with time_limit():
                found = CliRunner().invoke(main, command)
            assert found.exception is None or isinstance(found.exception, SystemExit), (file, command, found.exception)
            assert found.exit_code in (0, 2, 3), (file, command, found.output)
            page = Path("report.html").read_text() if Path("report.html").exists() else ""
            try:
                check(place, found.stdout, found.stderr)
                assert SECRET not in page
            except AssertionError as error:
                raise AssertionError((file, command, found.output)) from error
        shutil.rmtree("runs")
        shutil.copytree("whole", "runs")


def test_the_unchanged_folder_is_read_evaluated_and_resumed(zygote: Zygote, place: Path) -> None:
    shutil.copytree("runs/tiny", "runs/other")
    for command in READERS:
        assert CliRunner().invoke(main, command).exit_code == 0, command
    page = Path("report.html").read_text()
    assert all(one in page for one in ('<pre tabindex="0">text</pre>', "data:image/png", "3 values from 0 to 2"))
    zygote.run(["eval", "tiny"], nproc=1, cwd=place).check()
    resumed = zygote.run(["run", "tiny.toml", "--set", "train.length=6st"], nproc=1, cwd=place).check()
    assert resumed.stdout.startswith("runs/tiny: done at step 6, eval/loss ")


def trains(zygote: Zygote, place: Path, file: str, kind: str) -> None:
    make(file, kind)
    for command in (["eval", "tiny"], ["run", "tiny.toml", "--set", "train.length=6st"]):
        ranks = zygote.run(command, nproc=1, cwd=place, timeout=60)
        assert ranks.codes[0] in (0, 2, 3), (command, ranks.stderr)
        check(place, ranks.stdout, ranks.stderr)


# `full` runs the other files; the tests above cover them with readers.
OF_RUNS = [pytest.param(file, n, marks=[pytest.mark.full] if n % 4 else []) for n, file in enumerate(FILES)]


@pytest.mark.parametrize(("file", "number"), OF_RUNS)
def test_eval_and_run_end_quickly_without_a_traceback_for_odd_files(
    zygote: Zygote, place: Path, file: str, number: int
) -> None:
    """Tests each file with one kind; `full` tests all pairs."""
    trains(zygote, place, file, ["link", "pipe", "zeros", "dangling", "deep", "types"][number // 4 % 6])


@pytest.mark.full  # the test above covers each file and each kind
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_eval_and_run_end_quickly_for_all_pairs_of_file_and_kind(
    zygote: Zygote, place: Path, file: str, kind: str
) -> None:
    trains(zygote, place, file, kind)
