"""Every damaged file is found and named, and the newest intact checkpoint is chosen instead."""

import errno
import random
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from checkpoint.doubles import checkpoint_of, steps_in

from ddpforge.checkpoint.format import read, write
from ddpforge.checkpoint.retention import newest
from ddpforge.errors import CheckpointError

FILES = ("COMMIT", "manifest.json", "model.safetensors", "optimizer.safetensors", "callbacks.safetensors")


@pytest.fixture
def path(folder: Path) -> Path:
    """A checkpoint of step 20, beside an older one of step 10."""
    write(folder, checkpoint_of(10))
    return write(folder, checkpoint_of(20))


def assert_refused_and_passed_over(path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        read(path)

    chosen, skipped = newest(path.parent)
    assert chosen is not None
    assert steps_in(read(chosen)) == {10}
    assert [(other, re.search(name, reason) is not None) for other, reason in skipped] == [(path, True)]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(path: Path, name: str) -> None:
    (path / name).unlink()

    assert_refused_and_passed_over(path, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(path: Path, name: str, share: float) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(len(content) * share)])

    assert_refused_and_passed_over(path, name)


@pytest.mark.parametrize("name", FILES)
def test_a_longer_file_is_named(path: Path, name: str) -> None:
    with (path / name).open("ab") as file:
        file.write(b"\0")

    assert_refused_and_passed_over(path, name)


def test_200_flipped_bits_are_all_found(path: Path) -> None:
    chance = random.Random(0)
    for _ in range(200):
        name = chance.choice(FILES)
        original = (path / name).read_bytes()
        content = bytearray(original)
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(content)

        with pytest.raises(CheckpointError, match="COMMIT|manifest.json" if name == "COMMIT" else name):
            read(path)
        (path / name).write_bytes(original)

    assert steps_in(read(path)) == {20}


def test_a_file_on_a_failing_disk_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path) -> str:
        if file.parent == path and file.name == "model.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return sha256(file.read_bytes()).hexdigest()

    monkeypatch.setattr("ddpforge.checkpoint.files.sha256", fail)

    assert_refused_and_passed_over(path, "model.safetensors is damaged: it cannot be read .Input/output error")


def test_files_of_another_checkpoint_do_not_pass(path: Path) -> None:
    """Half old, half new: every file is intact, the whole is not."""
    other = next(each for each in path.parent.glob("step-*") if each != path)
    shutil.copy(other / "optimizer.safetensors", path / "optimizer.safetensors")

    assert_refused_and_passed_over(path, "optimizer.safetensors")
