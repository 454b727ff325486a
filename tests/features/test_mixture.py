"""Mixtures: shares exact at every place, sources in epochs of their own, and the same samples at any step."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ddpforge.features.mixture import (
    LONGEST_CYCLE,
    MixtureSampler,
    Shares,
    cycle_of,
    spread,
    tempered,
    weights_over_steps,
)

SIZES = (1000, 300, 50)
BATCH = 12


def mixture(*stages: Shares, sizes: Sequence[int] = SIZES, batch: int = BATCH, seed: int = 3) -> MixtureSampler:
    return MixtureSampler(sizes, stages or (Shares(0, (7, 2, 1)),), seed=seed, global_batch=batch)


def samples(order: MixtureSampler, steps: int) -> NDArray[np.int64]:
    """Returns the samples of the first steps, in one row."""
    return np.concatenate([order(step) for step in range(steps)]).astype(np.int64)


def sources(ids: NDArray[np.int64], sizes: Sequence[int] = SIZES) -> NDArray[np.int64]:
    return np.searchsorted(np.cumsum(sizes), ids, side="right")


def counts(of: NDArray[np.int64], number: int = len(SIZES)) -> NDArray[np.int64]:
    """Returns how many of the first n samples come from each source, for every n from 1."""
    return np.cumsum(of[:, None] == np.arange(number), axis=0)


# ---------------------------------------------------------------------------------------------- cycles
@pytest.mark.parametrize(
    ("weights", "cycle"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([7, 2, 1], (7, 2, 1)),
        ([3, 1, 2.5], (6, 2, 5)),
        ([1, 0, 3], (1, 0, 3)),
        ([1e-3, 1], (1, 1000)),
        ([0.5], (1,)),
    ],
)
def test_a_cycle_is_the_shortest_with_the_exact_shares(weights: list[float], cycle: tuple[int, ...]) -> None:
    assert cycle_of(weights) == cycle


@pytest.mark.parametrize("weights", [[0.123456789, 0.3, 0.7], [np.pi, np.e, 0.0], [1 / 3, 0.3, 1]])
def test_a_cycle_of_other_shares_is_rounded_and_leaves_no_source_out(weights: list[float]) -> None:
    cycle, shares = np.array(cycle_of([float(one) for one in weights])), np.array(weights) / sum(weights)
    assert cycle.sum() == LONGEST_CYCLE
    assert (np.abs(cycle - shares * LONGEST_CYCLE) <= 1).all()
    assert ((cycle > 0) == (shares > 0)).all()
    assert cycle_of([1e9, 1e-9, 1, 0]) == (LONGEST_CYCLE - 2, 1, 1, 0)


def test_within_a_cycle_no_source_is_a_whole_sample_off_its_share() -> None:
    draws = np.random.default_rng(0)
    for _ in range(100):
        cycle = draws.integers(0, 50, size=draws.integers(1, 12))
        if not cycle.sum():
            continue
        found = counts(spread(cycle.tolist()), len(cycle))
        places = np.arange(1, cycle.sum() + 1)[:, None]
        assert (found[-1] == cycle).all()
        # In whole numbers: |found - places · cycle / Σ cycle| < 1.
        assert (np.abs(found * cycle.sum() - places * cycle) < cycle.sum()).all()


def test_temperatures() -> None:
    assert tempered([100, 10_000], 1) == [100, 10_000]
    assert tempered([100, 10_000], 2) == [pytest.approx(0.1), 1]
    assert tempered([100, 10_000], 1e6) == [pytest.approx(1, abs=1e-5), 1]
    assert cycle_of(tempered([100, 10_000], 2)) == (1, 10)


def test_weights_change_at_the_steps_of_any_source() -> None:
    weights = {"a": {0: 0.5, 10: 0.2}, "b": {0: 1.0}, "c": {0: 0.0, 10: 1.0, 30: 2.0}}
    assert weights_over_steps(weights) == [(0, [0.5, 1.0, 0.0]), (10, [0.2, 1.0, 1.0]), (30, [0.2, 1.0, 2.0])]


# ---------------------------------------------------------------------------------------------- the order
def test_three_sources_over_two_thousand_steps_have_exact_shares_at_every_place() -> None:
    order = mixture()
    found = counts(sources(samples(order, 2000)))
    assert found[-1].tolist() == [16_800, 4_800, 2_400]  # of 24,000
    shares = np.arange(1, 24_001)[:, None] * np.array([7, 2, 1])  # in tenths
    assert (np.abs(found * 10 - shares) < 10).all()
    assert (found[9::10] * 10 == shares[9::10]).all()  # no error at the end of a cycle


def test_all_samples_of_a_source_come_before_one_comes_again() -> None:
    ids = samples(mixture(), 2000)
    for number, (size, first) in enumerate(zip(SIZES, (0, 1000, 1300), strict=True)):
        mine = ids[sources(ids) == number] - first
        epochs = [mine[start : start + size].tolist() for start in range(0, len(mine), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
        assert epochs[0] != epochs[1]
        assert epochs[0] != sorted(epochs[0])


def test_shares_change_at_a_step_and_a_source_continues_its_epoch() -> None:
    order = mixture(Shares(0, (7, 2, 1)), Shares(100, (0, 1, 1)), Shares(150, (1, 1, 1)))
    ids = samples(order, 200)
    found = sources(ids)
    assert np.bincount(found[: 100 * BATCH]).tolist() == [840, 240, 120]
    assert np.bincount(found[100 * BATCH : 150 * BATCH], minlength=3).tolist() == [0, 300, 300]
    assert np.bincount(found[150 * BATCH :]).tolist() == [200, 200, 200]
    first = ids[found == 0]
    assert sorted(first[:1000]) == list(range(1000))
    assert ids[: 100 * BATCH].tolist() == samples(mixture(), 100).tolist()


def test_counts_and_epochs_of_sources_need_no_pass_over_the_steps() -> None:
    order = mixture(Shares(0, (7, 2, 1)), Shares(100, (0, 1, 1)), Shares(150, (1, 1, 1)))
    of = sources(samples(order, 200))
    for steps in (0, 1, 7, 99, 100, 101, 149, 150, 200):
        assert order.samples(steps).tolist() == np.bincount(of[: steps * BATCH], minlength=3).tolist()
    assert (order.shares(), order.last_change) == ([0.7, 0.2, 0.1], 150)
    assert order.epochs_of_sources(150) == [840 / 1000, 540 / 300, 420 / 50]
    assert order.epochs_of_sources(10**9) == pytest.approx([(10**9 - 150) * 4 / n for n in SIZES], rel=1e-5)


def test_an_epoch_has_as_many_samples_as_all_sources_in_whole_steps() -> None:
    order = mixture()
    assert order.steps_per_epoch == 113  # 1,350 samples in steps of 12
    assert [order.size(step) for step in (0, 112, 113, 5000)] == [12, 12, 12, 12]
    assert [order.epoch(step) for step in (112, 113)] == [0, 1]
    assert mixture(sizes=(3, 1, 1), batch=64).steps_per_epoch == 1


def test_another_seed_has_other_samples_but_the_same_sources() -> None:
    one, other = samples(mixture(), 50), samples(mixture(seed=4), 50)
    assert (sources(one) == sources(other)).all()
    assert (one != other).mean() > 0.9
