"""Several sources as one dataset: the same samples and random numbers on any ranks and after a resume, and columns."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.data import Batches, RankShare
from ddpforge.errors import PluginError, UsageError
from ddpforge.features.sources import BatchedSources, Sources, by_name, check_source, join_sources, mixture_of
from ddpforge.interfaces import ShardedDataset
from ddpforge.recipe.schema import DataSection
from ddpforge.training.loaders import open_data

SIZES = {"code": 300, "math": 50, "web": 1000}


class Numbers:
    """Dataset whose samples are its name's first letter, their index and a random number."""

    def __init__(self, name: str, size: int) -> None:
        self.letter, self.size = ord(name[0]), size
        self.lengths = np.arange(size) % 7

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int, Tensor]:
        return self.letter, index, torch.rand(())


class Endless(IterableDataset[int]):
    """Stream of numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from range(9)


def section(**weights: Any) -> DataSection:
    """Returns [data] with sources of these weights."""
    train = {name: {"use": "numbers", "weight": weight} for name, weight in weights.items()}
    return DataSection.model_validate({"train": train})


def sources() -> Sources:
    return Sources({name: Numbers(name, size) for name, size in SIZES.items()})


WEIGHTS = section(web={"0st": 0.7, "1000st": 0.5}, code={"0st": 0.2, "10ep": 0.4}, math=0.1)


def opened(rank: int = 0, ranks: int = 1, *, workers: int = 0, micro: int = 0, elastic: int | None = None) -> Batches:
    data = sources()
    order = mixture_of(WEIGHTS, data, seed=3, global_batch=12)
    share = RankShare(rank, ranks, micro or 12 // (elastic or ranks), elastic)
    given: dict[str, Any] = {"seed": 3, "drop_last": False, "workers": workers, "prefetch": 2, "pin": False}
    return open_data(data, order=order, global_batch=12, share=share, **given)


def steps(batches: Batches, number: int, start: int = 0) -> list[list[tuple[int, int, float, int]]]:
    """Returns the samples of steps as (letter, index, random number, source)."""
    source, found = batches.training(start), []
    for _ in range(number):
        step: list[tuple[int, int, float, int]] = []
        last = False
        while not last:
            micro = next(source)
            last = micro.last
            assert micro.places is not None
            columns = [column.tolist() for column in micro.data]
            numbers = batches._data.source_of(micro.places).tolist()
            step += list(zip(*columns, numbers, strict=True))[: micro.samples]
        found.append(step)
    return found


@pytest.fixture(scope="module")
def alone() -> list[list[tuple[int, int, float, int]]]:
    """Returns 2,000 steps of a single process."""
    return steps(opened(), 2000)


# ---------------------------------------------------------------------------------------------- ranks and resumes
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),  # four ranks and two of four virtual ranks, below
        pytest.param(4, {}, marks=pytest.mark.full),
        (4, {"micro": 1}),
        (1, {"elastic": 4, "micro": 3}),
        (2, {"elastic": 4}),
    ],
)
def test_any_ranks_train_on_the_same_samples_over_two_thousand_steps(
    alone: list[Any], ranks: int, more: dict[str, Any]
) -> None:
    hands = [steps(opened(rank, ranks, **more), 2000) for rank in range(ranks)]
    assert [sum(parts, []) for parts in zip(*hands, strict=True)] == alone


def test_a_resume_at_any_step_continues(alone: list[Any]) -> None:
    for start in (*range(1, 12), 112, 113, 999, 1000, 1001, 1129, 1130, 1131, 1990):
        assert steps(opened(), 3, start) == alone[start : start + 3]


def test_loader_processes_fetch_the_same_samples(alone: list[Any]) -> None:
    assert steps(opened(workers=2), 30, 995) == alone[995:1025]


def test_shares_are_exact_in_every_stage(alone: list[Any]) -> None:
    letters = np.array([[letter for letter, *_ in step] for step in alone])
    shares = [(0, 1000, [2, 1, 7]), (1000, 1130, [2, 1, 5]), (1130, 2000, [4, 1, 5])]  # 10 epochs are 1,130 steps
    for first, end, weights in shares:
        found = [int((letters[first:end] == ord(name[0])).sum()) for name in SIZES]
        exact = (end - first) * 12 * np.array(weights) / sum(weights)
        assert np.abs(found - exact).max() < 1


def test_micro_batches_have_the_source_of_each_sample(alone: list[Any]) -> None:
    assert {(letter, source) for step in alone for letter, _, _, source in step} == {
        (ord("c"), 0),
        (ord("m"), 1),
        (ord("w"), 2),
    }


def test_a_sample_is_augmented_differently_each_time(alone: list[Any]) -> None:
    draws = [draw for step in alone for letter, index, draw, _ in step if (letter, index) == (ord("m"), 7)]
    assert len(draws) > 40
    assert len(set(draws)) == len(draws)


def test_epochs_of_sources_are_counted(alone: list[Any]) -> None:
    seen = [letter for step in alone[:1500] for letter, *_ in step]
    order = mixture_of(WEIGHTS, sources(), seed=3, global_batch=12)
    assert dict(zip(order.names, order.epochs_of_sources(1500), strict=True)) == {
        name: pytest.approx(seen.count(ord(name[0])) / size) for name, size in SIZES.items()
    }
    assert dict(zip(order.names, order.shares(), strict=True)) == {"code": 0.2, "math": 0.1, "web": 0.7}


# ---------------------------------------------------------------------------------------------- weights
def test_without_weights_shares_are_by_size_or_by_temperature() -> None:
    data = sources()
    by_size = mixture_of(section(code=None, math=None, web=None), data, seed=0, global_batch=27)
    assert by_size.stages[0].cycle == (6, 1, 20)
    assert (by_size.samples(50) == [300, 50, 1000]).all()  # an epoch of the mixture is one of each source
    even = section(code=None, math=None, web=None).model_copy(update={"temperature": 1e6})
    cycle = np.array(mixture_of(even, data, seed=0, global_batch=27).stages[0].cycle)
    assert np.abs(cycle - 10_000 / 3).max() < 1


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({"0st": 1.0, "2ep": 2.0, "226st": 3.0}, "two weights from step 226 on"),
        ({"0st": 1.0, "5st": 0.0}, "from step 5 on, all sources have the weight 0"),
    ],
)
def test_weights_that_contradict_each_other_are_refused(weight: dict[str, float], message: str) -> None:
    weights = section(code=weight, math={"0st": 1.0, "5st": 0.0}, web=dict(weight))
    with pytest.raises(UsageError, match=message):
        mixture_of(weights, sources(), seed=0, global_batch=12)


def test_weights_change_at_steps_of_the_run_if_a_step_uses_several_batches() -> None:
    weights = section(code={"0st": 1.0, "5st": 2.0, "2ep": 3.0}, math=1.0, web=1.0)
    order = mixture_of(weights, sources(), seed=0, global_batch=12, batches_per_step=3)
    assert [stage.start for stage in order.stages] == [0, 15, 2 * 38 * 3]  # 113 batches are 38 steps of an epoch


# ---------------------------------------------------------------------------------------------- the dataset
def test_columns_are_joined_and_other_attributes_must_be_equal() -> None:
    data = sources()
    assert data.lengths.tolist() == [n % 7 for size in SIZES.values() for n in range(size)]
    assert len(data) == 1350
    assert data[300][:2] == (ord("m"), 0)
    with pytest.raises(AttributeError, match="the sources code, math, web have no common `letter`"):
        _ = data.letter
    assert not hasattr(data, "classes")
    two = Sources({"a": Digits(split="test"), "b": Digits(split="train")})
    assert two.classes == 10
    assert not hasattr(two, "__getitems__")
    assert not two.forkable
    assert not two.random


def test_samples_of_data_that_fetches_whole_batches_are_the_same() -> None:
    one, both = Digits(split="test"), Sources({"a": Digits(split="test"), "b": Digits(split="train")})
    images, labels = one.__getitems__([5, 7])
    assert torch.equal(torch.stack([both[5][0], both[7][0]]), images)
    assert [both[5][1], both[7][1]] == labels.tolist()
    assert both.collate is None


class Told(Numbers):
    """Dataset whose samples are its epoch and the step."""

    epoch = step = -1

    def __init__(self) -> None:
        super().__init__("a", 30)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_step(self, step: int) -> None:
        self.step = step

    def __getitem__(self, index: int) -> tuple[int, int, Tensor]:
        return self.epoch, self.step, torch.zeros(())


class Wide(Digits):
    """Digits of another size."""

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = super().__getitems__(ids)
        return images.repeat(1, 1, 1, 2), labels


def test_sources_that_fetch_whole_batches_have_the_batches_of_single_samples() -> None:
    pair = {"a": Digits(split="test"), "b": Digits(split="train")}
    batched, single = join_sources(pair), Sources(pair)
    assert type(batched) is BatchedSources
    for ids in ([3, 400, 5, 1796, 361, 0], [1, 2], [1796, 500]):
        images, labels = batched.__getitems__(ids)
        assert torch.equal(images, torch.stack([single[index][0] for index in ids]))
        assert labels.tolist() == [single[index][1] for index in ids]
    assert type(join_sources({"a": Digits(split="test"), "b": Numbers("b", 3)})) is Sources
    with pytest.raises(PluginError, match="batches of the sources a, b cannot be joined: Sizes of tensors must match"):
        BatchedSources({"a": Digits(split="test"), "b": Wide(split="test")}).__getitems__([1, 400])


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_of_a_source_receives_its_own_epoch(workers: int) -> None:
    data = Sources({"a": Told(), "b": Numbers("b", 100)})
    order = mixture_of(section(a=1.0, b=1.0), data, seed=0, global_batch=10)
    given: dict[str, Any] = {"seed": 3, "drop_last": False, "workers": workers, "prefetch": 2, "pin": False}
    batches = open_data(data, order=order, global_batch=10, share=RankShare(0, 1, 10), **given)
    for start in (0, 11):
        for step, (micro, _) in enumerate(zip(batches.training(start), range(8), strict=False), start):
            epochs, steps_seen, _ = micro.data
            mine = torch.tensor(data.source_of(micro.places)) == 0
            assert epochs[mine].tolist() == [step * 5 // 30] * 5
            assert steps_seen[mine].tolist() == [step] * 5


# ---------------------------------------------------------------------------------------------- data in parts
class Parts(ShardedDataset):
    """Data in parts, whose samples are a letter, their number and a random number."""

    shuffle = True
    interleave = (2, 2)

    def __init__(self, letter: str, parts: Sequence[int], shuffle_buffer: int) -> None:
        self.letter, self.shard_sizes, self.shuffle_buffer = ord(letter), parts, shuffle_buffer

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[int]:
        begin = sum(self.shard_sizes[:part])
        yield from range(begin + skip, begin + self.shard_sizes[part])

    def prepare(self, sample: int) -> tuple[int, int, Tensor]:
        return self.letter, sample, torch.rand(())


IN_PARTS = section(a={"0st": 3.0, "40st": 1.0}, b=2.0)
SIZES_IN_PARTS = {"a": [30, 1, 0, 40, 9], "b": [17, 8]}


def opened_in_parts(rank: int = 0, ranks: int = 1, *, micro: int = 0, workers: int = 0, window: int = 1) -> Batches:
    data = join_sources({name: Parts(name, parts, window) for name, parts in SIZES_IN_PARTS.items()})
    order = mixture_of(IN_PARTS, data, seed=3, global_batch=10)
    given: dict[str, Any] = {"seed": 3, "drop_last": False, "workers": workers, "prefetch": 2, "pin": False}
    return open_data(data, order=order, global_batch=10, share=RankShare(rank, ranks, micro or 10 // ranks), **given)


@pytest.mark.parametrize("window", [1, 5])
def test_sources_in_parts_have_the_same_samples_on_any_ranks_and_after_a_resume(window: int) -> None:
    alone = steps(opened_in_parts(window=window), 100)
    for ranks, micro in ((2, 5), (5, 1)):
        hands = [steps(opened_in_parts(rank, ranks, micro=micro, window=window), 100) for rank in range(ranks)]
        assert [sum(parts, []) for parts in zip(*hands, strict=True)] == alone
    for start in (1, 10, 39, 40, 41, 77):
        assert steps(opened_in_parts(window=window), 3, start) == alone[start : start + 3]
    assert steps(opened_in_parts(window=window, workers=2), 5, 38) == alone[38:43]


def test_sources_in_parts_have_exact_shares_and_epochs_of_their_own() -> None:
    batches = opened_in_parts(window=5)
    assert batches.steps_per_epoch == 11  # 105 samples
    found = [one for step in steps(batches, 100) for one in step]
    letters = [letter for letter, *_ in found]
    assert letters[:400].count(ord("a")) == 240
    assert letters[400:].count(ord("a")) == 200
    for number, (name, parts) in enumerate(SIZES_IN_PARTS.items()):
        mine = [index for letter, index, _, source in found if source == number]
        assert len(mine) == letters.count(ord(name))
        epochs = [mine[start : start + sum(parts)] for start in range(0, len(mine), sum(parts))]
        assert all(sorted(epoch) == list(range(sum(parts))) for epoch in epochs[:-1])
        assert epochs[0] != epochs[1]
    assert batches._order.epochs_of_sources(40) == [240 / 80, 160 / 25]
    draws = [draw for _, _, draw, _ in found]
    assert len(set(draws)) == len(draws)


def test_a_source_in_parts_cannot_be_mixed_with_another_kind() -> None:
    with pytest.raises(UsageError, match=r"\[data.train.b\] is an iterable dataset in parts and"):
        join_sources({"a": Numbers("a", 3), "b": Parts("b", [3], 1)})


def test_a_dataset_alone_is_a_source_without_a_name() -> None:
    data = Numbers("a", 3)
    assert by_name(data) == {"": data}
    assert list(by_name(sources())) == list(SIZES)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (Endless(), UsageError, "Endless is an iterable dataset without parts of known length"),
        ([], PluginError, "list is empty: it has no samples"),
        (5, PluginError, "int is not a dataset"),
    ],
)
def test_sources_without_numbered_samples_are_refused(data: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_source("web", data)
