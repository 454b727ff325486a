"""`ddpforge compare-script`: real scripts, with recipes that train the same, and with recipes that do not."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.launched import FORKED_PROGRAMS, Ranks, Zygote

from ddpforge.recipe import load_recipe
from ddpforge.tools.script_comparison.compare import (
    ScriptComparison,
    _compared,
    _Limits,
    _other_size,
    _overrides,
    _relative,
    _update,
)
from ddpforge.tools.script_comparison.record import ScriptStep

PARTS = """
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __init__(self, *, samples: int = 40, shift: int = 3):
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(shift))
        self.y = (self.x.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self, *, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh())
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.dropout(self.body(x)))


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


class WithLoss(Net):
    def forward(self, x, targets):
        logits = super().forward(x)
        return logits, nn.functional.cross_entropy(logits, targets)
"""
RECIPE = """
recipe = 2
name = "moved"
model = { use = "./parts.py:Net" }
data.train = { use = "./parts.py:Points" }
task = { use = "classification" }
optimizer = { use = "adamw", lr = 0.02 }
schedule = { use = "constant" }
train = { length = "8ep", global_batch = 8 }
"""
LOOP = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from parts import Net, Points

torch.manual_seed(5)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=float((sys.argv[1:] or ["0.02"])[0]))
loader = DataLoader(Points(), 8, shuffle=True)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
DDP = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from parts import Net, Points

dist.init_process_group("gloo")
torch.manual_seed(6)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
sampler = DistributedSampler(Points(), seed=1)
loader = DataLoader(Points(), 8, sampler=sampler, num_workers=1)
for epoch in range(100):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
NO_LOADER = """
import torch
from parts import Points, WithLoss

torch.manual_seed(5)
model, data = WithLoss(), Points()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
while True:
    chosen = torch.randint(len(data), (8,))
    optimizer.zero_grad()
    model(data.x[chosen], data.y[chosen])[1].backward()
    optimizer.step()
"""
ACCELERATE = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from parts import Net, Points

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(7)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = DataLoader(Points(), 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(100):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""
MEANS = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from parts import Plain, Points

model = Plain()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = DataLoader(Points(), 6, shuffle=True)
number = 0
while True:
    for x, y in loader:
        (F.cross_entropy(model(x), y) / 2).backward()
        number += 1
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
TRAINER = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments
from parts import Net, Points

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

torch.manual_seed(8)
arguments = TrainingArguments(output_dir="hf", num_train_epochs=8, per_device_train_batch_size=8, learning_rate=0.02,
                              lr_scheduler_type="cosine", warmup_steps=5, report_to="none", use_cpu=True)
Trainer(WithLoss(), arguments, train_dataset=Points(), data_collator=collate).train()
"""

Compare = Callable[..., tuple[Ranks, dict[str, Any]]]


@pytest.fixture
def compare(tmp_path: Path, zygote: Zygote) -> Compare:
    """Writes the files, compares a script with the recipe; returns the output and the JSON.

    The script's process is forked, or started as for a user.
    """
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "moved.toml").write_text(RECIPE)

    def run(
        script: str, *arguments: str, code: int = 0, forked: bool = True, tolerance: str = "--tolerance=1e-6"
    ) -> tuple[Ranks, dict[str, Any]]:
        (tmp_path / "train.py").write_text(script)
        command = [
            "compare-script",
            "train.py",
            "moved.toml",
            "--json",
            *([tolerance] if tolerance else []),
            *arguments,
        ]
        done = zygote.run(command, nproc=1, cwd=tmp_path, env={FORKED_PROGRAMS: "1"} if forked else None)
        assert done.codes == [code], done.stdout + done.stderr
        return done, json.loads(done.stdout) if code < 2 else {}

    return run


# ---------------------------------------------------------------------------------------------- the same
# Wrapped loaders and optimizers of Accelerate and of the Trainer, whose import takes seconds, are `full`.
@pytest.mark.parametrize(
    ("script", "sets"),
    [
        pytest.param(LOOP, [], id="loop"),
        pytest.param(DDP, ["--torchrun"], id="ddp"),
        pytest.param(
            NO_LOADER,
            ["-s", "task.use=model_loss", "-s", "model.use=./parts.py:WithLoss"],
            id="no loader",
            marks=pytest.mark.full,
        ),
        pytest.param(ACCELERATE, ["-s", "train.micro_batch=4"], id="accelerate", marks=pytest.mark.full),
        pytest.param(
            TRAINER,
            [
                *("-s", "schedule.use=hf_cosine", "-s", "schedule.warmup=5st", "-s", "train.clip_norm=1.0"),
                *("-s", "optimizer.weight_decay=0"),
            ],
            id="trainer",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_script_and_its_recipe_have_the_same_losses(compare: Compare, script: str, sets: list[str]) -> None:
    if script == TRAINER:
        pytest.importorskip("transformers")
    _, found = compare(script, *sets, forked=script == DDP)
    assert found["same"]
    assert len(found["steps"]) == 20
    assert found["largest_difference"] <= 1e-6
    first, *_, last = [step["loss"][0] for step in found["steps"]]
    assert last < 0.8 * first  # both have learnt


def test_without_a_tolerance_the_rounding_of_the_recipe_is_measured_in_its_dtype(compare: Compare) -> None:
    lines = "        F.cross_entropy(model(x), y).backward()\n"
    low = LOOP.replace(
        lines,
        """        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
        F.cross_entropy(scores.float(), y).backward()
""",
    )
    _, found = compare(low, "--steps", "4", "-s", "train.precision=bf16", tolerance="")
    assert found["same"]
    assert 1e-4 < found["steps"][0]["allowed"] < 2e-2
    _, found = compare(
        low, "--steps", "2", "-s", "train.precision=bf16", "-s", "optimizer.lr=0.03", tolerance="", code=1
    )
    assert found["parted_in"] == ["lr: 0.02 in the script, 0.03 in the recipe"]
    assert "update: the norm of the change of `" in found["steps"][0]["notes"][0]
    assert "× 0.66" in found["steps"][0]["notes"][0]


# ---------------------------------------------------------------------------------------------- planted differences
@pytest.mark.parametrize(
    ("change", "step", "part"),
    [
        pytest.param("optimizer.lr=0.03", 1, "lr: 0.02 in the script, 0.03 in the recipe", marks=pytest.mark.full),
        ("data.train.shift=4", 1, "batch: the inputs of the models differ"),
        pytest.param("model.dropout=0.5", 1, "loss: ", marks=pytest.mark.full),
        ("optimizer.weight_decay=0.5", 2, "loss: "),
    ],
)
def test_a_difference_is_found_at_its_step(compare: Compare, change: str, step: int, part: str) -> None:
    _, found = compare(LOOP, "--steps", "4", "-s", change, code=1)
    assert (found["same"], found["parted_at"]) == (False, step)
    assert found["parted_in"][0].startswith(part)


@pytest.mark.parametrize("size", [6, 16])
def test_steps_of_another_number_of_samples_are_a_difference(compare: Compare, size: int) -> None:
    _, found = compare(LOOP, "--steps", "2", "-s", f"train.global_batch={size}", code=1)
    assert found["parted_in"][0] == (
        f"batch: 8 samples per step in the script, train.global_batch = {size} in the recipe"
    )


def test_the_update_before_a_different_loss_names_the_parameter(compare: Compare) -> None:
    _, found = compare(LOOP, "--steps", "3", "-s", "optimizer.weight_decay=0.5", code=1)
    assert found["steps"][0]["parts"] == []
    assert "update: the norm of the change of `" in found["steps"][0]["notes"][0]


def test_another_length_of_the_dataset_is_noted(compare: Compare) -> None:
    _, found = compare(LOOP, "--steps", "2", "-s", "data.train.samples=60")
    assert found["notes"][0] == "the script's dataset has 40 samples, that of the recipe 60: epochs differ"


def test_arguments_of_the_script_come_after_the_dashes(compare: Compare) -> None:
    _, found = compare(LOOP, "--steps", "3", "--", "0.01", code=1)
    assert found["steps"][0]["lr"] == [0.01, 0.02]


def test_a_mean_of_means_parts_at_the_step_with_an_incomplete_micro_batch(compare: Compare) -> None:
    sets = ["-s", "train.global_batch=12", "-s", "train.micro_batch=6", "-s", "model.use=./parts.py:Plain"]
    _, found = compare(MEANS, "--steps", "5", *sets, code=1)
    # 40 samples are six batches of 6 and one of 4: step 4 has the seventh and the first of the next epoch.
    assert found["parted_at"] == 4
    assert found["parted_in"][0].startswith("loss: ")


# ---------------------------------------------------------------------------------------------- bad input
TWO = LOOP.replace(
    "        optimizer.step()", "        optimizer.step()\n        torch.optim.SGD(model.parameters(), lr=1.0).step()"
)
APART = LOOP.replace("model = Net()", "body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)").replace(
    "model.parameters()", "[*body.parameters(), *head.parameters()]"
)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        pytest.param("print('hello')", [], "ended without an optimizer step in its process", id="never-steps"),
        pytest.param("raise ValueError('my own fault')", [], "ValueError: my own fault", id="raises"),
        pytest.param(TWO, [], "it steps two optimizers, AdamW and SGD", id="two-optimizers", marks=pytest.mark.full),
        pytest.param(APART.replace("model(x)", "head(body(x))"), [], "no module that it called holds all", id="apart"),
        pytest.param(LOOP.replace("in loader", "in [next(iter(Points())), ] and [(Points().x, Points().y)]"), [],
                     "the script has no DataLoader: the recipe gets the inputs", id="no-loader"),
        pytest.param(LOOP, ["-s", "model.width=8"], "`body.0.bias` has the shape [8], in the script [16]",
                     id="other-shape"),
        pytest.param(LOOP, ["-s", "model={use='mlp', inputs=4, outputs=2}"], "only the script has `body.0.bias`",
                     id="other-names", marks=pytest.mark.full),
        pytest.param(LOOP, ["-s", "data.train.samples=20"], "but [data.train] has only 20 samples", id="fewer-samples",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_comparison_that_cannot_work_is_an_error(
    compare: Compare, script: str, arguments: list[str], message: str
) -> None:
    done, _ = compare(script, "--steps", "3", *arguments, code=2)
    assert message in done.stderr
    assert "compare.py" not in done.stderr  # no traceback of ddpforge


def test_a_script_that_waits_for_input_fails_with_the_reason(compare: Compare) -> None:
    done, _ = compare("print('how many? ', input())", "--steps", "3", code=2)
    assert "EOFError" in done.stderr
    assert "reads from the terminal: give its answers as arguments" in done.stderr


def test_a_process_that_a_script_leaves_behind_is_ended_and_not_waited_for(compare: Compare, tmp_path: Path) -> None:
    left = "import subprocess, pathlib\npathlib.Path('pid').write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    compare(left + LOOP, "--steps", "2", forked=False)
    process = psutil.Process(int(pid)) if psutil.pid_exists(int(pid := (tmp_path / "pid").read_text())) else None
    # Until init has read the exit code of the killed process, it is a zombie.
    assert process is None or process.status() == psutil.STATUS_ZOMBIE


def test_a_stop_signal_ends_the_script_too(tmp_path: Path) -> None:
    waits = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "train.py").write_text(waits)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "moved.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "ddpforge", "compare-script", "train.py", "moved.toml"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert running.poll() is None
    running.terminate()
    assert "stopped while the script trained" in running.communicate(timeout=60)[1]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_script_that_does_not_exist_is_an_error(tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "moved.toml").write_text(RECIPE)
    done = zygote.run(["compare-script", "none.py", "moved.toml"], nproc=1, cwd=tmp_path)
    assert done.codes == [2]
    assert "there is no script none.py" in done.stderr


# ---------------------------------------------------------------------------------------------- evaluations of a script
EVALUATES = LOOP.replace(
    "        optimizer.step()",
    """        optimizer.step()
        with torch.no_grad():
            for x, y in DataLoader(Points(shift=9), 5, shuffle=True):
                F.cross_entropy(model.eval()(x), y)
        model.train()""",
)
EVALUATES_WITHOUT_LOADER = NO_LOADER.replace(
    "    optimizer.step()",
    """    optimizer.step()
    with torch.no_grad():
        model.eval()(data.x[:7], data.y[:7])
    model.train()""",
)


@pytest.mark.parametrize(
    ("script", "sets"),
    [
        (EVALUATES, []),
        (EVALUATES_WITHOUT_LOADER, ["-s", "task.use=model_loss", "-s", "model.use=./parts.py:WithLoss"]),
    ],
    ids=["loader", "no loader"],
)
def test_samples_and_forward_passes_of_an_evaluation_do_not_count(
    compare: Compare, script: str, sets: list[str]
) -> None:
    _, found = compare(script, "--steps", "4", *sets)
    assert (found["same"], len(found["steps"])) == (True, 4)


# ---------------------------------------------------------------------------------------------- parts of a comparison
def allowed(name: str) -> float:
    return 1e-3


def recorded(losses: list[float], indices: list[int] | None = None, **updates: float) -> ScriptStep:
    return ScriptStep(losses=losses, indices=indices, batch=[], lr=0.1, updates=updates)


def test_a_parameter_that_only_one_side_trains_is_named_with_the_side_that_freezes_it() -> None:
    one, both = recorded([1.0], a=1.0), recorded([1.0], a=1.0, b=1.0)
    rename = {"a": "a", "b": "b"}
    assert [*_update(both, one, rename, allowed)] == ["update: `b` is not trained in the recipe"]
    assert [*_update(one, both, rename, allowed)] == ["update: `b` is not trained in the script"]
    assert [*_update(both, both, rename, allowed)] == []


def test_parameters_with_another_update_are_named_with_their_factors() -> None:
    script, recipe = recorded([1.0], a=1.0, b=1.0, c=1.0), recorded([1.0], a=1.0, b=2.0, c=1.25)
    (found,) = _update(script, recipe, {name: name for name in "abc"}, allowed)
    assert found == (
        "update: the norm of the change of `b` is 1 in the script, 2 in the recipe (5.0e-01 apart); also `c` × 0.8"
    )


@pytest.mark.parametrize(
    ("sizes", "global_batch", "samples", "same"),
    [
        ([8, 8, 4], 8, 20, True),
        ([20, 20], 64, 20, True),  # a batch is never larger than the dataset
        ([20], 64, 40, False),
        ([8], 16, None, False),
        ([16], 16, None, True),
    ],
)
def test_the_size_of_a_step_is_compared_with_the_batch_or_the_whole_dataset(
    sizes: list[int], global_batch: int, samples: int | None, same: bool
) -> None:
    steps = [recorded([1.0], list(range(size))) for size in sizes]
    assert (_other_size(steps, global_batch, samples) == "") is same


@pytest.mark.parametrize("given", ["", '\n[checkpoint]\ninit_from = "gone"\n[data.sampler]\nuse = "sequential"\n'])
def test_the_recipe_starts_from_the_weights_of_the_script_in_its_order(tmp_path: Path, given: str) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    recipe = tmp_path / "moved.toml"
    recipe.write_text(RECIPE + given)
    sets = _overrides(recipe, [], tmp_path / "indices.json", None)
    found = load_recipe(recipe, sets=sets).recipe
    assert found.checkpoint.init_from is None
    assert found.data.sampler is not None
    assert found.data.sampler.use.endswith("replay:Replay")


@pytest.mark.parametrize(
    ("reference", "value", "difference"),
    [
        (2.0, 2.0, 0.0),
        (2.0, 1.0, 0.5),
        (math.inf, math.inf, 0.0),
        (math.nan, math.nan, math.inf),
        (1.0, math.nan, math.inf),
    ],
)
def test_a_loss_that_is_not_finite_differs_unless_both_are_the_same_infinity(
    reference: float, value: float, difference: float
) -> None:
    assert _relative(reference, value) == difference


def compared(script: list[ScriptStep], recipe: list[ScriptStep], asked: int = 1) -> ScriptComparison:
    trained: Any = SimpleNamespace(notes=[], steps=recipe, other_size="", rename={})
    return _compared(script, trained, asked, _Limits.given(1e-6))


@pytest.mark.parametrize(("lr", "differs"), [(0.1, False), (0.1 * (1 + 1e-8), False), (0.1 * (1 + 1e-5), True)])
def test_another_learning_rate_is_a_difference_even_with_the_same_loss(lr: float, differs: bool) -> None:
    found = compared([recorded([1.0])], [replace(recorded([1.0]), lr=lr)]).steps[0].parts
    assert [part.partition(":")[0] for part in found] == (["lr"] if differs else [])


def test_a_sum_over_the_samples_of_several_micro_batches_is_divided_once() -> None:
    found = compared([recorded([3.0, 5.0], [*range(8)])], [recorded([1.0])])
    assert (found.steps[0].loss, found.steps[0].parts, len(found.notes)) == ((1.0, 1.0), [], 1)
    assert found.notes[0].startswith("the script's loss is a sum over the samples of a step")


def test_losses_of_micro_batches_that_are_not_divided_are_averaged() -> None:
    found = compared([recorded([0.5, 1.5])], [recorded([1.0])])
    assert (found.steps[0].loss, found.steps[0].parts) == ((1.0, 1.0), [])
    assert found.notes[0].startswith("the script adds the gradients of 2 micro-batches")


@pytest.mark.parametrize(
    ("script", "recipe", "notes"),
    [
        (3, 3, []),
        (2, 2, ["the script ended after step 2"]),
        (3, 1, ["the recipe ended after step 1: see train.length"]),
    ],
)
def test_a_side_that_ends_early_is_noted(script: int, recipe: int, notes: list[str]) -> None:
    assert compared([recorded([1.0])] * script, [recorded([1.0])] * recipe, asked=3).notes == notes
