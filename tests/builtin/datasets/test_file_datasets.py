"""Datasets in files of other libraries: tar files, token files, parquet and Hugging Face datasets, written here."""

import gzip
import io
import json
import os
import pickle
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from email.message import Message
from functools import partial
from pathlib import Path
from ssl import SSLError
from typing import Any, Never
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from ddpforge.builtin.datasets import files
from ddpforge.builtin.datasets import hugging_face as hf
from ddpforge.builtin.datasets.files import find_files
from ddpforge.builtin.datasets.hugging_face import HuggingFaceShards, Streamed, hugging_face
from ddpforge.builtin.datasets.parquet import Parquet
from ddpforge.builtin.datasets.tar import Tar
from ddpforge.builtin.datasets.tokens import Tokens
from ddpforge.data import MicroBatch, RankShare
from ddpforge.data.batch_assignment import AssignmentTerms
from ddpforge.errors import SetupError, UsageError, library
from ddpforge.features.shard_reader import ShardedStream
from ddpforge.training.loaders import open_data


def png(shade: int, size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 0, 255)).save(file, "png")
    return file.getvalue()


def write_tar(path: Path, samples: list[dict[str, bytes]], first: int = 0) -> None:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples, start=first):
            for ending, data in sample.items():
                about = tarfile.TarInfo(f"part/{number:05d}.{ending}")
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))


Streams = Callable[..., Any]

SIZES = [30, 0, 47, 13, 25, 45]  # 160 samples


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Writes six tar files; the class of each sample is its number."""
    first = 0
    for number, size in enumerate(SIZES):
        samples = [{"png": png(one % 256), "cls": str(one).encode()} for one in range(first, first + size)]
        write_tar(tmp_path / f"data-{number:02d}.tar", samples, first)
        first += size
    return tmp_path


def numbers(micro: MicroBatch) -> list[int]:
    found: list[int] = micro.data[-1].tolist()
    return found[: micro.samples]


def opened(data: Any, *, batch: int = 16, workers: int = 0) -> Any:
    options: dict[str, Any] = {"seed": 1, "drop_last": False, "workers": workers, "prefetch": 2, "pin": False}
    return open_data(data, global_batch=batch, share=RankShare(0, 1, batch), **options)


def hand(data: Any, *, rank: int, ranks: int, worker: int, workers: int, start: int = 0) -> Iterator[MicroBatch]:
    """Returns the micro-batches of one loader process of one rank, with one micro-batch of four samples a step."""
    terms = AssignmentTerms(global_batch=4 * ranks, share=RankShare(rank, ranks, 4), seed=1, drop_last=False)
    return ShardedStream(data, terms, None, start, stop_after_epoch=True).batches(worker, workers)


# ---------------------------------------------------------------------------------------------- tar
def test_tar_reads_images_and_classes(shards: Path) -> None:
    data = Tar(path=str(shards), fields=["jpg;png", "cls"], classes=160)
    assert (len(data), data.shard_sizes, data.classes) == (160, SIZES, 160)
    image, number = data.prepare(next(data.iter_shard(2, epoch=0, skip=5)))
    assert number == 35
    assert torch.equal(image[:, 0, 0], torch.tensor([35 / 255, 0.0, 1.0]))
    grey, _ = Tar(path=str(shards), fields=["png", "cls"], images="l").prepare(next(iter(data)))
    assert grey.shape == (1, 4, 4)
    (batch, *_) = [micro.data for micro in opened(data).evaluation()]
    assert [(part.shape, part.dtype) for part in batch] == [
        (torch.Size([16, 3, 4, 4]), torch.float32),
        (torch.Size([16]), torch.int64),
    ]


def test_tar_is_read_once_by_4_ranks_with_2_loader_processes(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads 160 samples 160 times in all, not 4 × 2 × 160 times."""
    read: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    prepare = Tar.prepare

    def counting(self: Tar, sample: Any) -> Any:
        found = prepare(self, sample)
        read[found[-1]] += 1
        return found

    monkeypatch.setattr(Tar, "prepare", counting)
    for rank in range(4):
        for worker in range(2):
            data = Tar(path=str(shards), fields=["cls"], shuffle=True)
            opened_parts, original = [], data.iter_shard

            def noted(part: int, *, epoch: int, skip: int, original: Any = original, to: Any = opened_parts) -> Any:
                to.append(part)
                for sample in original(part, epoch=epoch, skip=skip):
                    read[-1] += 1
                    yield sample

            data.iter_shard = noted  # type: ignore[method-assign]
            for micro in hand(data, rank=rank, ranks=4, worker=worker, workers=2):
                seen.update(numbers(micro))
            assert len(opened_parts) <= 4 * 2 + 2  # its lanes, each over two or three files
    assert seen == Counter(range(160))
    assert read.pop(-1) == 160
    assert read == seen


@pytest.mark.parametrize("start", [1, 6, 9])
def test_resume_of_tar_reads_only_the_samples_it_uses(shards: Path, start: int) -> None:
    data = Tar(path=str(shards), fields=["cls"])
    straight = [numbers(micro) for micro in hand(data, rank=0, ranks=1, worker=0, workers=1)]
    bytes_read, original = [], data.iter_shard

    def noted(part: int, *, epoch: int, skip: int) -> Any:
        for sample in original(part, epoch=epoch, skip=skip):
            bytes_read.append(len(sample[0][1]))
            yield sample

    data.iter_shard = noted  # type: ignore[method-assign]
    found = [numbers(micro) for micro in hand(data, rank=0, ranks=1, worker=0, workers=1, start=start)]
    assert found == straight[start:]
    assert len(bytes_read) == sum(map(len, found)) == 160 - 4 * start


def test_tar_index_avoids_reading_headers_again(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads only the changed file again."""
    opened_files: list[str] = []
    real = tarfile.open

    def spy(path: Any, *arguments: Any) -> Any:
        opened_files.append(Path(path).name)
        return real(path, *arguments)

    monkeypatch.setattr(tarfile, "open", spy)
    kept = str(shards / "index")
    first = Tar(path=str(shards), fields=["cls"], index=kept)
    assert len(opened_files) == len(SIZES)
    again = Tar(path=str(shards), fields=["cls"], index=kept)
    assert len(opened_files) == len(SIZES)
    assert (again.shard_sizes, list(again)) == (first.shard_sizes, list(first))

    write_tar(shards / "data-03.tar", [{"cls": b"7"}])
    opened_files.clear()
    assert Tar(path=str(shards), fields=["cls"], index=kept).shard_sizes == [30, 0, 47, 1, 25, 45]
    assert opened_files == ["data-03.tar"]


def test_transforms_of_tar_images_are_seeded_by_epoch_and_sample(shards: Path) -> None:
    data = Tar(path=str(shards / "data-0*.tar"), fields=["png", "cls"], transforms=[{"use": "RandomCrop", "size": 2}])
    assert data.random
    batches = [micro.data for micro in opened(data).evaluation()]
    assert batches[0][0].shape == (16, 3, 2, 2)
    again = [micro.data for micro in opened(pickle.loads(pickle.dumps(data))).evaluation()]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, again, strict=True))


def test_tar_decodes_other_suffixes_and_refuses_pickles(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    sample = {"a.npy": array.getvalue(), "json": b'{"x": 1}', "txt": b"words", "bin": b"\x00\x01", "pkl": b""}
    write_tar(tmp_path / "one.tar", [sample])
    data = Tar(path=str(tmp_path / "one.tar"), fields=["a.npy", "json", "txt", "bin"])
    array_, *rest = data.prepare(next(iter(data)))
    assert array_.tolist() == [0, 1, 2]
    assert rest == [{"x": 1}, "words", b"\x00\x01"]
    with pytest.raises(UsageError, match="fields: pkl is a pickle"):
        Tar(path=str(tmp_path), fields=["pkl"])


class Payload:
    """Pickles as a call that creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def payloads(marker: Path) -> dict[str, bytes]:
    """Returns, by format, bytes that create the marker if a reader of that format unpickles them."""
    array, arrays, weights = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(array, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    np.savez(arrays, np.array([Payload(marker)], dtype=object))
    torch.save(Payload(marker), weights)
    return {
        "pickle": pickle.dumps(Payload(marker)),
        "npy": array.getvalue(),
        "npz": arrays.getvalue(),
        "torch": weights.getvalue(),
    }


ENDINGS = (
    "pkl PKL Pkl a.PKL pickle PICKLE pyd pYd pth PTH pt PT joblib dill npy NPY npz txt cls json JSON bin mp msg ten tb"
    " cbor jpg PNG webp tiff unknown gz pkl.gz"
)


@pytest.mark.parametrize("ending", ENDINGS.split())
def test_tar_field_of_any_suffix_is_never_unpickled(tmp_path: Path, ending: str) -> None:
    """Expects each suffix to be refused by name, to fail to decode, or to stay bytes."""
    marker = tmp_path / "marker"
    for name, payload in payloads(marker).items():
        write_tar(tmp_path / f"{name}.tar", [{ending: payload}])
        if ending.lower() == "bin":
            data = Tar(path=str(tmp_path / f"{name}.tar"), fields=[ending])
            assert data.prepare(next(iter(data))) == (payload,)
            continue
        with pytest.raises(UsageError, match=rf"fields: `?{ending}`? .*(pickle|decoded|can read)"):  # noqa: PT012  # either may raise
            data = Tar(path=str(tmp_path / f"{name}.tar"), fields=[ending])
            data.prepare(next(iter(data)))
    assert not marker.exists()
    pickle.loads(payloads(marker)["pickle"])
    assert marker.exists()  # the payload works


def test_tar_images_never_start_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores PostScript under the suffix of a JPEG."""
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    write_tar(tmp_path / "one.tar", [{"jpg": postscript}])
    data = Tar(path=str(tmp_path / "one.tar"), fields=["jpg"])
    with pytest.raises(
        UsageError, match=r"`jpg` of sample 1 of .*one\.tar is not an image that Pillow can read: cannot identify"
    ):
        data.prepare(next(iter(data)))


def test_tar_reads_npz_and_rgba_images(tmp_path: Path) -> None:
    arrays = io.BytesIO()
    np.savez(arrays, a=np.arange(2), b=np.ones(1))
    write_tar(tmp_path / "one.tar", [{"x.NPZ": arrays.getvalue(), "PNG": png(51)}])
    data = Tar(path=str(tmp_path / "one.tar"), fields=["x.NPZ", "PNG"], images="rgba")
    found, image = data.prepare(next(iter(data)))
    assert {name: array.tolist() for name, array in found.items()} == {"a": [0, 1], "b": [1.0]}
    assert image[:, 0, 0].tolist() == pytest.approx([0.2, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("t-{008..011}", ["t-008", "t-009", "t-010", "t-011"]),
        ("{a,b}{1..5..2}", ["a1", "a3", "a5", "b1", "b3", "b5"]),
        ("{a,{b,c}d}.tar", ["a.tar", "bd.tar", "cd.tar"]),
        ("{2..-1}{x..z}", [f"{n}{c}" for n in (2, 1, 0, -1) for c in "xyz"]),
        ("{one}{,s}", ["{one}", "{one}s"]),
    ],
)
def test_braces_in_paths_expand_as_in_a_shell(pattern: str, names: list[str]) -> None:
    assert files._named(pattern) == names
    assert list(library("braceexpand", "webdataset").braceexpand(pattern)) == names


@pytest.mark.parametrize(
    "pattern",
    [
        "t-{0..999999999999}.tar",
        "{0..99999}{0..99999}",
        "{a,b}" * 30,
        "{" + "{a,b}" * 30 + ",x}",
        "{" * 5000 + "}" * 5000,
        "{a,b" + "{a,b}" * 20,
    ],
)
def test_braces_with_too_many_names_are_refused_at_once(pattern: str) -> None:
    with pytest.raises(UsageError, match="path: "):
        find_files(pattern, ".tar")


def test_first_suffix_that_a_sample_has_is_used(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"json": b"1", "txt": b"one", "cls": b"0"}, {"json": b"2", "cls": b"0"}])
    data = Tar(path=str(tmp_path), fields=["txt;json", "cls"])
    assert [data.prepare(one)[0] for one in data.iter_shard(0, epoch=0, skip=0)] == ["one", 2]


def test_tar_skips_members_that_are_not_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("__MACOSX/0.txt", "0.txt", "folder", "notes"):
            about = tarfile.TarInfo(name)
            if name == "folder":
                about.type = tarfile.DIRTYPE
            archive.addfile(about, io.BytesIO())
    assert Tar(path=str(tmp_path), fields=["txt"]).shard_sizes == [1]


def test_tar_index_is_rebuilt_for_a_changed_file_of_the_same_size(tmp_path: Path) -> None:
    """Uses that tar files are padded: a file of two samples may be as long as a file of one."""
    kept, path = str(tmp_path / "index"), tmp_path / "a.tar"
    sizes = []
    for number in (1, 2):
        write_tar(path, [{"txt": b"x"}] * number)
        os.utime(path, (number, number))
        sizes.append(path.stat().st_size)
        assert Tar(path=str(path), fields=["txt"], index=kept).shard_sizes == [number]
    assert sizes[0] == sizes[1]


def test_invalid_tar_options_and_files_are_refused(shards: Path) -> None:
    with pytest.raises(UsageError, match=r"sample part/00000 of .*data-00\.tar has cls, png, but no jpg or jpeg"):
        Tar(path=str(shards), fields=["jpg;jpeg"])
    with pytest.raises(SetupError, match=r"no such file: .*data-06\.tar"):
        Tar(path=str(shards / "data-{00..06}.tar"), fields=["cls"])
    with pytest.raises(SetupError, match="no file matches"):
        find_files(str(shards / "*.zip"), ".tar")
    with pytest.raises(UsageError, match="is an address, but only files can be read"):
        find_files("s3://bucket/x.tar", ".tar")
    (shards / "data-07.tar").write_bytes(b"nonsense" * 100)
    with pytest.raises(SetupError, match=r"data-07\.tar is not an uncompressed tar file"):
        Tar(path=str(shards), fields=["cls"])


@pytest.mark.parametrize("form", ["npy", "index"])
def test_arrays_in_token_and_index_files_are_never_unpickled(tmp_path: Path, form: str) -> None:
    marker = tmp_path / "marker"
    payload = payloads(marker)["npy"]
    if form == "npy":
        (tmp_path / "tokens.npy").write_bytes(payload)
        with pytest.raises(UsageError, match=r"Python objects in dtype|Object arrays"):
            Tokens(path=tmp_path / "tokens.npy", block_size=1)
    else:
        write_tar(tmp_path / "one.tar", [{"cls": b"1"}])
        Tar(path=str(tmp_path / "one.tar"), fields=["cls"], index=str(tmp_path / "kept"))
        (kept,) = (tmp_path / "kept").iterdir()
        kept.write_bytes(payload)
        assert Tar(path=str(tmp_path / "one.tar"), fields=["cls"], index=str(tmp_path / "kept")).shard_sizes == [1]
        assert kept.read_bytes() != payload
    assert not marker.exists()


def numbers_of(folder: Path, count: int, facts: list[Any] | None = None) -> list[int]:
    return files.keep(str(folder), "plan", facts or ["v1", count], lambda: np.arange(count, dtype=np.int64)).tolist()


FLIPS = [0, 7, 60, 127, 128, 135, 200, -1, -2, -40, -70, -100, -116, -117]


@pytest.mark.parametrize("place", FLIPS)
def test_a_cache_file_with_one_flipped_bit_is_made_again_with_a_warning(
    tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert numbers_of(tmp_path, 20) == list(range(20))
    (kept,) = tmp_path.iterdir()
    right = kept.read_bytes()
    for bit in range(8):
        data = bytearray(right)
        data[place] ^= 1 << bit
        kept.write_bytes(data)
        caplog.clear()
        assert numbers_of(tmp_path, 20) == list(range(20))
        assert kept.read_bytes() == right
        assert f"index: {kept} is " in caplog.text
        assert "; it is made again" in caplog.text


def test_a_cut_empty_or_foreign_cache_file_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers_of(tmp_path, 20)
    (kept,) = tmp_path.iterdir()
    right = kept.read_bytes()
    numbers_of(tmp_path / "other", 30)
    foreign = next((tmp_path / "other").iterdir()).read_bytes()
    for content, fault in (
        *((right[:size], "is damaged") for size in (0, 1, 100, 127, 200, len(right) - 1)),
        (right + b"x", "is damaged"),
        (right * 2, "is damaged"),
        (b"x" * 1000, "is damaged"),
        (foreign, "is of other data or options"),
    ):
        kept.write_bytes(content)
        caplog.clear()
        assert numbers_of(tmp_path, 20) == list(range(20))
        assert kept.read_bytes() == right
        assert fault in caplog.text
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == [kept.name]


def test_a_cache_file_without_checksum_is_made_again_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers_of(tmp_path, 20)
    (kept,) = tmp_path.iterdir()
    right = kept.read_bytes()
    np.save(kept, np.full(20, -3))  # as older versions wrote it
    assert numbers_of(tmp_path, 20) == list(range(20))
    assert kept.read_bytes() == right
    assert caplog.text == ""


def test_a_link_or_a_pipe_in_place_of_a_cache_file_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    folder, target = tmp_path / "index", tmp_path / "target"
    numbers_of(folder, 20)
    (kept,) = folder.iterdir()
    kept.rename(target)
    right = target.read_bytes()
    target.write_bytes(b"the user's own")
    kept.symlink_to(target)
    assert numbers_of(folder, 20) == list(range(20))
    assert target.read_bytes() == b"the user's own"
    assert kept.read_bytes() == right
    assert not kept.is_symlink()
    kept.unlink()
    os.mkfifo(kept)
    assert numbers_of(folder, 20) == list(range(20))
    kept.unlink()
    kept.mkdir()
    with pytest.raises(SetupError, match=r"index: .*plan-.*\.npy cannot be read: it is a folder"):
        numbers_of(folder, 20)


def test_cached_arrays_have_any_shape_and_type(tmp_path: Path) -> None:
    for array in (
        np.zeros((0, 2, 3), np.int64),
        np.ones((3, 2), np.int32),
        np.asfortranarray(np.eye(3)),
        np.arange(6)[::2],
    ):
        for _ in range(2):
            found = files.keep(str(tmp_path), "x", [array.shape, str(array.dtype)], lambda array=array: array)
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)


@pytest.mark.parametrize("form", ["tar", "json"])
@pytest.mark.usefixtures("offline")
def test_a_damaged_or_foreign_index_gives_the_samples_of_the_data(
    shards: Path, lines: Path, tmp_path: Path, form: str
) -> None:
    index = tmp_path / "the-index"

    def sizes() -> list[int]:
        if form == "tar":
            return Tar(path=str(shards), fields=["cls"], index=str(index)).shard_sizes
        return streamed(lines, "json", index=str(index)).shard_sizes

    right = sizes()
    kept = sorted(index.iterdir())
    contents = [file.read_bytes() for file in kept]
    assert len(kept) > 1
    for number, file in enumerate(kept):
        for change in (
            contents[number - 1],
            contents[number][:-130] + b"\x01" + contents[number][-129:],
            contents[number][:150],
            b"",
        ):
            file.write_bytes(change)
            assert sizes() == right
            assert file.read_bytes() == contents[number]


@pytest.mark.usefixtures("offline")
def test_hugging_face_formats_that_unpickle_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for ending in ("pkl", "pickle"):
        (tmp_path / f"x.{ending}").write_bytes(pickle.dumps(Payload(marker)))
        for path in ("pandas", "pickle"):
            with pytest.raises(UsageError, match=f'path: "{path}" reads pickles'):
                hugging_face(path=path, data_files=str(tmp_path / f"x.{ending}"), split="train", columns=["x"])
        with pytest.raises((SetupError, UsageError)):
            hugging_face(path=str(tmp_path), split="train", columns=["x"])
    write_tar(tmp_path / "one.tar", [{"pkl": pickle.dumps(Payload(marker)), "cls": b"1"}])
    data = hugging_face(path="webdataset", data_files=str(tmp_path / "one.tar"), split="train", columns=["pkl", "cls"])
    assert len(data) == 1  # type: ignore[arg-type]
    assert not marker.exists()


# ---------------------------------------------------------------------------------------------- tokens
@pytest.mark.parametrize("form", ["npy", "bin"])
def test_token_files_are_memory_mapped_and_split_into_blocks(tmp_path: Path, form: str) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    path = tmp_path / f"tokens.{form}"
    np.save(path, tokens) if form == "npy" else tokens.tofile(path)
    data = Tokens(path=path, block_size=8, vocab_size=100)
    assert len(data) == 12
    inputs, targets = data.__getitems__([0, 11])
    assert inputs.tolist() == [list(range(8)), list(range(88, 96))]
    assert (targets - inputs).unique().tolist() == [1]
    assert inputs.dtype == targets.dtype == torch.int64
    packed = pickle.dumps(data)
    assert len(packed) < 1000  # the path of the file, not its content
    assert pickle.loads(packed)[3][0].tolist() == list(range(24, 32))
    with pytest.raises(UsageError, match=r"contains the token 99, but vocab_size is 90") as told:
        Tokens(path=path, block_size=9, vocab_size=90).__getitems__([10])
    assert told.value.hints == ("set vocab_size of the data and of the model to 100 or more",)


def test_invalid_token_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no such file"):
        Tokens(path=tmp_path / "none.bin")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(UsageError, match="3 bytes, not a multiple of the 2 bytes of uint16"):
        Tokens(path=tmp_path / "odd.bin")
    np.save(tmp_path / "floats.npy", np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"contains float64 of shape \[3, 2\]"):
        Tokens(path=tmp_path / "floats.npy")
    np.save(tmp_path / "few.npy", np.zeros(8, dtype=np.int32))
    with pytest.raises(ValueError, match="has 8 tokens; one sample of block_size = 8 needs 9"):
        Tokens(path=tmp_path / "few.npy", block_size=8)


def test_token_file_of_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, 50257, 40_000)
    path, options = tmp_path / "tokens.bin", {"path": tmp_path / "tokens.bin", "block_size": 8}
    drawn.astype(np.uint16).tofile(path)
    assert len(Tokens(**options)) == 4999  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"every second token of .* is at most 196, .* wider dtype than uint8") as told:
        Tokens(**options, dtype="uint8")  # type: ignore[arg-type]
    assert told.value.hints == ('set dtype = "uint16"',)
    for dtype in ("uint32", "int32", "int64"):
        with pytest.raises(UsageError, match=r"contains the token -?[0-9]+, which no vocabulary has"):
            Tokens(**options, dtype=dtype)  # type: ignore[arg-type]
    drawn.astype(np.uint32).tofile(path)
    with pytest.raises(UsageError, match=r"every second token of .* is 0") as told:
        Tokens(**options)  # type: ignore[arg-type]
    assert told.value.hints == ('set dtype = "uint32"',)
    assert Tokens(**options, dtype="uint32")[0][0].tolist() == drawn[:8].tolist()  # type: ignore[arg-type]


def test_token_file_with_the_header_of_llm_c_is_read_without_it(tmp_path: Path) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 100
    path = tmp_path / "tokens.bin"
    path.write_bytes(header.tobytes() + np.arange(100, dtype=np.uint16).tobytes())
    data = Tokens(path=path, block_size=8)
    assert (len(data), data[0][0].tolist()) == (12, list(range(8)))
    assert pickle.loads(pickle.dumps(data))[11][1].tolist() == list(range(89, 97))
    with pytest.raises(UsageError, match=r"has the header of llm\.c, for tokens of the dtype uint16, not uint32"):
        Tokens(path=path, block_size=8, dtype="uint32")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="has 90 tokens, but its header announces 100"):
        Tokens(path=path, block_size=8)


def test_token_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    with pytest.raises(UsageError, match=r"is an \.npy file, not plain numbers"):
        Tokens(path=tmp_path / "a.bin", block_size=8)
    (tmp_path / "a.bin").write_bytes(gzip.compress(bytes(2000)) + b"0")
    with pytest.raises((UsageError, ValueError), match=r"is compressed with gzip|not a multiple"):
        Tokens(path=tmp_path / "a.bin", block_size=8)
    np.save(tmp_path / "cut.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"cut\.npy is not a whole \.npy file"):
        Tokens(path=tmp_path / "cut.npy", block_size=8)
    np.save(tmp_path / "signed.npy", np.full(100, -1, dtype=np.int16))
    with pytest.raises(UsageError, match="contains the token -1, which no vocabulary has; it is at position 0"):
        Tokens(path=tmp_path / "signed.npy", block_size=8)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_hidden_and_left_behind_shards_of_a_folder_are_left_out_with_a_warning(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (f"a.{form}", f"._a.{form}", f"a.{form}~", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [file.name for file in files.find_files(str(tmp_path), f".{form}")] == [f"a.{form}"]
    assert [one.message for one in caplog.records] == [
        f"{tmp_path}: left out: 2 hidden or left behind by a program (._a.{form}, a.{form}~); "
        "1 with other endings (notes.txt)"
    ]


# ---------------------------------------------------------------------------------------------- parquet, hugging face
@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Writes two parquet files of 50 rows, in row groups of 20, 20 and 10."""
    import pyarrow
    from pyarrow import parquet

    for number in (0, 1):
        rows = range(number * 50, number * 50 + 50)
        table = pyarrow.table({"x": [[row / 2, 1.0] for row in rows], "y": list(rows), "word": ["w"] * 50})
        parquet.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=20)
    return tmp_path


def test_parquet_rows_are_read_once(tables: Path) -> None:
    data = Parquet(path=str(tables), columns=["x", "y"], shuffle=True, shuffle_buffer=3, interleave=(2, 2))
    assert list(data.shard_sizes) == [20, 20, 10] * 2
    micro_batches = list(opened(data).evaluation())
    assert sorted(one for micro in micro_batches for one in numbers(micro)) == list(range(100))
    x, y = micro_batches[0].data
    assert torch.equal(x, torch.stack([y / 2, torch.ones(16)], dim=1))
    assert [row[1] for row in data.iter_shard(1, epoch=0, skip=17)] == [37, 38, 39]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_floats_of_tables_become_float32(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    column = list(np.array([[0.5, 1.5], [2.5, 3.5]], kind))
    table = pa.table({"x": column, "y": [0.25, 0.75], "z": pa.array([[1], [2]], pa.list_(pa.int16()))})
    parquet.write_table(table, tmp_path / "one.parquet")
    columns, files = ["x", "y", "z"], str(tmp_path / "one.parquet")
    data: Any = hugging_face(path="parquet", data_files=files, split="train", columns=columns)
    read = Parquet(path=files, columns=columns)
    for batch in (default_collate([read.prepare(row) for row in read]), data.collate(data.__getitems__([0, 1]))):
        assert [part.dtype for part in batch] == [torch.float32, torch.float32, torch.int64]
        assert batch[0].tolist() == [[0.5, 1.5], [2.5, 3.5]]


@pytest.mark.parametrize("value", [None, [0.5, None], [[1], [1, 2]]])
def test_values_that_cannot_form_a_batch_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"columns: a (row|list)"):
        files.numeric(value)


def test_invalid_parquet_files_are_refused(tables: Path) -> None:
    with pytest.raises(UsageError, match="has no `z`") as told:
        Parquet(path=str(tables), columns=["z"])
    assert told.value.hints == ("it has x, y, word",)
    (tables / "part-2.parquet").write_bytes(b"nonsense")
    with pytest.raises(SetupError, match=r"part-2\.parquet is not a parquet file"):
        Parquet(path=str(tables), columns=["x"])


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("offline")
def test_hugging_face_reads_files(tables: Path) -> None:
    files = str(tables / "*.parquet")
    data: Any = hugging_face(path="parquet", data_files=files, split="train", columns=["x", "y"])
    assert len(data) == 100
    assert data.y.tolist() == list(range(100))  # for samplers
    x, y = data.collate(data.__getitems__([3, 7]))
    assert (x.tolist(), y.tolist()) == ([[1.5, 1.0], [3.5, 1.0]], [3, 7])
    assert data[3] == {"x": [1.5, 1.0], "y": 3}
    with pytest.raises(UsageError, match="columns: parquet has no `z`"):
        hugging_face(path="parquet", data_files=files, split="train", columns=["z"])
    with pytest.raises(UsageError, match="need streaming = true"):
        hugging_face(path="parquet", data_files=files, split="train", columns=["y"], shuffle=True)


def streamed(folder: Path, form: str = "parquet", **more: Any) -> Any:
    options = {"path": form, "columns": ["x", "y"], "split": "train", "streaming": True}
    return hugging_face(data_files=str(folder / f"*.{form}"), **(options | more))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Writes two files of 50 rows, in a format without row counts."""
    write_rows(tmp_path, "json", [50, 50])
    return tmp_path


def write_rows(folder: Path, form: str, sizes: list[int]) -> None:
    """Writes one file per size, with that number of rows; `y` is the number of the row."""
    import pyarrow
    from pyarrow import csv, feather

    first = 0
    for number, size in enumerate(sizes):
        path, places = folder / f"part-{number}.{form}", range(first, first + size)
        rows = [{"x": place / 2 if form == "csv" else [place / 2, 1.0], "y": place} for place in places]
        if form == "json":
            path.write_text("\n".join(map(json.dumps, rows)))
        elif form == "tar":
            samples = [{f"{key}.json": json.dumps(row[key]).encode() for key in row} for row in rows]
            write_tar(path, samples, first)
        else:
            write = csv.write_csv if form == "csv" else feather.write_feather
            write(pyarrow.Table.from_pylist(rows), str(path))
        first += size


@pytest.mark.usefixtures("offline")
def test_hugging_face_streams_with_and_without_known_shards(lines: Path) -> None:
    plain = streamed(lines, "json")
    assert not hasattr(plain, "__len__")
    assert [one for micro in opened(plain).evaluation() for one in numbers(micro)] == list(range(100))

    (lines / "lengths.txt").write_text("50\n50\n")
    shards = streamed(lines, "json", shard_lengths=lines / "lengths.txt", interleave=(2, 1))
    assert list(shards.shard_sizes) == [50, 50]
    found = [numbers(micro) for micro in opened(shards).evaluation()]
    assert sorted(one for step in found for one in step) == list(range(100))
    assert found[0] == [*range(8), *range(50, 58)]
    assert numbers(next(opened(shards).training(3))) == found[3]
    (lines / "lengths.txt").write_text("50\n")
    with pytest.raises(UsageError, match="has 1 numbers, but the dataset has 2 shards"):
        streamed(lines, "json", shard_lengths=lines / "lengths.txt")


ROWS = [20, 20, 10] * 2


@pytest.fixture(params=["parquet", "json"])
def sharded_stream(request: pytest.FixtureRequest, tmp_path: Path) -> Streams:
    """Returns a function that builds a stream in shards of `ROWS` rows: row groups, or counted files."""
    if request.param == "parquet":
        return partial(streamed, request.getfixturevalue("tables"))
    write_rows(tmp_path, "json", ROWS)
    return partial(streamed, tmp_path, "json", index=str(tmp_path / "index"))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_stream_shards_are_read_only_by_their_ranks_and_workers(
    sharded_stream: Streams, monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int
) -> None:
    """Reads every sample once over all ranks and loader processes; a resume opens only the shard that it continues."""
    opened_parts: list[tuple[int, int]] = []
    original = HuggingFaceShards.iter_shard

    def noted(self: HuggingFaceShards, part: int, *, epoch: int, skip: int) -> Any:
        opened_parts.append((part, skip))
        return original(self, part, epoch=epoch, skip=skip)

    monkeypatch.setattr(HuggingFaceShards, "iter_shard", noted)
    data = sharded_stream(interleave=(ranks, workers))
    assert list(data.shard_sizes) == ROWS
    whose = [(rank, worker) for rank in range(ranks) for worker in range(workers)]
    seen = {
        (rank, worker): [numbers(micro) for micro in hand(data, rank=rank, ranks=ranks, worker=worker, workers=workers)]
        for rank, worker in whose
    }
    used = [one for micros in seen.values() for micro in micros for one in micro]
    assert sorted(used) == list(range(100))
    assert len(opened_parts) <= len(ROWS) + ranks * workers  # each lane begins in the middle of a shard

    opened_parts.clear()
    rest = hand(data, rank=0, ranks=ranks, worker=0, workers=workers, start=workers)
    assert [numbers(micro) for micro in rest] == seen[0, 0][1:]
    (part, skip) = opened_parts[0]
    assert (part, skip) == (0, 4)  # the first step uses 4 samples of the first lane


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("workers", [0, 2])
def test_sharded_stream_resumes_in_loader_processes(sharded_stream: Streams, workers: int) -> None:
    data = sharded_stream(shuffle=True, shuffle_buffer=3)
    straight = [sorted(numbers(micro)) for micro, _ in zip(opened(data).training(0), range(14), strict=False)]
    assert sorted(one for step in straight[:7] for one in step) == list(range(100))
    assert sorted(one for step in straight[7:] for one in step) == list(range(100))
    again = opened(sharded_stream(shuffle=True, shuffle_buffer=3), workers=workers).training(5)
    assert [sorted(numbers(next(again))) for _ in range(4)] == straight[5:9]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("form", ["json", "csv", "arrow", "tar"])
def test_resume_does_not_read_finished_files(tmp_path: Path, form: str) -> None:
    """Deletes finished files: of 100 rows in six files, the last 24 are in two."""
    write_rows(tmp_path, form, ROWS)
    columns = {"columns": ["x.json", "y.json"], "path": "webdataset"} if form == "tar" else {}
    data = streamed(tmp_path, form, index=str(tmp_path / "index"), interleave=(1, 1), **columns)
    assert list(data.shard_sizes) == ROWS
    for number in range(4):
        (tmp_path / f"part-{number}.{form}").unlink()
    rest = hand(data, rank=0, ranks=1, worker=0, workers=1, start=19)
    assert [one for micro in rest for one in numbers(micro)] == list(range(76, 100))


@pytest.mark.usefixtures("offline")
def test_row_index_avoids_counting_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts only the changed file again."""
    counted: list[int] = []
    original = hf._rows

    def noted(data: Any, in_tables: bool, number: int, file: str) -> Any:
        counted.append(number)
        return original(data, in_tables, number, file)

    monkeypatch.setattr(hf, "_rows", noted)
    write_rows(tmp_path, "json", ROWS)
    kept = str(tmp_path / "index")
    first = streamed(tmp_path, "json", index=kept)
    assert sorted(counted) == [0, 1, 2, 3, 4, 5]
    again = streamed(tmp_path, "json", index=kept)
    assert len(counted) == 6
    assert list(again) == list(first)

    changed = tmp_path / "part-3.json"
    changed.write_text('{"x": [0.0, 1.0], "y": 0}\n' * 7)
    os.utime(changed, (2e9, 2e9))  # not within one tick of the clock
    assert streamed(tmp_path, "json", index=kept).shard_sizes == [20, 20, 10, 7, 20, 10]
    assert counted[6:] == [3]


@pytest.mark.usefixtures("offline")
def test_combined_splits_are_read_in_order(tables: Path, lines: Path) -> None:
    named = {"train": str(tables / "part-1.*"), "test": str(tables / "part-0.*")}
    for form in ("parquet", "json"):
        files = {split: path.replace("*", form) for split, path in named.items()}
        data: Any = hugging_face(
            path=form, data_files=files, split="train+test", columns=["y"], streaming=True, index=str(lines / "index")
        )
        assert sum(data.shard_sizes) == 100
        assert [row["y"] for row in data] == [*range(50, 100), *range(50)]


@pytest.mark.usefixtures("offline")
def test_stream_without_shards_logs_the_reason(lines: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ddpforge")
    assert isinstance(streamed(lines, "json"), Streamed)
    (lines / "part-1.json").unlink()
    assert isinstance(streamed(lines, "json", index=str(lines / "index")), Streamed)
    said = [record.message.partition(": ")[2] for record in caplog.records]
    assert said == [
        "set `index` to a folder, to count the rows of its 2 files once",
        "it does not consist of several files that can be read separately",
    ]


@pytest.mark.usefixtures("offline")
def test_invalid_index_options_and_files_are_refused(lines: Path) -> None:
    kept = str(lines / "index")
    with pytest.raises(UsageError, match="shard_lengths and index both determine"):
        streamed(lines, "json", index=kept, shard_lengths=lines / "lengths.txt")
    (lines / "part-1.json").write_text('{"x": [1')
    with pytest.raises(SetupError, match=r"part-1\.json cannot be read"):
        streamed(lines, "json", index=kept)


@pytest.mark.usefixtures("offline")
def test_error_for_rows_of_different_lengths_names_the_column(tmp_path: Path) -> None:
    rows = [{"x": [1.0] * (1 + number % 2), "y": number} for number in range(4)]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match=r"columns: rows have different shapes in `x`: \[1\] and \[2\]") as told:
        next(iter(opened(streamed(tmp_path, "json"), batch=4).evaluation()))
    assert "pad them" in told.value.hints[0]


# ---------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("lines", "options", "message", "hint"),
    [
        (
            ['{"x": 1, "y": 1}', '{"x": null, "y": 1}'],
            {},
            "row 2 has no value (null) in `x`, and so have 1 of 2",
            "fill",
        ),
        (['{"x": 1, "y": 1}'], {"split": "test"}, 'has no split "test"', "it has 'train'"),
        (['{"x": 1, "y": 1}'], {"split": "train[:8"}, 'has no split "train[:8": Unrecognized', '"train[:90%]"'),
        (['{"x": 1, "y": 1}'], {"split": "train[100%:]"}, "corresponds to no data", '"train[:90%]"'),
        ([], {}, "has no rows", "the file is empty"),
    ],
)
def test_mistakes_with_hugging_face_data_are_named_before_training(
    tmp_path: Path, lines: list[str], options: dict[str, Any], message: str, hint: str
) -> None:
    (tmp_path / "d.jsonl").write_text("".join(f"{line}\n" for line in lines))
    given: dict[str, Any] = {"path": "json", "split": "train", "columns": ["x", "y"]} | options
    with pytest.raises(UsageError) as caught:
        hugging_face(data_files=str(tmp_path / "d.jsonl"), **given)
    assert message in caught.value.message
    assert hint in "; ".join(caught.value.hints)
    assert caught.value.key in ("columns", "split", "data_files")


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere", "/nowhere/at/all"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(SetupError, match=f"there is no file or folder {path}"):
        hugging_face(path=path, split="train", columns=["x"])


def test_a_cut_tar_file_is_a_likely_cause_of_a_missing_field(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"cls": b"1", "txt": b"a"}, {"cls": b"2"}])
    with pytest.raises(UsageError, match="but no txt") as caught:
        Tar(path=str(tmp_path / "a.tar"), fields=["cls", "txt"])
    assert "the file is cut: copy it again" in caught.value.hints[0]


def test_a_name_on_the_hub_is_refused_at_once_if_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One short request, instead of those of datasets, which are repeated for half a minute. A cached name is read."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def unreachable(request: Any, timeout: float) -> Never:
        asked.append((request.full_url, timeout))
        raise URLError("no route to host")

    monkeypatch.setattr(hf, "urlopen", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it was looked up"))
    hf.hub_fault.cache_clear()
    try:
        with pytest.raises(SetupError, match=r"path: org/name cannot be loaded: https://hub cannot be reached \(no r"):
            hugging_face(path="org/name", split="train", columns=["x"])
        (tmp_path / "org___name").mkdir()
        with pytest.raises(pytest.fail.Exception, match="it was looked up"):
            hugging_face(path="org/name", split="train", columns=["x"])
        assert asked == [("https://hub", 5.0)]
    finally:
        hf.hub_fault.cache_clear()


@pytest.mark.parametrize("answer", [HTTPError("https://hub", 401, "", Message(), None), URLError(SSLError("old"))])
def test_a_hub_that_answers_with_an_error_is_reached(answer: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves errors of a login or of a certificate to the libraries of the hub."""

    def answers(*_: Any, **__: Any) -> Never:
        raise answer

    monkeypatch.setattr(hf, "urlopen", answers)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hf.hub_fault.cache_clear()
    try:
        assert hf.hub_fault() == ""
    finally:
        hf.hub_fault.cache_clear()
