"""Collectives: a single rank, threads of one process, and processes over gloo all keep the same contract."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.forked import in_ranks
from support.ranks_contract import CHECKS, talk

from ddpforge.errors import PeerFailed, UsageError
from ddpforge.interfaces import Ranks
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.testing.doubles import in_threads

each = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@each
def test_single_rank_keeps_the_contract(check: Callable[[Ranks], None]) -> None:
    check(SingleRank())


@each
@pytest.mark.parametrize("size", [1, 2, 3])
def test_thread_ranks_keep_the_contract(check: Callable[[Ranks], None], size: int) -> None:
    in_threads(size, check)


def test_process_group_keeps_the_contract(tmp_path: Path) -> None:
    """Starts three processes; two of them form a subgroup."""
    in_ranks(3, lambda rank: talk(rank, 3, tmp_path / "store"))


def test_a_thread_that_fails_releases_the_others() -> None:
    def act(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ZeroDivisionError
        ranks.barrier()

    with pytest.raises(ZeroDivisionError):
        in_threads(2, act)


# ---------------------------------------------------------------------------------------------- work of rank 0
def test_on_rank_zero_returns_the_result_of_rank_0_on_all_ranks() -> None:
    acted: list[int] = []

    def act(ranks: Ranks) -> str:
        return on_rank_zero(ranks, lambda: acted.append(ranks.rank) or "found")

    assert in_threads(3, act) == ["found"] * 3
    assert acted == [0]


@pytest.mark.parametrize(("error", "code"), [(UsageError("no"), 2), (ZeroDivisionError(), 1)])
def test_failure_of_rank_0_ends_other_ranks_with_its_exit_code(error: Exception, code: int) -> None:
    def fail() -> None:
        raise error

    def act(ranks: Ranks) -> BaseException:
        with pytest.raises(type(error) if ranks.is_rank_zero else PeerFailed) as failed:
            on_rank_zero(ranks, fail)
        return failed.value

    first, second = in_threads(2, act)
    assert first is error
    assert isinstance(second, PeerFailed)
    assert second.exit_code == code
    assert second.message == ("no" if code == 2 else "rank 0 failed first: ZeroDivisionError: ")  # for its own node


def test_all_reduce_returns_tensors_on_the_device_of_the_group() -> None:
    assert SingleRank(torch.device("meta")).all_reduce_sum(torch.ones(2)).device.type == "meta"
