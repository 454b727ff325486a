"""What PowerSGD remembers, kept by parameter, and what becomes of it on another number of ranks."""

import logging
from typing import Any

import pytest
import torch
from doubles import Elsewhere
from saved import Saved
from torch import nn

from ddpforge.errors import StrategyError
from ddpforge.interfaces import Part, Range
from ddpforge.strategies.powersgd import PowerSGD


def powersgd(model: nn.Module, rank: int = 0, ranks: int = 2) -> PowerSGD:
    hook = PowerSGD(1, 2, Elsewhere(ranks, rank))
    hook.look_at(model)
    return hook


def saved(**errors: list[list[float]]) -> dict[str, Any]:
    return {"powersgd.step": 7, **{f"powersgd.error.{name}": Saved(torch.tensor(e)) for name, e in errors.items()}}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_its_own_error_back(rank: int) -> None:
    hook = powersgd(nn.Linear(3, 1), rank)
    hook.restore(saved(weight=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], bias=[[7.0], [8.0]]))
    state = hook.capture()
    assert state["powersgd.step"] == 7
    part = state["powersgd.error.weight"]
    assert isinstance(part, Part)
    assert part.tensor.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]][rank]
    assert (part.shape, part.region) == ((2, 3), Range(3 * rank, 3 * rank + 3))


def test_on_another_number_of_ranks_the_mean_of_the_errors_stays(caplog: pytest.LogCaptureFixture) -> None:
    hook = powersgd(nn.Linear(3, 1), rank=2, ranks=4)
    with caplog.at_level(logging.WARNING, "ddpforge"):
        powersgd(nn.Linear(3, 1), ranks=4).restore(saved(bias=[[7.0], [9.0]]))
        hook.restore(saved(bias=[[7.0], [9.0]]))
    part = hook.capture()["powersgd.error.bias"]
    assert isinstance(part, Part)
    assert part.tensor.tolist() == [8.0]
    assert caplog.messages == ["powersgd: the checkpoint is of 2 ranks: each begins with the mean of their errors"]


def test_a_checkpoint_without_its_memory_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    hook = powersgd(nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING, "ddpforge"):
        hook.restore({})
    assert hook.capture() == {"powersgd.step": 0}
    assert caplog.messages == ["powersgd: the checkpoint has no memory of it: it begins anew"]


def test_a_scalar_is_refused_by_name() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(StrategyError, match="parameter `scale` is a scalar"):
        powersgd(model)
