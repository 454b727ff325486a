"""`ddpforge prove`: relations hold for a right script, and each planted error breaks one, with its factor and cause."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from ddpforge.cli import main
from ddpforge.tools.prove.observed import ScriptChange
from ddpforge.tools.prove.relations import (
    Certificate,
    _differences,
    _factor,
    _judged,
    _meaning,
    _Run,
    _Tried,
    _without_effect,
)

LOOP = """
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--bug", default="")
given = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
)
replica = model if given.bug == "no DDP" else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, given.bs, sampler=DistributedSampler(data, seed=3))
passes = 0
for epoch in range(10):
    for inputs, targets in loader:
        outputs = replica(inputs)
        if given.bug == "place":
            outputs = outputs * torch.linspace(0.5, 1.5, len(outputs))[:, None]
        loss = F.cross_entropy(outputs, targets, reduction="sum" if given.bug == "sum" else "mean")
        if given.bug != "not divided":
            loss = loss / given.ga
        if given.bug == "world":
            loss = loss / dist.get_world_size()
        loss.backward()
        passes += 1
        if passes % given.ga == 0:
            if given.bug == "half":
                model[4].weight.grad *= 1 / given.ga
            optimizer.step()
            optimizer.zero_grad()
"""
WAYS = ["--batch", "--bs {}", "--accumulate", "--ga {}", "--steps", "2"]


def proved(folder: Path, *arguments: str, bug: str = "") -> Certificate | dict[str, object]:
    script = folder / "loop.py"
    script.write_text(LOOP)
    words = ["prove", str(script), "--json", *WAYS, *arguments, *(["--", "--bug", bug] if bug else [])]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == (1 if bug else 0), done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------------------------------------- whole scripts
@pytest.mark.full
def test_all_relations_hold_for_a_right_script(tmp_path: Path) -> None:
    found = proved(tmp_path)
    results = {one["name"]: one["result"] for one in found["relations"]}  # type: ignore[index]
    assert results == dict.fromkeys(("again", "order", "doubled", "workers", "split", "ranks"), "holds")


@pytest.mark.full
@pytest.mark.parametrize(
    ("bug", "relation", "factor"),
    [
        ("not divided", "split", 2.0),
        ("sum", "doubled", 2.0),
        ("world", "ranks", 0.5),
        ("no DDP", "ranks", None),
        ("half", "split", 0.5),
        ("place", "order", None),
    ],
)
def test_a_planted_error_breaks_a_relation(tmp_path: Path, bug: str, relation: str, factor: float | None) -> None:
    found = proved(tmp_path, bug=bug)
    (broken,) = (one["broken"] for one in found["relations"] if one["name"] == relation)  # type: ignore[index]
    assert broken["step"] == 1
    assert broken["factor"] == (None if factor is None else pytest.approx(factor, rel=1e-3))


# ---------------------------------------------------------------------------------------------- one observed run
def observed(folder: Path, change: str, *arguments: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    script, out = folder / "loop.py", folder / change.replace('"', "")
    script.write_text(
        LOOP.replace('dist.init_process_group("gloo")', "").replace(", sampler=DistributedSampler(data, seed=3)", "")
    )
    out.mkdir()
    program = ["-m", "ddpforge.tools.prove.observed", str(out), "1", change, str(script), "--bug", "no DDP", *arguments]
    subprocess.run([sys.executable, *program], check=True)
    return load_file(out / "gradients-1.safetensors"), json.loads((out / "steps-0.json").read_text())


def test_an_observed_script_writes_gradients_by_name_and_the_samples_of_each_step(tmp_path: Path) -> None:
    gradients, found = observed(tmp_path, "{}")
    assert gradients.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    (step,) = found["steps"]  # type: ignore[misc]
    assert len({*step["samples"]}) == 8
    assert found["batches"] == [8]
    doubled, twice = observed(tmp_path, '{"doubled": true}')
    assert max(_differences(gradients, doubled).values()) < 1e-6
    assert len(twice["steps"][0]["samples"]) == 16  # type: ignore[index]


# ---------------------------------------------------------------------------------------------- judgement
def run(*gradients: dict[str, Tensor]) -> _Run:
    return _Run(gradients, [1.0] * len(gradients), [8], [], 1, 1)


SPLIT = _Tried("split", "", ScriptChange(split=2))


def test_the_first_step_the_parameter_and_the_factor_are_named() -> None:
    right = {"a": torch.ones(4), "router": torch.arange(4.0)}
    wrong = right | {"router": torch.arange(4.0) / 2}
    found = _judged(SPLIT, run(right, right), run(right, wrong), [1e-5, 1e-5])
    assert found.result == "broken"
    assert found.broken is not None
    assert (found.broken.step, found.broken.parameter, found.broken.factor) == (2, "router", 0.5)
    assert found.broken.worst["a"] == pytest.approx(1.0)


def test_a_difference_within_measured_rounding_holds() -> None:
    right, near = {"a": torch.ones(4)}, {"a": torch.ones(4) * (1 + 1e-6)}
    found = _judged(SPLIT, run(right), run(near), [1e-5])
    assert found.result == "holds"
    assert found.difference == pytest.approx(1e-6, rel=0.1)
    assert _judged(SPLIT, run(right), run(near), [1e-7]).result == "broken"


def test_a_gradient_that_only_one_run_has_breaks_the_relation() -> None:
    found = _judged(SPLIT, run({"a": torch.ones(2), "b": torch.ones(2)}), run({"a": torch.ones(2)}), [1e-5])
    assert found.broken is not None
    assert found.broken.parameter == "b"
    assert found.difference == float("inf")


@pytest.mark.parametrize(
    ("name", "ranks", "factor", "meaning"),
    [
        ("split", 1, 2.0, "not divided by their number"),
        ("split", 1, 0.5, "by the number of micro-batches twice"),
        ("ranks", 4, 4.0, "added over ranks"),
        ("ranks", 4, 0.25, "divided by the samples of all ranks"),
        ("doubled", 1, 2.0, "a sum over samples"),
        ("split", 1, 1.37, "multiplied by 1.37"),
        ("split", 1, None, "each micro-batch has its own mean"),
        ("order", 1, None, "place of a sample"),
    ],
)
def test_a_factor_is_explained(name: str, ranks: int, factor: float | None, meaning: str) -> None:
    assert meaning in _meaning(_Tried(name, "", ScriptChange(split=2), ranks), factor)


def test_gradients_that_are_not_parallel_have_no_factor() -> None:
    assert _factor(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) is None
    assert _factor(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("size", "divide", "batches", "expected"),
    [(8, 2, (8,), 4), (4, 2, (8,), 4), (8, 1, (), 4)],  # the last: split = 2
)
def test_a_batch_that_the_script_has_divided_by_its_ranks_is_not_divided_again(
    size: int, divide: int, batches: tuple[int, ...], expected: int
) -> None:
    assert ScriptChange(divide=divide, split=1 if divide > 1 else 2, batches=batches).part_of(size, 0) == expected


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(SystemExit, match="a batch of 3 cannot be divided by 2"):
        ScriptChange(split=2).part_of(3, 0)


@pytest.mark.parametrize(
    ("name", "one", "samples", "passes", "loaders", "why"),
    [
        ("order", ScriptChange(order=True), ["b", "a"], 1, 1, ""),
        ("order", ScriptChange(order=True), ["a", "b"], 1, 1, "the change has no effect"),
        ("doubled", ScriptChange(doubled=True), ["a", "b", "a", "b"], 1, 1, ""),
        ("doubled", ScriptChange(doubled=True), ["a", "b"], 1, 1, "the steps have other samples"),
        ("workers", ScriptChange(workers=2), ["a", "b"], 1, 0, "the change has no effect"),
        ("split", ScriptChange(split=2), ["a", "b"], 2, 1, ""),
        ("split", ScriptChange(split=2), ["a", "b"], 1, 1, "the change has no effect"),
        ("ranks", ScriptChange(divide=2), ["a", "c"], 1, 1, "the steps have other samples"),
        ("ranks", ScriptChange(divide=2), ["b", "a"], 1, 1, ""),
    ],
)
def test_a_change_without_effect_proves_nothing(
    name: str, one: ScriptChange, samples: list[str], passes: int, loaders: int, why: str
) -> None:
    gradients = [{"a": torch.ones(1)}]
    base = _Run(gradients, [1.0], [2], [["a", "b"]], passes=1, loaders=1)
    changed = _Run(gradients, [1.0], [2], [samples], passes=passes, loaders=loaders)
    found = _without_effect(_Tried(name, "", one), base, changed)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_a_missing_script_is_refused() -> None:
    done = CliRunner().invoke(main, ["prove", "absent.py"])
    assert done.exit_code == 2
    assert "there is no script" in done.stderr
