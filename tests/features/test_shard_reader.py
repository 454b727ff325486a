"""Sharded data: each sample is read once over all ranks, and a resume enters the shards at the position of the run."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ddpforge.data import Batches, MicroBatch, RankShare
from ddpforge.data.batch_assignment import AssignmentTerms
from ddpforge.errors import PluginError
from ddpforge.features.shard_reader import ShardedStream, ShardOrder
from ddpforge.interfaces import ShardedDataset
from ddpforge.training.loaders import open_data

PARTS = [7, 0, 31, 1, 18, 12, 25, 3, 40, 6]  # 143 samples


class Shards(ShardedDataset):
    """Dataset whose samples are their shard and place in it. Records reads, and how often a shard is opened."""

    random = False

    def __init__(self, parts: list[int] = PARTS, **more: Any) -> None:
        self.shard_sizes = parts
        self.read: list[tuple[int, int]] = []
        self.opened = 0
        for name, value in more.items():
            setattr(self, name, value)

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[tuple[int, int]]:
        self.opened += 1
        for place in range(skip, self.shard_sizes[part]):
            self.read.append((part, place))
            yield part, place

    def collate(self, samples: list[Any]) -> list[Any]:
        return list(samples)


EVERY = [(part, place) for part, length in enumerate(PARTS) for place in range(length)]


def terms(
    rank: int, ranks: int, *, batch: int = 16, micro: int = 4, drop: bool = False, seed: int = 3
) -> AssignmentTerms:
    return AssignmentTerms(global_batch=batch, share=RankShare(rank, ranks, micro), seed=seed, drop_last=drop)


def epoch(data: Shards, *, rank: int, ranks: int, worker: int = 0, workers: int = 1, **more: Any) -> list[MicroBatch]:
    """Returns the micro-batches of one loader process of one rank for one epoch."""
    stream = ShardedStream(data, terms(rank, ranks, **more), None, 0, stop_after_epoch=True)
    return list(stream.batches(worker, workers))


def steps(data: Shards, ranks: int, workers: int, number: int, start: int = 0, **more: Any) -> list[list[Any]]:
    """Returns the samples of each step over all ranks, with loader processes in rotation."""
    found: list[list[Any]] = [[] for _ in range(number)]
    for rank in range(ranks):
        stream = ShardedStream(data, terms(rank, ranks, **more), None, start, stop_after_epoch=False)
        sources = [stream.batches(worker, workers) for worker in range(workers)]
        step = turn = 0
        while step < number:
            micro = next(sources[turn % workers])
            found[step] += micro.data[: micro.samples]
            turn, step = turn + 1, step + micro.last
    return found


# ---------------------------------------------------------------------------------------------- exactly once
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("window", [1, 5])
def test_every_sample_is_read_once_over_all_ranks_and_loader_processes(ranks: int, workers: int, window: int) -> None:
    """With windows, and with processes that share lanes, some samples are read several times; each is used once."""
    data = Shards(shuffle=True, shuffle_buffer=window, interleave=(12, 6))
    used: Counter[Any] = Counter()
    for rank in range(ranks):
        for worker in range(max(1, workers)):
            micro_batches = epoch(
                data, rank=rank, ranks=ranks, worker=worker, workers=max(1, workers), batch=12, micro=3
            )
            used.update(one for micro in micro_batches for one in micro.data[: micro.samples])
    assert used == Counter(EVERY)
    extra = len(data.read) - len(EVERY)
    assert extra <= (ranks * max(1, workers) if window == 1 else 0.5 * len(EVERY))  # padding samples; ends of windows


@pytest.mark.parametrize("lanes", [(1, 1), (8, 4), (3, 5), (40, 2)])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("batch", [1, 10, 16, 143, 200])
def test_lanes_contain_every_place_once(lanes: tuple[int, int], drop: bool, batch: int) -> None:
    layout = ShardOrder(143, batch, drop, lanes)
    assert layout.steps_per_epoch == (143 // batch if drop else -(-143 // batch))
    found = []
    for step in range(layout.steps_per_epoch):
        lane, along = layout.find(step, range(layout.size(step)))
        assert (along < layout.lengths[lane].astype(np.int64)).all()
        found += (layout.begins[lane].astype(np.int64) + along).tolist()
    assert sorted(found) == list(range(143 // batch * batch if drop else 143))


@pytest.mark.parametrize(
    "more", [{}, {"shuffle": True}, {"shuffle": True, "shuffle_buffer": 4}, {"jumps": False, "shuffle_buffer": 3}]
)
def test_ranks_and_loader_processes_do_not_change_the_samples_of_a_step(more: dict[str, Any]) -> None:
    alone = steps(Shards(**more), 1, 1, 20)
    for ranks, workers in ((1, 3), (2, 1), (2, 2), (4, 2), (4, 5)):
        assert steps(Shards(**more), ranks, workers, 20) == alone
    for start in (1, 4, 8, 9, 13):
        assert steps(Shards(**more), 2, 2, 3, start=start) == alone[start : start + 3]


def test_epochs_have_different_orders_if_shards_are_shuffled() -> None:
    found = steps(Shards(shuffle=True), 1, 1, 18)  # 9 steps per epoch
    one, two = sum(found[:9], []), sum(found[9:], [])
    assert sorted(one) == sorted(two) == EVERY
    assert one != two
    assert steps(Shards(), 1, 1, 9) == steps(Shards(), 1, 1, 9, start=9)
    assert steps(Shards(shuffle=True), 1, 1, 2, seed=4) != found[:2]


def test_a_window_shuffles_neighbours() -> None:
    data = Shards([1000], shuffle_buffer=50, interleave=(1, 1))
    places = [place for step in steps(data, 1, 1, 62) for _, place in step]
    assert sorted(places[:50]) == list(range(50))
    assert places[:50] != list(range(50)) != [place - 50 for place in places[50:100]]


PINNED = [
    [(2, 1), (2, 0), (3, 1), (3, 2)],
    [(2, 4), (2, 5), (0, 0), (3, 5)],
    [(3, 0), (2, 8), (0, 4), (0, 3)],
    [(2, 2), (2, 3), (3, 4), (3, 3)],
    [(2, 6), (2, 7), (0, 2), (0, 1)],
    [(2, 0), (2, 1), (0, 2), (0, 1)],
    [(2, 5), (2, 4), (3, 1), (3, 0)],
    [(2, 8), (0, 0), (3, 5), (3, 4)],
    [(2, 3), (2, 2), (0, 3), (0, 4)],
    [(2, 7), (2, 6), (3, 2), (3, 3)],
]
"""The steps of two epochs: shards are shuffled, and so is each of two times three lanes, in windows of two."""


def test_the_order_of_sharded_data_is_pinned() -> None:
    """Checkpoints of today must continue with the same samples under any later version."""
    data = Shards([5, 0, 9, 6], shuffle=True, shuffle_buffer=2, interleave=(2, 3))
    assert steps(data, 1, 1, 10, batch=4) == PINNED


def test_every_window_of_every_lane_is_shuffled_differently() -> None:
    """Twelve windows of eight in each of two epochs; a single permutation would shuffle all of them identically."""
    data = Shards([96], shuffle_buffer=8, interleave=(4, 1))
    found = [[place for step in epoch for _, place in step] for epoch in
             (steps(data, 1, 1, 6), steps(data, 1, 1, 6, start=6))]  # fmt: skip
    by_lane = [[[place for place in one if place // 24 == lane] for lane in range(4)] for one in found]
    windows = [tuple(place % 8 for place in lane[n : n + 8]) for one in by_lane for lane in one for n in (0, 8, 16)]
    assert all(sorted(window) == list(range(8)) for window in windows)
    assert len(set(windows)) == 24


# ---------------------------------------------------------------------------------------------- read samples
def test_a_lane_is_read_by_one_process_and_a_shard_opened_once_per_lane() -> None:
    """4 ranks with 2 loader processes each, over (8, 4) lanes: 8 × 4 places in the row of 10 shards."""
    opened = []
    for rank in range(4):
        for worker in range(2):
            data = Shards([100] * 10)
            epoch(data, rank=rank, ranks=4, worker=worker, workers=2, batch=16, micro=4)
            assert len(data.read) == len(set(data.read)) in range(110, 140)
            opened.append(data.opened)
    assert max(opened) <= 2 * 4  # each of its four lanes spans at most two shards


@pytest.mark.parametrize(("start", "jumps"), [(1, True), (55, True), (55, False)])
def test_a_resume_opens_each_lane_at_its_position(start: int, jumps: bool) -> None:
    """Reads 16 samples for a step of 16, at any position, and opens at most as many shards as a step has lanes."""
    data = Shards([100] * 10, seekable=jumps)
    (found,) = steps(data, 1, 1, 1, start=start)
    assert len(data.read) == len(found) == 16
    assert data.opened <= 8


def test_data_that_is_not_seekable_is_read_through_if_that_is_cheaper() -> None:
    """Two processes share one lane: each reads the samples in between, from its position."""
    opened = {}
    for jumps in (True, False):
        data = Shards([64], interleave=(1, 1), seekable=jumps)
        epoch(data, rank=0, ranks=1, worker=1, workers=2, batch=8, micro=8)
        opened[jumps] = data.opened, len(data.read)
    assert opened == {True: (4, 32), False: (1, 56)}


def test_shard_sizes_may_be_a_numpy_array() -> None:
    assert len(list(opened(Shards(np.array(PARTS))).evaluation())) == len(list(opened(Shards()).evaluation()))  # type: ignore[arg-type]


def test_a_shard_that_is_shorter_than_declared_is_refused() -> None:
    class Short(Shards):
        def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[Any]:
            return iter([(part, place) for place in range(skip, min(5, self.shard_sizes[part]))])

    with pytest.raises(PluginError, match="part 1 of Short ended before its sample 5, but by `shard_sizes` it has 9"):
        steps(Short([5, 9], interleave=(1, 1)), 1, 1, 1, batch=14)


def test_a_shard_that_is_longer_than_declared_is_refused() -> None:
    """Otherwise its last samples would never be used, without a message."""

    class Long(Shards):
        def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[Any]:
            return iter([(part, place) for place in range(skip, 10)])

    with pytest.raises(PluginError, match="part 1 of Long has more samples than `shard_sizes`: 9"):
        steps(Long([10, 9], interleave=(1, 1)), 1, 1, 1, batch=19)


# ---------------------------------------------------------------------------------------------- open_data
def test_samples_that_cannot_be_stacked_are_refused_with_their_dataset() -> None:
    batches = open_data(
        [torch.zeros(1), torch.zeros(2)],
        global_batch=2,
        share=RankShare(0, 1, 2),
        seed=0,
        drop_last=False,
        workers=0,
        prefetch=2,
        pin=False,
    )
    with pytest.raises(PluginError, match="the samples of list cannot be stacked to a batch: stack expects"):
        batches.first()


class Draws(Shards):
    """Shards that draw random numbers when samples are prepared."""

    random = True

    def prepare(self, sample: Any) -> Any:
        return sample, float(torch.rand(()))


def opened(data: Any, *, rank: int = 0, ranks: int = 1, workers: int = 0, batch: int = 16) -> Batches:
    share = RankShare(rank, ranks, 4)
    options: dict[str, Any] = {"seed": 3, "drop_last": False, "workers": workers, "prefetch": 2, "pin": False}
    return open_data(data, global_batch=batch, share=share, **options)


def test_random_numbers_of_a_sample_depend_only_on_the_epoch_and_the_sample() -> None:
    alone = {tuple(one): drawn for micro in opened(Draws()).evaluation() for one, drawn in micro.data}
    hands = [opened(Draws(), rank=rank, ranks=3, batch=12).evaluation() for rank in range(3)]
    together = {tuple(one): drawn for hand in hands for micro in hand for one, drawn in micro.data[: micro.samples]}
    assert together == alone
    assert len(set(alone.values())) == len(EVERY)
    assert opened(Draws()).steps_per_epoch == 9


@pytest.mark.slow
def test_loader_processes_yield_the_batches_of_this_process() -> None:
    def seen(workers: int) -> list[Any]:
        source = opened(Draws(shuffle=True, shuffle_buffer=4), workers=workers).training(4)
        return [next(source).data for _ in range(30)]

    assert seen(3) == seen(0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Shards([]), "Shards is empty"),
        (Shards([3, -1]), r"Shards\.shard_sizes must hold the number of samples of each part"),
        (Shards(None), r"Shards\.shard_sizes must hold the number of samples of each part"),  # type: ignore[arg-type]
        (Shards(interleave=8), "interleave must be two whole numbers of at least 1"),  # type: ignore[arg-type]
        (Shards(interleave=(8,)), "interleave must be two whole numbers of at least 1"),
        (Shards(shuffle_buffer=0), "shuffle_buffer must be at least 1, not 0"),
    ],
)
def test_invalid_shards_are_refused(data: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        opened(data)


def test_ranks_with_different_shards_have_different_read_fingerprints() -> None:
    one, other = (next(iter(opened(Shards(parts)).evaluation())).read for parts in ([10, 20], [20, 10]))
    assert one != other
    assert all(0 < read < 2**20 for read in (one, other))
