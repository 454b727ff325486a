"""What the operations on a disk ask of the operating system, and in which order: everything durable rests on it."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoint.doubles import checkpoint_of
from checkpoint.worlds import checkpoints

from ddpforge import disk
from ddpforge.ranks.writers import Peers

MiB = 1 << 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the operating system is asked for that must not change its order, by the names of files.

    A file is followed by its size when it was synced: what a buffer of Python's still held is not in it.
    """
    found: list[tuple[str, ...]] = []
    rename, rmdir = os.rename, os.rmdir

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append(("sync", path.name) if path.is_dir() else ("sync", path.name, str(path.stat().st_size)))

    def renamed(old: Any, new: Any) -> None:
        found.append(("rename", Path(old).name, Path(new).name))
        rename(old, new)

    def removed(path: Any, **options: Any) -> None:
        found.append(("remove", Path(path).name))
        rmdir(path, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "rmdir", removed)
    return found


# ---------------------------------------------------------------------------------------------- one after the other
def test_a_save_reaches_the_disk_before_it_counts_and_counts_before_older_ones_go(
    folder: Path, calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter(["aaaa", "bbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda count: next(ends))
    saving = checkpoints(folder, Peers.alone(), async_save=False, keep={"last": 1})
    saving.save(checkpoint_of(1), checkpoint_of(1).share)
    saving.wait()
    calls.clear()

    saving.save(checkpoint_of(2), checkpoint_of(2).share)
    path = saving.wait()
    saving.finish()

    def synced(name: str) -> tuple[str, ...]:
        return "sync", name, str((path / name).stat().st_size)

    draft, hint = ".step-000000002-bbbb.tmp", len('{"dir": "step-000000002-bbbb", "step": 2}')
    assert calls == [
        synced("shard-00000-of-00001.safetensors"),
        synced("rank-00000.json"),
        ("sync", draft),
        synced("manifest.json"),
        synced("COMMIT"),
        ("sync", draft),
        ("sync", ".latest.json.tmp", str(hint)),
        ("rename", draft, "step-000000002-bbbb"),
        ("sync", folder.name),
        ("rename", ".latest.json.tmp", "latest.json"),
        ("sync", folder.name),
        ("rename", "step-000000001-aaaa", ".trash-step-000000001-aaaa"),
        ("sync", folder.name),
        ("remove", ".trash-step-000000001-aaaa"),
    ]


def test_a_file_is_replaced_by_one_that_is_on_the_disk(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b"old")
    (tmp_path / ".status.json.tmp").write_bytes(b"of an attempt that was killed")

    disk.replace(path, b"newer")

    assert path.read_bytes() == b"newer"
    assert calls == [
        ("sync", ".status.json.tmp", "5"),
        ("rename", ".status.json.tmp", "status.json"),
        ("sync", tmp_path.name),
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_a_file_that_need_not_survive_a_power_cut_is_replaced_without_waiting(
    tmp_path: Path, calls: list[tuple[str, ...]]
) -> None:
    path = tmp_path / "shown.txt"
    (tmp_path / ".shown.txt.tmp").write_bytes(b"of an attempt that was killed")
    disk.replace(path, b"new", waits=False)
    assert path.read_bytes() == b"new"
    assert calls == [("rename", ".shown.txt.tmp", "shown.txt")]


@pytest.mark.parametrize("name", ["step-000000001-aaaa", ".step-000000001-aaaa.tmp"])
def test_a_folder_loses_its_name_before_its_contents(tmp_path: Path, calls: list[tuple[str, ...]], name: str) -> None:
    (tmp_path / name / "inner").mkdir(parents=True)
    trash = f".trash-{name.lstrip('.')}"

    disk.remove(disk.put_away(tmp_path / name))

    assert calls == [("rename", name, trash), ("sync", tmp_path.name), ("remove", "inner"), ("remove", trash)]
    assert list(tmp_path.iterdir()) == []


def test_a_long_file_is_synced_again_and_again(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    """Every GiB: as if that were 4 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_MOST_UNSYNCED", 4 * MiB)
        disk.write_new(tmp_path / "long", [bytes(3 * MiB), bytes(6 * MiB + 5)])

    assert [int(size) for _, _, size in calls] == [4 * MiB, 8 * MiB, 9 * MiB + 5]


# ---------------------------------------------------------------------------------------------- one by one
def test_a_folder_is_synced_and_closed_again_even_when_the_disk_refuses(
    tmp_path: Path, calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.sync_folder(tmp_path)
    assert calls == [("sync", tmp_path.name)]
    opened: list[int] = []

    def refuse(descriptor: int) -> None:
        opened.append(descriptor)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync_folder(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        disk.sync_folder(tmp_path / "file")


def test_nothing_that_is_there_is_made_or_written_over(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")

    with pytest.raises(FileExistsError):
        disk.write_new(tmp_path / "there", [b"new"])
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "there")
    with pytest.raises(FileNotFoundError):
        disk.make_folder(tmp_path / "missing" / "inner")

    assert (tmp_path / "there").read_bytes() == b"old"


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "file").touch()

    for name in ("link", "lost", "file", "never there"):
        disk.remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]

    disk.remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", [[], [0], [5, 0, 1], [MiB], [MiB + 1, 2 * MiB, 3]])
def test_writing_tells_the_size_and_the_hash_of_each_block(tmp_path: Path, sizes: list[int]) -> None:
    blocks = [bytes([number + 1]) * size for number, size in enumerate(sizes)]

    size, hashes = disk.write_new(tmp_path / "file", blocks)

    content = b"".join(blocks)
    assert (tmp_path / "file").read_bytes() == content
    assert size == len(content)
    assert hashes == [xxhash.xxh3_128_hexdigest(block) for block in blocks]
    assert disk.sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_hash_of_a_link_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")

    with pytest.raises(OSError, match="link"):
        disk.sha256(tmp_path / "link")


@pytest.mark.parametrize(
    "act",
    [
        lambda file: disk.write(file, b"some"),
        lambda file: disk.sync(file),
        lambda file: disk.proceed(),
    ],
    ids=["write", "sync", "verify"],
)
def test_whatever_a_disk_did_is_progress(tmp_path: Path, act: Callable[[Any], None]) -> None:
    with disk.create(tmp_path / "file") as file:
        before = disk.progress()
        act(file)
        assert disk.progress() > before


def test_many_short_blocks_are_synced_once(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    """As those of tensors of a few elements are: a sync for every so many blocks would be one for nothing."""
    disk.write_new(tmp_path / "file", [b"1234"] * 5000)
    assert calls == [("sync", "file", "20000")]


# ---------------------------------------------------------------------------------------------- anybody's files
ODD: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(__file__),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("mode", ["rb", "r+b", "ab", "a+b"])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_regular_file_is_neither_opened_nor_waited_for(
    tmp_path: Path, make: Callable[[Path], object], mode: Any
) -> None:
    make(path := tmp_path / "file")
    with pytest.raises(disk.NotPlain):
        disk.open_plain(path, mode)
    assert not disk.is_plain(path)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_takes_a_files_place_after_it_was_looked_at_is_not_opened(
    tmp_path: Path, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "file").write_text("mine")
    looked = disk.plain_size

    def swapped(path: Path) -> int:
        size = looked(path)
        path.unlink()
        make(path)
        return size

    monkeypatch.setattr(disk, "plain_size", swapped)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"symbolic links|not a regular file"):
        disk.open_plain(path)
    assert len(os.listdir("/proc/self/fd")) == before, "nothing is left open"


def test_a_file_is_made_where_it_is_appended_to_and_not_where_it_is_read(tmp_path: Path) -> None:
    for mode in ("rb", "r+b"):
        with pytest.raises(FileNotFoundError):
            disk.open_plain(tmp_path / "file", mode)  # type: ignore[arg-type]
    with disk.open_plain(tmp_path / "file", "ab") as file:
        file.write(b"one")
    with disk.open_plain(tmp_path / "file", "a+b") as file:
        file.write(b"two")
    assert disk.read_plain(tmp_path / "file", 6) == b"onetwo"
    with pytest.raises(OSError, match="it has more than 5 bytes"):
        disk.read_plain(tmp_path / "file", 5)


def test_folders_on_the_way_to_a_file_are_no_links(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run / "logs", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file").write_text("mine")
    (run / "linked").symlink_to(elsewhere)
    assert disk.read_plain(run / "logs" / "file", 9, within=run) == b"mine"
    assert disk.read_plain(run / "linked" / "file", 9) == b"mine"
    for way in (run / "linked", run / "logs" / "file"):
        with pytest.raises(OSError, match="is a link, or no folder"):
            disk.read_plain(way / "file", 9, within=run)
    disk.refuse_linked_folders(run / "absent" / "too", run)


def test_odd_entries_are_found_at_every_depth_or_in_one_folder(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    for folder in (tmp_path, deep):
        (folder / "file").write_text("mine")
        os.mkfifo(folder / "pipe")
    (tmp_path / "link").symlink_to(deep)
    assert list(disk.odd_entries(tmp_path, deep=False)) == [tmp_path / "link", tmp_path / "pipe"]
    assert list(disk.odd_entries(tmp_path, deep=True)) == [deep / "pipe", tmp_path / "link", tmp_path / "pipe"]
    assert list(disk.odd_entries(tmp_path / "absent", deep=True)) == []


def test_what_a_killed_attempt_left_is_no_hindrance_to_the_next(tmp_path: Path) -> None:
    (tmp_path / ".status.json.tmp").write_text("half")
    disk.replace(tmp_path / "status.json", b"{}")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("status.json", "{}")]
