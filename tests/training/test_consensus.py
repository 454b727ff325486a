"""Ranks agree on wishes, pace and saving in a reduction that they make anyway."""

import pytest
import torch

from ddpforge.interfaces import Ranks, Total
from ddpforge.testing.doubles import in_threads
from ddpforge.training.consensus import ConsensusInputs, Decision

WISHES = ["stop", "end", "train.eval_every"]


@pytest.mark.parametrize("saved", [[True, True, True], [True, False, True]])
def test_a_wish_of_one_rank_is_everybodys_and_saved_is_what_all_have_written(saved: list[bool]) -> None:
    wanted = [set[str](), {"stop"}, {"stop", "train.eval_every"}]

    def agree(ranks: Ranks) -> tuple[Decision, dict[str, float]]:
        ballot = ConsensusInputs(WISHES)
        mine = ballot.totals(wanted[ranks.rank], seconds=ranks.rank + 1.0, saved=saved[ranks.rank])
        means = ranks.reduce_metrics({"loss": Total(torch.tensor(6.0), 2), **mine})
        return ballot.count(means), means

    expected = Decision(frozenset({"stop", "train.eval_every"}), 2.0, all(saved))
    assert in_threads(3, agree) == [(expected, {"loss": 3.0})] * 3


def test_nobody_wants_anything_before_ranks_have_talked() -> None:
    assert Decision() == Decision(frozenset(), 0.0, all_saved=False)
