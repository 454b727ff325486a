"""Ranks on two hosts, with networks and processes of their own, train as those on one do."""

import json
import os
from pathlib import Path

import pytest
from forked import in_ranks
from hosts import Hosts
from sharding import DDP, FSDP, ZERO

from ddpforge.runner import run

RECIPE = """
recipe = 1
name = "{name}"
[model]
use = "mlp"
inputs = 64
outputs = 10
[data.train]
use = "digits"
split = "train"
[task]
use = "classification"
[optimizer]
use = "adamw"
lr = 0.01
[train]
length = "12st"
global_batch = 36
device = "cpu"
[checkpoint]
every = "6st"
[track]
every = "1st"
[strategy]
{strategy}
"""


def losses(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize("where", ["ab", "aab"])
@pytest.mark.parametrize("strategy", [DDP, FSDP, ZERO[3]], ids=["ddp", "fsdp", "zero3"])
def test_two_hosts_train_as_one_does(hosts: Hosts, tmp_path: Path, strategy: str, where: str) -> None:
    def train(name: str, *, on_hosts: bool) -> None:
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(RECIPE.format(name=name, strategy=strategy))

        def rank(number: int) -> tuple[str, int]:
            os.environ["DS_ACCELERATOR"] = "cpu"
            if on_hosts:
                hosts.become(number, where)
            os.chdir(tmp_path)
            status = run(recipe).status
            return status["state"], status["world_size"]

        assert in_ranks(len(where), rank) == [("done", len(where))] * len(where)

    train("apart", on_hosts=True)
    train("together", on_hosts=False)
    found = losses(tmp_path, "apart")
    assert len(found) == 12
    assert found == losses(tmp_path, "together")
