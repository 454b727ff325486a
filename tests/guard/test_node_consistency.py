"""Node consistency: ranks that cannot train together report the reason before training begins."""

import logging
import os
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forked import in_ranks, set_up
from support.hosts import Hosts

from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, ForgeError, PeerFailed, SetupError
from ddpforge.guard import node_consistency as checks
from ddpforge.interfaces import Ranks
from ddpforge.recipe import load_recipe
from ddpforge.strategies.ddp import DDP
from ddpforge.testing.doubles import in_threads

REGISTRY = Registry.installed()
CODE = "from torch import nn\n\nclass Net(nn.Linear):\n    pass\n"


def ends(ranks: int, action: Callable[[Ranks], None]) -> list[str]:
    """Returns a text for each rank: empty, its error with hints, or a note that rank 0 reports the error."""

    def told(rank: Ranks) -> str:
        try:
            action(rank)
        except PeerFailed as failed:
            return "rank 0 reports it" if failed.exit_code == ExitCode.ENVIRONMENT else str(failed.exit_code)
        except SetupError as error:
            return " | ".join([error.message, *error.hints])
        return ""

    return in_threads(ranks, told)


def compared(*sets: list[str], source: str | Path = "digits") -> list[str]:
    """Returns the texts of ranks with a recipe under each of these `sets`."""
    loaded = [load_recipe(source, sets=each, registry=REGISTRY) for each in sets]
    return ends(len(sets), lambda ranks: checks.check_same_environment(ranks, loaded[ranks.rank], REGISTRY))


# ---------------------------------------------------------------------------------------------- software and recipe
def test_identical_ranks_are_accepted() -> None:
    assert compared([], [], []) == ["", "", ""]


def test_error_names_another_version_with_host_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe("digits", registry=REGISTRY)
    made = checks._Facts
    elsewhere = {1: ("nodeb", "2.10.0"), 2: ("nodeb", "2.10.0")}

    def check(ranks: Ranks) -> None:
        host, torch = elsewhere.get(ranks.rank, ("nodea", "2.14.1"))
        software = {"Python": "3.11", "torch": torch}
        facts = made(host, software, "digest")
        told = ranks.all_gather_object  # each rank sends the facts of its own host
        monkeypatch.setattr(ranks, "all_gather_object", lambda _: told(facts), raising=False)
        checks.check_same_environment(ranks, loaded, REGISTRY)

    first, *others = ends(3, check)
    assert first == (
        "ranks do not run the same software: torch 2.14.1 on nodea (rank 0), 2.10.0 on nodeb (ranks 1, 2)"
        " | use one environment on all hosts"
    )
    assert others == ["rank 0 reports it"] * 2


def test_versions_of_python_torch_and_ddpforge_are_compared() -> None:
    found = checks._software(load_recipe("digits", registry=REGISTRY), REGISTRY)
    assert found.keys() == {"Python", "torch", "ddpforge"}
    assert found["torch"] == metadata.version("torch")


def test_versions_of_plugins_in_the_recipe_are_compared() -> None:
    class Plugins:
        def find(self, kind: str, use: str) -> Any:
            return SimpleNamespace(distribution=f"lab-{kind}", version="1.2")

    found = checks._software(load_recipe("digits", registry=REGISTRY), Plugins())  # type: ignore[arg-type]
    assert (found["lab-model"], found["lab-optimizer"]) == ("1.2", "1.2")


def test_error_shows_recipe_differences_key_by_key() -> None:
    same, other = ["train.seed=1"], ["train.seed=2", "checkpoint.every=7st", "data.workers=3"]
    host = socket.gethostname()
    first, *others = compared(same, same, other)
    assert first == (
        f"the recipe on {host} (rank 2) differs from that of rank 0 on {host}:\n  train.seed: 1 → 2\n"
        '  checkpoint.every: "5ep" → "7st" | start all ranks with the same files, flags and environment variables'
    )
    assert others == ["rank 0 reports it"] * 2


def test_data_paths_and_data_workers_may_differ_between_hosts(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("def data(root: str): return [root]\n")
    recipe = tmp_path / "run.toml"
    tables = {
        "model": 'use = "mlp"\ninputs = 1\noutputs = 1',
        "data.train": 'use = "./data.py:data"',
        "task": 'use = "classification"',
        "optimizer": 'use = "sgd"\nlr = 0.1',
        "train": 'length = "1ep"\nglobal_batch = 4',
    }
    listed = "".join(f"[{table}]\n{keys}\n" for table, keys in tables.items())
    recipe.write_text(f'recipe = 2\nname = "x"\n{listed}')
    here, there = [["data.train.root=/local/a", "data.workers=1"], ["data.train.root=/scratch/b"]]
    assert compared(here, there, source=recipe) == ["", ""]
    assert "data.train.root" in compared(["data.train.root=a"], ["data.train.root=b"], source=recipe)[0]
    elsewhere = [["data.train.root=/a", f"checkpoint.init_from={path}"] for path in ("/local/a", "/scratch/b")]
    assert "checkpoint.init_from" in compared(*elsewhere, source=recipe)[0], "only paths of data may differ"


def test_error_names_local_code_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe("digits", registry=REGISTRY)

    def check(ranks: Ranks) -> None:
        digests = {"code/net.py": str(ranks.rank), "code/same.py": "same"}
        facts = checks._Facts("node", {}, str(digests))
        told = iter([facts, (loaded.tables, digests)])
        everyone = ranks.all_gather_object
        monkeypatch.setattr(ranks, "all_gather_object", lambda _: everyone(next(told)), raising=False)
        checks.check_same_environment(ranks, loaded, REGISTRY)

    assert "\n  the code in net.py |" in ends(2, check)[0]


# ---------------------------------------------------------------------------------------------- clocks
@pytest.mark.parametrize(("off", "how"), [(20.0, "20.0 s ahead of"), (-5.0, "5.0 s behind"), (2.0, "")])
def test_clock_difference_is_logged_with_both_hosts(caplog: pytest.LogCaptureFixture, off: float, how: str) -> None:
    def compare(ranks: Ranks) -> None:
        everyone, number = ranks.all_gather_object, ranks.rank
        shift = off if number == 1 else 0.0
        host = f"node{'ab'[number]}"
        ranks.all_gather_object = lambda told: everyone((host, told[1] + shift))  # type: ignore
        checks.compare_clocks(ranks)

    assert ends(2, compare) == ["", ""]
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ([f"the clock of nodeb (rank 1) is {how} that of nodea (rank 0)"] if how else [])


# ---------------------------------------------------------------------------------------------- the folder
def test_shared_folder_is_accepted_and_not_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def check(rank: int) -> list[str]:
        checks.check_shared_filesystem(tmp_path / "new/runs", set_up(DDP()).global_ranks)
        return [record.message for record in caplog.records if record.levelno >= logging.WARNING]

    assert in_ranks(2, check) == [[], []]
    assert not list(tmp_path.iterdir())


def test_file_locks_that_do_not_work_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Uses threads as hosts: threads of one process share a lock."""
    assert ends(2, lambda ranks: checks.check_shared_filesystem(tmp_path, ranks)) == ["", ""]
    assert [record.message for record in caplog.records] == [
        f"file locks do not work in {tmp_path}: make sure that no second process trains there"
    ]


def test_folder_that_is_not_shared_is_rejected(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    hosts["b"].own_disk(runs, tmp_path / "disk of b")
    monkeypatch.setattr(checks, "_CACHED", 0.0)

    def check(rank: int) -> str:
        world = set_up(DDP())
        try:
            checks.check_shared_filesystem(runs, world.global_ranks)
        except ForgeError as error:
            return f"{type(error).__name__}: {error.message}"
        return "shared"

    said = f"a file that rank 0 on nodea wrote in {runs} is not visible to rank 1 on nodeb ({runs})"
    assert hosts.in_ranks("ab", check) == [f"EnvironmentProblem: {said}", f"PeerFailed: {said}"]
    assert os.listdir(runs) == os.listdir(tmp_path / "disk of b") == []


def test_folder_that_cannot_be_written_is_rejected_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = ends(2, lambda ranks: checks.check_shared_filesystem(tmp_path / "file/runs", ranks))
    assert said[0].startswith(f"cannot write to the folder of runs {tmp_path}/file/runs: ")
    assert said[1] == "rank 0 reports it"
