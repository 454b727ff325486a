"""An order of one's own choice on real ranks: the same curve on any number of them, also after an interruption."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT

RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "mlp"
inputs = 64
outputs = 10
hidden = [8]
[data.train]
use = "digits"
split = "test"
[data.sampler]
use = "reuse_batches"
times = 2
sampler = {{ use = "batch_size_warmup", start = 3, until = "5st" }}
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
    sizes = [size for size in (3, 5, 8, 10, 13, 16) for _ in range(2)]
    assert [samples for samples, _ in alone] == list(accumulate(sizes))
    assert [samples for samples, _ in together] == [samples for samples, _ in alone]
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-5)


STREAM = """
recipe = 2
name = "stream"
[model]
use = "./parts.py:Seen"
[data]
workers = 2
[data.train]
use = "./mine.py:Shards"
shuffle = true
[task]
use = "./parts.py:SumOfLosses"
[optimizer]
use = "sgd"
lr = 1e-6
[train]
length = "2ep"
global_batch = 8
micro_batch = 2
[checkpoint]
every = "6st"
"""
SHARDS = '''
import os
from ddpforge.interfaces import PartedData

class Shards(PartedData):
    """The numbers 1 to 100 in parts; every one that is read is written down."""

    parts = [20, 1, 40, 9, 30]
    interleave = (4, 2)
    random = False

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle

    def open(self, part, *, epoch, skip):
        for number in range(sum(self.parts[:part]) + skip, sum(self.parts[: part + 1])):
            with open("read.txt", "a") as file:
                file.write(f"{number + 1}\\n")
            yield float(number + 1)
'''


def test_a_stream_in_parts_is_used_once_by_ranks_with_loader_processes_and_resumed_within_an_epoch(
    ddpforge: Callable[..., object], tmp_path: Path
) -> None:
    """13 steps an epoch; the first attempt ends after 6."""
    copy(SUPPORT / "parts.py", tmp_path)
    (tmp_path / "mine.py").write_text(SHARDS)
    (tmp_path / "run.toml").write_text(STREAM)
    ddpforge("run", "run.toml", "--set", "train.length=6st", nproc=2)
    ddpforge("run", "run.toml", nproc=2)
    seen = [list(map(float, (tmp_path / f"seen-{rank}.txt").read_text().split())) for rank in (0, 1)]
    first = sorted(one for hand in seen for one in hand[:50])
    both = sorted(one for hand in seen for one in hand)
    assert first == [float(number) for number in range(1, 101)]
    assert both == sorted(first * 2)
    read = (tmp_path / "read.txt").read_text().split()
    assert len(read) <= 200 + 2 * 2 * 2 * 4 * 2  # and what loader processes had ready when each attempt ended
