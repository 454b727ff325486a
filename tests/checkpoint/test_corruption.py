"""Detection of damaged files: the error names the file, and the newest intact checkpoint is used instead."""

import errno
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoint.doubles import Checkpoint, checkpoint_of, read, steps_in, write
from checkpoint.worlds import write_sharded

from ddpforge.checkpoint.manifest import read_manifest
from ddpforge.checkpoint.retention import newest
from ddpforge.errors import CheckpointError

Save = Callable[[Path, Checkpoint], Path]
LAYOUTS: dict[str, tuple[Save, tuple[str, ...]]] = {
    "one rank": (write, ("shard-00000-of-00001.safetensors", "rank-00000.json")),
    "full": (partial(write_sharded, full=True), ("shard-00001-of-00002.safetensors", "model.safetensors")),
    "two ranks": (
        write_sharded,
        (
            "shard-00000-of-00002.safetensors",
            "shard-00001-of-00002.safetensors",
            "rank-00000.json",
            "rank-00001.json",
        ),
    ),
}
FILES = [(layout, name) for layout, (_, names) in LAYOUTS.items() for name in ("COMMIT", "manifest.json", *names)]

each_file = pytest.mark.parametrize(("path", "name"), FILES, indirect=["path"], ids="-".join)
each_layout = pytest.mark.parametrize("path", LAYOUTS, indirect=True)
a_file_of_each_layout = pytest.mark.parametrize(
    ("path", "name"), [(layout, names[0]) for layout, (_, names) in LAYOUTS.items()], indirect=["path"]
)


@pytest.fixture
def path(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Saves step 10, then step 20, in the layout of the parameter; returns the path of step 20."""
    save, _ = LAYOUTS[request.param]
    save(folder, checkpoint_of(10))
    return save(folder, checkpoint_of(20))


def assert_refused_and_skipped(path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        read(path)

    chosen, skipped = newest(path.parent)
    assert chosen is not None
    assert steps_in(read(chosen)) == {10}
    assert [(other, re.search(name, reason) is not None) for other, reason in skipped] == [(path, True)]


@each_file
def test_error_names_a_missing_file(path: Path, name: str) -> None:
    (path / name).unlink()

    assert_refused_and_skipped(path, name)


@each_file
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_error_names_a_truncated_file(path: Path, name: str, share: float) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(len(content) * share)])

    assert_refused_and_skipped(path, name)


@each_file
def test_error_names_a_file_with_extra_bytes(path: Path, name: str) -> None:
    with (path / name).open("ab") as file:
        file.write(b"\0")

    assert_refused_and_skipped(path, name)


@each_layout
def test_each_of_200_flipped_bits_is_detected(path: Path) -> None:
    chance = random.Random(0)
    names = sorted(file.name for file in path.iterdir())
    assert len(names) >= 4
    for _ in range(200):
        name = chance.choice(names)
        original = (path / name).read_bytes()
        content = bytearray(original)
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(content)

        for action in (read, lambda each: read_manifest(each, verify=True)):
            with pytest.raises(CheckpointError, match="COMMIT|manifest.json" if name == "COMMIT" else name):
                action(path)
        (path / name).write_bytes(original)

    assert steps_in(read(path)) == {20}


@a_file_of_each_layout
def test_error_names_a_file_that_cannot_be_read(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], start: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path / name):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, start)

    monkeypatch.setattr("os.preadv", fail)

    assert_refused_and_skipped(path, f"{name} is damaged: it cannot be read .Input/output error")


@a_file_of_each_layout
def test_a_file_of_another_checkpoint_is_refused(path: Path, name: str) -> None:
    """Refused although each file is intact."""
    other = next(each for each in path.parent.glob("step-*") if each != path)
    shutil.copy(other / name, path / name)

    assert_refused_and_skipped(path, name)
