"""Verification of a strategy's contract before the first step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.forked import Training, in_ranks, refused
from torch import nn

from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import Ranks
from ddpforge.ranks.collectives import ProcessGroup, SingleRank
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.single import Single
from ddpforge.training.contract import ParameterCount, contract_of, count_parameters, verify_contract


class Net(nn.Module):
    """Six trained elements, four of them under two names, and two frozen elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def test_tied_parameters_are_counted_once() -> None:
    assert count_parameters(Net()) == ParameterCount(all=8, trainable=6, frozen={"fp32": 2}, frozen_bytes=8)


def test_a_strategy_without_a_contract_is_refused() -> None:
    class Silent(Single):
        contract: Any = "trust me"

    assert refused(PluginError, lambda: contract_of(Silent())).startswith("Silent has no contract")
    assert contract_of(Single()) is Single.contract


class Fewer(ProcessGroup):
    """Process group that reports one rank less than it reduces over."""

    def __init__(self) -> None:
        super().__init__(cast(dist.ProcessGroup, dist.group.WORLD))
        self.size -= 1


def violation(strategy: Any, *, trainable: int = 6, data: Callable[[], Ranks] | None = None, model: Any = Net) -> str:
    """Returns the message of `verify_contract`, or "" if the strategy fulfils its contract."""
    training = Training(strategy, model)
    world = training.world if data is None else replace(training.world, dp_ranks=data())
    try:
        verify_contract(
            strategy.contract, type(strategy).__name__, world, training.replica.weights, ParameterCount(99, trainable)
        )
    except StrategyError as error:
        return error.message
    return ""


class Replicated(DDP):
    """DDP whose contract declares shards."""

    contract = replace(DDP.contract, shards=("optimizer state",), replicas=1)


class Twice(DDP):
    contract = replace(DDP.contract, shards=("optimizer state",), replicas=2)


class GradientsOnly(DDP):
    contract = replace(DDP.contract, shards=("gradients",), replicas=1)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(Single, 1), (DDP, 2), (FSDP, 2), (lambda: FSDP(replicas=2), 2), (Twice, 2), (GradientsOnly, 2)],
)
def test_a_strategy_that_fulfils_its_contract_passes(strategy: Any, ranks: int) -> None:
    model = Net if strategy is not FSDP else lambda: nn.Linear(2, 2)
    assert in_ranks(ranks, lambda rank: violation(strategy(), model=model)) == [""] * ranks


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (
            Replicated,
            {},
            "Replicated promises that 2 ranks hold each trainable weight once, but they hold 6 of 6 trainable "
            "weights, each part 2 times",
        ),
        (
            Twice,
            {"trainable": 5},
            "Twice promises that 2 ranks hold each trainable weight 2 times, but they hold 6 of 5 trainable weights",
        ),
        (
            DDP,
            {"trainable": 7},
            "DDP promises that 2 ranks hold each trainable weight 2 times, but they hold 6 of 7 trainable weights",
        ),
        (
            DDP,
            {"data": Fewer},
            "DDP declares 1 data-parallel rank(s), but a sum over them counts 2: gradients would be divided by the "
            "wrong number",
        ),
        (
            DDP,
            {"model": lambda: nn.Linear(3, 2, dtype=torch.bfloat16)},
            "parameter `weight` is bfloat16, but DDP promises float32 master weights: updates smaller than a "
            "rounding step would be lost",
        ),
    ],
)
def test_a_strategy_that_breaks_its_contract_is_refused(strategy: Any, options: dict[str, Any], said: str) -> None:
    assert in_ranks(2, lambda rank: violation(strategy(), **options)) == [said] * 2


def test_float64_parameters_fulfil_a_float32_contract() -> None:
    assert in_ranks(1, lambda rank: violation(Single(), model=lambda: nn.Linear(2, 2).double())) == [""]


def test_ranks_with_the_same_data_count_once() -> None:
    def rank(number: int) -> str:
        training = Training(DDP(), Net)
        world = replace(training.world, dp_ranks=SingleRank())
        verify_contract(DDP.contract, "DDP", world, training.replica.weights, ParameterCount(8, 6))
        return "kept"

    assert in_ranks(2, rank) == ["kept"] * 2
