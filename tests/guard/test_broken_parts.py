"""Recipes of a user with broken parts: every broken part is reported, and nothing else."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.stages import ALONE

from ddpforge.app.build import build_checked, check_chosen
from ddpforge.app.choose import choose
from ddpforge.cli.check import _build, choose_and_check
from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import load_recipe
from ddpforge.training.problems import Problems

CODE = """
import numpy as np
import torch
from torch import nn
from ddpforge.interfaces import BatchSampler, Callback, Task

def fail(fault: str) -> None:
    if fault == "refuses":
        raise ValueError("it refuses its options")
    if fault == "crashes":
        raise KeyError("it has a mistake")

class Net(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        fail(fault)
        self.layer = nn.LazyLinear(3) if fault == "lazy" else nn.Linear(4, 3)
        self.table = nn.Embedding(3, 4, max_norm=1.0 if fault == "max_norm" else None)
    def forward(self, x):
        return self.layer(x) + 0 * self.table.weight.sum()

class Data:
    def __init__(self, fault: str = "") -> None:
        fail(fault)
        self.fault = fault
    def __len__(self):
        if self.fault == "length":
            fail("crashes")
        return 0 if self.fault == "empty" else 16
    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % 3

class Own(Task):
    def __init__(self, fault: str = "") -> None:
        fail(fault)
        self.fault = fault
    def check(self, model, data):
        if self.fault == "check":
            fail("refuses")
        if self.fault == "mistake in check":
            fail("crashes")
    def loss(self, model, batch):
        y = model(batch[0])
        return nn.functional.cross_entropy(y, batch[1], reduction="sum"), y

class Watch(Callback):
    def __init__(self, fault: str = "") -> None:
        fail(fault)

def constant(horizon, fault: str = ""):
    fail(fault)
    return lambda step: fail("crashes") if fault == "call" else 1.0

def plain(params, lr: float, fault: str = ""):
    fail(fault)
    return torch.optim.SGD(params, lr=lr)

class Order(BatchSampler):
    def __init__(self, data, global_batch, fault: str = "") -> None:
        fail(fault)
        self.data, self.size = data, global_batch
    def __call__(self, step):
        return np.arange(self.size)
"""

OWN: Mapping[str, Any] = {
    "recipe": 2,
    "name": "run",
    "model.use": "./mine.py:Net",
    "data.train.use": "./mine.py:Data",
    "data.eval.use": "./mine.py:Data",
    "data.sampler.use": "./mine.py:Order",
    "task.use": "./mine.py:Own",
    "callbacks.watch.use": "./mine.py:Watch",
    "optimizer.use": "./mine.py:plain",
    "optimizer.lr": 0.1,
    "schedule.use": "./mine.py:constant",
    "train.length": "4st",
    "train.global_batch": 8,
    "train.eval_every": "2st",
    "checkpoint.every": "4st",
}
FAULTS = {
    "model": ("refuses", "crashes", "lazy", "max_norm"),
    "data.train": ("refuses", "crashes", "length", "empty"),
    "data.eval": ("refuses", "crashes", "length", "empty"),
    "task": ("refuses", "crashes", "check", "mistake in check"),
    "callbacks.watch": ("refuses", "crashes"),
    "schedule": ("refuses", "crashes", "call"),
    "optimizer": ("refuses", "crashes"),
    "data.sampler": ("refuses", "crashes"),
}
NEEDS = {
    "task": ("model", "data.train", "data.eval"),  # of its `check`
    "schedule": ("data.train", "data.sampler"),  # its horizon
    "data.sampler": ("data.train",),
    "optimizer": ("model", "data.train", "data.eval", "data.sampler", "task", "callbacks.watch", "schedule"),
}
"""The parts without which a part is not tried."""


def _pairs() -> Iterator[tuple[tuple[str, str], ...]]:
    single = [(part, fault) for part, faults in FAULTS.items() for fault in faults]
    yield from ((one,) for one in single)
    yield from ((one, other) for one, other in combinations(single, 2) if one[0] != other[0])


def _checked(recipe: Mapping[str, Any]) -> dict[str, str]:
    chosen, problems = choose_and_check(recipe, (), 1, "cpu")  # type: ignore[arg-type]
    with pytest.raises(RecipeError) as caught:
        _build(chosen, problems)
    return {problem.key: problem.message for problem in caught.value.problems}


def _begun(recipe: Mapping[str, Any]) -> dict[str, str]:
    registry = Registry.installed()
    loaded = load_recipe(recipe, registry=registry)
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=1)
    try:
        check_chosen(chosen, problems)
        build_checked(chosen, ALONE, problems, samples=True)
    except RecipeError as error:
        return {problem.key: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize("found_by", [_checked, _begun], ids=["check", "run"])
def test_every_pair_of_broken_parts_is_reported_and_no_part_that_works(found_by: Any) -> None:
    Path("mine.py").write_text(CODE)
    wrong = {}
    for broken in _pairs():
        if found_by is _begun and broken[0][0] == "optimizer" and len(broken) == 1:
            continue  # a run builds its optimizer with the model on the ranks
        recipe = {**OWN, **{f"{part}.fault": fault for part, fault in broken}}
        keys = set(found_by(recipe))
        parts = {part for part, _ in broken}
        blocked = {part for part in parts for need in NEEDS.get(part, ()) if need in parts}
        named = {part for part in parts if any(key == part or key.startswith(f"{part}.") for key in keys)}
        others = {key for key in keys if not any(key == part or key.startswith(f"{part}.") for part in parts)}
        if others or not parts - blocked - {"optimizer"} <= named:
            wrong[broken] = keys
    assert wrong == {}


def test_a_model_that_cannot_be_built_is_the_only_error_with_a_task_of_the_users_own() -> None:
    Path("mine.py").write_text(CODE)
    expected = {"model": "model `./mine.py:Net` cannot be built: it refuses its options"}
    assert _begun({**OWN, "model.fault": "refuses"}) == expected
    assert _checked({**OWN, "model.fault": "refuses"}) == expected


def test_a_lazy_layer_is_named_and_no_other_check_of_the_model_fails() -> None:
    Path("mine.py").write_text(CODE)
    (message,) = _begun({**OWN, "model.fault": "lazy"}).values()
    assert message.startswith("`layer` (LazyLinear) has no weights before its first forward pass")


def test_a_mistake_in_a_component_after_it_was_built_keeps_its_traceback() -> None:
    Path("mine.py").write_text(CODE)
    chosen, problems = choose_and_check({**OWN, "task.fault": "mistake in check"}, (), 1, "cpu")  # type: ignore[arg-type]
    with pytest.raises(RecipeError) as caught:
        _build(chosen, problems)
    (problem,) = caught.value.problems
    assert problem.message == "[task] raised KeyError: 'it has a mistake'"
    assert "mine.py" in problem.trace
    assert "ddpforge/" not in problem.trace
