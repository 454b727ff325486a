"""Micro-batches by tokens: full but never over the limit, the same samples in a step on any ranks, each once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpforge.builtin.samplers.bucketed import Bucketed
from ddpforge.builtin.samplers.curricula import Growing
from ddpforge.data import MicroBatch, RankShare
from ddpforge.errors import UsageError
from ddpforge.features.sources import Sources, mixture_of
from ddpforge.features.token_limit import TokenLimit
from ddpforge.interfaces import BatchSampler, Duration, Shuffled
from ddpforge.recipe.schema import DataSection
from ddpforge.training.loaders import open_data

MOST = 64
BATCH = 24


class Texts:
    """Dataset of sequences with 1 to 60 tokens, whose first token is the index; padded with -1."""

    def __init__(self, size: int = 100) -> None:
        self.lengths = np.random.default_rng(0).integers(1, 60, size)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[int]:
        return [index] * int(self.lengths[index])

    def collate(self, rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def steps(
    order: BatchSampler, data: Any, number: int, *, rank: int = 0, ranks: int = 1, start: int = 0, **more: Any
) -> list[list[MicroBatch]]:
    """Returns the micro-batches of a rank, by step."""
    limit = TokenLimit.of(data, "lengths", MOST)
    share = RankShare(rank, ranks, more.get("micro", BATCH), more.get("elastic"))
    given: dict[str, Any] = {"seed": 0, "drop_last": False, "workers": more.get("workers", 0), "prefetch": 2}
    batches = open_data(data, order=order, global_batch=BATCH, share=share, pin=False, limit=limit, **given)
    source, found = batches.training(start), []
    for _ in range(number):
        found.append([next(source)])
        while not found[-1][-1].last:
            found[-1].append(next(source))
    return found


def ids(micros: list[MicroBatch]) -> list[int]:
    return sorted(row for micro in micros for row in micro.data[: micro.samples, 0].tolist())


def shuffled(data: Any) -> BatchSampler:
    return Shuffled(data, 3, BATCH, False)


# ---------------------------------------------------------------------------------------------- ranks
@pytest.mark.parametrize(
    "make",
    [
        shuffled,
        lambda data: Bucketed(data, 3, BATCH, False, window=2),
        lambda data: Growing(data, 3, BATCH, False, start=2, until=Duration(9, "st")),
    ],
)
def test_a_step_has_the_samples_of_its_order_on_any_ranks(make: Any) -> None:
    data = Texts()
    order = make(data)
    for ranks, more in ((1, {}), (2, {}), (4, {}), (4, {"micro": 2}), (2, {"elastic": 4})):
        hands = [steps(order, data, 12, rank=rank, ranks=ranks, **more) for rank in range(ranks)]
        for number, of_ranks in enumerate(zip(*hands, strict=True)):
            assert ids([micro for hand in of_ranks for micro in hand]) == sorted(order(number))
            assert len({len(hand) for hand in of_ranks}) == 1  # as many passes on every rank
            assert {micro.step_samples for hand in of_ranks for micro in hand} == {len(order(number))}


def test_no_micro_batch_has_more_tokens_or_samples_than_allowed_and_few_are_needed() -> None:
    data = Texts()
    for micro in (BATCH, 3):
        for hand in steps(shuffled(data), data, 20, micro=micro):
            assert all(one.data.numel() <= MOST and one.samples <= micro for one in hand)
            assert all(one.samples for one in hand)
            assert [one.data.numel() for one in hand] == sorted((one.data.numel() for one in hand), reverse=True)
    used = [one for hand in steps(shuffled(data), data, 4) for one in hand]
    tokens, padded = int(data.lengths.sum()), sum(one.data.numel() for one in used)
    assert tokens / padded > 0.85  # in the order of the epoch, a batch of 24 has 0.52
    assert len(used) < 1.45 * tokens / MOST  # samples with more than 32 tokens fill one alone


def test_ranks_have_micro_batches_of_similar_sizes_at_every_turn() -> None:
    data = Texts(1000)
    hands = [steps(shuffled(data), data, 20, rank=rank, ranks=2) for rank in range(2)]
    sums = np.array([[sum(one.data.numel() for one in micros) for micros in hand] for hand in hands])
    assert np.abs(sums[0] / sums[1] - 1).mean() < 0.06


def test_with_virtual_ranks_micro_batches_do_not_depend_on_ranks() -> None:
    data = Texts()

    def passes(ranks: int) -> list[tuple[int, int, list[int]]]:
        hands = [steps(shuffled(data), data, 5, rank=rank, ranks=ranks, elastic=4) for rank in range(ranks)]
        return [
            (micro.shard, micro.number, micro.data.tolist())
            for of_ranks in zip(*hands, strict=True)
            for hand in of_ranks
            for micro in hand
        ]

    assert passes(1) == passes(2) == passes(4)
    assert {shard for shard, _, _ in passes(1)} == {0, 1, 2, 3}


@pytest.mark.parametrize("more", [{}, {"workers": 2}])
def test_a_resume_at_any_step_continues(more: dict[str, Any]) -> None:
    data = Texts()
    whole = [[one.data.tolist() for one in hand] for hand in steps(shuffled(data), data, 12)]
    for start in (1, 4, 5, 7):
        resumed = steps(shuffled(data), data, 3, start=start, **more)
        assert [[one.data.tolist() for one in hand] for hand in resumed] == whole[start : start + 3]


def test_a_rank_without_samples_gets_a_padding_sample() -> None:
    data = Texts(3)
    hands = [steps(shuffled(data), data, 1, rank=rank, ranks=4)[0] for rank in range(4)]
    assert sorted(hand[0].samples for hand in hands) == [0, 1, 1, 1]
    (padding,) = (hand[0] for hand in hands if not hand[0].samples)
    assert padding.data.shape == (1, int(data.lengths.min()))


def test_a_mixture_is_divided_by_the_lengths_of_all_sources() -> None:
    data = Sources({"a": Texts(40), "b": Texts(70)})
    train = {name: {"use": "texts", "weight": weight} for name, weight in (("a", 1.0), ("b", 2.0))}
    order = mixture_of(DataSection.model_validate({"train": train}), data, seed=0, global_batch=BATCH)
    for number, hand in enumerate(steps(order, data, 10)):
        assert sum(one.samples for one in hand) == BATCH
        assert all(one.data.numel() <= MOST for one in hand)
        assert sum(data.source_of(one.places).tolist().count(0) for one in hand) == 8
        assert int((order.samples(number + 1) - order.samples(number))[0]) == 8


# ---------------------------------------------------------------------------------------------- lengths
def test_lengths_are_read_from_an_attribute_a_method_or_a_file(tmp_path: Path) -> None:
    data = Texts()
    np.save(tmp_path / "tokens.npy", data.lengths * 0.5 + 0.5)
    assert TokenLimit.of(data, str(tmp_path / "tokens.npy"), 64).lengths[:3].tolist() == [
        int(np.ceil(length / 2 + 0.5)) for length in data.lengths[:3]
    ]
    data.sizes = lambda: data.lengths  # type: ignore[attr-defined]
    assert TokenLimit.of(data, "sizes", 64).lengths.tolist() == data.lengths.tolist()


@pytest.mark.parametrize(
    ("by", "most", "message"),
    [
        ("lengths", 50, "sample 0 has 51 tokens; samples that are too long: 13 of 100"),
        ("words", 64, "data.lengths: Texts has no attribute or method `words`"),
        ("none.npy", 64, "data.lengths: there is no file none.npy"),
        ("zeros", 64, "data.lengths: `zeros` must contain finite numbers of at least 1; sample 0 has 0"),
    ],
)
def test_lengths_that_cannot_be_used_are_refused(by: str, most: int, message: str) -> None:
    data = Texts()
    data.zeros = np.zeros(100)  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=message) as caught:
        TokenLimit.of(data, by, most)
    assert isinstance(caught.value, UsageError) or by == "none.npy"
