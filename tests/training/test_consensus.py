"""Ranks agree on requests, pace and saving in a reduction that they perform anyway."""

import pytest
import torch

from ddpforge.interfaces import Ranks, Total
from ddpforge.testing.doubles import in_threads
from ddpforge.training.consensus import ConsensusInputs, Decision

REQUESTS = ["stop", "end", "train.eval_every"]


@pytest.mark.parametrize("saved", [[True, True, True], [True, False, True]])
def test_a_request_of_one_rank_applies_to_all_and_saved_requires_all_ranks(saved: list[bool]) -> None:
    wanted = [set[str](), {"stop"}, {"stop", "train.eval_every"}]

    def agree(ranks: Ranks) -> tuple[Decision, dict[str, float]]:
        ballot = ConsensusInputs(REQUESTS)
        mine = ballot.totals(wanted[ranks.rank], seconds=ranks.rank + 1.0, saved=saved[ranks.rank])
        means = ranks.reduce_metrics({"loss": Total(torch.tensor(6.0), 2), **mine})
        return ballot.count(means), means

    expected = Decision(frozenset({"stop", "train.eval_every"}), 2.0, all(saved))
    assert in_threads(3, agree) == [(expected, {"loss": 3.0})] * 3


def test_the_initial_decision_has_no_requests() -> None:
    assert Decision() == Decision(frozenset(), 0.0, all_saved=False)


@pytest.mark.parametrize(
    ("seconds", "every"), [(0.0, 1000), (1e-6, 1000), (0.001, 1000), (0.25, 4), (0.9, 1), (30.0, 1)]
)
def test_steps_between_two_agreements_take_about_a_second_and_are_at_most_a_thousand(
    seconds: float, every: int
) -> None:
    assert Decision(seconds=seconds).every == every
