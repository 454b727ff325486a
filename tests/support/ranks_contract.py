"""Checks that every implementation of `Ranks` must pass."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddpforge.interfaces import Ranks, Total
from ddpforge.ranks.collectives import ProcessGroup

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.uint16, torch.bool, torch.complex64]


def adds_up(ranks: Ranks) -> None:
    """Checks sums of floats and integers of any shape; the arguments stay unchanged."""
    for values in (torch.tensor([[1.0, ranks.rank]]), torch.tensor(1 << 40)):
        before = values.clone()
        expected = sum(_of(ranks, values, rank) for rank in range(ranks.size))
        assert torch.equal(ranks.all_reduce_sum(values), expected)
        later = ranks.all_reduce_sum_async(values.clone())
        ranks.barrier()  # other collectives may run before the result is read
        assert torch.equal(later(), expected)
        assert torch.equal(later(), expected)
        assert torch.equal(values, before)


def _of(ranks: Ranks, values: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.tensor([[1.0, rank]]) if values.ndim else values


def takes_means(ranks: Ranks) -> None:
    """Checks means (sums over counts, both over all ranks), also of names that only one rank has."""
    totals = {
        "x": Total(torch.tensor(float(ranks.rank)), 1 + ranks.rank),
        f"of {ranks.rank}": Total(torch.tensor(3.0), 2),
    }
    expected = {"x": sum(range(ranks.size)) / sum(range(1, ranks.size + 1))}
    expected |= {f"of {rank}": 1.5 for rank in range(ranks.size)}
    for _ in range(2):
        assert ranks.reduce_metrics(totals) == expected
        assert ranks.all_reduce_mean({"rank": ranks.rank}) == {"rank": (ranks.size - 1) / 2}


def gathers_rows_with_gradients(ranks: Ranks) -> None:
    """Checks gathered rows: rank r has r rows of value r and weighs all rows by r + 1; ranks sum the gradients."""
    mine = torch.full((ranks.rank, 2), float(ranks.rank), requires_grad=True)
    rows, begin = ranks.all_gather(mine)
    assert rows[:, 0].tolist() == [float(rank) for rank in range(ranks.size) for _ in range(rank)]
    assert begin == sum(range(ranks.rank))
    (rows.sum() * (ranks.rank + 1)).backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    assert torch.equal(mine.grad, torch.full_like(mine, float(sum(range(1, ranks.size + 1)))))


def broadcasts_from_rank_0(ranks: Ranks) -> None:
    """Checks broadcasts of tensors of any dtype and layout, in place and bitwise, and of objects."""
    assert ranks.broadcast({"rank": ranks.rank}) == {"rank": 0}
    forms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:0],
        lambda x: x[0, 0],
    ]
    for dtype in DTYPES:
        mine, first = (torch.tensor([[rank + 1, 2, 3], [4, 5, 6]]).to(dtype) for rank in (ranks.rank, 0))
        for form in forms:
            tensor = form(mine.clone())
            assert ranks.broadcast(tensor) is tensor
            assert tensor.tolist() == form(first).tolist(), dtype
    nans = torch.tensor([0x7FC00001 + ranks.rank], dtype=torch.int32).view(torch.float32)
    assert ranks.broadcast(nans).view(torch.int32).item() == 0x7FC00001
    parameter = torch.nn.Parameter(torch.full((2,), float(ranks.rank)))
    assert ranks.broadcast(parameter).tolist() == [0.0, 0.0]


def gathers_objects_by_rank(ranks: Ranks) -> None:
    """Checks that objects are gathered in the order of ranks."""
    assert ranks.all_gather_object(ranks.rank) == list(range(ranks.size))
    ranks.barrier()
    assert ranks.is_rank_zero == (ranks.rank == 0)


def splits_into_groups(ranks: Ranks) -> None:
    """Checks groups of neighbours, of single ranks and of all ranks; a group behaves like any other ranks."""
    size = ranks.size
    pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    mine = ranks.split(pairs)
    group = pairs[ranks.rank // 2]
    assert (mine.rank, mine.size) == (ranks.rank % 2, len(group))
    assert mine.all_gather_object(ranks.rank) == group
    assert mine.all_reduce_sum(torch.tensor(ranks.rank)).item() == sum(group)
    alone = ranks.split([[rank] for rank in range(size)])
    assert (alone.rank, alone.size, alone.all_gather_object(ranks.rank)) == (0, 1, [ranks.rank])
    whole = ranks.split([list(range(size))])
    assert whole.all_gather_object(ranks.rank) == list(range(size))


CHECKS: list[Callable[[Ranks], None]] = [
    adds_up,
    takes_means,
    gathers_rows_with_gradients,
    broadcasts_from_rank_0,
    gathers_objects_by_rank,
    splits_into_groups,
]


def talk(rank: int, size: int, store: Path) -> None:
    """Checks a gloo group, and the separate group of checkpoint writers."""
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    ranks = ProcessGroup(dist.group.WORLD)  # type: ignore[arg-type]
    for group in (ranks, ProcessGroup.of_writers(ranks, timeout)):
        for check in CHECKS:
            if group is ranks or check is not splits_into_groups:
                check(group)
    half = dist.new_group([1, 2], timeout=timeout)  # its rank 0 is global rank 1
    if rank in (1, 2):
        for check in CHECKS:
            if check is not splits_into_groups:  # needs all ranks of the run
                check(ProcessGroup(half))
