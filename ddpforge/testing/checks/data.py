"""Checks of datasets: samples depend only on the seed and the index, and each is read once."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from ddpforge.api import RankShare, digest, leaves, open_data, seed_all
from ddpforge.data import is_stream
from ddpforge.data.pytree import may_hold
from ddpforge.interfaces import ShardedDataset, Shuffled
from ddpforge.interfaces.forms import described
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, blame, source_of

LOOK = 256  # most samples that a check reads
_MOST_ALIKE = 0.1  # share of samples that may be copies of others


class SamplePrefix:
    """First LOOK samples of a map-style dataset, as a dataset."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return min(LOOK, len(self.data))

    def __getattr__(self, name: str) -> Any:
        if name == "data":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.data, name)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def batches(
    data: Any, *, rank: int = 0, ranks: int = 1, micro: int = 4, shuffle: bool = False, seed: int = 0
) -> Iterator[Any]:
    """Yields a rank's batches of one pass, each of up to `micro` samples, without batches of padding samples."""
    if not is_stream(data) and not len(data):
        raise Breach("at least one sample", f"{type(data).__name__} of length 0", where=source_of(type(data)))
    given = data if is_stream(data) else SamplePrefix(data)
    shuffled = shuffle and not is_stream(data)
    opened = open_data(
        given,
        order=Shuffled(given, seed, global_batch=8, drop_last=False) if shuffled else None,
        global_batch=8,
        share=RankShare(rank, ranks, micro),
        seed=seed,
        drop_last=False,
        workers=0,
        prefetch=2,
        pin=False,
    )
    source = opened.evaluation() if not shuffle else islice(opened.training(0), LOOK // micro)
    for batch in islice(source, LOOK // micro):
        if batch.samples:
            if not may_hold(batch.data, batch.samples):
                raise Breach(
                    "batches with one sample for each requested index",
                    f"{described(batch.data)} for {batch.samples} samples",
                    hints=["check __getitems__ and collate"],
                )
            yield batch.data


@check("length", "data")
def length(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the length is at least one, constant, and that of a stream's iterator."""
    data = _build(case)
    if not is_stream(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise Breach("__len__ and __getitem__, or __iter__", f"a {type(data).__name__} with neither")
    if not hasattr(data, "__len__"):
        return
    found = [len(data), len(data)]
    if found[0] != found[1] or found[0] < 1:
        raise Breach("a length of at least one sample that stays the same", f"{found}")
    if is_stream(data):
        counted = sum(1 for _ in islice(iter(data), found[0] + 1 if found[0] <= LOOK else LOOK))
        if found[0] <= LOOK and counted != found[0]:
            raise Breach(f"the {found[0]} samples that __len__ promises", f"__iter__ yields {counted} or more")


@check("picklable", "data")
def picklable(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the data can be pickled for loader processes, and that the copy has the same samples."""
    data = _build(case)
    try:
        other = pickle.loads(pickle.dumps(data))
    except Exception as error:
        raise blame(error, "data that can be pickled, for loader processes", type(data)) from error
    mine, theirs = (_first(each) for each in (data, other))
    if mine != theirs:
        raise Breach("a pickled copy with the same samples", "the first ones differ")


@check("deterministic", "data")
def deterministic(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the same seed gives the same samples when the data is built again or read again."""
    one, other = _build(case), _build(case)
    if not is_stream(one) and getattr(one, "random", True) is False:
        found = []
        for seed in (1, 2):
            seed_all(seed)
            found.append(digest(one[0]))
        if found[0] != found[1]:
            raise Breach(
                "no use of random numbers, because it declares `random = False`",
                "sample 0 differs between two seeds of the global generators",
                where=source_of(type(one)),
                hints=["remove `random = False`"],
            )
    for what, a, b in (("built twice from one seed", one, other), ("read twice", one, one)):
        mine, theirs = (list(map(digest, batches(each))) for each in (a, b))
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            where = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(mine), len(theirs)))
            raise Breach(
                f"the same samples when {what}",
                f"batch {where} differs",
                where=source_of(type(one)),
                hints=["use the global generator of python, numpy or torch: ddpforge seeds these before each sample"],
            )


@check("each-sample-once", "data")
def each_sample_once(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that two ranks together read every sample exactly once."""
    data = _build(case)
    try:
        for _ in batches(data):  # raises if a batch lacks samples
            pass
        # One by one, because a batch may be padded to its longest sample.
        alone = Counter(map(digest, batches(data, micro=1)))
        together = Counter(digest(one) for rank in (0, 1) for one in batches(data, rank=rank, ranks=2, micro=1))
    except (Breach, ValueError):
        raise
    except Exception as error:
        raise blame(error, "samples that can be fetched", type(data)) from error
    if getattr(data, "random", True) and hasattr(data, "__getitems__"):
        same = alone.total() == together.total()  # the first sample seeds its batch, and ranks form other batches
    else:
        same = alone == together
    if not same and not (is_stream(data) and min(alone.total(), together.total()) >= LOOK // 2):
        raise Breach(
            "every sample exactly once over two ranks",
            f"{(together - alone).total()} too many and {(alone - together).total()} missing of {alone.total()}",
            where=source_of(type(data)),
            hints=["do not shard in the dataset: ddpforge distributes the samples to ranks"],
        )
    copies = alone.total() - len(alone)
    if copies > _MOST_ALIKE * alone.total() and not case.settings.get("duplicates"):
        raise Breach(
            "samples that differ from each other",
            f"{copies} of the first {alone.total()} are copies of others: samples are repeated",
            where=source_of(type(data)),
            hints=[
                "check that __getitem__ returns different samples for different indices",
                f"if the data really has duplicates, declare `duplicates = true` below [data.{case.name}]",
            ],
        )


@check("shard-sizes", "data")
def parts(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the parts of a ShardedDataset have the lengths in `shard_sizes`, and can be opened at any sample."""
    data = _build(case)
    if not isinstance(data, ShardedDataset):
        return
    for part in [part for part, length in enumerate(data.shard_sizes) if length][:3]:
        length = min(LOOK, data.shard_sizes[part])
        whole = list(map(digest, islice(data.iter_shard(part, epoch=0, skip=0), LOOK + 1)))
        if len(whole) < length or (data.shard_sizes[part] <= LOOK and len(whole) > length):
            raise Breach(
                f"the {data.shard_sizes[part]} samples that `shard_sizes` has for part {part}",
                f"`iter_shard` yields {len(whole)}",
                where=source_of(type(data)),
            )
        for skip in (1, length // 2, length - 1):
            later = list(map(digest, islice(data.iter_shard(part, epoch=0, skip=skip), length - skip)))
            if later != whole[skip:length]:
                raise Breach(
                    f"iter_shard({part}, epoch=0, skip={skip}) to continue from sample {skip}",
                    "other samples",
                    where=source_of(type(data)),
                    hints=["a part's samples must depend only on the part; use random numbers only in `prepare`"],
                )


@check("batched-fetching", "data")
def batched_fetching(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that `__getitems__` returns the samples of `__getitem__`."""
    data = _build(case)
    if not hasattr(data, "__getitems__"):
        return
    ids = [index % len(data) for index in (0, 3, 1)]
    collate = getattr(data, "collate", default_collate)
    seed_all(0)
    batch = collate(data.__getitems__(ids))
    seed_all(0)
    singles = default_collate([data[index] for index in ids])
    shapes = [
        [(leaf.dtype, leaf.shape) for leaf in leaves(nest) if hasattr(leaf, "dtype")] for nest in (batch, singles)
    ]
    if shapes[0] != shapes[1]:
        raise Breach(
            f"__getitems__({ids}) to form the same batch as __getitem__",
            f"{shapes[0]} instead of {shapes[1]}",
            where=source_of(type(data)),
        )
    if getattr(data, "random", True) is False and digest(list(leaves(batch))) != digest(list(leaves(singles))):
        raise Breach(
            f"__getitems__({ids}) to return the samples of __getitem__", "other values", where=source_of(type(data))
        )


@check("same-on-every-rank", "data", ranks=True)
def same_on_every_rank(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that every rank reads the same samples in the same order."""
    found = worlds.outcome(case, "data", 2)["digests"]
    if found[0] != found[1]:
        number = next(
            (n for n, pair in enumerate(zip(*found, strict=False)) if pair[0] != pair[1]), min(map(len, found))
        )
        raise Breach(
            "the same samples on every rank, in the same order",
            f"sample {number} of rank 1 differs from that of rank 0",
            hints=["do not shard, and do not order samples by hash(), sets or the rank: ddpforge distributes them"],
        )


def _build(case: Case) -> Any:
    return case.build(seed=0)


def _first(data: Any) -> list[str]:
    found = []
    for batch in islice(batches(data), 2):
        found.append(digest(batch))
    return found
