"""State of a task in checkpoints and rollbacks; untrained parameters are refused, unsaved state is logged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Plain
from support.odd_models import Remembers
from support.saved_tensors import Saved
from support.trained import trained
from torch import Tensor, nn

from ddpforge.errors import PluginError, UsageError
from ddpforge.features.task_state import TaskState, Unsaved, check_no_parameters, has_state
from ddpforge.interfaces import AuxiliaryModule, Task

RECIPE = """
recipe = 2
name = "run"
model = {{ use = "./odd_models.py:Attending" }}
data.train = {{ use = "./parts.py:{points}", samples = 24 }}
task = {{ use = "./odd_models.py:{task}" }}
optimizer = {{ use = "adamw", lr = 0.01 }}
strategy = {{ {strategy} }}
train = {{ length = "{length}st", global_batch = 8, device = "cpu"{train} }}
checkpoint = {{ every = "3st" }}
track.every = "1st"
"""


def run(folder: Path, length: int, strategy: str, ranks: int, **more: str) -> list[float]:
    folder.mkdir(exist_ok=True)
    options = {"points": "Points", "task": "Remembers", "train": ""} | more
    return trained(folder, RECIPE.format(length=length, strategy=strategy, **options), ranks)[-1].column()


# ------------------------------------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ('use = "single"', 1),
        pytest.param('use = "ddp"', 2, marks=pytest.mark.full),  # "fsdp" on two ranks, "single" without shards
        ('use = "fsdp"', 2),
        ('use = "deepspeed", stage = 3', 2),
        ('use = "pipeline", stages = 2', 2),
    ],
    ids=["single", "ddp", "fsdp", "zero3", "pipeline"],
)
def test_the_state_of_a_task_survives_a_resume(tmp_path: Path, strategy: str, ranks: int) -> None:
    straight = run(tmp_path / "whole", 6, strategy, ranks)
    first, rest = (run(tmp_path / "parts", length, strategy, ranks) for length in (3, 6))
    assert len(rest) == 3
    assert first + rest == pytest.approx(straight, rel=1e-6)
    run(tmp_path / "lost", 3, strategy, ranks, task="Forgets")
    assert run(tmp_path / "lost", 6, strategy, ranks, task="Forgets") != pytest.approx(straight[3:], rel=1e-4)


def test_a_rollback_restores_the_state_of_a_task(tmp_path: Path) -> None:
    """One nonfinite sample makes the mean of the task nonfinite too; later losses are finite again."""
    losses = run(tmp_path, 9, 'use = "ddp"', 2, points="SpoiltPoints", train=', on_nonfinite = "rollback"')
    assert any(map(math.isnan, losses))
    assert not all(map(math.isnan, losses[next(n for n, loss in enumerate(losses) if math.isnan(loss)) :]))


def test_a_state_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Apart.state: `(bank|mean)` has different values on rank 0 and on"):
        run(tmp_path, 3, 'use = "ddp"', 2, task="Apart")


def test_a_state_is_copied_and_loaded_as_tensors() -> None:
    task = Remembers()
    state = TaskState(
        task, Plain().holding(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)])), Plain().world.global_ranks
    )
    before = state.state()
    task.mean += 1
    assert before["mean"] == 0
    state.load_state({"mean": Saved(torch.tensor(3.0)), "bank": Saved(torch.ones(2)), "calls": 7})
    assert (float(task.mean), len(task.bank), task.calls) == (3.0, 2, 7)


@pytest.mark.parametrize("method", ["state", "load_state"])
def test_a_task_with_only_one_state_method_is_refused(method: str) -> None:
    class Half(Plainly):
        pass

    setattr(Half, method, lambda *_: {})
    with pytest.raises(PluginError, match=f"has `{method}`, but no `"):
        has_state(Half({}))


# ------------------------------------------------------------------------------------------------ parameters
class Plainly(Task):
    """Task with the given attributes."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        vars(self).update(attributes)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        return model(batch).sum(), None


class Meter:
    """Object with a value."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("t", nn.Parameter(torch.ones(())), "a parameter `t` []"),
        ("t", torch.ones(2, requires_grad=True), "a tensor that requires gradients `t` [2]"),
        ("t", [1, (nn.Parameter(torch.ones(3)),)], "a parameter `t.1.0` [3]"),
        ("t", {"a": nn.Linear(2, 1)}, "a parameter `t.a.weight` [1, 2]"),
        ("t", Meter(nn.Parameter(torch.ones(4))), "a parameter `t.value` [4]"),
        ("t", nn.ParameterDict({"a": nn.Parameter(torch.ones(5))}), "a parameter `t.a` [5]"),
    ],
)
def test_parameters_of_a_task_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_no_parameters(Plainly({name: value}), nn.Linear(1, 1), ())
    assert said in refused.value.message
    assert refused.value.hints


def test_parameters_of_the_model_frozen_parameters_and_auxiliary_modules_are_accepted() -> None:
    model, teacher = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    attributes = {
        "model": model,
        "layer": model[0],
        "weight": model[0].weight,
        "teacher": teacher,
        "frozen": nn.Linear(2, 2).requires_grad_(False),
        "output": model(torch.ones(2)),
    }
    computed = attributes["computed"] = nn.Identity()
    computed.register_buffer("twice", 2 * model[0].weight)
    check_no_parameters(Plainly(attributes), model, [AuxiliaryModule(module=teacher)])


# ------------------------------------------------------------------------------------------------ lost by a resume
class Net(nn.Module):
    """Model that calls `change` at every forward pass."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.change, self.calls, self.past, self.box = change, 0, deque([0.0], maxlen=3), Meter(1.0)
        self.plain, self.large, self.worst = torch.zeros(2), torch.zeros(2**16 + 1), float("nan")
        self.random = torch.Generator().manual_seed(0)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        self.cache = getattr(self, "cache", None) or 3
        self.newest = self.layer(x)  # a result of one pass, with its graph
        return self.newest


def count(net: Any) -> None:
    net.calls += 1


def add(net: Any) -> None:
    net.lost += 1


def replace(net: Any) -> None:
    net.plain = net.plain + 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (count, "`model.calls`"),
        (add, "`model.lost`"),
        (replace, "`model.plain`"),
        (lambda net: net.plain.data.mul_(2).add_(1), "`model.plain`"),
        (lambda net: net.past.append(float(len(net.past))), "`model.past"),
        (lambda net: setattr(net.box, "value", net.box.value + 1), "`model.box.value`"),
        (lambda net: torch.randn(1, generator=net.random), "`model.random`"),
        (lambda net: net.large.add_(1), "`model.large`"),
        (lambda net: setattr(net, "worst", net.worst + 1), ""),  # NaN before and after
        (lambda net: setattr(net, f"after_{net.layer.weight.grad is not None}", 1), ""),  # set once, in a later step
        (lambda net: net.kept.add_(1), ""),
        (lambda net: None, ""),
    ],
)
def test_unsaved_state_that_training_changes_is_logged(
    change: Callable[[Any], object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(change)
    unsaved = Unsaved(Plainly({}), net, {}, None, is_rank_zero=True)
    with caplog.at_level("INFO", "ddpforge"):
        for goes_on in (True, False):
            net(torch.ones(2)).sum().backward()
            assert unsaved.look() is goes_on
    assert (named in caplog.text) if named else not caplog.messages
    assert len(caplog.messages) == bool(named)


def test_unsaved_state_that_changes_after_the_second_step_is_logged_once_at_a_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Net(lambda net: setattr(net, "calls", net.calls + (net.steps > 2)))
    net.steps = 0
    unsaved = Unsaved(Plainly({}), net, {}, None, is_rank_zero=True)
    for net.steps in (1, 2):
        net(torch.ones(2)).sum().backward()
        unsaved.look()
    assert "`model.calls`" not in caplog.text
    for net.steps in (3, 4):
        net(torch.ones(2))
        unsaved.compare()
    assert caplog.text.count("`model.calls`") == 1


def test_saved_state_of_a_task_is_not_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "one", 3, 'use = "single"', 1)
    assert "no checkpoint holds" not in capfd.readouterr().err
    run(tmp_path / "two", 3, 'use = "single"', 1, task="Forgets")
    said = capfd.readouterr().err
    assert "`task.mean`" in said
    assert "`task.calls`" in said


def test_weights_in_a_plain_list_that_get_gradients_are_refused() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers, self.teacher = nn.Linear(2, 2), [nn.Linear(2, 2)], [nn.Linear(2, 2)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher[0](x)
            return self.layers[0](self.first(x)) - wanted

    model = Listed()
    model(torch.ones(2)).sum().backward()
    with pytest.raises(UsageError, match=r"plain attribute, `layers.0.weight` \[2, 2\]"):
        Unsaved(Plainly({}), model, {}, None, is_rank_zero=True).look()
