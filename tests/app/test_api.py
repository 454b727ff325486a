"""Python API: any number of runs, evaluations and models in one process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jupyter_client.manager import start_new_kernel
from support.forked import in_ranks, refused
from support.launched import Zygote
from torch import nn

import ddpforge
from ddpforge.cli.run import run as command
from ddpforge.errors import CheckpointError, ExitCode, ForgeError, RecipeError, UsageError
from ddpforge.launchers import process
from ddpforge.launchers.exit_record import LaunchExit, RankDeath
from ddpforge.recipe import load_recipe
from ddpforge.runs.folder import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "search"
SHORT = ("train.length=4st", "train.eval_every=2st", "checkpoint.every=2st", "schedule.warmup=1st")
RECIPE = """
recipe = 2
name = "run"
model = { use = "./net.py:Tied" }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
strategy = { use = "single" }
train = { length = "4st", global_batch = 8, device = "cpu", eval_every = "2st" }
checkpoint = { every = "2st", keep = { last = 9, best = 1, monitor = "eval/loss" } }
callbacks.ema = { decay = 0.5 }
"""
NET = """
from .layers import Layer
from torch import nn

class Other(nn.Linear):
    def __init__(self, bad: bool):
        super().__init__(64, 10)

class Tied(nn.Module):
    def __init__(self, bad: bool = False):
        super().__init__()
        self.bad = bad
        self.one = Layer(64, 64)
        self.two = Layer(64, 64)
        self.two.linear.weight = self.one.linear.weight
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x):
        y = self.head(self.norm(self.two(self.one(x.flatten(1)))))
        return y / 0 if self.bad else y
"""
LAYERS = """
from torch import nn

class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.linear(x).relu()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains, evaluates and loads a run of four steps in one process; returns the folder with the results."""
    folder = tmp_path_factory.mktemp("api")
    for name, text in (("run.toml", RECIPE), ("net.py", NET), ("layers.py", LAYERS)):
        (folder / name).write_text(text)

    def rank(_: int) -> Any:
        os.chdir(folder)
        outcome = ddpforge.run("run.toml")
        again = ddpforge.run("run.toml", fresh=True, sets=["train.seed=1"], out="other")
        ddpforge.run("run.toml", sets=["name=part", "train.freeze=['one.*']", "checkpoint.save=trainable"])
        evaluated = {step: ddpforge.evaluate("run", checkpoint=step).metrics["eval/loss"] for step in (2, 4)}
        return {"outcomes": [outcome.sentence(), again.sentence()], "evaluated": evaluated, "code": outcome.exit_code}

    (found,) = in_ranks(1, rank)
    (folder / "found.json").write_text(json.dumps(found))
    return folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained / "runs" / "run"


def loss_of(model: nn.Module) -> float:
    """Returns the mean loss over the test digits."""
    from ddpforge.builtin.datasets.digits import Digits

    images, labels = zip(*[Digits(split="test")[i] for i in range(360)], strict=True)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(torch.stack(images)), torch.tensor(labels)))


# ---------------------------------------------------------------------------------------------- one process
def test_runs_and_evaluations_follow_each_other_in_one_process(run: Path) -> None:
    found = json.loads((run.parents[1] / "found.json").read_text())
    assert [sentence.partition(",")[0] for sentence in found["outcomes"]] == [
        "runs/run: done at step 4",
        "other/run: done at step 4",
    ]
    rows = {row["step"]: row["eval/loss"] for row in ddpforge.load(run).metrics() if "eval/loss" in row}
    assert {int(step): loss for step, loss in found["evaluated"].items()} == pytest.approx(rows)


def test_loaded_model_gives_the_evaluated_loss(run: Path) -> None:
    """Loads averaged weights, BatchNorm's statistics and tied parameters, at any step, and keeps torch's RNG state."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = ddpforge.load(run, checkpoint=2)
    newest = ddpforge.load("run")
    rows = {row["step"]: row["eval/loss"] for row in newest.metrics() if "eval/loss" in row}
    models = {one.step: one.model() for one in (first, newest)}
    assert torch.equal(torch.rand(2), expected)
    assert {step: loss_of(model) for step, model in models.items()} == pytest.approx(rows, rel=1e-5)
    assert not models[4].training
    assert models[4].two.linear.weight is models[4].one.linear.weight  # type: ignore[union-attr]
    assert newest.recipe.optimizer.options["lr"] == 0.1
    live = ddpforge.load(run, weights="model").model()
    assert loss_of(live) != pytest.approx(rows[4], rel=1e-5)
    assert loss_of(ddpforge.load(run, weights="ema").model()) == pytest.approx(rows[4], rel=1e-5)


def test_loaded_run_gives_its_task_and_data(run: Path) -> None:
    """Compares their loss with the loss of the evaluation."""
    trained = ddpforge.load(run)
    data, task, model = trained.data(), trained.task(), trained.model()
    assert (len(data), len(trained.data("train"))) == (360, 1437)
    batch = torch.utils.data.default_collate([data[number] for number in range(360)])
    with torch.no_grad():
        assert task.loss(model, batch)[0].item() / 360 == pytest.approx(trained.metrics()[-1]["eval/loss"], rel=1e-5)
    assert refused(UsageError, lambda: trained.data("test")).endswith("has no data 'test' | one of train, eval")


def test_weights_that_a_checkpoint_skips_come_from_the_model(run: Path) -> None:
    loaded = ddpforge.load(run.with_name("part"))
    measured = loaded.metrics()[-1]["eval/loss"]
    assert loss_of(loaded.model()) == pytest.approx(measured, rel=1e-5)


def test_load_selects_the_best_checkpoint_or_a_checkpoint_by_its_folder(run: Path) -> None:
    losses = {row["step"]: row["eval/loss"] for row in ddpforge.load(run).metrics() if "eval/loss" in row}
    best = ddpforge.load(run, checkpoint="best")
    assert best.step == min(losses, key=lambda step: losses[step])
    assert ddpforge.load(best.checkpoint).step == best.step


def test_load_errors_have_clear_messages(run: Path) -> None:
    assert "there is no run 'nowhere'" in refused(UsageError, lambda: ddpforge.load("nowhere"))
    assert "has no checkpoint of step 3" in refused(UsageError, lambda: ddpforge.load(run, checkpoint=3))
    newest = ddpforge.load(run)
    assert "contains no weights called 'swa'" in refused(UsageError, lambda: ddpforge.load(run, weights="swa"))
    assert "only for a run" in refused(UsageError, lambda: ddpforge.load(newest.checkpoint, checkpoint="best"))
    said = refused(UsageError, lambda: ddpforge.load(run, checkpoint="last"))  # type: ignore[arg-type]
    assert "checkpoint='last': expected" in said
    text = newest.folder.resolved.read_text()
    try:
        newest.folder.resolved.write_text(text.replace("./code/net.py:Tied", "./code/net.py:Other"))
        said = refused(CheckpointError, ddpforge.load(run).model)
    finally:
        newest.folder.resolved.write_text(text)
    assert "is of another model: it lacks" in said


# ---------------------------------------------------------------------------------------------- several processes
@pytest.fixture
def ranks(zygote: Zygote, run: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the numbers of ranks of each start. Ranks are forked instead of started by a launcher."""
    started: list[int] = []

    def start(arguments: list[str], *, nproc: int, **_: Any) -> LaunchExit:
        started.append(nproc)
        ended = zygote.run(["run", *arguments], nproc=nproc, cwd=run.parents[1])
        return LaunchExit(max(ended.codes))

    monkeypatch.setattr("ddpforge.launchers.local.torchrun_command", lambda arguments, **_: arguments)
    monkeypatch.setattr(process, "start", start)
    return started


def test_launch_trains_on_several_processes_and_returns_the_outcome(ranks: list[int]) -> None:
    sets = ["strategy.use=ddp", "name=two"]
    outcome = ddpforge.launch("run.toml", nproc=2, sets=sets)
    assert (outcome.exit_code, outcome.status["state"], outcome.status["world_size"]) == (ExitCode.DONE, "done", 2)
    failed = ddpforge.launch("run.toml", nproc=2, sets=["strategy.use=ddp", "name=bad", "model.bad=true"])
    assert (failed.exit_code, failed.status["state"]) == (ExitCode.DIVERGED, "diverged")
    assert ranks == [2, 2]


@pytest.mark.parametrize("nproc", [0, -1])
def test_launch_rejects_fewer_than_one_process(ranks: list[int], nproc: int) -> None:
    said = refused(UsageError, lambda: ddpforge.launch("run.toml", nproc=nproc))
    assert said == f"nproc={nproc}: expected 1 process or more | omit it for one process per GPU"
    assert ranks == []


@pytest.mark.full
@pytest.mark.parametrize("way", ["a program without a file", "another thread"])
def test_launch_works_without_a_script_file(run: Path, way: str) -> None:
    """Imitates a notebook that has used torch before."""
    train = "print(ddpforge.launch('run.toml', nproc=2, sets=['strategy.use=ddp', 'name=note']).sentence())"
    if way == "another thread":
        train = f"import threading; thread = threading.Thread(target=lambda: {train}); thread.start(); thread.join()"
    program = f"import torch, ddpforge; torch.rand(3, 3) @ torch.rand(3, 3); {train}"
    ended = subprocess.run(
        [sys.executable, "-"], input=program, cwd=run.parents[1], capture_output=True, text=True, timeout=300
    )
    assert "runs/note: done at step 4" in ended.stdout, ended.stderr


@pytest.mark.full
def test_interrupt_of_a_notebook_cell_stops_its_launch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # if it is set, kernels do not show the output of other processes
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        said.append(message["content"].get("text", ""))
        if "step 1/" in said[-1]:
            manager.interrupt_kernel()

    manager, client = start_new_kernel(cwd=str(run.parents[1]))
    try:
        sets = "['strategy.use=ddp', 'name=cell', 'train.length=100000st']"
        cell = f"import torch, ddpforge; print(ddpforge.launch('run.toml', nproc=2, sets={sets}).sentence())"
        reply = client.execute_interactive(cell, output_hook=hear, timeout=300)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok"
    status = RunFolder(run.parent / "cell").status()
    assert status is not None
    assert status["state"] == "preempted"
    assert "runs/cell: preempted at step" in "".join(said)


def test_launch_raises_the_errors_of_its_ranks(ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("train.global_batch=7", "model.nothing=1"):  # the latter is an option of a local file
        with pytest.raises(RecipeError):
            ddpforge.launch("run.toml", nproc=2, sets=[wrong])
    assert ranks == []
    monkeypatch.setattr(process, "start", lambda *_, **__: LaunchExit(3))
    error = refused(ForgeError, lambda: ddpforge.launch("run.toml", nproc=2, sets=["name=new"]))
    assert error == "the ranks ended with exit code 3 before training; see their messages on stderr"
    monkeypatch.setattr(process, "start", lambda *_, **__: LaunchExit(137, RankDeath(1, 9)))
    assert refused(ForgeError, lambda: ddpforge.launch("run.toml", nproc=2, sets=["name=new"])).startswith(
        "rank 1 was ended by signal 9 (SIGKILL)"
    )


# ---------------------------------------------------------------------------------------------- searches
def test_wandb_agent_starts_a_run_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ddpforge: Callable[..., Any]
) -> None:
    """Runs the real agent; a script `ddpforge` on the path records its arguments."""
    from wandb.wandb_agent import Agent

    sweep = yaml.safe_load((EXAMPLE / "sweep.yaml").read_text())
    assert (EXAMPLE / "sweep.yaml").read_text().partition("command:\n")[2] in (
        EXAMPLE.parents[1] / "docs" / "guides" / "wandb.md"
    ).read_text()
    script = tmp_path / "ddpforge"
    script.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done > "$0.words"\n')
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, str(tmp_path))  # the agent changes these variables
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    agent = Agent(None, None)
    agent._sweep_command = sweep["command"]
    parameters = sweep["parameters"].items()
    values = {name: {"value": spec.get("value", spec.get("values", [0.003])[-1])} for name, spec in parameters}
    agent._command_run({"run_id": "abc123", "program": sweep["program"], "args": values})
    agent._run_processes["abc123"].wait()
    words = Path(f"{script}.words").read_text().splitlines()

    context = command.make_context("run", words[1:], help_option_names=["-h", "--help"])
    assert (words[0], context.params["recipe"], context.params["out"]) == ("run", "digits", "runs/sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")  # as the agent sets it
    recipe = load_recipe("digits", sets=context.params["words"]).recipe
    assert recipe.name == "abc123"
    assert recipe.optimizer.options["lr"] == 0.003
    assert (recipe.optimizer.no_decay, recipe.train.seed) == (("bias", "norm"), 2)
    assert recipe.track.trackers["wandb"].options["project"] == "digits"


@pytest.mark.parametrize("name", ["sets", "allow_change"])
def test_string_instead_of_a_list_is_rejected(name: str) -> None:
    given: Any = {name: "train.seed=1"}
    assert f"{name} is the string" in refused(UsageError, lambda: ddpforge.run("digits", **given))
