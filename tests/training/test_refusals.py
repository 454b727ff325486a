"""What no strategy can do with a recipe is refused by the recipe's key."""

import pytest
from forked import train

from ddpforge.training.refusals import general_refusals


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("asked", "device", "count"), [(True, "cpu", 1), (True, "cuda", 0), (False, "cpu", 0)])
def test_batchnorm_over_ranks_needs_a_gpu(ranks: int, asked: bool, device: str, count: int) -> None:
    found = list(general_refusals(train(sync_batchnorm=asked), ranks, device))
    assert [each.key for each in found] == ["train.sync_batchnorm"] * count
    assert [each.message for each in found] == ["train.sync_batchnorm needs CUDA, and this run is on cpu"] * count
