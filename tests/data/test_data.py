"""Samples of each rank: order, assignment to ranks, uneven ends, seeds, streams."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from multiprocessing import active_children
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddpforge.data import Batches, MicroBatch, RankShare, is_stream, mix, seed_all, to_device
from ddpforge.data.fetching import fetch_some
from ddpforge.errors import PluginError, UsageError
from ddpforge.features.streams import loader_in
from ddpforge.interfaces import BatchSampler, sampler
from ddpforge.interfaces.permutation import permute
from ddpforge.training.loaders import open_data


class Numbers:
    """Dataset whose sample at index i is i."""

    random = False

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Numbers):
    """Dataset whose samples contain random numbers of python, numpy and torch."""

    random = True

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(())


class NumberStream:
    """Stream of the same numbers, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def deal(
    data: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    batch: int,
    micro: int,
    shuffle: bool = True,
    order: BatchSampler | None = None,
    elastic: int | None = None,
    **more: Any,
) -> Batches:
    options: dict[str, Any] = {"seed": 7, "drop_last": False, "workers": 0, "prefetch": 2, "pin": False} | more
    share = RankShare(rank, ranks, micro, elastic)
    if order is None and shuffle and hasattr(data, "__len__"):
        order = sampler.Shuffled(data, options["seed"], batch, options["drop_last"])
    return open_data(data, order=order, global_batch=batch, share=share, **options)


def ids(micro: MicroBatch) -> list[int]:
    values: list[int] = micro.data.tolist()
    return values[: micro.samples]


def steps(batches: Batches, number: int, start: int = 0) -> list[list[int]]:
    """Returns the samples of the first steps, one list per step."""
    source, found = batches.training(start), []
    for _ in range(number):
        step: list[int] = []
        last = False
        while not last:
            micro = next(source)
            step += ids(micro)
            last = micro.last
        found.append(step)
    return found


# ---------------------------------------------------------------------------------------------- virtual ranks
@pytest.mark.parametrize("dataset", [Numbers, NumberStream, Draws])
@pytest.mark.parametrize("samples", [48, 29, 13])
def test_virtual_ranks_receive_the_samples_of_as_many_real_ranks(dataset: type, samples: int) -> None:
    """Compares each micro-batch: the same samples and seeds, even at the uneven end of an epoch."""

    def micro_batches(rank: int, ranks: int) -> list[str]:
        source = deal(dataset(samples), rank=rank, ranks=ranks, batch=12, micro=2, elastic=4).training(0)
        found, ended = [], 0
        while ended < 10:
            micro = next(source)
            ended += micro.last
            found.append(repr((ended - micro.last, micro.shard, micro.number, micro.data, micro.samples)))
        return sorted(found)

    four = sorted(one for rank in range(4) for one in micro_batches(rank, 4))
    assert sorted(one for rank in range(2) for one in micro_batches(rank, 2)) == four
    assert micro_batches(0, 1) == four


def test_without_virtual_ranks_every_rank_is_one_virtual_rank() -> None:
    source = deal(Numbers(12), rank=2, ranks=3, batch=12, micro=2).training(0)
    assert [(micro.shard, micro.number, micro.last) for micro in (next(source), next(source))] == [
        (2, 0, False),
        (2, 1, True),
    ]


# ---------------------------------------------------------------------------------------------- order
def order(samples: int, epoch: int = 0, seed: int = 0) -> list[int]:
    places = np.arange(samples, dtype=np.uint64)
    found: list[int] = permute(places, np.full(samples, epoch, dtype=np.uint64), samples, seed).tolist()
    return found


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 16, 17, 1000, 50_001])
def test_an_epoch_is_a_permutation(samples: int) -> None:
    assert sorted(order(samples)) == list(range(samples))


def test_every_epoch_and_every_seed_has_a_different_order() -> None:
    orders = [order(1000, epoch, seed) for epoch in range(3) for seed in range(3)]
    matches = [sum(a == b for a, b in zip(x, y, strict=True)) for i, x in enumerate(orders) for y in orders[:i]]
    assert max(matches) < 10  # two independent permutations agree in one place on average


def test_the_order_is_as_uniform_as_a_fair_shuffle() -> None:
    """Computes chi-squared of place x sample over 2,000 epochs of 12: mean 121, standard deviation 15.6."""
    counts = np.zeros((12, 12))
    for epoch in range(2000):
        counts[np.arange(12), order(12, epoch)] += 1
    expected = 2000 / 12
    assert ((counts - expected) ** 2 / expected).sum() < 121 + 4 * 15.6


def test_a_place_far_into_a_huge_dataset_costs_no_memory() -> None:
    places = np.array([999_999_999], dtype=np.uint64)
    assert permute(places, np.zeros(1, dtype=np.uint64), 10**9, seed=3)[0] < 10**9


def test_the_order_is_pinned() -> None:
    """Checkpoints of today must continue with the same samples under any later version."""
    assert order(10, epoch=0, seed=0) == [1, 5, 2, 7, 6, 8, 4, 9, 0, 3]
    assert order(10, epoch=1, seed=0) == [4, 8, 1, 6, 0, 7, 9, 2, 3, 5]
    assert [order(2, epoch)[0] for epoch in range(12)] == [0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1]
    assert [order(3, epoch) for epoch in range(3)] == [[2, 1, 0], [2, 1, 0], [0, 2, 1]]
    assert mix(1, 2, 3) == 7510213797696614745


# ---------------------------------------------------------------------------------------------- assignment
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("samples", [1, 2, 5, 11, 12, 24])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_every_sample_is_assigned_once_and_ranks_have_equally_many_passes(samples: int, ranks: int, micro: int) -> None:
    hands = [RankShare(rank, ranks, micro).deal(samples) for rank in range(ranks)]

    assert [place for hand in hands for part in hand for place in part] == list(range(samples))
    assert len({len(hand) for hand in hands}) == 1
    assert max(len(part) for hand in hands for part in hand) <= micro


def test_a_full_step_has_equal_micro_batches() -> None:
    assert RankShare(1, 2, 4).deal(16) == [range(8, 12), range(12, 16)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 24])
def test_the_number_of_ranks_does_not_change_the_samples_of_a_step(ranks: int) -> None:
    alone = steps(deal(Numbers(100), batch=24, micro=24), 12)
    hands = [steps(deal(Numbers(100), rank=r, ranks=ranks, batch=24, micro=1), 12) for r in range(ranks)]
    assert [sum((hand[step] for hand in hands), []) for step in range(12)] == alone
    assert [len(step) for step in alone[:5]] == [24, 24, 24, 24, 4]  # the uneven end is trained on, not padded


def test_two_epochs_have_every_sample_once_in_different_orders() -> None:
    """Trap 18."""
    found = steps(deal(Numbers(16), batch=4, micro=4), 8)
    first, second = sum(found[:4], []), sum(found[4:], [])
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


def test_drop_last_skips_the_incomplete_step() -> None:
    batches = deal(Numbers(10), batch=4, micro=4, drop_last=True)
    assert batches.steps_per_epoch == 2
    assert [len(step) for step in steps(batches, 4)] == [4, 4, 4, 4]


@pytest.mark.parametrize("start", [1, 3, 4, 5, 9, 23, 1000])
def test_a_resume_in_mid_epoch_neither_repeats_nor_skips_samples(start: int) -> None:
    """Trap 08."""
    batches = deal(Numbers(24), rank=1, ranks=2, batch=5, micro=2)
    assert steps(batches, 4, start=start) == steps(batches, start + 4)[start:]


def test_blocks_of_steps_join_seamlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = steps(deal(Numbers(37), batch=5, micro=2), 40)
    monkeypatch.setattr("ddpforge.data.batch_assignment._BLOCK", 15)
    assert steps(deal(Numbers(37), batch=5, micro=2), 40) == whole


def test_a_step_may_be_larger_than_a_block() -> None:
    found = steps(deal(Numbers(11_000), batch=10_000, micro=5000), 3)
    assert [len(step) for step in found] == [10_000, 1000, 10_000]
    assert sorted(found[0] + found[1]) == list(range(11_000))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 3, 10, 11])
def test_an_evaluation_has_every_sample_once_in_order(samples: int, ranks: int) -> None:
    """Traps 03 and 12: no padding, no duplicates, and the same number of forward passes on every rank."""
    hands = []
    for rank in range(ranks):
        batches = deal(Numbers(samples), rank=rank, ranks=ranks, batch=2 * ranks, micro=2, shuffle=False)
        hands.append(list(batches.evaluation()))
    assert sorted(i for hand in hands for micro in hand for i in ids(micro)) == list(range(samples))
    assert len({len(hand) for hand in hands}) == 1


def test_a_rank_without_samples_left_gets_a_padding_sample() -> None:
    batches = deal(Numbers(5), rank=0, ranks=2, batch=4, micro=2)
    source = batches.training(1)
    micro = next(source)  # the epoch's last step: one sample for two ranks
    assert (micro.samples, micro.step_samples, micro.last, len(micro.data)) == (0, 1, True, 1)


# ---------------------------------------------------------------------------------------------- fetching
def test_a_batched_fetch_is_called_once_per_micro_batch() -> None:
    class Batched(Numbers):
        calls: ClassVar[list[list[int]]] = []

        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            self.calls.append(indices)
            return torch.tensor(indices)

        def collate(self, batch: torch.Tensor) -> torch.Tensor:
            return batch

    data = Batched(8)
    assert steps(deal(data, batch=4, micro=2), 1)[0] == sum(data.calls, [])
    assert [len(call) for call in data.calls] == [2, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_the_sample_alone(workers: int) -> None:
    """Trap 10: random numbers differ between samples, and neither ranks, loader processes nor a resume change them."""

    def draws(rank: int, ranks: int, start: int = 0) -> dict[int, tuple[float, float, float]]:
        batches = deal(Draws(12), rank=rank, ranks=ranks, batch=12, micro=2, workers=workers)
        source, found = batches.training(start), {}
        while True:
            micro = next(source)
            found |= {int(i): (float(a), float(b), float(c)) for i, a, b, c in zip(*micro.data, strict=True)}
            if micro.last:
                return found

    alone = draws(0, 1)
    assert draws(0, 2) | draws(1, 2) == alone
    assert len({value for triple in alone.values() for value in triple}) == 36
    assert draws(0, 1, start=1) != alone


@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_do_not_change_the_batches(workers: int) -> None:
    assert steps(deal(Numbers(23), batch=5, micro=2, workers=workers), 12) == steps(
        deal(Numbers(23), batch=5, micro=2), 12
    )


# ---------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_yields_every_sample_once_over_ranks_and_loader_processes(ranks: int, workers: int) -> None:
    """Trap 37."""
    hands = [
        steps(deal(NumberStream(10), rank=rank, ranks=ranks, batch=ranks, micro=1, workers=workers), 10 // ranks)
        for rank in range(ranks)
    ]
    assert Counter(i for hand in hands for step in hand for i in step) == Counter(range(10))


def test_a_stream_restarts_after_its_end_and_can_be_resumed() -> None:
    batches = deal(NumberStream(7), batch=3, micro=2)
    found = steps(batches, 6)
    assert found == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2], [3, 4, 5], [6]]
    assert steps(batches, 2, start=4) == found[4:]
    assert batches.steps_per_epoch is None


def test_a_stream_is_evaluated_once() -> None:
    batches = deal(NumberStream(7), batch=4, micro=4, shuffle=False)
    assert [i for micro in batches.evaluation() for i in ids(micro)] == list(range(7))


class Torchs(IterableDataset[int]):
    """Stream with torch's base class, whose `__getitem__` raises. Splits itself between loader processes."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(10)[worker.id :: worker.num_workers] if worker else range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_iterable_datasets_are_streams_that_do_not_split_themselves(workers: int) -> None:
    hands = [steps(deal(Torchs(), rank=rank, ranks=2, batch=2, micro=1, workers=workers), 5) for rank in range(2)]
    assert Counter(i for hand in hands for step in hand for i in step) == Counter(range(10))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (NumberStream(1), True),
        (Torchs(), True),
        (iter(()), True),
        (Numbers(1), False),
        ([1, 2], False),
        (torch.zeros(2), False),
        ({}, False),
        (object(), False),
    ],
)
def test_a_stream_can_be_iterated_and_not_indexed(data: Any, expected: bool) -> None:
    assert is_stream(data) is expected


def test_rng_state_is_not_kept_for_a_stream_that_is_not_random(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(NumberStream):
        random = False

    monkeypatch.setattr("ddpforge.features.streams.RandomState", None)
    assert steps(deal(Quiet(4), batch=2, micro=2), 3) == [[0, 1], [2, 3], [0, 1]]
    with pytest.raises(TypeError):
        steps(deal(NumberStream(4), batch=2, micro=2), 1)


class Shuffled(NumberStream):
    """Stream that shuffles with the global generator of python, numpy or torch. Collating draws random numbers, too."""

    def __init__(self, samples: int, how: str) -> None:
        super().__init__(samples)
        self.how = how

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.samples))
        if self.how == "python":
            random.shuffle(numbers)
        elif self.how == "numpy":
            np.random.shuffle(numbers)
        for number in numbers:
            yield number if self.how != "torch" else int(torch.randint(10**9, ()))

    def collate(self, samples: list[int]) -> tuple[list[int], float]:
        torch.rand(len(samples)), np.random.rand(), random.random()
        return samples, random.random()


class Rolls(NumberStream):
    """Stream whose samples are random numbers of python."""

    def __iter__(self) -> Iterator[float]:  # type: ignore[override]
        return (random.random() for _ in range(self.samples))


class Collates(NumberStream):
    """Stream whose `collate` draws random numbers."""

    def collate(self, samples: list[int]) -> tuple[list[int], float]:
        return samples, random.random()


@pytest.mark.parametrize("how", ["python", "numpy", "torch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_has_the_same_random_numbers_on_every_rank(how: str, workers: int) -> None:
    """Reads ten samples twice in steps of 2, while ranks collate and compute in between."""

    def read(rank: int, ranks: int, start: int = 0) -> list[list[int]]:
        source = deal(Shuffled(10, how), rank=rank, ranks=ranks, batch=2, micro=1, workers=workers).training(start)
        found: list[list[int]] = [[] for _ in range(10 - start)]
        for step in found:
            while True:
                one = next(source)
                step += one.data[0]
                seed_all(rank)  # as a forward pass does
                if one.last:
                    break
        return found

    alone = read(0, 1)
    assert [sorted(a + b) for a, b in zip(read(0, 2), read(1, 2), strict=True)] == [sorted(step) for step in alone]
    assert read(0, 1, start=7) == alone[7:]
    epochs = sum(alone[:5], []), sum(alone[5:], [])
    assert epochs[0] != epochs[1]
    if how != "torch":
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))


def test_a_resumed_stream_has_the_same_random_numbers_in_collate() -> None:
    source = deal(Shuffled(10, "python"), batch=2, micro=2)
    straight = [one.data[1] for one in islice(source.training(0), 8)]
    assert [one.data[1] for one in islice(source.training(3), 5)] == straight[3:]
    assert len(set(straight)) == 8


def test_drop_last_skips_the_incomplete_step_of_a_stream() -> None:
    batches = deal(NumberStream(7), batch=3, micro=3, drop_last=True)
    assert steps(batches, 4) == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_different_streams_have_different_read_fingerprints() -> None:
    """Fingerprints are equal on all ranks as long as the first samples of steps are, and different from then on."""

    class Swapped(NumberStream):
        def __iter__(self) -> Iterator[int]:
            numbers = list(range(self.samples))
            numbers[4], numbers[5] = numbers[5], numbers[4]
            return iter(numbers)

    one, two = (
        [micro.read for micro in islice(deal(data, rank=rank, ranks=2, batch=2, micro=1).training(0), 5)]
        for rank, data in enumerate((NumberStream(10), Swapped(10)))
    )
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False, False]
    assert all(0 < read < 2**20 for read in one + two)
    assert next(deal(Numbers(4), batch=2, micro=2).training(0)).read == 0


def test_the_read_fingerprint_of_a_stream_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero is the fingerprint of data that is not a stream, and is not compared."""
    monkeypatch.setattr("ddpforge.features.streams.digest", lambda nest: "0" * 64)
    assert next(deal(NumberStream(4), batch=2, micro=2).training(0)).read == 1


class Batched(Draws):
    """Dataset that fetches batches, and draws random numbers for each."""

    def __getitems__(self, ids: list[int]) -> list[float]:
        return [random.random() for _ in ids]


def test_every_epoch_augments_batches_differently() -> None:
    draws = [one.data.tolist() for one in islice(deal(Batched(4), batch=4, micro=4, shuffle=False).training(0), 2)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("data", [Draws(4), Batched(4), Rolls(4), Collates(4)], ids=lambda d: type(d).__name__)
def test_every_seed_and_every_step_has_different_random_numbers(data: Any) -> None:
    def draws(seed: int) -> list[str]:
        source = deal(data, batch=2, micro=2, shuffle=False, seed=seed).training(0)
        return [repr(one.data) for one in islice(source, 6)]

    assert draws(1) == draws(1)
    assert len(set(draws(1) + draws(2))) == 12


def test_every_micro_batch_of_a_stream_has_different_random_numbers() -> None:
    """Wrapper on every rank, and for padding samples."""
    found = [
        [one.data[1] for one in islice(deal(Collates(4), rank=rank, ranks=2, batch=4, micro=1).training(0), 4)]
        for rank in (0, 1)
    ]
    assert len({draw for rank in found for draw in rank}) == 8


class EpochNumbers(Numbers):
    """Dataset whose samples are the current epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_is_called_before_samples_of_an_epoch_are_fetched(workers: int) -> None:
    batches = deal(EpochNumbers(4), batch=2, micro=2, workers=workers)
    assert steps(batches, 6) == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]
    assert steps(batches, 2, start=3) == [[1, 1], [2, 2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_of_a_stream_is_called_before_each_pass(workers: int) -> None:
    class Tells(NumberStream):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([10 * self.epoch] * self.samples)

    batches = deal(Tells(3), batch=2, micro=1, workers=workers)
    assert steps(batches, 5) == [[0, 0], [0], [10, 10], [10], [20, 20]]
    assert steps(batches, 2, start=3) == [[10], [20, 20]]


# ---------------------------------------------------------------------------------------------- refusals, transfer
class Wrapper(NumberStream):
    """Stream that reads another object."""

    def __init__(self, inner: Any) -> None:
        self.parts = {"source": [inner]}

    def __iter__(self) -> Iterator[int]:
        return iter(self.parts["source"][0])


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda loader: loader, "^a DataLoader is a loader, not a dataset"),
        (Wrapper, "^a DataLoader, which Wrapper reads, is a loader, not a dataset"),
        (lambda loader: Wrapper(Wrapper(loader)), "^a DataLoader, which Wrapper reads, is a loader"),
    ],
)
def test_a_loader_is_refused_as_a_dataset_even_inside_another(wrap: Any, said: str) -> None:
    loader: Any = DataLoader(Numbers(16), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=said):
        deal(wrap(loader), batch=2, micro=2)


def test_loaders_are_searched_eight_objects_deep_and_in_the_first_items_of_a_list() -> None:
    """Limits the search, because a list of samples may be long, and an object may contain itself."""
    loader: Any = DataLoader(Numbers(4))  # type: ignore[arg-type]

    def within(depth: int) -> Any:
        found = loader
        for _ in range(depth):
            found = SimpleNamespace(inner=found)
        return found

    assert loader_in(within(8)) is loader
    assert loader_in(within(9)) is None
    assert loader_in([0] * 7 + [loader]) is loader
    assert loader_in([0] * 8 + [loader]) is None
    assert loader_in((1, {"a": (2, loader)})) is loader
    assert loader_in(type("Named", (), {"loader": loader})) is None
    assert loader_in(SimpleNamespace(none=None, other=SimpleNamespace(x=1), last=loader)) is loader
    own = SimpleNamespace()
    own.self = own
    assert loader_in(own) is None


def test_an_object_that_is_not_a_dataset_is_refused() -> None:
    with pytest.raises(PluginError, match="object is not a dataset"):
        deal(object(), batch=1, micro=1)


def test_a_dataset_smaller_than_a_dropped_batch_is_refused() -> None:
    with pytest.raises(PluginError, match="has 3 samples, fewer than one global batch of 4"):
        deal(Numbers(3), batch=4, micro=4, drop_last=True)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(PluginError, match="Numbers is empty: it has no samples"):
        deal(Numbers(0), batch=4, micro=4)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(PluginError, match="NumberStream yields no sample"):
        next(deal(NumberStream(0), batch=2, micro=2).training(0))
    with pytest.raises(PluginError, match="NumberStream yields less than one batch"):
        next(deal(NumberStream(1), batch=2, micro=2, drop_last=True).training(0))


def test_an_evaluation_without_samples_is_refused() -> None:
    """Otherwise its metrics would be missing without a message."""
    with pytest.raises(PluginError, match="NumberStream yields no sample"):
        list(deal(NumberStream(0), batch=2, micro=2).evaluation())


class Refuses(Numbers):
    """Dataset that raises UsageError if a sample is read."""

    def __getitem__(self, index: int) -> int:
        raise UsageError("a sample has no label", hints=["leave it out"])


class RefusesToStream(NumberStream):
    def __iter__(self) -> Iterator[int]:
        yield from Refuses(1)


@pytest.mark.parametrize("data", [Refuses(4), RefusesToStream(4)])
@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_data_in_a_loader_process_are_raised_unchanged(data: Any, workers: int) -> None:
    """Raises no traceback of the loader process, and leaves no process behind."""
    before = set(active_children())
    with pytest.raises(UsageError, match=r"(?m)^a sample has no label$") as error:
        list(deal(data, batch=2, micro=2, workers=workers).evaluation())
    assert error.value.hints == ("leave it out",)
    del error
    assert not set(active_children()) - before


def test_a_stream_that_can_be_read_only_once_is_refused_at_its_second_evaluation() -> None:
    class Once(NumberStream):
        def __init__(self) -> None:
            self.left = iter(range(4))

        def __iter__(self) -> Iterator[int]:
            return self.left

    batches = deal(Once(), batch=2, micro=2)
    assert [micro.data.tolist() for micro in batches.evaluation()] == [[0, 1], [2, 3]]
    with pytest.raises(PluginError, match="Once yields no sample") as error:
        list(batches.evaluation())
    assert error.value.hints == (
        "if this is not the first epoch: `__iter__` must start from the beginning at every call",
    )


def test_a_pytree_of_tensors_moves_to_a_device() -> None:
    meta = torch.device("meta")
    micro = MicroBatch({"x": [torch.ones(2), (torch.ones(1), "text")]}, 1, 1, True, 0, 0)
    moved = to_device(micro, meta)
    assert isinstance(moved, MicroBatch)
    assert moved.data["x"][0].device == meta
    assert moved.data["x"][1][0].device == meta
    assert moved.data["x"][1][1] == "text"


@pytest.mark.parametrize(
    ("samples", "ranks", "micro", "steps", "expected"),
    [
        (24, 2, 2, None, (2, 2)),
        (25, 2, 2, None, (2, 0)),  # the other rank has a padding sample
        (27, 2, 2, None, (2, 1)),
        (27, 2, 2, 3, (2, 2)),  # ends before the end of the epoch
        (27, 2, 2, 4, (2, 1)),
        (27, 1, 8, None, (8, 3)),
    ],
)
def test_fewest_returns_the_smallest_micro_batches(
    samples: int, ranks: int, micro: int, steps: int | None, expected: tuple[int, int]
) -> None:
    for rank in range(ranks):
        batches = open_data(
            list(range(samples)),
            global_batch=8,
            share=RankShare(rank, ranks, micro),
            seed=0,
            drop_last=False,
            workers=0,
            prefetch=2,
            pin=False,
        )
        assert batches.fewest(steps) == expected


def test_the_smallest_micro_batch_is_full_with_drop_last_or_an_even_end() -> None:
    for samples, drop_last in ((27, True), (24, False), (24, True)):
        batches = deal(Numbers(samples), ranks=2, batch=8, micro=2, drop_last=drop_last)
        assert batches.fewest(None) == batches.fewest(100) == (2, 2)


class Fetchers:
    """Dataset whose samples contain the id of the fetching process."""

    random = False

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.tensor(os.getpid())


def test_prefetch_sets_the_number_of_batches_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Noted(DataLoader[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.update(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr("ddpforge.data.fetching.DataLoader", Noted)
    deal(Numbers(8), batch=2, micro=2, workers=2, prefetch=5).evaluation()
    assert (given["num_workers"], given["prefetch_factor"]) == (2, 5)


def test_loader_processes_are_reused_by_the_next_evaluation_even_after_an_interruption() -> None:
    batches = deal(Fetchers(), batch=4, micro=2, workers=2)

    def evaluated() -> tuple[list[int], set[int]]:
        found = [micro.data for micro in batches.evaluation()]
        return torch.cat([ids for ids, _ in found]).tolist(), set(torch.cat([pids for _, pids in found]).tolist())

    samples, first = evaluated()
    assert sorted(samples) == list(range(20))
    assert len(first) == 2
    assert os.getpid() not in first
    next(iter(batches.evaluation()))
    assert evaluated() == (samples, first)


# ---------------------------------------------------------------------------------------------- declared lengths
class Promising:
    """Stream that declares `length` samples and yields `samples`."""

    def __init__(self, samples: int, length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "found"), [(4, "it yielded more"), (8, "it yielded more"), (16, "it yielded 10")])
def test_a_stream_with_a_wrong_length_is_refused(length: int, found: str, workers: int) -> None:
    """Otherwise, with a declared length of 4, 3 epochs of 10 samples were 18 samples."""
    batches = deal(Promising(10, length), batch=4, micro=2, shuffle=False, workers=workers)
    with pytest.raises(PluginError, match=f"Promising has {length} samples .* {found}") as refused:
        steps(batches, 4)
    assert "remove it" in refused.value.hints[0]


def test_a_length_that_is_too_small_is_detected_at_the_last_declared_sample() -> None:
    with pytest.raises(PluginError, match="has 8 samples"):
        steps(deal(Promising(10, 8), batch=4, micro=4, shuffle=False), 2)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_with_a_correct_length_is_read_in_epochs(drop_last: bool) -> None:
    batches = deal(Promising(10, 10), batch=4, micro=4, shuffle=False, drop_last=drop_last)
    per_epoch = [[0, 1, 2, 3], [4, 5, 6, 7], *([] if drop_last else [[8, 9]])]
    assert steps(batches, 2 * len(per_epoch)) == per_epoch * 2
    assert [ids(micro) for micro in batches.evaluation()][-1] in ([8, 9], [4, 5, 6, 7])


class _Odd:
    """Dataset of samples that do not form a batch, or with a sample that cannot be read."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if self.sample is FileNotFoundError:
            os.stat(f"/nowhere/{index}")
        return self.sample


@pytest.mark.parametrize(
    ("sample", "hint"),
    [(None, "`__getitem__` returned None"), ((1.0, None), "a part of a sample is None"), ("PIL", "pil_to_tensor")],
)
def test_samples_that_cannot_be_stacked_have_a_hint(sample: Any, hint: str) -> None:
    data = _Odd(Image.new("L", (2, 2)) if sample == "PIL" else sample)
    with pytest.raises(PluginError, match="cannot be stacked") as caught:
        next(iter(fetch_some(data, [0], seed=0, workers=0)))
    assert hint in caught.value.hints[0]


def test_an_error_in_a_sample_has_the_dataset_and_the_index() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        next(iter(fetch_some(_Odd(FileNotFoundError), [3], seed=0, workers=0)))
    assert caught.value.__notes__ == ["while the dataset _Odd gave sample 3"]
