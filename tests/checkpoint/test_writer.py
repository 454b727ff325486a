"""The checkpoint writer with several ranks: any sharding is restored on any number of ranks, or all ranks raise an
error."""

import json
import logging
import re
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.doubles import Disk, Killed, checkpoint_of, read, same, steps_in, tensors_of_every_kind, write
from checkpoint.shapes import regions, tilings
from checkpoint.worlds import FACTS, Turns, World, checkpoints, counted, cuts, save, saved, share_of, write_sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ddpforge import disk
from ddpforge.checkpoint import writer
from ddpforge.checkpoint.manifest import read_manifest
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.retention import committed, newest
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.interfaces.regions import Box, BoxList, FlatRange, Shape, Simple, TensorShard
from ddpforge.interop.export import export
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.writers import WriterGroup


# ---------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_replicated_tensors_are_restored_bit_for_bit(folder: Path, ranks: int) -> None:
    model = tensors_of_every_kind()
    share = RankState(model=model, optimizer={"a/b": {**model, "step": 3}}, callbacks={"ema": {**model, "n": "é"}})

    loaded = read(saved(folder, [share] * ranks))

    assert list(loaded.state.model) == list(model)
    for name, tensor in model.items():
        assert same(loaded.state.model[name], tensor), name
        assert same(loaded.state.optimizer["a/b"][name], tensor), name  # type: ignore[arg-type]
        assert same(loaded.callbacks["ema"][name], tensor), name  # type: ignore[arg-type]
    assert (loaded.state.optimizer["a/b"]["step"], loaded.callbacks["ema"]["n"]) == (3, "é")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tilings(), st.integers(1, 3), st.data())
def test_any_region_can_be_read_from_any_sharding(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[Shape, list[Simple]],
    ranks: int,
    data: st.DataObject,
) -> None:
    shape, tiles = case
    folder = tmp_path_factory.mktemp("any")
    tensor = counted(*shape)
    parts = [TensorShard(part_of(tensor, tile), shape, tile) for tile in tiles]
    dealt: list[list[TensorShard]] = [[TensorShard(tensor.flatten()[:0], shape, FlatRange(0, 0))] for _ in range(ranks)]
    for part in parts:
        dealt[data.draw(st.integers(0, ranks - 1))].append(part)

    reader = CheckpointReader(saved(folder, [RankState(model={"w": mine}) for mine in dealt]))

    assert torch.equal(reader.read("model", "w"), tensor)
    for _ in range(4):
        region = data.draw(regions(shape))
        expected = part_of(tensor, region)
        target = torch.full_like(expected, -1)
        if target.ndim and data.draw(st.booleans()):
            target = torch.full((*target.shape, 2), -1.0)[..., 0]
        if target.ndim > 1 and isinstance(region, FlatRange):
            continue
        reader.read_into("model", "w", region, target)
        assert torch.equal(target, expected)


def part_of(tensor: Tensor, region: Simple) -> Tensor:
    if isinstance(region, FlatRange):
        return tensor.flatten()[region.start : region.stop].clone()
    slices = tuple(slice(begin, begin + count) for begin, count in zip(region.offset, region.size, strict=True))
    return tensor[slices].clone()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([(), (2,), (3, 2)]))
def test_a_fused_weight_sharded_by_heads_is_restored_under_any_sharding(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, fused: int, rows: int, rest: tuple[int, ...]
) -> None:
    """Queries, keys and values are stacked; each rank holds some rows of each as one tensor."""
    tensor = counted(fused * ranks * rows, *rest)

    def heads(rank: int, of: int) -> TensorShard:
        count = len(tensor) // fused // of
        begins = [part * len(tensor) // fused + rank * count for part in range(fused)]
        pieces = BoxList(tuple(Box((begin, *(0 for _ in rest)), (count, *rest)) for begin in begins))
        return TensorShard(torch.cat([tensor[begin : begin + count] for begin in begins]), tuple(tensor.shape), pieces)

    shares = [RankState(model={"qkv": heads(rank, ranks)}) for rank in range(ranks)]
    reader = CheckpointReader(saved(tmp_path_factory.mktemp("fused"), shares))

    assert torch.equal(reader.read("model", "qkv"), tensor)
    for of in (1, ranks):
        for rank in range(of):
            part = heads(rank, of)
            target = torch.zeros_like(part.tensor)
            region = part.region if of > 1 else BoxList((Box((0,) * tensor.ndim, tuple(tensor.shape)),))
            reader.read_into("model", "qkv", region, target)
            assert torch.equal(target, part.tensor)


LAYOUTS = [("flat", 2), ("flat", 5), ("rows", 2), ("rows", 4), ("columns", 3), ("whole", 1), ("whole", 4)]


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_resharding_and_back_is_bitwise_identical(
    folder: Path, source: tuple[str, int], target: tuple[str, int]
) -> None:
    """Saves under layout A, loads and saves under layout B, then loads under layout A."""
    torch.manual_seed(0)
    model = {"w": torch.randn(7, 10), "b": torch.randn(13), "conv": torch.randn(3, 4, 5, 2), "one": torch.randn(1)}
    model["bits"] = torch.randint(0, 2**15, (6, 9), dtype=torch.int16).view(torch.bfloat16)

    def split(values: dict[str, Tensor], how: str, ranks: int) -> list[RankState]:
        if how == "whole":
            return [RankState(model=values)] * ranks
        dealt = {name: cuts(tensor, ranks, how) for name, tensor in values.items()}
        return [RankState(model={name: parts[rank] for name, parts in dealt.items()}) for rank in range(ranks)]

    def load(path: Path, how: str, ranks: int) -> list[RankState]:
        """Reads each rank's shards into new memory."""
        readers = [CheckpointReader(path) for _ in range(ranks)]
        shares = split({name: torch.full_like(x, 99) for name, x in model.items()}, how, ranks)
        for reader, share in zip(readers, shares, strict=True):
            for name, parts in share.model.items():
                for part in [TensorShard.whole(parts)] if isinstance(parts, Tensor) else parts:
                    reader.read_into("model", name, part.region, part.tensor)
        return shares

    first = saved(folder, split(model, *source))
    second = saved(folder, load(first, *target))
    third = saved(folder, load(second, *source))

    for path in (first, second, third):
        assert all(same(CheckpointReader(path).read("model", name), x) for name, x in model.items())


def test_metadata_is_restored(folder: Path) -> None:
    changes: dict[str, Any] = {
        "recipe": 'name = "digits"\n',
        "lineage": [{"step": 0, "recipe": "ab"}],
        "position": {"epoch": 3},
        "loop": {"scale": 65536.0},
    }
    path = write_sharded(folder, checkpoint_of(7, **changes), 3)
    loaded, original = read(path), checkpoint_of(7, **changes)

    assert CheckpointReader(path).metadata == CheckpointMetadata(
        **{name: getattr(original, name) for name in vars(CheckpointReader(path).metadata)}
    )
    assert {name: getattr(loaded, name) for name in changes} == changes
    assert steps_in(loaded) == {7}
    assert loaded.state.aliases == original.state.aliases
    assert repr(loaded.state.optimizer) == repr(original.state.optimizer)


def test_state_that_only_some_ranks_hold_is_restored(folder: Path) -> None:
    """ZeRO: a rank holds the optimizer state only of its own parameters."""
    shares = [
        RankState(
            model={"a": TensorShard.whole(counted(3))}, optimizer={"a": {"step": 1, "m": TensorShard.whole(counted(3))}}
        ),
        RankState(
            model={"b": TensorShard.whole(counted(5))}, optimizer={"b": {"step": 2}}, callbacks={"mine": {"x": 1}}
        ),
    ]

    loaded = read(saved(folder, shares))

    assert {name: x.tolist() for name, x in loaded.state.model.items()} == {"a": [0, 1, 2], "b": [0, 1, 2, 3, 4]}
    assert loaded.state.optimizer["b"] == {"step": 2}
    assert loaded.state.optimizer["a"].keys() == {"step", "m"}
    assert loaded.callbacks == {"mine": {"x": 1}}


# ---------------------------------------------------------------------------------------------- on disk
def test_each_rank_writes_one_shard_that_safetensors_can_read(folder: Path) -> None:
    whole, half = counted(4, 5), counted(6)
    shares = [
        RankState(model={"mine": TensorShard.whole(whole), "ours": TensorShard(half[:2], (6,), FlatRange(0, 2))}),
        RankState(
            model={"ours": TensorShard(half[2:], (6,), FlatRange(2, 6))},
            optimizer={"mine": {"m": TensorShard.whole(whole)}},
        ),
    ]

    path = saved(folder, shares)

    names = {
        f"{kind}-0000{rank}{end}"
        for rank in range(2)
        for kind, end in (("shard", "-of-00002.safetensors"), ("rank", ".json"))
    }
    assert {file.name for file in path.iterdir()} == {"COMMIT", "manifest.json", *names}
    first = load_file(path / "shard-00000-of-00002.safetensors")
    assert torch.equal(first["mine"], whole)
    assert torch.equal(first["ours[flat 0:2]"], half[:2])
    assert load_file(path / "shard-00001-of-00002.safetensors").keys() == {"mine/m", "ours[flat 2:6]"}
    assert json.loads((folder / "latest.json").read_text()) == {"dir": path.name, "step": 7}


def test_a_rank_with_an_empty_shard_writes_no_entry(folder: Path) -> None:
    shares = [
        RankState(model={"w": TensorShard(counted(6), (6,), FlatRange(0, 6)), "none": torch.zeros(0, 3)}),
        RankState(model={"w": TensorShard(torch.zeros(0), (6,), FlatRange(6, 6)), "none": torch.zeros(0, 3)}),
    ]

    path = saved(folder, shares)

    assert load_file(path / "shard-00000-of-00002.safetensors").keys() == {"w", "none"}
    assert load_file(path / "shard-00001-of-00002.safetensors").keys() <= {"none"}
    loaded = read(path).state.model
    assert torch.equal(loaded["w"], counted(6))
    assert loaded["none"].shape == (0, 3)


def test_equal_names_in_one_file_are_made_unique(folder: Path) -> None:
    share = RankState(
        model={
            "a/b": counted(2),
            "__metadata__": counted(3),
            "w": [TensorShard(counted(6)[i : i + 2], (6,), FlatRange(i, i + 2)) for i in (0, 2, 4)],
        },
        optimizer={"a": {"b": counted(4)}},
        callbacks={"a": {"b": counted(5)}},
    )

    loaded = read(saved(folder, [share]))

    assert {name: len(x) for name, x in loaded.state.model.items()} == {"a/b": 2, "__metadata__": 3, "w": 6}
    assert torch.equal(loaded.state.model["w"], counted(6))
    assert torch.equal(loaded.state.optimizer["a"]["b"], counted(4))  # type: ignore[arg-type]
    assert torch.equal(loaded.callbacks["a"]["b"], counted(5))  # type: ignore[arg-type]
    (file,) = folder.glob("step-*/shard-*")
    assert load_file(file).keys() == {
        *("a/b", "a/b'", "a/b''", "__metadata__'"),
        *("w[flat 0:2]", "w[flat 2:4]", "w[flat 4:6]"),
    }


def test_ranks_divide_the_writing_of_replicated_tensors(folder: Path) -> None:
    model = {f"layer {i}": torch.randn(1 << 18) for i in range(6)} | {"embedding": torch.randn(9, 1 << 18)}

    path = saved(folder, [RankState(model=model)] * 3)

    sizes = [(path / f"shard-0000{rank}-of-00003.safetensors").stat().st_size for rank in range(3)]
    assert max(sizes) - min(sizes) < 2 << 20
    assert sum(sizes) < 15.1 * (1 << 20)
    loaded = read(path).state.model
    assert all(torch.equal(loaded[name], x) for name, x in model.items())


def replicated(tensor: Tensor, how: str) -> list[TensorShard]:
    """Returns the shard of each of four ranks: two shards, two replicas of each (HSDP)."""
    return [replace(part, replica=replica, replicas=2) for replica in range(2) for (part,) in cuts(tensor, 2, how)]


@pytest.mark.parametrize("how", ["flat", "rows", "columns"])
def test_replicas_of_shards_divide_the_writing(folder: Path, how: str) -> None:
    tensor, buffer = torch.randn(64, 1 << 17), torch.randn(1 << 20)
    state = [CanonicalState({"w": part, "mean": buffer}, {"w": {"m": part}}) for part in replicated(tensor, how)]

    path = saved(folder, [RankState.of(mine) for mine in state])

    found = read(path).state
    assert torch.equal(found.model["w"], tensor)
    assert torch.equal(found.model["mean"], buffer)
    assert torch.equal(found.optimizer["w"]["m"], tensor)
    sizes = [shard.stat().st_size for shard in sorted(path.glob("shard-*"))]
    assert sum(sizes) < (64 + 4 + 0.1) * (1 << 20), "each element is written once"
    assert max(sizes) - min(sizes) < 4 << 20, "all ranks write about the same amount"


def test_overlapping_replica_groups_of_equal_size_write_all_tensors(folder: Path) -> None:
    """As with tied weights of pipeline stages: one tensor on ranks 0 and 1, another on ranks 0 and 2."""
    one, other = torch.randn(6, 1 << 17), torch.randn(6, 1 << 17)
    first = {name: [TensorShard.whole(x, replica=n, replicas=2, among=name) for n in range(2)] for name, x in
             (("01", one), ("02", other))}  # fmt: skip
    models = [{"one": first["01"][0], "other": first["02"][0]}, {"one": first["01"][1]}, {"other": first["02"][1]}]

    path = saved(folder, [RankState(model=model) for model in models])

    found = read(path).state.model
    assert torch.equal(found["one"], one)
    assert torch.equal(found["other"], other)


def test_save_fails_if_replicas_hold_different_tensors(folder: Path) -> None:
    tensor = counted(6, 1 << 18)
    first, second = (TensorShard.whole(tensor, replica=replica, replicas=2) for replica in range(2))
    shares = [RankState(model={"a": first, "b": first}), RankState(model={"b": second})]

    for result in save(folder, shares):
        assert isinstance(result, CheckpointError)
        assert re.search(r"cannot be saved: b \(model\): element .* is (missing|there 2 times)", result.message)


# ---------------------------------------------------------------------------------------------- the whole model
def test_the_full_layout_adds_the_whole_model_for_other_tools(folder: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(7)
    sharded_only, full = (write_sharded(folder, checkpoint, full=full) for full in (False, True))

    names = {file.name for file in sharded_only.iterdir()} | {"model.safetensors"}
    assert {file.name for file in full.iterdir()} == names
    weights = load_file(full / "model.safetensors")
    assert weights.keys() == checkpoint.state.model.keys()
    assert all(same(weights[name], tensor) for name, tensor in checkpoint.state.model.items())
    with safe_open(full / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "layer.weight"}
    manifest = read_manifest(full, verify=True)
    assert manifest.files["model.safetensors"].model_dump() == {
        "bytes": (full / "model.safetensors").stat().st_size,
        "sha256": sha256((full / "model.safetensors").read_bytes()).hexdigest(),
    }
    assert repr(read(full)) == repr(read(sharded_only))
    assert export(full, tmp_path / "out").sha256 == sha256((full / "model.safetensors").read_bytes()).hexdigest()


def test_the_whole_model_is_written_one_tensor_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[int] = set()
    most = 0
    real = CheckpointReader.read

    def watch(reader: CheckpointReader, *arguments: Any) -> Tensor:
        nonlocal most
        tensor = real(reader, *arguments)
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", watch)
    model = {f"layer {i}": torch.randn(5000) for i in range(20)}  # smaller ones are joined

    saved(folder, [RankState(model=model)] * 2, full=True)

    assert 1 <= most <= 2


def test_a_shard_damaged_before_the_model_file_is_written_fails_the_save(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = disk.sync_folder

        def damage(path: Path) -> None:
            real(path)
            for shard in path.glob("shard-00001-*"):
                shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")

        patch.setattr(disk, "sync_folder", damage)
        results = save(folder, [RankState(model={name: TensorShard.whole(counted(9))}) for name in "wv"], full=True)

    for result in results:
        assert isinstance(result, CheckpointError)
        assert "rank 0 does not see a file as another rank wrote it" in result.message
        assert "shard-00001-of-00002.safetensors is damaged: the contents of v" in result.message
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------- refused
HOLE = [TensorShard(counted(2), (2, 3), FlatRange(0, 2))], [TensorShard(counted(3), (2, 3), FlatRange(3, 6))]
OVERLAP = (
    [TensorShard(counted(2, 2), (2, 3), Box((0, 0), (2, 2)))],
    [TensorShard(counted(2, 2), (2, 3), Box((0, 1), (2, 2)))],
)


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        (
            RankState(model={"w": HOLE[0]}),
            RankState(model={"w": HOLE[1]}),
            r"rank 0: .* w \(model\): element \[0, 2\] is missing",
        ),
        (RankState(model={"w": OVERLAP[0]}), RankState(model={"w": OVERLAP[1]}), r"element \[0, 1\] occurs 2 times"),
        (RankState(model={"w": HOLE[0]}), RankState(model={}), r"w \(model\): element \[0, 2\] is missing"),
        (
            RankState(model={"w": HOLE[0]}),
            RankState(model={"w": TensorShard(counted(4), (4,), FlatRange(0, 4))}),
            r"w \(model\) is float32 \[4\] on rank 1, and float32 \[2, 3\] on a lower one",
        ),
        (
            RankState(model={}, optimizer={"w": {"step": torch.tensor(3.0)}}),
            RankState(model={}, optimizer={"w": {"step": torch.tensor(4.0)}}),
            "step of w is 4.0 on rank 1, and 3.0 on a lower one",
        ),
        (
            RankState(model={}, callbacks={"mine": {"seen": True}}),
            RankState(model={}, callbacks={"mine": {"seen": False}}),
            "seen of mine is False on rank 1, and True on a lower one",
        ),
        (RankState(model={}), RankState(model={"w": 3}), "rank 1: w of the model cannot be saved: it is a int"),  # type: ignore[dict-item]
        (
            RankState(model={}),
            RankState(model={"w": TensorShard.whole(torch.ones(2, dtype=torch.complex64))}),
            "rank 1: w of the model cannot be saved: it is of type complex64",
        ),
        (
            RankState(model={}),
            RankState(model={"w": [*HOLE[0], TensorShard.whole(torch.ones(2))]}),
            "rank 1: w of the model .* its parts differ in dtype",
        ),
        (
            RankState(model={}),
            RankState(
                model={
                    "w": [
                        TensorShard(counted(2), (4,), FlatRange(0, 2)),
                        TensorShard(counted(2).double(), (4,), FlatRange(2, 4)),
                    ]
                }
            ),
            "rank 1: w of the model .* its parts differ in dtype",
        ),
        (
            RankState(model={"w": TensorShard(counted(2), (4,), FlatRange(0, 2))}),
            RankState(model={"w": TensorShard(counted(2).bfloat16(), (4,), FlatRange(2, 4))}),
            r"w \(model\) is bfloat16 \[4\] on rank 1, and float32 \[4\] on a lower one",
        ),
        (
            RankState(model={}, optimizer={"w": {"a/b": counted(2)}}),
            RankState(model={}, optimizer={"w": {"a/b": counted(2)}}),
            "^ranks 0, 1: a/b in the optimizer state of w .* slash",
        ),
    ],
)
def test_inconsistent_state_is_refused_on_every_rank(
    folder: Path, first: RankState, second: RankState, complaint: str
) -> None:
    earlier = write(folder, checkpoint_of(5))

    for result in save(folder, [first, second]):
        assert isinstance(result, CheckpointError)
        with pytest.raises(CheckpointError, match=f"(?s){complaint}"):
            raise result
    assert {path.name for path in folder.iterdir()} == {earlier.name, "latest.json"}


def test_metadata_of_rank_0_is_saved(folder: Path) -> None:
    """Metadata of the other ranks is ignored, even if it could not be saved."""
    facts = [
        CheckpointMetadata(step=7, samples=7, strategy="fsdp", world_size=2, position={"epoch": x}) for x in (1, {1, 2})
    ]  # type: ignore[dict-item]

    def write(peers: WriterGroup) -> Path:
        return writer.write(folder, facts[peers.rank], RankState(model={"w": counted(3)}), peers)

    first, second = World(2).run(write)

    assert first == second
    assert read(first).position == {"epoch": 1}


def test_unsupported_metadata_is_refused_before_anything_is_written(folder: Path) -> None:
    facts = CheckpointMetadata(step=7, samples=7, strategy="fsdp", world_size=2, position={"epoch": {1, 2}})  # type: ignore[dict-item]

    results = save(folder, [RankState(model={})] * 2, facts)

    assert all(isinstance(result, CheckpointError) and "position.epoch" in result.message for result in results)
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------- failing ranks
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_raises_its_error_on_all_ranks(folder: Path, rank: int, order: Sequence[int]) -> None:
    write_sharded(folder, checkpoint_of(10))
    whole = Disk(0, "full", rank=rank)
    with pytest.MonkeyPatch.context() as patch:
        whole.install(patch)
        write_sharded(folder, checkpoint_of(10))

    complete = set()
    for at in range(1, whole.count + 1):
        step = 10 + at
        with pytest.MonkeyPatch.context() as patch:
            Disk(at, "full", rank=rank).install(patch)
            shares = [share_of(checkpoint_of(step), each, 2) for each in range(2)]
            results = save(folder, shares, checkpoint_of(step), order=order)
        for result in results:
            assert isinstance(result, CheckpointError), result
            assert result.message.startswith(f"rank {rank}: the checkpoint of step {step} could not be written to")
            assert "No space left on device" in result.message
            assert any("make room" in hint for hint in result.hints)
        assert not list(folder.glob(".step-*"))
        chosen, _ = newest(folder)
        assert chosen is not None
        (found,) = steps_in(read(chosen))
        complete.add(found == step)  # True if only the hint could not be written
    assert complete == ({True, False} if rank == 0 else {False})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_writing_rank_is_an_error_on_the_other_and_keeps_the_earlier_checkpoint(
    folder: Path, rank: int, order: Sequence[int]
) -> None:
    write_sharded(folder, checkpoint_of(10))
    with pytest.MonkeyPatch.context() as patch:
        Disk(5, "kill", rank=rank).install(patch)
        shares = [share_of(checkpoint_of(20), each, 2) for each in range(2)]
        results = save(folder, shares, checkpoint_of(20), order=order)

    assert isinstance(results[rank], Killed)
    survivor = results[1 - rank]
    assert isinstance(survivor, CheckpointError)
    if rank == 1:
        assert "step 20 was not saved: no connection to rank 1 (Connection closed by peer)" in survivor.message
        assert not list(folder.glob(".step-*"))
    else:
        assert "step 20: rank 1 lost the connection to rank 0 (Connection closed by peer)" in survivor.message
    chosen, skipped = newest(folder)
    assert chosen is not None
    assert (steps_in(read(chosen)), skipped) == ({10}, [])


def test_a_checkpoint_is_complete_even_if_a_rank_dies_after_its_part(folder: Path) -> None:
    """Rank 1 dies after it wrote its shard, before it receives the result."""
    told = 0

    def die(value: Any) -> Any:
        nonlocal told
        told += 1
        if told == 2:
            raise RuntimeError("Connection closed by peer")
        return value

    ranks = SingleRank()
    ranks.broadcast = die  # type: ignore[method-assign]
    peers = WriterGroup(ranks=ranks)
    with pytest.raises(CheckpointError, match=r"step 7 is complete, but not all ranks could be informed"):
        writer.write(folder, FACTS, RankState(model={"w": counted(3)}), peers)

    assert [manifest.step for _, manifest in committed(folder)[0]] == [7]


def test_a_rank_raises_its_own_error_even_if_the_connection_is_lost(folder: Path) -> None:
    def gone(value: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    peers = WriterGroup(ranks=Turns(1, 2, gone))
    with pytest.raises(CheckpointError, match=r"^rank 1: w of the model cannot be saved: it is a int"):
        writer.write(folder, FACTS, RankState(model={"w": 3}), peers)  # type: ignore[dict-item]


def test_a_bug_fails_the_save_on_all_ranks_and_logs_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(path: Path) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    monkeypatch.setattr(disk, "sync_folder", break_down)  # rank 1 is the first to call it

    for result in save(folder, [RankState(model={"w": counted(3)})] * 2, order=(1, 0)):
        assert isinstance(result, CheckpointError)
        assert "ZeroDivisionError: a defect" in result.message
    assert "in break_down" in caplog.text


def test_error_names_a_folder_that_ranks_do_not_share(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"

    def write_somewhere(peers: WriterGroup) -> Path:
        return writer.write(elsewhere if peers.rank else folder, FACTS, RankState(model={"w": counted(3)}), peers)

    for result in World(2).run(write_somewhere):
        assert isinstance(result, CheckpointError)
        assert result.message.startswith(f"rank 1: rank 0 created the folder {elsewhere}")
        assert "all ranks must see the run's folder" in result.hints[0]
    assert not list(folder.iterdir())


def test_save_fails_if_rank_0_does_not_see_a_shard(folder: Path) -> None:
    """Both ranks have a folder of this name, on the disks of two machines."""

    with pytest.MonkeyPatch.context() as patch:
        real = disk.sync_folder

        def hide(path: Path) -> None:
            real(path)
            for shard in path.glob("shard-00001-*"):
                shard.unlink()

        patch.setattr(disk, "sync_folder", hide)
        results = save(folder, [RankState(model={"w": counted(3)})] * 2)

    for result in results:
        assert isinstance(result, CheckpointError)
        assert "rank 0: rank 0 does not see a file as another rank wrote it:" in result.message
        assert "shard-00001-of-00002.safetensors" in result.message


# ---------------------------------------------------------------------------------------------- no code
def test_writing_and_reading_use_no_pickle_and_run_no_code(folder: Path) -> None:
    events: list[str] = []
    watching = False

    def watch(event: str, arguments: object) -> None:
        if watching and event in ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen"):
            events.append(event)

    def there_and_back() -> None:
        for chosen in ({"layout": "full"}, {"async_save": False}):
            saving = checkpoints(folder, WriterGroup.alone(), **chosen)
            saving.save(checkpoint_of(7), checkpoint_of(7).share)
            read(saving.wait())
            reader = saving.open()
            assert reader is not None
            read_manifest(reader.path, verify=True)
        read(early)

    (early,) = (Path(__file__).parent / "golden" / "format-1").glob("step-*")
    there_and_back()  # completes lazy imports
    sys.addaudithook(watch)
    watching = True
    there_and_back()
    watching = False

    assert not events
