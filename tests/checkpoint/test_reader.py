"""The checkpoint reader: reads only the requested regions, verifies all bytes read, and trusts no unverified file."""

import itertools
import json
import os
import pickle
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from checkpoint.doubles import Bomb, checkpoint_of, read, reseal, steps_in, write
from checkpoint.worlds import counted, cuts, saved, write_sharded
from safetensors.torch import save_file
from torch import nn

from ddpforge import disk
from ddpforge.checkpoint.manifest import read_manifest
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.retention import newest
from ddpforge.checkpoint.state import RankState
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.interfaces.regions import Box, FlatRange, TensorShard, whole
from ddpforge.interop.export import export

GOLDEN = Path(__file__).parent / "golden"
SHARD = "shard-00001-of-00002.safetensors"
ALONE = "shard-00000-of-00001.safetensors"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Reduces the block size from 64 MiB to 64 bytes; returns it."""
    for module in ("safetensors_writer", "manifest", "reader"):
        monkeypatch.setattr(f"ddpforge.checkpoint.{module}.BLOCK", 64)
    return 64


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Records every read: file name, offset, and the size of the buffers in bytes."""
    found: list[tuple[str, int, int]] = []
    real = os.preadv

    def watch(descriptor: int, buffers: list[memoryview], start: int) -> int:
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, sum(map(len, buffers))))
        return real(descriptor, buffers, start)

    monkeypatch.setattr("os.preadv", watch)
    return found


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("how", ["flat", "rows", "columns"])
def test_large_tensors_are_read_block_by_block(folder: Path, small_blocks: int, how: str) -> None:
    tensor = counted(13, 17)
    path = saved(folder, [RankState(model={"w": parts}) for parts in cuts(tensor, 3, how)])

    assert torch.equal(read(path).state.model["w"], tensor)
    reader = CheckpointReader(path)
    for start in range(0, tensor.numel(), 7):
        stop = min(start + 30, tensor.numel())
        target = torch.empty(stop - start)
        reader.read_into("model", "w", FlatRange(start, stop), target)
        assert target.tolist() == list(range(start, stop))
    for box in (Box((0, 3), (13, 2)), Box((5, 0), (3, 17)), Box((12, 16), (1, 1)), Box((4, 4), (6, 9))):
        target = torch.empty(box.size)
        reader.read_into("model", "w", box, target)
        expected = tensor[tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.size, strict=True))]
        assert torch.equal(target, expected)


def test_every_block_is_verified_against_its_own_hash(folder: Path, small_blocks: int) -> None:
    path = saved(folder, [RankState(model={"w": counted(5, 16), "b": counted(3)})])
    read_manifest(path, verify=True)
    file = path / ALONE
    content = file.read_bytes()
    data = len(content) - 5 * small_blocks - 12
    begins = [data + 12 + number * small_blocks for number in range(5)]  # "b" comes first

    for number, begin in enumerate(begins):
        file.write_bytes(content[:begin] + bytes([content[begin] ^ 1]) + content[begin + 1 :])
        with pytest.raises(CheckpointError, match=rf"the contents of w are not .* \(block {number}\)"):
            read_manifest(path, verify=True)


def test_finish_verifies_unread_files_only_if_verify_is_true(folder: Path, reads: list[tuple[str, int, int]]) -> None:
    path = write_sharded(folder, checkpoint_of(7), full=True)
    careless, careful = CheckpointReader(path, verify=False), CheckpointReader(path)
    reads.clear()
    careless.finish()
    assert reads == []
    careful.finish()
    assert {name for name, _, _ in reads} == {f"shard-0000{rank}-of-00002.safetensors" for rank in range(2)}
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its sha256"):
        CheckpointReader(path).finish()


@pytest.mark.parametrize("verify", [True, False])
def test_any_flat_range_can_be_read_by_a_new_or_a_used_reader(folder: Path, *, verify: bool) -> None:
    """Ranges need not begin or end at a block, nor follow the previous read."""
    path = saved(folder, [RankState(model={"w": part}) for part in cuts(counted(7), 2, "flat")])
    one = CheckpointReader(path, verify=verify)
    for start, stop in itertools.combinations(range(8), 2):
        for reader in (CheckpointReader(path, verify=verify), one):
            target = torch.empty(stop - start)
            reader.read_into("model", "w", FlatRange(start, stop), target)
            assert target.tolist() == list(range(start, stop))


def test_only_the_blocks_that_a_read_touches_are_read_and_each_is_verified_once(
    folder: Path, small_blocks: int, reads: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(folder, [RankState(model={"w": TensorShard.whole(counted(40, 16))})])  # one block per row
    file = path / "shard-00000-of-00001.safetensors"
    data = file.stat().st_size - 40 * small_blocks
    hashed: list[Any] = []  # blocks; headers are hashed whole
    real = disk.xxh3
    monkeypatch.setattr(disk, "xxh3", lambda *whole: real(*whole) if whole else hashed.append(real()) or hashed[-1])
    reader = CheckpointReader(path)
    flip(file, data + 30 * small_blocks)

    target = torch.empty(2, 16)
    reader.read_into("model", "w", Box((3, 0), (2, 16)), target)
    assert torch.equal(target, counted(40, 16)[3:5])
    assert [read for read in reads if read[0] == file.name and read[1] >= data] == [
        (file.name, data + row * small_blocks, small_blocks) for row in (3, 4)
    ]
    assert len(hashed) == 2

    reader.read_into("model", "w", FlatRange(3 * 16 + 2, 3 * 16 + 5), torch.empty(3))
    assert reads[-1] == (file.name, data + 3 * small_blocks + 8, 12)
    assert len(hashed) == 2

    with pytest.raises(CheckpointError, match=r"shard-00000.* the contents of w are not as written \(block 30\)"):
        reader.read_into("model", "w", Box((0, 5), (40, 1)), torch.empty(40, 1))
    assert torch.equal(CheckpointReader(path, verify=False).read("model", "w")[:30], counted(40, 16)[:30])


def test_several_threads_read_from_one_reader(folder: Path, small_blocks: int) -> None:
    """Columns span all blocks; each thread reads a block into memory of its own."""
    tensors = {f"w{number}": counted(64, 16) + number for number in range(8)}
    reader = CheckpointReader(saved(folder, [RankState(model=tensors)]))
    state, targets = reader.state(), {name: torch.zeros(64, 3) for name in tensors}
    with ThreadPoolExecutor(8) as threads:
        box = Box((0, 5), (64, 3))
        for read_one in [threads.submit(state.model[name].read_into, box, target) for name, target in targets.items()]:
            read_one.result()
    assert all(torch.equal(targets[name], tensor[:, 5:8]) for name, tensor in tensors.items())


def test_a_reader_uses_at_most_one_block_of_memory(
    folder: Path, small_blocks: int, reads: list[tuple[str, int, int]]
) -> None:
    path = saved(folder, [RankState(model={"w": parts}) for parts in cuts(counted(64, 64), 2, "flat")])
    reader = CheckpointReader(path)
    del reads[:]

    reader.read_into("model", "w", Box((0, 7), (64, 9)), torch.empty(64, 9))
    reader.read_into("model", "w", FlatRange(5, 4000), torch.empty(3995))

    assert max(count for file, start, count in reads if start > 8) <= small_blocks
    assert len(reader._spare.memory) <= small_blocks


def test_the_target_may_be_a_parameter_or_a_view(folder: Path) -> None:
    tensor = counted(4, 6)
    reader = CheckpointReader(saved(folder, [RankState(model={"w": parts}) for parts in cuts(tensor, 2, "rows")]))
    parameter = nn.Parameter(torch.zeros(4, 6))
    larger = torch.zeros(9, 9)
    transposed = torch.zeros(6, 4).t()

    reader.read_into("model", "w", whole((4, 6)), parameter)
    reader.read_into("model", "w", Box((1, 2), (2, 3)), larger[3:5, 1:4])
    reader.read_into("model", "w", Box((1, 0), (2, 6)), larger[6:8, 2:8])
    reader.read_into("model", "w", whole((4, 6)), transposed)

    assert torch.equal(parameter, tensor)
    assert parameter.requires_grad
    assert torch.equal(larger[3:5, 1:4], tensor[1:3, 2:5])
    assert torch.equal(larger[6:8, 2:8], tensor[1:3])
    assert larger.count_nonzero() == 6 + 12
    assert torch.equal(transposed, tensor)


def test_names_shapes_and_dtypes(folder: Path) -> None:
    reader = CheckpointReader(write_sharded(folder, checkpoint_of(7)))

    assert reader.names("model") == ["layer.weight", "layer.bias", "norm.num_batches_tracked"]
    assert reader.names("optimizer") == ["layer.weight/exp_avg", "layer.bias/exp_avg"]
    assert reader.names("callbacks") == ["ema/layer.weight"]
    assert (reader.shape("model", "layer.weight"), reader.dtype("model", "layer.bias")) == ((3, 5), torch.bfloat16)
    assert reader.aliases == {"head.weight": "layer.weight"}
    assert not list(folder.glob("*/model.safetensors"))


def test_state_is_lazy_and_reads_no_tensor(folder: Path, reads: list[tuple[str, int, int]]) -> None:
    reader = CheckpointReader(write_sharded(folder, checkpoint_of(7)))
    del reads[:]

    state, callbacks = reader.state(), reader.callbacks()

    assert list(state.model) == reader.names("model")
    assert state.aliases == {"head.weight": "layer.weight"}
    assert state.optimizer["layer.bias"]["step"] == torch.tensor(7.0)
    assert callbacks["early_stopping"] == {"bad": 7}
    bias, momentum = state.model["layer.bias"], state.optimizer["layer.weight"]["exp_avg"]
    assert (bias.shape, bias.dtype) == ((3,), torch.bfloat16)
    assert not reads

    average: Any = callbacks["ema"]["layer.weight"]
    target = torch.zeros(2, 2)
    average.read_into(Box((1, 3), (2, 2)), target)
    assert target.eq(7).all()
    assert torch.equal(bias.read(), torch.full((3,), 7, dtype=torch.bfloat16))
    assert momentum.read().shape == (3, 5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "region", "target", "complaint"),
    [
        ("gone", FlatRange(0, 15), torch.empty(15), r"has no tensor gone \(model\)"),
        ("layer.weight", FlatRange(0, 16), torch.empty(16), r"layer.weight \(model\) of .* is not part of a tensor"),
        ("layer.weight", FlatRange(0, 15), torch.empty(14), "has 15 elements, and the target has 14"),
        ("layer.weight", Box((0, 0), (3, 2)), torch.empty(2, 3), r"the target has the shape \[2, 3\]"),
        ("layer.weight", FlatRange(0, 6), torch.empty(3, 2).t(), r"the target has the shape \[2, 3\]"),
        (
            "layer.weight",
            FlatRange(0, 15),
            torch.empty(15, dtype=torch.float16),
            "is float32; it cannot be read into float16",
        ),
    ],
)
def test_invalid_reads_are_refused(folder: Path, name: str, region: Any, target: torch.Tensor, complaint: str) -> None:
    reader = CheckpointReader(write(folder, checkpoint_of(7)))

    with pytest.raises(CheckpointError, match=complaint):
        reader.read_into("model", name, region, target)


# ---------------------------------------------------------------------------------------------- untrusted files
def weight(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"]["model"]["layer.weight"]  # type: ignore[no-any-return]


def grow(manifest: dict[str, Any]) -> None:
    """Claims a terabyte, with the right number of hashes."""
    entry = weight(manifest)
    entry["shape"] = [1 << 38]
    del entry["chunks"][1:]
    entry["chunks"][0].update(region={"start": 0, "stop": 1 << 38}, hashes=["00"] * (1 << 14))


CRAFTED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda m: weight(m)["chunks"].pop(), r"layer.weight \(model\): element \[1, 0\] is missing"),
    (lambda m: weight(m)["chunks"].reverse() or weight(m)["chunks"].pop(), r"element \[0, 0\] is missing"),
    (lambda m: weight(m).update(chunks=[]), r"element \[0, 0\] is missing"),
    (lambda m: weight(m)["chunks"].append(weight(m)["chunks"][0]), r"element \[0, 0\] occurs 2 times"),
    (lambda m: weight(m)["chunks"][1]["region"].update(start=4), r"element \[0, 4\] occurs 2 times"),
    (lambda m: weight(m)["chunks"][1]["region"].update(stop=16), "is not part of a tensor"),
    (lambda m: weight(m)["chunks"][1]["region"].update(start=-1), "is not part of a tensor"),
    (
        lambda m: weight(m)["chunks"][0].update(region={"offset": [0, 0], "size": [1, 5]}),
        "that ddpforge does not write",
    ),
    (lambda m: weight(m)["chunks"][0].update(region={"offset": [0], "size": [5]}), "is not part of a tensor"),
    (lambda m: weight(m)["chunks"][0].update(region=[0, 5]), "manifest.json is damaged: tensors.model.layer.weight"),
    (lambda m: weight(m)["chunks"][0].update(hashes=[]), "that ddpforge does not write"),
    (lambda m: weight(m)["chunks"][0].update(hashes=["", ""]), "that ddpforge does not write"),
    (lambda m: weight(m).update(shape=[3, 6]), r"element \[2, 3\] is missing"),
    (lambda m: weight(m).update(shape=[-3, -5]), "manifest.json is damaged: tensors.model.layer.weight.shape"),
    (lambda m: weight(m).update(shape=[1] * 65), "manifest.json is damaged: tensors.model.layer.weight.shape"),
    (lambda m: weight(m).update(shape=[1 << 63, 0]), "manifest.json is damaged: tensors.model.layer.weight.shape"),
    (lambda m: weight(m).update(shape=[1 << 62, 1 << 62, 0], chunks=[]), "manifest.json is damaged: tensors"),
    (lambda m: weight(m).update(dtype="float64"), "too few for its entries|is F32"),
    (lambda m: weight(m).update(dtype="int32"), r"is F32 \[5\]; the manifest lists int32 \[5\]"),
    (lambda m: weight(m).update(dtype="os.system"), "unknown dtype 'os.system'"),
    (grow, "shard-00000-of-00002.safetensors has .* bytes: too few for its entries"),
    (lambda m: weight(m)["chunks"][0].update(entry="layer.bias"), "share the entry layer.bias of"),
    (lambda m: weight(m)["chunks"][0].update(entry="gone"), "it lacks gone"),
    (lambda m: weight(m)["chunks"][0].update(file=SHARD), r"(lacks|holds) layer.weight\[flat 0:5\]"),
    (lambda m: weight(m)["chunks"][0].update(file="rank-00000.json"), "rank-00000.json"),
    (lambda m: weight(m)["chunks"][0].update(file="manifest.json"), "in the file 'manifest.json', which it does not"),
    (lambda m: weight(m)["chunks"][0].update(file="../outside.safetensors"), "'../outside.safetensors', which it does"),
    (lambda m: m["files"].update({"../outside.safetensors": m["files"].pop(SHARD)}), "leaves the folder"),
    (lambda m: m["files"].update({"/etc/passwd": m["files"].pop(SHARD)}), "leaves the folder"),
    (lambda m: m["files"][SHARD].update(bytes=1 << 40), f"{SHARD} is damaged: it has .* bytes; the manifest lists"),
    (lambda m: m["files"][SHARD].update(header_xxh3=""), f"{SHARD} is damaged: its header is not as written"),
    (lambda m: m["files"][SHARD].pop("header_xxh3"), "manifest.json is damaged: files"),
]


@pytest.mark.parametrize(("change", "complaint"), CRAFTED)
def test_a_crafted_manifest_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    write(folder, checkpoint_of(5))
    path = write_sharded(folder, checkpoint_of(7))
    save_file({"layer.weight": torch.full((3, 5), 666.0)}, folder / "outside.safetensors")
    reseal(path, change)

    for action in (read, lambda each: read_manifest(each, verify=True)):
        with pytest.raises(CheckpointError, match=complaint):
            action(path)
    chosen, skipped = newest(folder)
    assert chosen is not None
    assert steps_in(read(chosen)) == {5}
    assert [each for each, _ in skipped] == [path]


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of a safetensors file, and corrects all hashes."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    reseal(path.parent)


def lie(**claims: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["layer.weight"].update(claims)


HEADERS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lie(data_offsets=[8, 1 << 40]), r"its header puts layer.weight at the wrong bytes, 8 to \d+ of the data"),
    (lie(data_offsets=[0, 60]), "at the wrong bytes"),
    (lie(data_offsets=[12, 72]), "at the wrong bytes"),
    (lie(data_offsets=[8, 64]), "at the wrong bytes"),
    (lie(data_offsets=[68, 8]), "at the wrong bytes"),
    (lie(data_offsets=[-8, 68]), "data_offsets"),
    (lie(data_offsets=[8, 68, 70]), "data_offsets"),
    (lie(data_offsets=[8.0, 68.5]), "data_offsets"),
    (lie(shape=[1 << 40, 5]), r"layer.weight is F32 \[1099511627776, 5\]; the manifest lists float32 \[3, 5\]"),
    (lie(data_offsets=["8", "68"]), "data_offsets"),
    (lie(shape=["3", "5"]), "shape"),
    (lie(shape=[-3, -5]), "shape"),
    (lie(shape=[5, 3]), r"layer.weight is F32 \[5, 3\]"),
    (lie(dtype="F64"), "layer.weight is F64"),
    (lie(surprise=1), "surprise"),
    (lambda header: header.pop("layer.weight"), "it lacks layer.weight"),
    (lambda header: header.update(more=header["layer.weight"]), "it holds more, which the manifest does not list"),
    (lambda header: header.update(more={}), "neither a tensor nor metadata"),
    (lambda header: header.update(more=header.pop("layer.bias")), "it lacks layer.bias"),
]


@pytest.mark.parametrize(("change", "complaint"), HEADERS)
def test_a_false_header_is_refused_before_memory_is_allocated(
    folder: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    path = write(folder, checkpoint_of(7))
    rewritten(path / ALONE, change)

    for action in (read, lambda each: read(each, verify=False), lambda each: read_manifest(each, verify=True)):
        with pytest.raises(CheckpointError, match=f"(?s){ALONE} is damaged: .*{complaint}"):
            action(path)


def test_bytes_that_belong_to_no_tensor_are_refused(folder: Path) -> None:
    path = write(folder, checkpoint_of(7))
    file = path / ALONE
    file.write_bytes(file.read_bytes() + b"more")
    reseal(path)

    with pytest.raises(CheckpointError, match=r"according to its header it has \d+ bytes, but it has \d+"):
        read_manifest(path, verify=True)


@pytest.mark.parametrize("name", [SHARD, "rank-00001.json"])
def test_links_are_refused_even_if_their_target_is_valid(folder: Path, name: str) -> None:
    path = write_sharded(folder, checkpoint_of(7))
    reader = CheckpointReader(path)
    (path / name).rename(folder / "elsewhere")
    (path / name).symlink_to(folder / "elsewhere")

    with pytest.raises(CheckpointError, match=f"{name} is damaged: it is a link or a special file"):
        CheckpointReader(path)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        reader.finish()


def test_a_file_replaced_by_a_link_during_reading_is_refused(folder: Path) -> None:
    path = saved(folder, [RankState(model={"w": counted(100), "x": counted(3)})])
    reader = CheckpointReader(path)
    reader.read("model", "x")
    reader.close()
    (path / "shard-00000-of-00001.safetensors").rename(folder / "elsewhere")
    (path / "shard-00000-of-00001.safetensors").symlink_to(folder / "elsewhere")

    with pytest.raises(CheckpointError, match=r"shard-00000-of-00001.safetensors is damaged: it is a link"):
        reader.read("model", "w")


def test_an_open_file_can_be_read_after_it_was_deleted(folder: Path) -> None:
    path = saved(folder, [RankState(model={"w": counted(100), "x": counted(3)})])
    reader = CheckpointReader(path)
    reader.read("model", "x")
    (path / "shard-00000-of-00001.safetensors").unlink()

    assert reader.read("model", "w").equal(counted(100))


def test_a_reader_keeps_few_files_open_and_closes_them_in_finish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.checkpoint.reader._MOST_OPEN", 2)
    path = saved(folder, [RankState(model={"w": parts}) for parts in cuts(counted(12), 4, "flat")])

    def still_open() -> int:
        return sum(os.path.realpath(link).startswith(str(path)) for link in Path("/proc/self/fd").iterdir())

    reader = CheckpointReader(path)
    assert reader.read("model", "w").equal(counted(12))
    assert still_open() == 2
    reader.finish()
    assert still_open() == 0
    assert reader.read("model", "w").equal(counted(12)), "files are opened again"
    del reader
    assert still_open() == 0


def test_tensors_are_stored_in_the_order_of_reading(folder: Path, reads: list[tuple[str, int, int]]) -> None:
    """Model first, then optimizer state: the system reads ahead in a file that is read sequentially."""
    names = [f"layers.{number}.weight" for number in (2, 10, 1)]
    model = {name: counted(5, 5) for name in names}
    optimizer = {name: {"exp_avg": counted(5, 5), "exp_avg_sq": counted(5, 5)} for name in names}
    reader = CheckpointReader(saved(folder, [RankState(model=model, optimizer=optimizer)]))
    reads.clear()
    state = reader.state()
    for name in names:
        state.model[name].read()
    for entry in state.optimizer.values():
        for value in entry.values():
            value.read()  # type: ignore[union-attr]
    begins = [start for _, start, _ in reads]
    assert begins == sorted(begins)
    assert sum(size for *_, size in reads[2:]) == 9 * 100  # after the header, each byte once


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", ALONE])
def test_a_pipe_instead_of_a_file_is_refused_without_blocking(folder: Path, name: str) -> None:
    path = write(folder, checkpoint_of(7))
    reader = CheckpointReader(path)
    (path / name).unlink()
    os.mkfifo(path / name)

    for action in (lambda: read(path), lambda: read_manifest(path, verify=True)):
        with pytest.raises(CheckpointError, match=f"{name} is damaged: it is a link or a special file"):
            action()
    if name == ALONE:
        with pytest.raises(CheckpointError, match=f"{name} is damaged: it is a link or a special file"):
            reader.read("model", "layer.weight")


@pytest.mark.parametrize("sealed", [False, True], ids=["as it is", "with all hashes right"])
@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", SHARD, "rank-00001.json"])
def test_no_file_of_a_sharded_checkpoint_can_run_code(folder: Path, name: str, sealed: bool) -> None:
    path = write_sharded(folder, checkpoint_of(7))
    (path / name).write_bytes(pickle.dumps(Bomb(folder / "marker")))
    if sealed and name.endswith(("safetensors", "1.json")):
        reseal(path)

    for action in (read, lambda each: read_manifest(each, verify=True)):
        if sealed and name == "rank-00001.json":  # no code reads this file any more
            action(path)
            continue
        with pytest.raises(CheckpointError, match=name):
            action(path)
    assert not (folder / "marker").exists()


def test_error_names_a_file_that_shrinks_during_reading(folder: Path) -> None:
    path = saved(folder, [RankState(model={"w": counted(100), "x": counted(3)})])
    reader = CheckpointReader(path)
    reader.read("model", "x")
    os.truncate(path / "shard-00000-of-00001.safetensors", 200)

    with pytest.raises(CheckpointError, match=r"shard-00000-of-00001.safetensors is damaged: it ends before byte"):
        reader.read("model", "w")


# ---------------------------------------------------------------------------------------------- formats
@pytest.fixture
def early(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Copies a checkpoint of an earlier ddpforge: format 1, or format 2 with one file per section."""
    (source,) = (GOLDEN / request.param).glob("step-*")
    return Path(copytree(source, folder / source.name))


each_early_format = pytest.mark.parametrize("early", ["format-1", "format-2-by-section"], indirect=True)


@each_early_format
def test_early_formats_are_read_like_the_current_one(early: Path, tmp_path: Path) -> None:
    assert json.loads((early / "manifest.json").read_text())["version"] == int(early.name[-1])
    assert newest(early.parent) == (early, [])

    found, today = read(early), checkpoint_of(7)
    assert steps_in(found) == {7}
    assert repr(found.state) == repr(today.state)
    assert repr(found.callbacks) == repr(today.callbacks)
    assert CheckpointReader(early).read("model", "layer.weight").shape == (3, 5)
    today_s = write(tmp_path, today)
    for path, out in ((early, tmp_path / "early"), (today_s, tmp_path / "today")):
        export(path, out, weights="ema", dtype="bf16")
    assert (tmp_path / "early").read_bytes() == (tmp_path / "today").read_bytes()


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", "model.safetensors", "optimizer.safetensors"])
@each_early_format
def test_early_formats_are_verified_by_their_hashes(early: Path, name: str) -> None:
    flip(early / name, -2)

    named = "COMMIT|manifest.json" if name == "COMMIT" else f"{name} is damaged: (its sha256|the contents of)"
    for action in (read, lambda each: read_manifest(each, verify=True)):
        with pytest.raises(CheckpointError, match=named):
            action(early)


def test_one_rank_and_several_ranks_write_equal_checkpoints(folder: Path, tmp_path: Path) -> None:
    one, three = write(folder, checkpoint_of(7)), write_sharded(folder, checkpoint_of(7), 3)

    assert repr(read(one)) == repr(read(three))
    for path, out in ((one, tmp_path / "one"), (three, tmp_path / "three")):
        export(path, out, weights="ema", dtype="bf16")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "three").read_bytes()


def test_a_tensor_without_elements_is_restored(folder: Path) -> None:
    state = CanonicalState(model={"none": torch.empty(0, 3), "w": torch.ones(2)}, optimizer={})
    shares = [
        RankState(model={"none": state.model["none"], "w": TensorShard.whole(torch.ones(2))}),
        RankState(model={}),
    ]

    for path in (write(folder, checkpoint_of(7, state=state)), saved(folder, shares)):
        assert read(path).state.model["none"].shape == (0, 3)


def test_a_tensor_with_a_missing_chunk_is_refused(folder: Path) -> None:
    """Simulates a bug in the check that chunks cover the whole tensor."""
    reader = CheckpointReader(write(folder, checkpoint_of(7)))
    found: Any = reader.manifest.tensors["model"]
    found["layer.weight"] = replace(found["layer.weight"], chunks=())
    with pytest.raises(CheckpointError, match=r"it lists 0 of 15 elements of layer\.weight \(model\)"):
        reader.read("model", "layer.weight")
