"""Trials of a recipe with real ranks: their measurements, and that they leave no files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image
from support import SUPPORT
from support.launched import Ranks

from ddpforge.cli import main

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 0.01 }
train = { length = "2ep", global_batch = 64, eval_batch = 8 }
checkpoint = { every = "2st", at_start = true }
track.csv = {}

[callbacks.noted]
use = "./noted.py:Noted"
"""
NOTED = '''\
"""A callback that writes the path of its run."""

from pathlib import Path

from ddpforge.interfaces import Callback, RunContext


class Noted(Callback):
    def on_start(self, run: RunContext) -> None:
        (run.folder / "mine").write_text("a file in the run's folder")
        if run.world.is_rank_zero:
            Path("where").write_text(str(run.folder))

    def on_end(self, error: BaseException | None) -> None:
        print("the end")
'''


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE)
    Path("noted.py").write_text(NOTED)


def files() -> set[str]:
    return {path.name for path in Path().iterdir() if path.name[0] not in "._"}


@pytest.mark.parametrize("nproc", [1, 2])
def test_dry_run_measures_and_leaves_no_files(ddpforge: Callable[..., Ranks], nproc: int) -> None:
    said = ddpforge("run", "tiny.toml", "--dry-run", "3", "--json", nproc=nproc)
    found: dict[str, Any] = json.loads(said.stdout)
    assert (found["steps"], found["total_steps"]) == (3, 46)
    assert (found["evaluated"], found["to_evaluate"]) == (3, 45 if nproc == 1 else 23)
    assert sum(found["time"].values()) == pytest.approx(1, abs=1e-6)
    assert found["samples_per_second"] == pytest.approx(64 / found["seconds"])
    assert found["memory"] > 50e6
    assert found["loss"][0] == pytest.approx(2.3, abs=0.3)
    assert files() == {"tiny.toml", "noted.py", "where"}
    assert not Path(Path("where").read_text()).exists()


def test_dry_run_does_not_change_an_earlier_run(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml", "train.length=2st")
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    said = ddpforge("run", "tiny.toml", "train.length=4st", "optimizer.lr=0.1", "--dry-run", "9")
    lines = said.stdout.splitlines()
    assert lines[1] == "4 steps on trial; nothing was kept"
    assert [line.split("  ")[1] for line in lines[2:]] == [
        *("first step", "step", "time", "evaluation", "memory", "loss", "whole run")
    ]
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("option", ["--fresh", "--profile=1..2", "--out=elsewhere"])
def test_options_of_a_run_are_rejected_for_a_dry_run(ddpforge: Callable[..., Ranks], option: str) -> None:
    refused = ddpforge("run", "tiny.toml", "--dry-run", "1", option, fails=True)
    assert refused.codes == [2]
    assert "a trial has none" in refused.stderr


def test_overfit_learns_one_batch(ddpforge: Callable[..., Ranks]) -> None:
    said = ddpforge("run", "tiny.toml", "--overfit", "1", "--dry-run", "120", "train.length=3st", nproc=2)
    lines = said.stdout.splitlines()
    assert lines[0] == "120 steps on the first batch; nothing was kept"
    assert lines[-1] == "  learnt: model, loss and optimizer work together"
    assert files() == {"tiny.toml", "noted.py"}


def test_overfit_reports_a_loss_that_does_not_fall(ddpforge: Callable[..., Ranks]) -> None:
    said = ddpforge("run", "tiny.toml", "--overfit", "2", "--dry-run", "6", "--json", "optimizer.lr=1e-9")
    found = json.loads(said.stdout)
    assert len(found["losses"]) == 6
    assert found["losses"][0] == pytest.approx(found["losses"][2], rel=1e-4)  # the same batch
    assert found["losses"][0] != pytest.approx(found["losses"][1], rel=1e-4)
    assert found["share"] == pytest.approx(1.0, abs=1e-3)


def test_lr_range_stops_when_the_loss_diverges(ddpforge: Callable[..., Ranks]) -> None:
    options = ("--from", "1e-5", "--to", "1e5", "--steps", "60", "--json")
    said = ddpforge("lr-range", "tiny.toml", *options, "optimizer.use=sgd", "optimizer.lr=0.1", nproc=2)
    found = json.loads(said.stdout)
    assert found["lr"][0] == pytest.approx(1e-5)
    assert found["lr"][1] / found["lr"][0] == pytest.approx(1e10 ** (1 / 59))
    assert len(found["lr"]) < 60
    assert 1e-3 < found["suggestion"] < 10
    assert files() == {"tiny.toml", "noted.py"}


@pytest.mark.parametrize("options", [("--from", "0"), ("--from", "1", "--to", "0.1")])
def test_invalid_lr_range_is_rejected(ddpforge: Callable[..., Ranks], options: tuple[str, ...]) -> None:
    refused = ddpforge("lr-range", "tiny.toml", *options, fails=True)
    assert refused.codes == [2]
    assert "cannot test 100 rates" in refused.stderr


# ---------------------------------------------------------------------------------------------- data
def shown(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["data", "show", "tiny.toml", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_data_show_prints_the_first_training_batches() -> None:
    result = shown("--batches", "2", "-o", "sheet.png")
    lines = result.stdout.splitlines()
    assert lines[0] == "train, batch 1: 64 samples"
    assert lines[1].startswith("  0  float32 [64, 1, 8, 8]  0 … 1, mean 0.3")
    assert lines[2].startswith("  1  int64 [64]")
    counts = dict(pair.split(": ") for pair in lines[2].split("  ")[-1].split(", "))
    assert sum(map(int, counts.values())) == 64
    assert lines[3] == "train, batch 2: 64 samples"
    assert "sheet.png: 64 pictures" in result.stderr
    assert Path("sheet.png").read_bytes().startswith(b"\x89PNG")
    assert not Path("runs").exists()


def test_data_show_builds_no_model() -> None:
    Path("never.py").write_text("def model() -> None:\n    raise RuntimeError('it was built')\n")
    assert shown("--batches", "1", "model={use='./never.py:model'}").stdout == shown("--batches", "1").stdout
    refused = CliRunner().invoke(main, ["check", "tiny.toml", "--build", "model={use='./never.py:model'}"])
    assert "it was built" in refused.output


def test_data_show_prints_micro_batches() -> None:
    found = json.loads(shown("--batches", "1", "--json", "train.micro_batch=16").stdout)["batches"][0]
    assert (found["samples"], found["step_samples"]) == (16, 64)
    assert found["leaves"][1]["shape"] == [16]


def test_data_show_prints_the_number_of_samples_of_each_source() -> None:
    sets = [
        "~data.train",
        "data.train.many={use='digits', split='train', weight=3}",
        "data.train.few={use='digits', split='test', weight=1}",
    ]
    result = shown("--batches", "2", "train.micro_batch=16", *sets)
    assert result.stdout.startswith("train, batch 1: 16 samples, of 64 in the step (4 few, 12 many)\n")
    found = json.loads(shown("--batches", "1", "--json", *sets).stdout)["batches"][0]
    assert found["sources"] == {"few": 16, "many": 48}


def test_data_show_prints_the_tensors_of_custom_batch_objects() -> None:
    shutil.copy(SUPPORT / "odd_batches.py", ".")
    graphs = ["model={use='./odd_batches.py:GraphNet'}", "task={use='./odd_batches.py:GraphTask'}"]
    result = shown("--batches", "1", *graphs, "data.train={use='./odd_batches.py:Graphs'}")
    lines = result.stdout.splitlines()
    assert [line.split("  ")[1] for line in lines[1:]] == ["nodes", "graph", "targets"]


def test_data_show_accepts_the_name_of_an_evaluation_set() -> None:
    found = json.loads(shown("--split", "eval", "--batches", "1", "--json").stdout)
    assert found["batches"][0]["samples"] == 8
    refused = CliRunner().invoke(main, ["data", "show", "tiny.toml", "--split", "eval.hard"])
    assert refused.exit_code == 2
    assert "the recipe has no [data.eval.hard]\n  = help: it has train, eval" in refused.stderr


CHATTY = """
import torch

from ddpforge.interfaces import Task

class Chats:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"tokens": torch.tensor([1, 2, 3]), "number": torch.tensor(index)}

    def text_parts(self, batch):
        numbers = batch["number"].tolist()
        return [[("special", "<s>"), ("given", "a\\x1b[31m"), ("learnt", f"b{number}" * 2000)] for number in numbers]

    def batch_images(self, batch):
        squares = [torch.full((3, 8, 8), number / 8) for number in batch["number"].tolist()]
        return torch.stack(squares), [f"square {number}" for number in batch["number"].tolist()]

class Odd(Task):
    def loss(self, model, batch):
        return next(model.parameters()).sum() * 0, None

    def count(self, batch):
        return torch.tensor(len(batch["number"]))
"""


def test_data_show_marks_the_parts_of_texts_that_a_dataset_returns() -> None:
    Path("chats.py").write_text(CHATTY)
    sets = ["~data.train", "data.train.use=./chats.py:Chats", "train.global_batch=4", "task={use='./chats.py:Odd'}"]
    lines = shown("--batches", "1", *sets).stdout.splitlines()
    assert lines[3] == "  text of 3 samples: «learnt» given [special]"
    assert [line[:17] for line in lines[4:]] == [r"    [<s>]a\x1b[31m"[:17]] * 3
    assert lines[4].endswith("b»…")
    assert all("\x1b" not in line for line in lines)


def test_data_show_draws_the_images_that_a_dataset_returns_for_a_batch() -> None:
    Path("chats.py").write_text(CHATTY)
    sets = ["~data.train", "data.train.use=./chats.py:Chats", "train.global_batch=4", "task={use='./chats.py:Odd'}"]
    sets += ["data.sampler.use=sequential", "-o", "sheet.png"]
    assert "sheet.png: 4 pictures" in shown("--batches", "1", *sets).stderr
    with Image.open("sheet.png") as sheet:
        shades = [sheet.getpixel((x, y)) for y in (20, 102) for x in (20, 88)]
    assert shades == [(round(255 * number / 8),) * 3 for number in range(4)]


def test_data_show_decodes_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    (tmp_path / "tiny.toml").write_text(
        """\
recipe = 2
name = "tiny"
model = { use = "gpt", block_size = 20, layers = 1, heads = 1, width = 8 }
data.train = { use = "text", split = "train", path = "text.txt", block_size = 20 }
task = { use = "language_modeling" }
optimizer = { use = "adamw", lr = 0.01 }
train = { length = "2st", global_batch = 4 }
"""
    )
    lines = shown("--batches", "1").stdout.splitlines()
    assert lines[1].startswith("  0  int64 [4, 20]  32 … ")
    first, target = lines[2].removeprefix("    "), lines[6].removeprefix("    ")
    assert first in "The quick brown fox jumps over the lazy dog. " * 2
    assert target[:-1] == first[1:]


def test_data_show_rejects_a_contact_sheet_without_images(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(
        RECIPE.replace('"digits", split = "train"', '"./flat.py:Flat"').partition("[callbacks")[0]
    )
    (tmp_path / "flat.py").write_text(
        "import torch\n\nclass Flat:\n    classes = 10\n\n    def __len__(self):\n        return 64\n\n"
        "    def __getitem__(self, index):\n        return torch.full((64,), torch.nan), index % 10\n"
    )
    refused = CliRunner().invoke(main, ["data", "show", "tiny.toml", "-o", "sheet.png"])
    assert refused.exit_code == 2
    assert "  0  float32 [64, 64]  4,096 not finite" in refused.stdout
    assert "the batch has no images" in refused.stderr
