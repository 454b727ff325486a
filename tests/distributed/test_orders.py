"""An order of one's own choice on real ranks: the same curve on any number of them, also after an interruption."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = """
recipe = 1
name = "{name}"
[model]
use = "mlp"
inputs = 64
outputs = 10
hidden = [8]
[data.train]
use = "digits"
split = "test"
[data.order]
use = "repeated"
times = 2
order = {{ use = "growing", start = 3, until = "5st" }}
[task]
use = "classification"
[optimizer]
use = "sgd"
lr = 0.5
[train]
length = "12st"
global_batch = 16
micro_batch = 4
[checkpoint]
every = "7st"
[track]
every = "1st"
"""


def test_steps_that_grow_and_come_twice_train_alike_on_one_rank_and_on_two_that_were_interrupted(
    ddpforge: Callable[..., object], tmp_path: Path
) -> None:
    curves = []
    for name, lengths, nproc in (("alone", ["12st"], 1), ("together", ["7st", "12st"], 2)):
        (tmp_path / "run.toml").write_text(RECIPE.format(name=name))
        for length in lengths:
            ddpforge("run", "run.toml", "--set", f"train.length={length}", nproc=nproc)
        lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        curves.append([(line["samples"], line["train/loss"]) for line in lines if "train/loss" in line])
    alone, together = curves
    sizes = [3, 5, 8, 10, 13, 16]
    assert [samples for samples, _ in alone] == [
        sum(sizes[: n // 2]) * 2 + n % 2 * sizes[n // 2 % 6] for n in range(1, 13)
    ]
    assert [samples for samples, _ in together] == [samples for samples, _ in alone]
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-5)
