"""BatchNorm's running statistics of several shards on one rank are the mean of what a rank each would have."""

import pytest
import torch
from torch import nn

from ddpforge.training.batchnorm import Statistics

SHARDS, MICRO = 4, 3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_shards_one_after_the_other_equal_a_rank_each(momentum: float | None) -> None:
    batches = torch.randn(5, SHARDS, MICRO, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def norm() -> nn.BatchNorm1d:
        return nn.BatchNorm1d(6, momentum=momentum, dtype=torch.float64)

    apart = [norm() for _ in range(SHARDS)]
    together = norm()
    statistics = Statistics(nn.Sequential(together))
    for step in batches:
        for shard, micro_batches in enumerate(step):
            for batch in micro_batches:
                apart[shard](batch)
                statistics.enter(shard)
                together(batch)
        statistics.leave()

    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(one, name) for one in apart]).mean(0)
        torch.testing.assert_close(getattr(together, name), expected, rtol=1e-12, atol=1e-12)
    assert together.num_batches_tracked == apart[0].num_batches_tracked == 5 * MICRO


def test_nothing_is_touched_without_elastic_shards() -> None:
    norm = nn.BatchNorm1d(2)
    statistics = Statistics(None)
    statistics.enter(0)
    norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    statistics.enter(1)
    statistics.leave()
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.2, 0.3]))
