"""Built-in samplers: the samples of each step, tested by properties of many steps."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpforge.builtin.samplers.bucketed import Bucketed
from ddpforge.builtin.samplers.curricula import Curriculum, Growing
from ddpforge.builtin.samplers.repeated import Repeated
from ddpforge.builtin.samplers.weighted_sampling import Balanced, Weighted
from ddpforge.errors import SetupError, UsageError
from ddpforge.interfaces import BatchSampler, Duration, Sequential, Shuffled
from ddpforge.interfaces.columns import column
from ddpforge.interfaces.permutation import permute


class Samples:
    """Dataset of `number` samples, of three classes of different sizes."""

    def __init__(self, number: int = 103) -> None:
        self.number = number
        self.labels = ["rare" if n % 10 == 0 else "often" if n % 2 else "some" for n in range(number)]
        self.lengths = torch.arange(number) * 37 % 101
        self.weights = np.where(np.arange(number) % 4 == 0, 3.0, np.where(np.arange(number) % 4 == 1, 0.0, 1.0))

    def __len__(self) -> int:
        return self.number

    def difficulty(self) -> list[float]:
        return [float(number) / 2 for number in range(self.number)]


def st(steps: int) -> Duration:
    return Duration(steps, "st")


BATCH = 8
ORDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (Shuffled, {}),
    "balanced": (Balanced, {}),
    "balanced, replaced": (Balanced, {"replacement": True}),
    "balanced, smallest": (Balanced, {"epoch": "smallest"}),
    "weighted": (Weighted, {}),
    "weighted, longer": (Weighted, {"samples": 150}),
    "bucketed": (Bucketed, {"window": 5}),
    "curriculum": (Curriculum, {"until": st(20)}),
    "batch_size_warmup": (Growing, {"start": 2, "until": st(20)}),
    "reuse_batches": (Repeated, {"times": 3}),
    "repeated together": (Repeated, {"times": 2, "steps": 13}),
}


def made(
    name: str, samples: int = 103, *, batch: int = BATCH, drop: bool = False, seed: int = 5, **more: Any
) -> BatchSampler:
    kind, options = ORDERS[name]
    order: BatchSampler = kind(Samples(samples), seed, batch, drop, **options | more)
    return order


def steps(order: BatchSampler, number: int, start: int = 0) -> list[list[int]]:
    return [list(map(int, order(step))) for step in range(start, start + number)]


def epoch(order: BatchSampler, number: int = 0) -> list[list[int]]:
    assert order.steps_per_epoch
    return steps(order, order.steps_per_epoch, order.steps_per_epoch * number)


# ---------------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize("name", ORDERS)
def test_sampler_is_a_pure_function_of_step_and_seed(name: str) -> None:
    order = made(name)
    straight = steps(order, 60)
    assert [list(map(int, order(step))) for step in reversed(range(60))] == straight[::-1]
    assert steps(made(name), 20, start=40) == straight[40:]
    assert steps(made(name, seed=6), 60) != straight


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("samples", [1, 7, 8, 64, 103])
def test_every_step_has_existing_samples_and_at_most_the_global_batch(name: str, samples: int) -> None:
    for drop in (False, True) if samples >= 16 else (False,):
        found = steps(made(name, samples, drop=drop), 40)
        assert {0 <= one < samples for step in found for one in step} == {True}
        assert all(1 <= len(step) <= BATCH for step in found)


@pytest.mark.parametrize("name", ["shuffled", "balanced, smallest", "bucketed", "batch_size_warmup"])
def test_samplers_with_once_repeat_no_sample_in_an_epoch(name: str) -> None:
    order = made(name)
    assert order.once
    by_epoch: dict[int, list[int]] = {}
    for step in range(60):
        by_epoch.setdefault(order.epoch(step), []).extend(order(step))
    assert all(len(set(ids)) == len(ids) for ids in by_epoch.values())
    assert list(by_epoch) == list(range(len(by_epoch)))


# ---------------------------------------------------------------------------------------------- plain
def test_sequential_sampler_keeps_the_order_of_the_data() -> None:
    order = Sequential(Samples(10), 4, False)
    assert steps(order, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert steps(Sequential(Samples(10), 4, True), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


PINNED: dict[str, list[list[int]]] = {
    "shuffled": [
        [2, 15, 12, 20, 3, 13, 16, 8],
        [9, 10, 4, 18, 5, 11, 19, 6],
        [1, 21, 14, 7, 17, 0],
        [8, 10, 1, 15, 11, 4, 6, 18],
        [2, 0, 5, 16, 9, 3, 14, 19],
        [12, 20, 21, 17, 7, 13],
    ],
    "balanced": [
        [10, 8, 4, 15, 20, 17, 0, 6],
        [18, 0, 16, 12, 11, 5, 13, 20],
        [9, 10, 0, 1, 14, 2],
        [14, 19, 10, 7, 0, 20, 12, 3],
        [21, 8, 0, 10, 20, 11, 4, 2],
        [6, 1, 17, 20, 16, 10],
    ],
    "balanced, replaced": [
        [10, 14, 18, 11, 20, 15, 10, 8],
        [16, 10, 8, 18, 9, 17, 9, 20],
        [3, 10, 0, 5, 2, 6],
        [4, 7, 20, 13, 0, 0, 6, 5],
        [11, 8, 10, 0, 10, 5, 16, 4],
        [2, 19, 9, 10, 4, 0],
    ],
    "balanced, smallest": [[10, 8, 4, 15, 20, 17, 0, 6], [11], [10, 7, 4, 1, 8, 6, 0, 11], [20]],
    "weighted": [
        [2, 16, 12, 20, 4, 12, 16, 8],
        [8, 10, 4, 19, 4, 12, 20, 6],
        [0, 20, 15, 8, 16, 0],
        [8, 10, 0, 16, 11, 4, 6, 18],
        [2, 0, 4, 16, 8, 3, 14, 20],
        [12, 20, 20, 16, 7, 12],
    ],
    "weighted, longer": [
        [16, 2, 16, 16, 0, 8, 12, 12],
        [20, 16, 10, 15, 15, 6, 0, 8],
        [0, 12, 10, 7, 20, 16, 6, 19],
        [0, 8, 12, 20, 4, 4, 0, 14],
        [20, 8, 11, 0, 20, 0, 18, 6],
        [10, 3, 18, 12, 8, 8, 4, 3],
        [4, 12, 15, 16, 6, 19, 8, 20],
    ],
    "bucketed": [
        [18, 10, 2, 13, 5, 16, 8, 19],
        [11, 3, 6, 9, 20, 12, 4, 15],
        [0, 14, 17, 1, 7, 21],
        [0, 11, 3, 14, 6, 9, 1, 4],
        [15, 18, 10, 2, 5, 16, 8, 19],
        [17, 20, 12, 7, 21, 13],
    ],
    "curriculum": [
        [4, 0, 6, 2, 1, 3, 5, 7],
        [5, 3, 6, 0, 1, 7, 2, 4],
        [2, 1, 3, 0, 7, 4],
        [7, 5, 2, 3, 4, 0, 6, 1],
        [6, 0, 4, 2, 3, 5, 1, 7],
        [2, 3, 1, 0, 6, 7],
    ],
    "batch_size_warmup": [[2, 15], [12, 20], [3, 13], [16, 8], [9, 10, 4], [18, 5, 11], [19, 6, 1]],
    "reuse_batches": [
        [2, 15, 12, 20, 3, 13, 16, 8],
        [2, 15, 12, 20, 3, 13, 16, 8],
        [2, 15, 12, 20, 3, 13, 16, 8],
        [9, 10, 4, 18, 5, 11, 19, 6],
        [9, 10, 4, 18, 5, 11, 19, 6],
        [9, 10, 4, 18, 5, 11, 19, 6],
        [1, 21, 14, 7, 17, 0],
    ],
    "repeated together": [
        [2, 15, 12, 20, 3, 13, 16, 8],
        [9, 10, 4, 18, 5, 11, 19, 6],
        [1, 21, 14, 7, 17, 0],
        [8, 10, 1, 15, 11, 4, 6, 18],
        [2, 0, 5, 16, 9, 3, 14, 19],
        [12, 20, 21, 17, 7, 13],
        [11, 19, 5, 16, 12, 15, 6, 2],
    ],
}
"""Two epochs of 22 samples in steps of 8, in which a rare class of 3 repeats twice and more."""


@pytest.mark.parametrize("name", ORDERS)
def test_samplers_are_pinned_over_two_epochs(name: str) -> None:
    """Protects checkpoints of today: they must continue with the same samples under any later version."""
    assert steps(made(name, 22, batch=8), len(PINNED[name])) == PINNED[name]


def test_permutations_of_different_sizes_can_be_computed_together() -> None:
    sizes = np.repeat(np.array([1, 2, 3, 16, 17, 1000], dtype=np.uint64), [1, 2, 3, 16, 17, 1000])
    places = np.concatenate([np.arange(size, dtype=np.uint64) for size in (1, 2, 3, 16, 17, 1000)])
    found = permute(places, np.full_like(places, 3), sizes, seed=4)
    for size in (1, 2, 3, 16, 17, 1000):
        alone = permute(np.arange(size, dtype=np.uint64), np.full(size, 3, dtype=np.uint64), size, seed=4)
        assert found[sizes == size].tolist() == alone.tolist()
        assert sorted(alone.tolist()) == list(range(size))


# ---------------------------------------------------------------------------------------------- classes and weights
@pytest.mark.parametrize("name", ["balanced", "balanced, replaced", "balanced, smallest"])
def test_balanced_classes_are_equally_frequent_in_every_step(name: str) -> None:
    data, order = Samples(), made(name)
    for step in epoch(order)[:-1]:
        counts = Counter(data.labels[one] for one in step)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == 3


def test_balanced_without_replacement_uses_a_whole_class_before_repeating_it() -> None:
    """Checks after every step that the counts of a class's samples differ by at most one."""
    data, order = Samples(), made("balanced")
    drawn: Counter[int] = Counter()
    for step in epoch(order):
        drawn.update(step)
        for label in set(data.labels):
            counts = [drawn[one] for one in range(103) if data.labels[one] == label]
            assert max(counts) - min(counts) <= 1
    by_class = Counter(data.labels[one] for one in drawn.elements())
    assert sorted(by_class.values()) == [34, 34, 35]


@pytest.mark.parametrize("drop", [False, True])
def test_balanced_class_continues_into_the_next_epoch(drop: bool) -> None:
    """Uses epochs of 103 (or 96) samples, in which a rare class of 11 repeats three times."""
    data, order = Samples(), made("balanced", drop=drop)
    drawn: Counter[int] = Counter()
    for number in range(4):
        for step in epoch(order, number):
            drawn.update(step)
            for label in set(data.labels):
                counts = [drawn[one] for one in range(103) if data.labels[one] == label]
                assert max(counts) - min(counts) <= 1
        by_class = Counter(data.labels[one] for one in drawn.elements())
        assert max(by_class.values()) - min(by_class.values()) <= 1


def test_weighted_frequency_equals_the_weight_on_average() -> None:
    """Draws a sample with frequency 1.5 once or twice an epoch, and 1.5 times on average over 400 epochs."""
    data = Samples(10)
    data.weights = np.array([3.0, 1, 2, 2, 2, 2, 2, 2, 2, 2])  # of 20 in all: 1.5, 0.5 and 1 times an epoch
    order = Weighted(data, 5, 10, False)
    drawn = Counter(one for number in range(400) for one in order(number))
    assert drawn[0] / 400 == pytest.approx(1.5, abs=0.08)
    assert drawn[1] / 400 == pytest.approx(0.5, abs=0.08)
    assert {drawn[one] for one in range(2, 10)} == {400}


def test_balanced_with_replacement_draws_samples_of_a_class_uniformly() -> None:
    """Computes chi-squared of 11 rare samples over 60 epochs: mean 10, standard deviation 4.5."""
    data, order = Samples(), made("balanced, replaced")
    drawn = Counter(one for number in range(60) for step in epoch(order, number) for one in step)
    rare = [drawn[one] for one in range(103) if data.labels[one] == "rare"]
    assert len(rare) == 11
    expected = sum(rare) / 11
    assert 1 < sum((one - expected) ** 2 for one in rare) / expected < 10 + 4 * 4.5


def test_smallest_epoch_has_the_same_number_of_each_class() -> None:
    data, order = Samples(), made("balanced, smallest")
    found = [{one for step in epoch(order, number) for one in step} for number in (0, 1)]
    assert Counter(data.labels[one] for one in found[0]) == {"rare": 11, "some": 11, "often": 11}
    assert found[0] != found[1]  # other members of the larger classes


@pytest.mark.parametrize(("name", "places"), [("weighted", 103), ("weighted, longer", 150)])
def test_weighted_counts_are_the_expected_counts_rounded_up_or_down(name: str, places: int) -> None:
    data, order = Samples(), made(name)
    expected = places * data.weights / data.weights.sum()
    for number in range(5):
        drawn = Counter(one for step in epoch(order, number) for one in step)
        assert sum(drawn.values()) == places
        assert all(abs(drawn[one] - expected[one]) < 1 for one in range(103))
        assert all(drawn[one] == 0 for one in range(1, 103, 4))
    assert epoch(order, 0) != epoch(order, 1)


# ---------------------------------------------------------------------------------------------- lengths
def test_buckets_have_samples_of_similar_length_and_random_order() -> None:
    data = Samples()
    found = epoch(made("bucketed", window=12))
    assert sorted(one for step in found for one in step) == list(range(103))

    def spread(steps: list[list[int]]) -> float:
        lengths = [[int(data.lengths[one]) for one in step] for step in steps]
        return sum(max(one) - min(one) for one in lengths) / len(lengths)

    assert spread(found[:-1]) < 12 < 60 < spread(epoch(made("shuffled"))[:-1])
    longest = [max(int(data.lengths[one]) for one in step) for step in found[:-1]]
    assert longest not in (sorted(longest), sorted(longest)[::-1])
    assert all(a <= b for step in found for a, b in pairwise(int(data.lengths[one]) for one in step))


def test_incomplete_bucket_is_random_and_not_the_longest_samples() -> None:
    """Protects `drop_last`, which otherwise would always drop the same samples."""
    last = [set(epoch(made("bucketed"), number)[-1]) for number in range(4)]
    assert [len(ids) for ids in last] == [7] * 4
    assert len(set.union(*last)) > 14


def test_buckets_do_not_depend_on_the_queried_indices() -> None:
    order: Any = made("bucketed", samples=100, batch=4)
    places = np.arange(100, dtype=np.uint64)
    together = order.at(np.full_like(places, 2), places).tolist()
    assert [one for step in epoch(order, 2) for one in step] == together
    assert order.at(np.full(3, 2, dtype=np.uint64), np.array([99, 0, 21], dtype=np.uint64)).tolist() == [
        together[99],
        together[0],
        together[21],
    ]


# ---------------------------------------------------------------------------------------------- curricula
def test_curriculum_starts_with_the_easiest_samples_and_ends_with_shuffled_epochs() -> None:
    order = made("curriculum", start=0.2)  # 13 steps per epoch; all data from step 20 on
    hardest = [max(step) for step in steps(order, 20)]
    pool = [0.2 * 103 + 0.8 * 103 * step / 20 for step in range(20)]
    assert all(high < most + 1 for high, most in zip(hardest, pool, strict=True))
    assert max(hardest[:5]) < 42 < 80 < max(hardest[-5:])
    assert all(len(set(step)) == len(step) for step in steps(order, 20))
    assert steps(order, 30, start=20) == steps(made("shuffled"), 30, start=20)


def test_curriculum_starts_with_its_share_of_the_easiest_samples_rounded_up() -> None:
    """Draws the first step from a tenth of 103 samples."""
    drawn = {sample for seed in range(60) for sample in made("curriculum", start=0.1, seed=seed)(0)}
    assert drawn == set(range(11))


def test_weighted_sampler_with_rounded_weights_stays_within_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uses the greatest offset that can be drawn; the shares of 100,000 samples add up to 1 - 2e-12."""
    monkeypatch.setattr("ddpforge.builtin.samplers.weighted_sampling.draw", lambda keys, counts, seed: counts)
    data = Samples(100_000)
    data.weights = np.full(100_000, 0.1)
    assert sorted(map(int, Weighted(data, 5, 100_000, False)(0))) == list(range(100_000))


def test_curriculum_length_may_be_in_epochs() -> None:
    assert steps(made("curriculum", until=Duration(2, "ep")), 40) == steps(made("curriculum", until=st(26)), 40)


def test_curriculum_pool_has_at_least_one_global_batch() -> None:
    assert sorted(made("curriculum", start=0.01)(0)) == list(range(8))


def test_batch_size_warmup_grows_steps_and_keeps_whole_epochs() -> None:
    order = made("batch_size_warmup")
    sizes = [len(step) for step in steps(order, 40)]
    assert sizes[:20] == [2 + 6 * step // 20 for step in range(20)]
    assert sum(sizes[:21]) == 96
    assert sizes[20:24] == [8, 7, 8, 8]  # 103 samples: the epoch ends with 7
    assert [order.epoch(step) for step in (0, 21, 22, 34, 35)] == [0, 0, 1, 1, 2]
    seen = [one for step in steps(order, 22) for one in step]
    assert sorted(seen) == list(range(103))
    assert sorted(one for step in steps(order, 13, start=22) for one in step) == list(range(103))


def test_batch_size_warmup_with_drop_last_skips_steps_that_do_not_fit() -> None:
    order = made("batch_size_warmup", samples=20, drop=True)
    found = steps(order, 40)
    assert [len(step) for step in found[20:]] == [8] * 20
    for step in range(39):
        if order.epoch(step) == order.epoch(step + 1):
            assert not set(found[step]) & set(found[step + 1])


def test_batch_size_warmup_with_drop_last_drops_a_rest_smaller_than_the_step() -> None:
    """Uses 17 of 20 samples in seven steps; the eighth step has four."""
    order = made("batch_size_warmup", samples=20, drop=True)
    assert [len(step) for step in steps(order, 20)] == [2 + 6 * step // 20 for step in range(20)]
    assert [order.epoch(step) for step in (6, 7)] == [0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"until": Duration(1, "ep")}, "until: 1ep must be in steps"),
        ({"until": st(10**7)}, "1000000 at most"),
        ({"start": 9}, "start: 9 is more than train.global_batch, 8"),
    ],
)
def test_invalid_batch_size_warmup_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made("batch_size_warmup", **change)


# ---------------------------------------------------------------------------------------------- repeated
def test_reuse_batches_repeats_batches() -> None:
    inner = steps(made("shuffled"), 26)
    order = made("reuse_batches")
    assert steps(order, 39) == [step for step in inner[:13] for _ in range(3)]
    assert order.steps_per_epoch == 39
    assert (order.epoch(38), order.epoch(39)) == (0, 1)
    together = made("repeated together", steps=2)
    assert steps(together, 8) == [inner[n] for n in (0, 1, 0, 1, 2, 3, 2, 3)]
    assert together.steps_per_epoch is None  # 13 steps are not a multiple of 2
    assert made("repeated together").steps_per_epoch == 26


def test_reuse_batches_accepts_any_sampler() -> None:
    inner = made("batch_size_warmup")
    order = Repeated(Samples(), 5, BATCH, False, times=2, sampler=inner)
    assert steps(order, 6) == [step for step in steps(inner, 3) for _ in range(2)]
    assert order.steps_per_epoch is None


# ---------------------------------------------------------------------------------------------- values of samples
def test_column_reads_an_attribute_a_method_or_a_file(tmp_path: Path) -> None:
    data = Samples(5)
    assert column(data, "lengths").tolist() == [0, 37, 74, 10, 47]
    assert column(data, "difficulty").tolist() == [0, 0.5, 1, 1.5, 2]
    np.save(tmp_path / "a.npy", np.arange(5))
    (tmp_path / "b.txt").write_text("1.5\n2\n3\n4\n5\n")
    (tmp_path / "c.csv").write_text("cat\ndog\ncat\ncat\ndog\n")
    assert column(data, f"{tmp_path}/a.npy").tolist() == [0, 1, 2, 3, 4]
    assert column(data, f"{tmp_path}/b.txt").tolist() == [1.5, 2, 3, 4, 5]
    assert column(data, f"{tmp_path}/c.csv").tolist() == ["cat", "dog", "cat", "cat", "dog"]
    (tmp_path / "c.csv").write_text("New York\nRome\nRome\nBad Ems\nRome\n")
    assert column(data, f"{tmp_path}/c.csv").tolist() == ["New York", "Rome", "Rome", "Bad Ems", "Rome"]


def test_missing_or_mismatched_columns_are_refused(tmp_path: Path) -> None:
    data = Samples(5)
    with pytest.raises(UsageError, match="by: Samples has no attribute or method `colour`") as told:
        column(data, "colour")
    assert "give the dataset an attribute or a method `colour`" in told.value.hints[0]
    with pytest.raises(SetupError, match=r"there is no file nowhere\.npy"):
        column(data, "nowhere.npy")
    (tmp_path / "few.txt").write_text("1\n2\n")
    with pytest.raises(UsageError, match=r"few\.txt` has 2 values, but Samples has 5 samples"):
        column(data, f"{tmp_path}/few.txt")
    (tmp_path / "broken.npy").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match=r"broken\.npy cannot be read"):
        column(data, f"{tmp_path}/broken.npy")
    data.labels = [[1, 2]] * 5  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"one number or string per sample, not an array of shape \[5, 2\]"):
        column(data, "labels")


def test_invalid_weights_and_lengths_are_refused() -> None:
    data = Samples(5)
    data.weights = np.array([1.0, 2.0, -1.0, 0.0, 1.0])
    with pytest.raises(UsageError, match="finite numbers of at least 0; sample 2 has -1"):
        Weighted(data, 0, 2, False)
    data.weights[:] = 0
    with pytest.raises(UsageError, match="add up to 0"):
        Weighted(data, 0, 2, False)
    with pytest.raises(UsageError, match="must contain numbers, not strings"):
        Bucketed(data, 0, 2, False, by="labels")
    with pytest.raises(UsageError, match="2h must be in epochs or steps"):
        Curriculum(data, 0, 2, False, until=Duration(2, "h"))


def test_balanced_sampler_refuses_nan_classes(tmp_path: Path) -> None:
    """Protects against NaN as a class of its own, as frequent as all others."""
    labels = np.arange(103) % 3.0
    labels[[7, 11]] = np.nan
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(UsageError, match=r"the class of sample 7 is NaN; 2 samples have no class"):
        made("balanced", by=str(tmp_path / "labels.npy"))
