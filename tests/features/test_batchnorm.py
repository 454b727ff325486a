"""Buffers changed by forward passes: BatchNorm statistics of virtual ranks, and buffers that are restored."""

import pytest
import torch
from torch import Tensor, nn

from ddpforge.features.batchnorm import BatchNormAverager
from ddpforge.training.buffers import Buffers, unchanged

SHARDS, MICRO = 4, 3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_of_virtual_ranks_equal_those_of_real_ranks(momentum: float | None) -> None:
    batches = torch.randn(5, SHARDS, MICRO, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def norm() -> nn.BatchNorm1d:
        return nn.BatchNorm1d(6, momentum=momentum, dtype=torch.float64)

    apart = [norm() for _ in range(SHARDS)]
    together = norm()
    statistics = BatchNormAverager(nn.Sequential(together))
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


def test_statistics_are_unchanged_without_virtual_ranks() -> None:
    norm = nn.BatchNorm1d(2)
    statistics = BatchNormAverager(None)
    statistics.enter(0)
    norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    statistics.enter(1)
    statistics.leave()
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.2, 0.3]))


def test_micro_batches_of_one_virtual_rank_continue_its_statistics() -> None:
    """Each step runs two micro-batches of one virtual rank."""
    norm, alone = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    statistics = BatchNormAverager(norm)
    for first in (1.0, 5.0):
        for more in (0.0, 1.0):
            batch = torch.tensor([[first + more], [3.0]])
            statistics.enter(3)
            norm(batch)
            alone(batch)
        statistics.leave()
    assert torch.equal(norm.running_mean, alone.running_mean)
    assert torch.equal(norm.running_var, alone.running_var)
    assert norm.num_batches_tracked == 4


def test_leaving_without_a_micro_batch_changes_nothing() -> None:
    norm = nn.BatchNorm1d(2)
    statistics = BatchNormAverager(norm)
    statistics.leave()
    statistics.enter(0)
    norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    statistics.leave()
    statistics.leave()
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.2, 0.3]))


def test_norms_without_statistics_and_models_without_norms_are_accepted() -> None:
    for model in (nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)):
        statistics = BatchNormAverager(nn.Sequential(model))
        for shard in (0, 1):
            statistics.enter(shard)
            model(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        statistics.leave()
        assert getattr(model, "num_batches_tracked", None) in (None, 1)


def test_only_running_statistics_are_averaged() -> None:
    norm = nn.BatchNorm1d(1)
    norm.register_buffer("calls", torch.zeros(()))
    statistics = BatchNormAverager(norm)
    for shard in range(3):
        statistics.enter(shard)
        norm.calls += 1
        norm(torch.ones(2, 1))
    statistics.leave()
    assert norm.calls == 3


# ---------------------------------------------------------------------------------------------- restored buffers
class Buffered(nn.Module):
    """Model with a persistent buffer, a buffer that checkpoints skip, and a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("left_out", torch.ones(2, dtype=torch.int64), persistent=False)
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.ones(3))

    def values(self) -> list[list[float]]:
        return [self.kept.tolist(), self.left_out.tolist()]

    def change(self) -> None:
        self.kept.mul_(7)
        self.left_out = self.left_out + 5


def held() -> tuple[nn.Module, Buffered]:
    return (model := nn.Sequential(nn.Sequential(Buffered()))), model[0][0]


def test_buffers_are_restored_even_if_the_module_replaced_the_tensor() -> None:
    model, holds = held()
    before, values, tensor = Buffers(model), holds.values(), holds.kept
    holds.change()
    with torch.no_grad():
        holds.weight.fill_(4)
    replaced = holds.left_out
    before.restore()
    assert holds.values() == values
    assert holds.kept is tensor
    assert holds.left_out is replaced  # the current tensor gets the value
    assert holds.absent is None
    assert holds.weight.tolist() == [4, 4, 4]
    holds.change()
    before.restore()  # any number of times
    assert holds.values() == values


@pytest.mark.parametrize(("norm", "kept"), [(3.0, True), (torch.inf, False), (torch.nan, False)])
def test_buffers_are_restored_unless_the_norm_is_finite(norm: float, kept: bool) -> None:
    model, holds = held()
    before, old = Buffers(model), holds.values()
    holds.change()
    new = holds.values()
    before.restore_unless_finite(torch.tensor(norm))
    assert new != old
    assert holds.values() == (new if kept else old)
    assert holds.left_out.dtype == torch.int64


@pytest.mark.parametrize("unless", [None, torch.tensor(1.0), torch.tensor(torch.inf)])
def test_backward_works_after_a_saved_buffer_is_restored(unless: Tensor | None) -> None:
    model, holds = held()
    before = Buffers(model)
    loss = (holds.weight * holds.kept).sum()
    before.restore() if unless is None else before.restore_unless_finite(unless)
    loss.backward()  # raises if the saved tensor was changed
    assert holds.weight.grad is not None
    assert holds.weight.grad.tolist() == [0, 1, 2]


def test_unchanged_restores_buffers_on_exit() -> None:
    model, holds = held()
    values = holds.values()
    with unchanged(model):
        holds.change()
        assert holds.values() != values
    assert holds.values() == values
