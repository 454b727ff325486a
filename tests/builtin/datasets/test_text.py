"""What `text` and `text_stream` promise."""

import pickle
from pathlib import Path

import pytest
import torch

from ddpforge.builtin.datasets.text import Text, TextClasses


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "alphabet.txt"
    path.write_bytes(bytes(range(100)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten files of 20 equal bytes each: 0, 1, … 9, in folders, written in another order than that of their names."""
    for n in (7, 2, 9, 0, 4, 1, 8, 3, 6, 5):
        path = tmp_path / "texts" / f"{n // 5}" / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([n] * 20))
    return tmp_path / "texts"


# ---------------------------------------------------------------------------------------------- samples
def test_targets_are_the_inputs_one_token_later_and_samples_follow_one_another(file: Path) -> None:
    data = Text(path=file, split="train", block_size=8)  # 90 bytes: 11 blocks and a target
    assert len(data) == 11
    inputs, targets = data[1]
    assert inputs.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert targets.tolist() == [9, 10, 11, 12, 13, 14, 15, 16]


def test_every_token_but_the_first_is_predicted_exactly_once(file: Path) -> None:
    data = Text(path=file, split="train", block_size=8)
    _, targets = data.__getitems__(list(range(len(data))))
    assert targets.flatten().tolist() == list(range(1, 89))


def test_a_batch_is_what_fetching_its_samples_one_by_one_gives(file: Path) -> None:
    data, ids = Text(path=file, split="train", block_size=8), [3, 0, 10, 3]
    batch = data.collate(data.__getitems__(ids))
    for part, tensor in enumerate(batch):
        assert (tensor.shape, tensor.dtype) == ((4, 8), torch.int64)
        assert torch.equal(tensor, torch.stack([data[i][part] for i in ids]))


def test_random_offsets_move_samples_within_their_blocks_anew_every_epoch(file: Path) -> None:
    """90 bytes, each its own place: 11 blocks of 8, the last of which has no room to move."""
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


def test_it_survives_pickling_at_the_cost_of_one_byte_per_token(folder: Path) -> None:
    (folder / "large.txt").write_bytes(bytes(1_000_000))
    data = Text(path=folder, split="train", block_size=8)
    pickled = pickle.dumps(data)
    assert 1_000_000 < len(pickled) < 1_010_000
    assert torch.equal(pickle.loads(pickled)[0][0], data[0][0])


# ---------------------------------------------------------------------------------------------- splits
@pytest.mark.parametrize(("fraction", "cut"), [(0.1, 90), (0.5, 50)])
def test_of_one_file_the_tail_is_held_out(file: Path, fraction: float, cut: int) -> None:
    train = Text(path=file, split="train", block_size=1, eval_fraction=fraction)
    held_out = Text(path=file, split="eval", block_size=1, eval_fraction=fraction)
    assert tokens(train) == list(range(cut))
    assert tokens(held_out) == list(range(cut, 100))


@pytest.mark.parametrize(
    ("fraction", "held_out"), [(0.01, [5]), (0.2, [2, 7]), (0.3, [1, 5, 8]), (0.99, [0, 1, 2, 3, 5, 6, 7, 8, 9])]
)
def test_of_a_folder_whole_files_are_held_out_evenly_spread(folder: Path, fraction: float, held_out: list[int]) -> None:
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
    with pytest.raises(ValueError, match="holds 8 bytes in this split, less than one block of 9"):
        TextClasses(split="eval", paths=paths, block_size=9)
    with pytest.raises(ValueError, match="classes are two or more"):
        TextClasses(split="eval", paths=[tmp_path / "one"])


def test_packages_of_the_standard_library_are_classes() -> None:
    data = TextClasses(split="eval", block_size=128)
    tokens, classes = data.collate(data.__getitems__(list(range(len(data)))))
    assert data.classes == 10
    assert classes.bincount().min() > 0
    assert tokens.shape == (len(data), 128)
    assert len(TextClasses(split="train", block_size=128)) > 3 * len(data)
