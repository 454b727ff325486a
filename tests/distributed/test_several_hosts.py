"""Ranks on two hosts, with their own networks and processes, train as ranks on one host do."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.forked import in_ranks
from support.hosts import Hosts
from support.sharding import DDP, FSDP, ZERO

from ddpforge.app.run import run

RECIPE = """
recipe = 2
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
def test_launches_on_two_hosts_train_as_one_launch(hosts: Hosts, tmp_path: Path, strategy: str) -> None:
    """Runs the same command on every machine, without preparation: launchers find each other, ranks join one run."""
    for name in ("apart", "together"):
        (tmp_path / f"{name}.toml").write_text(RECIPE.format(name=name, strategy=strategy))
    # One rank of a host has more threads than one of two, and a sum has another order in more threads.
    ddpforge = ("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "ddpforge", "launch")
    meet = ("-n", "1", "--nnodes", "2", "--rdzv-endpoint", "nodea")
    launches = [
        hosts[letter].start(*ddpforge, "apart.toml", *meet, "--node-rank", str(number), cwd=tmp_path)
        for number, letter in enumerate("ab")
    ]
    ended = [launch.ended(timeout=300) for launch in launches]
    assert [code for code, _ in ended] == [0, 0], ended
    hosts["a"].run(*ddpforge, "together.toml", "-n", "2", cwd=tmp_path)
    assert losses(tmp_path, "apart") == losses(tmp_path, "together")
    assert len(losses(tmp_path, "apart")) == 12


# A clock that is ahead, for all processes of a host: torch's rendezvous uses `datetime`, others `time`.
AHEAD = """
import copyreg, datetime, os, time

real, now, ahead = datetime.datetime, time.time, float(os.environ.get("CLOCK_AHEAD", "0"))

def rebuilt(text):
    return real.fromisoformat(text)

copyreg.pickle(real, lambda moment: (rebuilt, (moment.isoformat(),)))

class Kind(type):
    def __instancecheck__(cls, value):
        return isinstance(value, real)

class Ahead(real, metaclass=Kind):
    @classmethod
    def now(cls, tz=None):
        return real.now(tz) + datetime.timedelta(seconds=ahead)

if ahead:
    datetime.datetime, time.time = Ahead, lambda: now() + ahead
"""


@pytest.mark.parametrize(
    ("ahead", "where"),
    [(20, "a"), pytest.param(300, "a", marks=pytest.mark.full), pytest.param(300, "b", marks=pytest.mark.full)],
)
def test_two_hosts_with_different_clocks_train_together_or_fail(
    hosts: Hosts, tmp_path: Path, ahead: int, where: str
) -> None:
    """Covers a trap of torch's defaults: the host that is 20 s ahead drops the other, trains alone, exits with 0."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(AHEAD)
    (tmp_path / "tiny.toml").write_text(RECIPE.format(name="tiny", strategy=DDP))
    words = [
        sys.executable,
        "-m",
        "ddpforge",
        "launch",
        "tiny.toml",
        "-n",
        "1",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "nodea",
    ]
    launches = {
        letter: hosts[letter].start(
            *words,
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path / "site"), "CLOCK_AHEAD": str(ahead if letter == where else 0)},
        )
        for letter in "ab"
    }
    (code, first), (other, second) = (launch.ended(timeout=300) for launch in launches.values())
    way = "ahead of" if where == "a" else "behind"
    assert f"the clock of nodea is {ahead}.0 s {way} that of nodeb" in second
    if ahead == 20:
        assert (code, other) == (0, 0), first + second
        assert "the clock of nodeb (rank 1) is 20.0 s behind that of nodea (rank 0)" in first
        assert json.loads((tmp_path / "runs/tiny/status.json").read_text())["world_size"] == 2
    else:
        assert (code, other) == (3, 3), first + second
        assert "only 1 of 2 nodes have joined" in first + second
        assert not (tmp_path / "runs").exists()
    assert "frame #" not in first + second
    assert "Traceback" not in first + second


# Stops the launcher of rank 1 at the last step, as if its host were cut off.
LOST = """
import os, signal
from ddpforge.interfaces import Callback

class Lost(Callback):
    def on_step(self, info):
        if info.step == 12 and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGSTOP)
"""


@pytest.mark.full
def test_host_lost_after_the_last_step_does_not_block_the_other(hosts: Hosts, tmp_path: Path) -> None:
    """Waits less than torchrun, which waits 300 s; `tests/launchers/test_launch.py` has the same without hosts."""
    (tmp_path / "lost.py").write_text(LOST)
    recipe = RECIPE.format(name="tiny", strategy=DDP) + '[callbacks.lost]\nuse = "./lost.py:Lost"\n'
    (tmp_path / "tiny.toml").write_text(recipe)
    words = [
        sys.executable,
        "-m",
        "ddpforge",
        "launch",
        "tiny.toml",
        "-n",
        "1",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "nodea",
    ]
    launches = [hosts[letter].start(*words, cwd=tmp_path) for letter in "ab"]
    assert [launch.ended(timeout=150)[0] for launch in launches] == [0, 0]


def test_hosts_without_name_resolution_rendezvous_by_address_and_both_print_a_refusal(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Covers a hang with torchrun's defaults: rank 0 sends its host name. Both hosts print the errors of ranks."""
    for host in hosts.values():
        host.names.write_text("127.0.0.1 localhost\n")
    hosts["b"].own_disk(tmp_path / "runs", tmp_path / "disk")
    (tmp_path / "tiny.toml").write_text(RECIPE.format(name="tiny", strategy=DDP))
    meet = ("-n", "1", "--nnodes", "2", "--rdzv-endpoint", hosts["a"].address)
    words = [sys.executable, "-m", "ddpforge", "launch", "tiny.toml", *meet]
    launches = [hosts[letter].start(*words, cwd=tmp_path) for letter in "ab"]
    for code, said in [launch.ended(timeout=120) for launch in launches]:
        assert code == 3, said
        assert "is not visible to rank 1 on nodeb" in said
        assert said.count("error:") == 1, said
        assert "frame #" not in said
        assert "Traceback" not in said


def test_occupied_rendezvous_port_is_named_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE.format(name="tiny", strategy=DDP))
    hold = "import socket; server = socket.create_server(('', 29501)); print(flush=True); server.accept(); input()"
    hosts["a"].start(sys.executable, "-u", "-c", hold, cwd=tmp_path).stdout.readline()
    words = [
        sys.executable,
        "-m",
        "ddpforge",
        "launch",
        "tiny.toml",
        "-n",
        "1",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "nodea",
    ]
    launches = [hosts[letter].start(*words, cwd=tmp_path) for letter in "ab"]
    for code, said in [launch.ended(timeout=120) for launch in launches]:
        assert code == 3, said
        assert "port 29501 of nodea" in said
        assert "Traceback" not in said
