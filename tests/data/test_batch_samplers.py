"""Samplers and ranks: the samples of a step do not depend on ranks, blocks or a resume."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from ddpforge.builtin.samplers.bucketed import Bucketed
from ddpforge.builtin.samplers.curricula import Curriculum, Growing
from ddpforge.builtin.samplers.repeated import Repeated
from ddpforge.builtin.samplers.weighted_sampling import Balanced, Weighted
from ddpforge.data import Batches, RankShare, end_of_epochs
from ddpforge.errors import PluginError
from ddpforge.interfaces import BatchSampler, Duration, Sequential, Shuffled
from ddpforge.training.loaders import open_data


class Samples:
    """Dataset whose samples are their index and a random number, which shows the draws per sample."""

    labels = np.arange(103) % 5 // 3
    lengths = np.arange(103) * 37 % 101

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


class Squares(BatchSampler):
    """Sampler of a plugin: steps of one, two, three, … samples, at most six."""

    steps_per_epoch = 3

    def __call__(self, step: int) -> Sequence[int]:
        return [step * number % 103 for number in range(1, min(step, 5) + 2)]


class Uneven(BatchSampler):
    """Sampler with epochs of 3, 5, 4, 3, 5, 4, … steps."""

    steps_per_epoch = None

    def epoch(self, step: int) -> int:
        turns, rest = divmod(step, 12)
        return 3 * turns + (rest >= 3) + (rest >= 8)

    def __call__(self, step: int) -> Sequence[int]:
        return [step % 103]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 8), (3, 12), (4, 15), (6, 24)])
def test_epochs_of_different_lengths_end_at_the_step_after_which_the_next_begins(epochs: int, steps: int) -> None:
    assert end_of_epochs(Uneven(), epochs) == steps


def test_orders_with_equal_epochs_or_without_epochs_need_no_search_for_the_end() -> None:
    assert end_of_epochs(Squares(), 2) is None

    class Endless(BatchSampler):
        def __call__(self, step: int) -> Sequence[int]:
            return [step]

    assert end_of_epochs(Endless(), 2) is None


UNTIL = Duration(9, "st")
ORDERS: dict[str, Any] = {
    "shuffled": partial(Shuffled, Samples(), 3, 12, False),
    "sequential": partial(Sequential, Samples(), 12, False),
    "balanced": partial(Balanced, Samples(), 3, 12, False),
    "weighted": partial(Weighted, Samples(), 3, 12, False, by="lengths"),
    "bucketed": partial(Bucketed, Samples(), 3, 12, False, window=3),
    "curriculum": partial(Curriculum, Samples(), 3, 12, False, by="lengths", until=UNTIL),
    "batch_size_warmup": partial(Growing, Samples(), 3, 12, False, start=1, until=UNTIL),
    "reuse_batches": partial(Repeated, Samples(), 3, 12, False, times=3),
    "a plugin's": Squares,
}


def opened(order: BatchSampler | None, *, rank: int = 0, ranks: int = 1, data: Any = None, **more: Any) -> Batches:
    options: dict[str, Any] = {"seed": 3, "drop_last": False, "workers": 0, "prefetch": 2, "pin": False} | more
    share = RankShare(rank, ranks, 12 // ranks // 2 or 1)
    return open_data(data or Samples(), order=order, global_batch=12, share=share, **options)


def steps(batches: Batches, number: int, start: int = 0) -> Iterator[list[tuple[int, float]]]:
    """Yields the samples of each step that a rank computes, with their random numbers."""
    source = batches.training(start)
    for _ in range(number):
        step: list[tuple[int, float]] = []
        last = False
        while not last:
            micro = next(source)
            last = micro.last
            ids, draws = micro.data
            step += list(zip(ids.tolist(), draws.tolist(), strict=True))[: micro.samples]
        yield step


@pytest.mark.parametrize("name", ORDERS)
def test_any_number_of_ranks_has_the_same_steps_and_a_resume_continues_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpforge.data.batch_assignment._BLOCK", 100)
    alone = list(steps(opened(ORDERS[name]()), 30))
    assert [[one for one, _ in step] for step in alone] == [list(ORDERS[name]()(step)) for step in range(30)]
    for ranks in (2, 4):
        hands = [steps(opened(ORDERS[name](), rank=rank, ranks=ranks), 30) for rank in range(ranks)]
        assert [sum(parts, []) for parts in zip(*hands, strict=True)] == alone
    for start in (1, 8, 9, 10, 26):
        assert list(steps(opened(ORDERS[name]()), 3, start=start)) == alone[start : start + 3]


@pytest.mark.parametrize("name", ORDERS)
def test_blocks_of_steps_join_seamlessly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(steps(opened(ORDERS[name]()), 30))
    monkeypatch.setattr("ddpforge.data.batch_assignment._BLOCK", 300)
    assert list(steps(opened(ORDERS[name]()), 30)) == whole


def test_the_size_of_a_step_is_part_of_its_micro_batches() -> None:
    """Divides the loss by the real number of samples."""
    source = opened(Squares()).training(0)
    assert [(micro.samples, micro.step_samples, micro.last) for micro in islice(source, 4)] == [
        (1, 1, True),
        (2, 2, True),
        (3, 3, True),
        (4, 4, True),
    ]
    hands = [list(steps(opened(Squares(), rank=rank, ranks=4), 5)) for rank in range(4)]
    assert [[len(step) for step in hand] for hand in zip(*hands, strict=True)] == [
        [0, 0, 0, 1],  # the others have padding samples
        [0, 1, 0, 1],
        [0, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 1, 2],
    ]


def test_random_numbers_of_a_sample_depend_on_its_epoch_or_repetition() -> None:
    def draws(order: BatchSampler, number: int) -> list[tuple[int, float]]:
        return [one for step in steps(opened(order), number) for one in step]

    twice = draws(ORDERS["reuse_batches"](), 2)
    assert [one for one, _ in twice[:12]] == [one for one, _ in twice[12:]]
    assert len(set(twice)) == 24
    by_order = dict(draws(ORDERS["sequential"](), 9))
    assert dict(draws(ORDERS["shuffled"](), 9)) == by_order


class Repeating(BatchSampler):
    """Sampler of steps with three samples, two of them several times."""

    def __call__(self, step: int) -> Sequence[int]:
        return [5, 7, 5, 5, 9, 7]


class Fetched(Samples):
    """Fetches whole micro-batches."""

    def __getitems__(self, ids: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        return [self[index] for index in ids]


@pytest.mark.parametrize("data", [Samples(), Fetched()], ids=["one by one", "together"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_sample_that_comes_several_times_in_a_step_has_other_random_numbers_each_time(
    data: Samples, ranks: int
) -> None:
    hands = [list(steps(opened(Repeating(), rank=rank, ranks=ranks, data=data), 2)) for rank in range(ranks)]
    found = [one for hand in hands for step in hand for one in step]
    assert sorted(index for index, _ in found) == sorted([5, 7, 5, 5, 9, 7] * 2)
    assert len(set(found)) == len(found)


def test_the_first_of_equal_samples_has_the_random_numbers_of_one_that_comes_once() -> None:
    class Once(BatchSampler):
        def __call__(self, step: int) -> Sequence[int]:
            return [5, 7, 1, 2, 9, 3]

    (repeated,), (once,) = list(steps(opened(Repeating()), 1)), list(steps(opened(Once()), 1))
    assert [repeated[place] for place in (0, 1, 4)] == [once[place] for place in (0, 1, 4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_and_set_step_are_called_before_the_first_sample(workers: int) -> None:
    class Told(Samples):
        random = False
        step = epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def set_step(self, step: int) -> None:
            self.step = step

        def __getitem__(self, index: int) -> Any:
            return self.epoch, self.step

    source = opened(ORDERS["reuse_batches"](), data=Told(), workers=workers).training(25)
    told = [(epoch.tolist(), step.tolist()) for epoch, step in (micro.data for micro in islice(source, 7))]
    assert [(set(epoch), set(step)) for epoch, step in told] == [
        ({epoch}, {step}) for epoch, step in [(0, 25), (0, 25), (0, 26), (0, 26), (1, 27), (1, 27), (1, 28)]
    ]
    evaluated = [micro.data[1].tolist() for micro in opened(None, data=Told(), workers=0).evaluation()]
    assert {step for steps in evaluated for step in steps} == {-1}


class Odd(BatchSampler):
    def __init__(self, found: Any) -> None:
        self.found = found

    def __call__(self, step: int) -> Sequence[int]:
        return self.found if step == 2 else [0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], r"the sampler Odd gave nothing for step 2 \(0 is the first\)"),
        ([[1, 2]], r"gave an array of shape \[1, 2\] of int64 for step 2"),
        ([0.5], r"gave an array of shape \[1\] of float64"),
        ([7, 103], "returned sample 103 for step .* or earlier, but the data has only 103"),
        (np.array([-1]), "returned sample -1 for step"),
    ],
)
def test_invalid_steps_of_a_sampler_are_refused(found: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        list(steps(opened(Odd(found)), 3))


def test_the_smallest_micro_batches_of_a_sampler_follow_from_its_first_steps() -> None:
    assert opened(Squares(), ranks=1).fewest(None) == (1, 1)
    assert opened(ORDERS["shuffled"](), ranks=2).fewest(None) == (3, 1)
    assert opened(ORDERS["batch_size_warmup"](), ranks=2).fewest(None) == (0, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", ["shuffled", "sequential", "bucketed", "balanced", "weighted", "reuse_batches"])
def test_an_incomplete_last_step_is_dropped_or_kept_by_every_sampler(name: str, drop_last: bool) -> None:
    """103 samples are eight steps of 12, and 7 more; in each of two epochs."""
    made: Any = ORDERS[name]
    given = [drop_last if one is False else one for one in made.args]
    sampler = made.func(*given, **made.keywords)
    times = made.keywords.get("times", 1)
    steps_of_epoch = times * (8 if drop_last else 9)
    assert sampler.steps_per_epoch == steps_of_epoch
    for epoch in range(2):
        chosen = [list(sampler(step)) for step in range(epoch * steps_of_epoch, (epoch + 1) * steps_of_epoch)]
        assert sorted(map(len, chosen)) == sorted([12] * 8 * times + ([] if drop_last else [7] * times))
        if name in ("shuffled", "sequential", "bucketed"):
            assert len({one for step in chosen for one in step}) == (96 if drop_last else 103)
