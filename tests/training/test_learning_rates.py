"""Schedules of the optimizer's other options: weight decay, momentum and betas, each a function of the step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import Ranks
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import ddpforge as ddpforge_package
from ddpforge.builtin.optim.schedules import onecycle, onecycle_momentum, ramp
from ddpforge.errors import RecipeError, UsageError
from ddpforge.interfaces import Horizon
from ddpforge.recipe import load_recipe
from ddpforge.training.learning_rates import Rates, check_scheduled_values, remember_initial

RUN = Horizon(12, None)
RECIPE = """
recipe = 2
name = "decayed"
extends = ["digits"]
train = { length = "6st", virtual_ranks = 2 }
schedule = { use = "exponential", gamma = 0.9 }
[track]
every = "1st"
[optimizer]
use = "adamw"
lr = 3e-3
weight_decay = 0.1
no_decay = ["bias"]
schedules.weight_decay = { use = "exponential", gamma = 0.5 }
schedules.beta1 = { use = "exponential", gamma = 0.8 }
"""


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.5, momentum=0.95), lambda p: AdamW(p, 0.5, betas=(0.95, 0.99))])
def test_onecycle_trains_the_weights_of_torch(make: Callable[[Any], Optimizer]) -> None:
    mine, theirs = weights(), weights()
    optimizer, other = make(mine), make(theirs)
    name = "momentum" if isinstance(optimizer, SGD) else "beta1"
    remember_initial(optimizer, [name])
    rates = Rates(optimizer, {"": onecycle(RUN)}, {name: onecycle_momentum(RUN)})
    scheduler = OneCycleLR(other, 0.5, total_steps=12)
    for step in range(12):
        rates.set(step)
        for params, each in ((mine, optimizer), (theirs, other)):
            for parameter in params:
                parameter.grad = parameter.detach() * (step + 1)
            each.step()
        scheduler.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)


def test_groups_without_weight_decay_stay_without() -> None:
    first, second = weights()
    optimizer = AdamW([{"params": [first], "weight_decay": 0.0}, {"params": [second]}], weight_decay=0.4)
    remember_initial(optimizer, ["weight_decay"])
    rates = Rates(optimizer, {"": lambda s: 1.0}, {"weight_decay": ramp(RUN, start=0.5, shape="linear")})
    rates.set(0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2]
    assert rates.scheduled() == {"weight_decay": 0.2}
    rates.set(11)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.4]


def test_a_factor_of_callbacks_scales_the_rate_and_no_other_scheduled_option() -> None:
    optimizer = AdamW(weights(), lr=0.2, weight_decay=0.4)
    remember_initial(optimizer, ["weight_decay", "beta1"])
    values = {"weight_decay": lambda step: 0.5, "beta1": lambda step: 0.9}
    Rates(optimizer, {"": lambda step: 0.25}, values).set(3, 0.5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"][0]) == pytest.approx((0.2 * 0.25 * 0.5, 0.2, 0.9 * 0.9))


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("lr", r"has its schedule in \[schedule\]", "move this table there"),
        ("momentum", "AdamW has no number `momentum`", "it has beta1, beta2, eps, weight_decay"),
        ("foreach", "AdamW has no number `foreach`", "it has beta1, beta2, eps, weight_decay"),
        ("weight_decay", "weight_decay is 0", "set weight_decay in [optimizer]"),
    ],
)
def test_a_schedule_that_could_change_nothing_is_refused(name: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        remember_initial(AdamW(weights(), weight_decay=0.0), ["beta2", name])
    assert [*caught.value.hints] == [hint]
    assert caught.value.key == f"optimizer.schedules.{name}"


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_scheduled_options_are_the_same_after_a_resume_under_another_strategy(
    ddpforge: Callable[..., Ranks], tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    ddpforge("run", "r.toml", "name=whole")
    ddpforge("run", "r.toml", "name=parts", "train.length=3st")
    ddpforge("run", "r.toml", "name=parts", f"strategy.use={strategy}", nproc=2)
    whole, parts = (
        [json.loads(line) for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    for key in ("weight_decay", "beta1", "train/loss"):
        mine = {row["step"]: row[key] for row in parts if key in row}
        assert mine == pytest.approx({row["step"]: row[key] for row in whole if key in row}, rel=1e-5)
    assert [row["beta1"] for row in whole if "beta1" in row] == pytest.approx([0.9 * 0.8**s for s in range(6)])


def test_a_group_with_a_start_is_not_trained_before(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    group = '\n[optimizer.groups.body]\nparameters = ["*", "!classifier.*"]\nstart = "3st"\n'
    saved = "[checkpoint]\nevery = '1st'\nkeep = { last = 9 }\n"
    (tmp_path / "r.toml").write_text(RECIPE.replace("[optimizer]", saved + "[optimizer]") + group)
    ddpforge("run", "r.toml")
    rows = [json.loads(line) for line in (tmp_path / "runs/decayed/metrics.jsonl").read_text().splitlines()]
    assert [row.get("lr/body") for row in rows if "lr" in row][:4] == [0.0, 0.0, 0.0, None]
    weights = [load_weights(tmp_path / "runs/decayed", step) for step in (1, 3, 4)]
    body = next(name for name in weights[0] if not name.startswith("classifier") and name.endswith("weight"))
    assert torch.equal(weights[0][body], weights[1][body])
    assert not torch.equal(weights[1][body], weights[2][body])


def load_weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return ddpforge_package.load(run, checkpoint=step).model().state_dict()


@pytest.mark.parametrize(
    ("start", "message"), [("1h", "is a wall time"), ("9st", "is 9st, but the run ends after 6st")]
)
def test_a_start_that_never_comes_is_refused(start: str, message: str) -> None:
    sets = [f"optimizer.groups.body.start={start}", 'optimizer.groups.body.parameters=["*"]', "train.length=6st"]
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits", sets=[*sets, "schedule.warmup=1st"])


@pytest.mark.parametrize(
    ("optimizer", "name"), [(SGD(weights(), 0.5, momentum=0.9), "momentum"), (AdamW(weights(), 0.5), "beta2")]
)
def test_momentum_and_betas_of_one_or_more_are_refused(optimizer: Optimizer, name: str) -> None:
    remember_initial(optimizer, [name])
    check_scheduled_values(optimizer, {name: lambda step: 1.0, "weight_decay": lambda step: 9.0}, 20)
    with pytest.raises(UsageError, match=rf"the schedule of {name} raises it from .* at step 1\d, but it must be less"):
        check_scheduled_values(optimizer, {name: lambda step: 1.2 if step > 10 else 1.0}, 20)
    for total in (1, 20, 100, 1000, 12345):
        last = total - 1
        with pytest.raises(UsageError, match=f" at step {last}, but it must be less"):
            check_scheduled_values(optimizer, {name: lambda step, last=last: 1.2 if step == last else 1.0}, total)
