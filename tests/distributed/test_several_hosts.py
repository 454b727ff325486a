"""Ranks on two hosts, with networks and processes of their own, train as those on one do."""

import json
import os
import sys
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


STRATEGIES = {"ddp": DDP, "fsdp": FSDP, "zero3": ZERO[3]}
CASES = [
    pytest.param(STRATEGIES[name], where, id=f"{name}-{where}", marks=() if name == "ddp" else pytest.mark.full)
    for name in STRATEGIES
    for where in ("ab", "aab")
]


@pytest.mark.parametrize(("strategy", "where"), CASES)
def test_two_hosts_train_as_one_does(hosts: Hosts, tmp_path: Path, strategy: str, where: str) -> None:
    def train(name: str, *, on_hosts: bool) -> None:
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(RECIPE.format(name=name, strategy=strategy))

        def rank(number: int) -> tuple[str, int]:
            os.environ["DS_ACCELERATOR"] = "cpu"
            os.chdir(tmp_path)
            status = run(recipe).status
            return status["state"], status["world_size"]

        found = hosts.in_ranks(where, rank) if on_hosts else in_ranks(len(where), rank)
        assert found == [("done", len(where))] * len(where)

    train("apart", on_hosts=True)
    train("together", on_hosts=False)
    found = losses(tmp_path, "apart")
    assert len(found) == 12
    assert found == losses(tmp_path, "together")


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_launch_on_each_of_two_hosts_trains_as_one_does(hosts: Hosts, tmp_path: Path, strategy: str) -> None:
    """What is typed on every machine, with nothing prepared: launchers meet, ranks join, one run comes of it."""
    for name in ("apart", "together"):
        (tmp_path / f"{name}.toml").write_text(RECIPE.format(name=name, strategy=strategy))
    # One rank of a host has more threads than one of two, and a sum has another order in more threads.
    ddpforge = ("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "ddpforge", "launch")
    meet = ("-n", "1", "--nnodes", "2", "--endpoint", "nodea")
    launches = [
        hosts[letter].start(*ddpforge, "apart.toml", *meet, "--node-rank", str(number), cwd=tmp_path)
        for number, letter in enumerate("ab")
    ]
    ended = [launch.ended(timeout=300) for launch in launches]
    assert [code for code, _ in ended] == [0, 0], ended
    hosts["a"].run(*ddpforge, "together.toml", "-n", "2", cwd=tmp_path)
    assert losses(tmp_path, "apart") == losses(tmp_path, "together")
    assert len(losses(tmp_path, "apart")) == 12
