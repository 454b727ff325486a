"""Media and measurements of callbacks and tasks in real runs are the same under DDP and FSDP."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import SUPPORT
from support.launched import Ranks

from ddpforge.runs.metrics import read_metrics

RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 4
hidden = [8]
outputs = 1
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "./shows.py:Shows"
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "4st"
global_batch = 8
eval_every = "2st"
clip_norm = 0.01
[checkpoint]
every = "2st"
[track]
every = "1st"
csv = {}
[callbacks.ema]
decay = 0.5
[callbacks.shows]
use = "./shows.py:Looks"
"""
CODE = """
import torch
from ddpforge.builtin.tasks.regression import Regression
from ddpforge.interfaces import Callback, Total

class Shows(Regression):
    def metrics(self, outputs, batch):
        self.log_media("task/outputs", outputs.detach(), "histogram")
        return super().metrics(outputs, batch)

class Looks(Callback):
    def on_start(self, run):
        self.run, self.norms = run, {}
        run.log_media("model", type(run.model).__name__, "text")

    def lr_factor(self):
        return 0.5 ** len(self.norms)

    def on_gradient(self, step, norm):
        squares = sum(part.tensor.square().sum() for part in self.run.gradients().values())
        one = self.run.world.global_ranks.all_reduce_sum(torch.stack([squares, torch.tensor(1.0)]))
        held = self.run.world.global_ranks.size if "fsdp" not in str(type(self.run.model)).lower() else 1
        self.norms[step] = (norm.item(), (one[0] / held).sqrt().item())

    def while_evaluating(self, step):
        x = torch.arange(8.0).view(2, 4)
        with self.run.forward():
            y = self.run.model(x)
        self.run.log_media("sums", y.sigmoid().view(1, 2), "image")
        self.run.log_media("norms", [{"step": s, "norm": a, "own": b} for s, (a, b) in self.norms.items()], "table")
        return {"sum": y.sum().item()}
"""


@pytest.fixture
def train(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Callable[..., Path]:
    copy(SUPPORT / "parts.py", tmp_path)
    (tmp_path / "shows.py").write_text(CODE)
    (tmp_path / "run.toml").write_text(RECIPE)

    def run(*sets: str, command: tuple[str, ...] = ("run", "run.toml"), nproc: int = 2) -> Path:
        ddpforge(*command, *(word for one in sets for word in ("--set", one)), nproc=nproc)
        return tmp_path / "runs" / "run"

    return run


def shown(run: Path, name: str) -> Any:
    return json.loads((run / "shown" / name).read_text())


def test_media_and_measurements_are_the_same_under_ddp_and_fsdp(
    train: Callable[..., Path], ddpforge: Callable[..., Ranks]
) -> None:
    sums: dict[str, list[float]] = {}
    for strategy in ("ddp", "fsdp"):
        run = train(f"strategy.use={strategy}", command=("run", "run.toml", "--fresh"))
        rows = read_metrics(run)
        sums[strategy] = [row["eval/sum"] for row in rows if "eval/sum" in row]
        # The gradient that a callback sees is the one whose norm is logged, before it is clipped to 0.01.
        norms = shown(run, "norms/step-000000004.json")
        assert [one["step"] for one in norms] == [1, 2, 3, 4]
        assert [one["norm"] for one in norms] == pytest.approx([row["train/grad_norm"] for row in rows])
        assert [one["own"] for one in norms] == pytest.approx([one["norm"] for one in norms], rel=1e-5)
        assert min(one["norm"] for one in norms) > 0.01
        assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
        assert np.asarray(Image.open(run / "shown/sums/step-000000002.png")).shape == (1, 2, 3)
        assert sum(shown(run, "task/outputs/step-000000003.json")["counts"]) == 4  # the main rank's micro-batch
        assert (run / "shown/model/step-000000000.txt").read_text() in ("MLP", "FSDPMLP")
        with (run / "metrics.csv").open(newline="") as file:
            written = [float(row["eval/sum"]) for row in csv.DictReader(file) if row["eval/sum"]]
        assert written == sums[strategy]
    assert sums["fsdp"] == pytest.approx(sums["ddp"], rel=1e-5)

    # `ddpforge eval` measures the same averaged weights, and stores no media.
    before = sorted(run.rglob("shown/**/*"))
    told = ddpforge("eval", "run", "--json", nproc=2)
    assert json.loads(told.stdout)["eval/sum"] == pytest.approx(sums["fsdp"][-1])
    assert sorted(run.rglob("shown/**/*")) == before


def test_resume_replaces_media_of_later_steps(train: Callable[..., Path]) -> None:
    run = train("train.length=2st", nproc=1)
    (run / "shown/sums/step-000000009.png").write_bytes(b"of a step that will be another")
    train(nproc=1)
    assert sorted(path.name for path in (run / "shown/sums").iterdir()) == ["step-000000002.png", "step-000000004.png"]
