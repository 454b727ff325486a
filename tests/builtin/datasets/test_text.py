"""The datasets `text`, `text_stream` and `text_classes`: samples, splits, tokens, refusals, streams."""

import pickle
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from ddpforge.builtin.datasets.text import StreamedText, Text, TextClasses
from ddpforge.errors import SetupError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "alphabet.txt"
    path.write_bytes(bytes(range(100)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes ten files of 20 equal bytes each: 0, 1, … 9, in folders, not in the order of their names."""
    for n in (7, 2, 9, 0, 4, 1, 8, 3, 6, 5):
        path = tmp_path / "texts" / f"{n // 5}" / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([n] * 20))
    return tmp_path / "texts"


# ---------------------------------------------------------------------------------------------- samples
def test_targets_are_the_inputs_shifted_by_one_token(file: Path) -> None:
    data = Text(path=file, split="train", block_size=8, seed=0)  # 90 bytes: 11 blocks and a target
    assert len(data) == 11
    inputs, targets = data[1]
    assert inputs.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert targets.tolist() == [9, 10, 11, 12, 13, 14, 15, 16]


def test_every_token_but_the_first_is_predicted_exactly_once(file: Path) -> None:
    data = Text(path=file, split="train", block_size=8, seed=0)
    _, targets = data.__getitems__(list(range(len(data))))
    assert targets.flatten().tolist() == list(range(1, 89))


def test_batch_equals_its_samples_fetched_one_by_one(file: Path) -> None:
    data, ids = Text(path=file, split="train", block_size=8, seed=0), [3, 0, 10, 3]
    batch = data.collate(data.__getitems__(ids))
    for part, tensor in enumerate(batch):
        assert (tensor.shape, tensor.dtype) == ((4, 8), torch.int64)
        assert torch.equal(tensor, torch.stack([data[i][part] for i in ids]))


def test_random_offsets_shift_samples_within_their_blocks_per_epoch(file: Path) -> None:
    """Uses 90 bytes, each equal to its index: 11 blocks of 8; the last block has no room to shift."""
    data = Text(path=file, split="train", block_size=8, random_offsets=True, seed=3)
    starts = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        inputs, targets = data.__getitems__(list(range(11)))
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
        starts.append(inputs[:, 0].tolist())
    assert starts[0] == starts[2] != starts[1]
    assert all(0 <= start - 8 * block < 8 for block, start in enumerate(starts[0]))
    assert starts[0][-1] == starts[1][-1] == 80
    other = Text(path=file, split="train", block_size=8, random_offsets=True, seed=4)
    assert other.__getitems__([0, 1, 2, 3])[0][:, 0].tolist() != starts[0][:4]


def test_pickle_has_one_byte_per_token(folder: Path) -> None:
    (folder / "large.txt").write_bytes(bytes(1_000_000))
    data = Text(path=folder, split="train", block_size=8, seed=0)
    pickled = pickle.dumps(data)
    assert 1_000_000 < len(pickled) < 1_010_000
    assert torch.equal(pickle.loads(pickled)[0][0], data[0][0])


# ---------------------------------------------------------------------------------------------- splits
@pytest.mark.parametrize(("fraction", "cut"), [(0.1, 90), (0.5, 50)])
def test_eval_split_of_a_file_is_its_tail(file: Path, fraction: float, cut: int) -> None:
    train = Text(path=file, split="train", block_size=1, eval_fraction=fraction, seed=0)
    held_out = Text(path=file, split="eval", block_size=1, eval_fraction=fraction, seed=0)
    assert tokens(train) == list(range(cut))
    assert tokens(held_out) == list(range(cut, 100))


@pytest.mark.parametrize(
    ("fraction", "held_out"), [(0.01, [5]), (0.2, [2, 7]), (0.3, [1, 5, 8]), (0.99, [0, 1, 2, 3, 5, 6, 7, 8, 9])]
)
def test_eval_split_of_a_folder_is_evenly_spread_files(folder: Path, fraction: float, held_out: list[int]) -> None:
    parts = {}
    split: Literal["train", "eval"]
    for split in ("train", "eval"):
        found = tokens(Text(path=folder, split=split, block_size=1, eval_fraction=fraction, seed=0))
        assert found == sorted(found)
        parts[split] = sorted(set(found))
        assert len(found) == 20 * len(parts[split])
    assert parts == {"eval": held_out, "train": [n for n in range(10) if n not in held_out]}


def test_suffixes_select_files_of_a_folder(folder: Path) -> None:
    (folder / "notes.md").write_bytes(bytes([77] * 20))
    assert 77 in tokens(Text(path=folder, split="train", block_size=1, seed=0))
    assert 77 not in tokens(Text(path=folder, split="train", block_size=1, suffixes=[".txt"], seed=0))


def test_default_text_is_the_source_of_the_standard_library() -> None:
    train, held_out = Text(split="train", seed=0), Text(split="eval", seed=0)
    assert 5_000_000 < (len(train) + len(held_out)) * 256 < 50_000_000
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.2
    assert torch.equal(train[1000][0], Text(split="train", seed=0)[1000][0])


# ---------------------------------------------------------------------------------------------- tokens
def test_characters_are_numbered_in_order_across_splits(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcabcab\nß", encoding="utf-8")
    train = Text(path=file, split="train", block_size=1, level="characters", eval_fraction=0.2, seed=0)
    held_out = Text(path=file, split="eval", block_size=1, level="characters", eval_fraction=0.2, seed=0)
    assert train.alphabet == held_out.alphabet == "\nabcß"
    assert train.vocab_size == held_out.vocab_size == 5
    assert tokens(train) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert tokens(held_out) == [0, 4]


def test_more_than_256_characters_have_different_numbers(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 500))), encoding="utf-8")
    data = Text(path=file, split="train", block_size=1, level="characters", seed=0)
    assert data.vocab_size == 500
    assert tokens(data) == list(range(450))


def test_bytes_have_a_vocabulary_of_256(file: Path) -> None:
    data = Text(path=file, split="train", block_size=8, seed=0)
    assert (data.vocab_size, data.block_size, data.level, data.random) == (256, 8, "bytes", False)


# ---------------------------------------------------------------------------------------------- refusals
def test_error_for_short_text_names_its_size_and_the_required_size(file: Path) -> None:
    with pytest.raises(ValueError, match=r"the eval split of .* has 10 bytes; .*block_size = 10 needs 11"):
        Text(path=file, split="eval", block_size=10, seed=0)
    assert len(Text(path=file, split="eval", block_size=9, seed=0)) == 1


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="has 0 characters"):
        Text(path=tmp_path / "empty.txt", split="train", level="characters", seed=0)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no such file or folder: .*nowhere"):
        Text(path=tmp_path / "nowhere", split="train", seed=0)


def test_suffix_without_files_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has no files ending in \['\.rst'\]"):
        Text(path=folder, split="train", suffixes=[".rst"], seed=0)


def test_suffixes_without_a_folder_are_refused(file: Path) -> None:
    for path in (file, None):
        with pytest.raises(ValueError, match="suffixes: they select files of a folder"):
            Text(path=path, split="train", suffixes=[".txt"], seed=0)


def test_file_that_is_not_utf8_is_refused_for_characters(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("straße".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8: .* position 4.*level = \"bytes\""):
        Text(path=tmp_path / "latin.txt", split="train", level="characters", seed=0)


# ---------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize("block_size", [1, 7, 898, 899])
def test_stream_has_the_samples_of_the_text_in_memory(tmp_path: Path, block_size: int) -> None:
    content = bytes(range(250)) * 4
    (tmp_path / "whole.txt").write_bytes(content)
    (tmp_path / "head.txt").write_bytes(content[:900])
    memory = Text(path=tmp_path / "whole.txt", split="train", block_size=block_size, seed=0)
    stream = StreamedText(path=tmp_path / "head.txt", block_size=block_size)

    streamed = stream.collate(list(stream))
    held = memory.__getitems__(list(range(len(memory))))
    assert torch.equal(streamed[0], held[0])
    assert torch.equal(streamed[1], held[1])
    assert streamed[0].dtype == torch.int64


def test_blocks_continue_over_the_ends_of_files_and_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.builtin.datasets.text._CHUNK", 7)
    stream = StreamedText(path=folder, block_size=30)
    assert [sample[0] for sample in stream] == [0, 1, 3, 4, 6, 7]
    assert all(len(sample) == 31 for sample in stream)


def test_stream_is_the_same_in_every_epoch_unless_files_are_shuffled(folder: Path) -> None:
    def epochs(shuffle_files: bool) -> list[list[bytes]]:
        stream = StreamedText(path=folder, block_size=19, shuffle_files=shuffle_files)
        passes = []
        for epoch in (0, 1, 0):
            stream.set_epoch(epoch)
            passes.append(list(stream))
        return passes

    first, second, again = epochs(shuffle_files=False)
    assert first == second == again
    first, second, again = epochs(shuffle_files=True)
    assert first == again != second


def test_stream_has_no_length_or_index_and_survives_pickling(folder: Path) -> None:
    stream = StreamedText(path=folder, block_size=8)
    assert not hasattr(stream, "__len__")
    assert not hasattr(stream, "__getitem__")
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)


def test_stream_too_short_for_one_sample_is_refused(file: Path) -> None:
    assert len(list(StreamedText(path=file, block_size=99))) == 1
    with pytest.raises(ValueError, match="has 100 bytes; one sample of block_size = 100 needs 101"):
        StreamedText(path=file, block_size=100)


def tokens(data: Text) -> list[int]:
    """Returns the tokens of a dataset with blocks of one token."""
    inputs, targets = data.__getitems__(list(range(len(data))))
    first: Tensor = inputs[0]
    return [*first.tolist(), *targets.flatten().tolist()]


def test_texts_are_classes_in_the_order_of_their_paths(tmp_path: Path) -> None:
    """Holds out whole files of a folder and the tail of a file; text that does not fill a block is skipped."""
    (tmp_path / "many").mkdir()
    for name in "abcde":
        (tmp_path / "many" / name).write_bytes(name.encode() * 6)
    (tmp_path / "one").write_bytes(bytes(range(40)))
    paths = [tmp_path / "one", tmp_path / "many"]
    parts = {
        "train": TextClasses(split="train", paths=paths, block_size=4),
        "eval": TextClasses(split="eval", paths=paths, block_size=4),
    }
    batches = {split: data.__getitems__(list(range(len(data)))) for split, data in parts.items()}
    assert batches["train"][1].tolist() == [0] * 8 + [1] * 6
    assert batches["eval"][1].tolist() == [0] * 2 + [1]
    assert batches["eval"][0].tolist() == [[32, 33, 34, 35], [36, 37, 38, 39], [ord("c")] * 4]
    assert parts["train"].classes == 2
    with pytest.raises(ValueError, match="has 8 bytes in this split, less than one block of 9"):
        TextClasses(split="eval", paths=paths, block_size=9)
    with pytest.raises(ValueError, match="two or more classes are needed"):
        TextClasses(split="eval", paths=paths[:1])


def test_packages_of_the_standard_library_are_classes() -> None:
    data = TextClasses(split="eval", block_size=128)
    tokens, classes = data.collate(data.__getitems__(list(range(len(data)))))
    assert data.classes == 10
    assert classes.bincount().min() > 0
    assert tokens.shape == (len(data), 128)
    assert len(TextClasses(split="train", block_size=128)) > 3 * len(data)


def test_hidden_files_leftovers_and_byte_order_marks_are_not_learnt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "books"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / "__MACOSX").mkdir()
    for name in (".hidden", ".ipynb_checkpoints/a.txt", "__MACOSX/a.txt", "a.txt~", "Thumbs.db", "#a.txt#"):
        (folder / name).write_bytes(b"left out " * 10)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"abcdefgh" * 4)
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbf" + b"ijklmnop" * 4)
    wanted = "abcdefgh" * 4 + "ijklmnop" * 4
    for level in ("bytes", "characters"):
        found = {}
        for split in ("train", "eval"):
            data = Text(path=folder, split=split, block_size=31, eval_fraction=0.5, seed=0, level=level)  # type: ignore[arg-type]
            found[split] = data.decode(data[0][0].tolist())
        assert sorted(found.values()) == [wanted[:31], wanted[32:63]]
    streamed = StreamedText(path=folder, block_size=63)
    assert b"".join(streamed) == wanted.encode()
    assert {one.message for one in caplog.records} == {
        f"{folder}: left out: 6 hidden or left behind by a program (#a.txt#, .hidden, .ipynb_checkpoints, …)"
    }
