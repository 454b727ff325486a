"""The checkpoint manager: saves in the background, reports failures on all ranks, prunes, and opens the newest intact
checkpoint."""

import logging
import mmap
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.doubles import Checkpoint, checkpoint_of, read, reseal, steps_in, tensors_of_every_kind, write
from checkpoint.worlds import FACTS, HANGS, World, checkpoints, counted, share_of
from torch import Tensor

from ddpforge import disk
from ddpforge.checkpoint import manager, manifest, retention, staging, writer
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.retention import committed
from ddpforge.checkpoint.state import Held, RankState
from ddpforge.checkpoint.untrusted import PlainFile
from ddpforge.errors import CheckpointError, ExitCode, PeerFailed
from ddpforge.interfaces import CanonicalState, device_kind
from ddpforge.interfaces.regions import Box, TensorShard
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.schema import CheckpointSection


def alone(folder: Path, **settings: Any) -> Checkpoints:
    return checkpoints(folder, WriterGroup.alone(), **settings)


def save(saving: Checkpoints, checkpoint: Checkpoint) -> Path:
    saving.save(checkpoint, checkpoint.share)
    return saving.wait()


def on_each(
    folder: Path, action: Callable[[Checkpoints, WriterGroup], Any], ranks: int = 2, **settings: Any
) -> list[Any]:
    """Returns what `action` returns or raises, for each rank."""
    return World(ranks).run(lambda peers: action(checkpoints(folder, peers, **settings), peers))


def step_of(saving: Checkpoints, path: Path | None = None) -> int:
    reader = saving.open(path)
    assert reader is not None
    return reader.metadata.step


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks the disk until the event is set."""
    answers = threading.Event()
    real = disk.make_folder

    def wait_for_it(path: Path) -> None:
        assert answers.wait(HANGS)
        real(path)

    monkeypatch.setattr(disk, "make_folder", wait_for_it)
    yield answers
    answers.set()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """Records the state passed to the writer of shards."""
    found: list[Held] = []
    real = writer.write_shard

    def watch(path: Path, held: Held) -> Any:
        found.append(held)
        return real(path, held)

    monkeypatch.setattr(writer, "write_shard", watch)
    return found


def addresses(held: Held) -> list[int]:
    return [part.tensor.data_ptr() for section in held.values() for parts in section.values() for part in parts]


@pytest.fixture
def ddpforge_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    return caplog


# ---------------------------------------------------------------------------------------------- in the background
def test_the_state_may_change_before_it_is_written(folder: Path, stalled: threading.Event) -> None:
    live: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors_of_every_kind().items()}
    live["parameter"] = torch.nn.Parameter(live["parameter"])
    live["transposed"] = torch.randn(4, 3).t()
    live["channels last"] = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    step, lists = torch.tensor(3.0), [1]
    callbacks: dict[str, dict[str, Any]] = {"ema": {"w": torch.ones(3), "n": 3}}
    facts = replace(FACTS, position={"left out": lists}, metrics=(metrics := {"eval/loss": 1.0}))
    saving = alone(folder)

    saving.save(facts, RankState.of(CanonicalState(live, {"nan": {"step": step, "m": live["nan"]}}), callbacks))
    assert (saving.pending, saving.ready()) == (True, False)
    saving.before_update()  # a thread copies weights that an optimizer updates, and their state
    with torch.no_grad():
        for tensor in (*live.values(), step, callbacks["ema"]["w"]):
            tensor.zero_()
    live.clear()
    callbacks["ema"]["n"] = 4
    lists.append(2)
    metrics["eval/loss"] = 2.0
    stalled.set()

    found = read(saving.wait())
    assert not saving.pending
    for name, tensor in before.items():
        assert torch.equal(found.state.model[name].view(-1).view(torch.uint8), flat_bytes(tensor)), name
    assert found.state.optimizer["nan"]["step"] == 3
    assert found.callbacks["ema"]["w"].eq(1).all()
    assert (found.callbacks["ema"]["n"], found.position, found.metrics) == (3, {"left out": [1]}, {"eval/loss": 1.0})


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def test_the_training_thread_neither_communicates_nor_accesses_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = threading.current_thread()
    busy: list[str] = []

    def not_here(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            if threading.current_thread() is training:
                busy.append(name)
            return action(*arguments)

        return act

    for name in ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove"):
        monkeypatch.setattr(disk, name, not_here(name, getattr(disk, name)))
    ranks = SingleRank()
    ranks.all_gather_object = not_here("everyone", ranks.all_gather_object)  # type: ignore[method-assign]
    saving = checkpoints(folder, WriterGroup(ranks=ranks), keep={"last": 1})
    for step in (1, 2, 3):
        save(saving, checkpoint_of(step))

    assert not busy
    assert step_of(saving) == 3
    assert busy == ["everyone"], "calls of the training thread are recorded"


def test_each_save_copies_into_the_same_memory(folder: Path, written: list[Held]) -> None:
    saving, small = alone(folder), checkpoint_of(1, callbacks={})
    for checkpoint in (small, checkpoint_of(2), checkpoint_of(3), small):
        save(saving, checkpoint)

    first, second, third, fourth = map(addresses, written)
    assert len(second) > len(first)
    assert second == third
    assert set(fourth) < set(third), "a smaller copy needs no new memory"


def test_each_rank_copies_only_its_share_of_replicated_tensors(folder: Path, written: list[Held]) -> None:
    model = {f"layer {i}": torch.randn(1 << 18) for i in range(8)}

    def act(saving: Checkpoints, peers: WriterGroup) -> int:
        saving.save(FACTS, RankState.of(CanonicalState(model, {})))
        saving.wait()
        return len(saving._staging._memory.bytes)  # type: ignore[union-attr]

    assert on_each(folder, act, ranks=4) == [2 << 20] * 4


def test_a_synchronous_save_writes_the_live_tensors_before_it_returns(folder: Path, written: list[Held]) -> None:
    saving, weight = alone(folder, async_save=False), torch.ones(4, 5)

    saving.save(FACTS, RankState.of(CanonicalState({"w": weight}, {})))

    assert saving.pending
    assert saving.ready()
    assert addresses(written[0]) == [weight.data_ptr()]
    assert [path for path, _ in committed(folder)[0]] == [saving.wait()]
    assert (saving.pending, saving.ready()) == (False, False)


@pytest.mark.parametrize("background", [True, False])
def test_only_the_full_layout_writes_the_model_as_one_file(folder: Path, background: bool) -> None:
    found = {
        layout: sorted(
            file.name for file in save(alone(folder, async_save=background, **settings), checkpoint).iterdir()
        )
        for layout, settings, checkpoint in (
            ("full", {"layout": "full"}, checkpoint_of(1)),
            ("sharded", {"layout": "sharded"}, checkpoint_of(2)),
            ("by default", {}, checkpoint_of(3)),
        )
    }

    sharded = ["COMMIT", "manifest.json", "rank-00000.json", "shard-00000-of-00001.safetensors"]
    assert found == {"full": sorted([*sharded, "model.safetensors"]), "sharded": sharded, "by default": sharded}


def test_ready_is_true_once_the_writer_is_done(folder: Path, stalled: threading.Event) -> None:
    saving = alone(folder)
    assert not saving.ready()

    saving.save(checkpoint_of(1), checkpoint_of(1).share)
    assert not saving.ready()
    stalled.set()
    wait([saving._saving], timeout=HANGS)  # type: ignore[list-item]
    assert saving.ready()
    assert saving.pending
    assert steps_in(read(saving.wait())) == {1}


def test_wait_without_a_save_is_an_error(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="no checkpoint is being saved"):
        alone(folder).wait()


def test_an_interrupted_wait_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    saving = alone(folder)
    saving.save(checkpoint_of(1), checkpoint_of(1).share)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saving.wait()

    assert saving.pending
    assert steps_in(read(saving.wait())) == {1}


def test_a_second_save_waits_for_the_first(
    folder: Path, stalled: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = alone(folder)
    saving.save(checkpoint_of(1), checkpoint_of(1).share)
    monkeypatch.setattr(
        manager, "wait", lambda futures: (stalled.set(), wait(futures))
    )  # the disk unblocks once `wait` is called

    saving.save(checkpoint_of(2), checkpoint_of(2).share)

    assert stalled.is_set()
    assert steps_in(read(saving.wait())) == {2}
    assert [steps_in(read(path)) for path, _ in committed(folder)[0]] == [{2}, {1}]


def test_open_waits_for_a_running_save_and_does_not_remove_it(
    folder: Path, stalled: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = alone(folder)
    saving.save(checkpoint_of(1), checkpoint_of(1).share)
    monkeypatch.setattr(manager, "wait", lambda futures: (stalled.set(), wait(futures)))

    assert step_of(saving) == 1
    assert steps_in(read(saving.wait())) == {1}


# ---------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_wait_raises_the_failure_of_one_rank_on_all_ranks_and_the_next_save_works(
    folder: Path, rank: int, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer.write_shard

    def fail(path: Path, held: Held) -> Any:
        if f"shard-0000{rank}" in path.name and ".step-000000001" in str(path):
            raise OSError(5, "Input/output error")
        return real(path, held)

    def act(saving: Checkpoints, peers: WriterGroup) -> tuple[str, Path]:
        checkpoint = checkpoint_of(1)
        saving.save(checkpoint, share_of(checkpoint, peers.rank, 2))
        with pytest.raises(CheckpointError) as caught:
            saving.wait()
        assert not saving.pending
        checkpoint = checkpoint_of(2)
        saving.save(checkpoint, share_of(checkpoint, peers.rank, 2))
        return caught.value.message, saving.wait()

    monkeypatch.setattr(writer, "write_shard", fail)
    first, second = on_each(folder, act, async_save=background)

    assert first == second
    message, path = first
    assert message.startswith(f"rank {rank}: the checkpoint of step 1 could not be written to {folder}: Input/output")
    assert steps_in(read(path)) == {2}
    assert {each.name for each in folder.iterdir()} == {path.name, "latest.json"}


@pytest.mark.parametrize("background", [False, True])
def test_unsupported_state_on_one_rank_fails_the_save_on_all_ranks(folder: Path, background: bool) -> None:
    def act(saving: Checkpoints, peers: WriterGroup) -> None:
        bad = torch.ones(2).to_sparse() if peers.rank else torch.ones(2)
        saving.save(FACTS, RankState(model={}, callbacks={"mine": {"x": TensorShard.whole(torch.ones(2)), "y": bad}}))
        saving.wait()

    for result in on_each(folder, act, async_save=background):
        assert isinstance(result, CheckpointError)
        assert result.message.startswith("rank 1: y in the state of callback mine cannot be saved: it is not dense")
    assert not list(folder.iterdir())


def test_the_next_save_raises_an_unreported_failure_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saving = alone(tmp_path / "file")
    saving.save(checkpoint_of(1), checkpoint_of(1).share)

    with pytest.raises(CheckpointError, match="rank 0: the checkpoint of step 1 could not be written"):
        saving.save(checkpoint_of(2), checkpoint_of(2).share)
    assert not saving.pending


def test_too_little_host_memory_for_a_copy_is_an_error_with_a_hint_on_every_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.empty

    def refuse(*arguments: Any, **options: Any) -> Tensor:
        if threading.current_thread().name == "rank-1":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*arguments, **options)

    def act(saving: Checkpoints, peers: WriterGroup) -> None:
        saving.save(checkpoint_of(1), share_of(checkpoint_of(1), peers.rank, 2))
        saving.wait()

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        results = on_each(folder, act)

    for result in results:
        assert isinstance(result, CheckpointError)
        assert "rank 1: not enough host memory for a copy of" in result.message
        assert "checkpoint.async_save = false" in result.hints[0]


# ---------------------------------------------------------------------------------------------- pruning
def test_save_prunes_by_the_keep_section_of_the_recipe(folder: Path) -> None:
    saving = alone(folder, keep={"last": 1, "best": 1, "monitor": "eval/loss"})
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        save(saving, checkpoint_of(step, metrics={"eval/loss": loss}))

    assert [found.step for _, found in committed(folder)[0]] == [4, 2]
    assert saving.is_best({"eval/loss": 0.5})
    assert not saving.is_best({"eval/loss": 1.0})


def test_milestones_are_kept_once_the_length_of_an_epoch_is_known(folder: Path) -> None:
    section = CheckpointSection.model_validate({"keep": {"last": 1}})
    peers = WriterGroup.alone()
    saving = Checkpoints(folder, section, peers=peers, ranks=peers.ranks, keep_every=3)
    for step in range(8):
        save(saving, checkpoint_of(step))

    assert [found.step for _, found in committed(folder)[0]] == [7, 6, 3]


def test_all_ranks_save_and_only_rank_0_prunes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, pruning = retention.prune, set()

    def watch(*arguments: Any, **options: Any) -> list[Path]:
        pruning.add(threading.current_thread().name)
        return real(*arguments, **options)

    monkeypatch.setattr(retention, "prune", watch)

    def act(saving: Checkpoints, peers: WriterGroup) -> list[Path]:
        paths = []
        for step in (10, 20, 30):
            saving.save(checkpoint_of(step), share_of(checkpoint_of(step), peers.rank, 2))
            paths.append(saving.wait())
        return paths

    first, second = on_each(folder, act, keep={"last": 2})

    assert first == second
    assert pruning == {"checkpoint writer of rank-0"}
    assert [path for path, _ in committed(folder)[0]] == [first[2], first[1]]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(
    folder: Path, ddpforge_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "put_away", refuse)
    saving = alone(folder, keep={"last": 1})

    first, second = (save(saving, checkpoint_of(step)) for step in (1, 2))

    assert f"older checkpoints were not removed: {first} could not be removed: Permission denied" in ddpforge_log.text
    assert "Traceback" not in ddpforge_log.text
    assert [path for path, _ in committed(folder)[0]] == [second, first]


def test_only_the_next_save_waits_for_the_removal_of_an_old_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may_go = disk.remove, threading.Event()

    def slowly(path: Path) -> None:
        assert path.name.startswith(".latest") or may_go.wait(HANGS)
        real(path)

    monkeypatch.setattr(disk, "remove", slowly)
    saving = alone(folder, keep={"last": 1}, async_save=False)
    first, second = (save(saving, checkpoint_of(step)) for step in (1, 2))
    hidden = folder / f".trash-{first.name}"

    assert [path for path, _ in committed(folder)[0]] == [second]
    assert hidden.is_dir()
    threading.Timer(0.1, may_go.set).start()
    third = save(saving, checkpoint_of(3))
    assert not hidden.exists()
    saving.finish()
    assert {path.name for path in folder.iterdir()} == {third.name, "latest.json"}


def test_a_failed_removal_in_the_background_is_a_warning(
    folder: Path, ddpforge_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.remove

    def refuse(path: Path) -> None:
        if path.name.startswith(".trash"):
            raise PermissionError(13, "Permission denied", str(path))
        real(path)

    monkeypatch.setattr(disk, "remove", refuse)
    saving = alone(folder, keep={"last": 1})
    first, _ = (save(saving, checkpoint_of(step)) for step in (1, 2))
    saving.finish()

    assert "older checkpoints were not removed: [Errno 13] Permission denied" in ddpforge_log.text
    assert f".trash-{first.name}" in ddpforge_log.text


def test_a_bug_in_pruning_keeps_the_checkpoint_and_logs_its_traceback(
    folder: Path, ddpforge_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("how odd")

    monkeypatch.setattr(retention, "prune", defective)

    path = save(alone(folder), checkpoint_of(1))

    assert path.is_dir()
    assert "older checkpoints were not removed: how odd" in ddpforge_log.text
    assert "Traceback" in ddpforge_log.text


def test_pruning_removes_nothing_if_the_new_checkpoint_is_damaged(
    folder: Path, ddpforge_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = alone(folder, keep={"last": 1})
    first = save(saving, checkpoint_of(1))
    real = disk.rename

    def damage(old: Path, new: Path) -> None:
        real(old, new)
        for shard in folder.glob("step-000000002-*/shard-*"):
            shard.write_bytes(shard.read_bytes()[:-1])

    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", damage)
        save(saving, checkpoint_of(2))

    assert "older checkpoints were not removed" in ddpforge_log.text
    assert "shard-00000-of-00001.safetensors is damaged" in ddpforge_log.text
    assert [path for path, _ in committed(folder)[0]] == [first]


def test_retention_parses_every_manifest_once_and_still_detects_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    real = manifest.parse_manifest

    def watch(path: Path, content: bytes) -> Any:
        parsed.append(path.name)
        return real(path, content)

    monkeypatch.setattr("ddpforge.checkpoint.retention.parse_manifest", watch)
    saving = alone(folder, keep={"last": 3})
    paths = [save(saving, checkpoint_of(step)) for step in (1, 2, 3)]
    saving.is_best({"eval/loss": -1.0})

    assert parsed == [path.name for path in paths]
    (paths[1] / "manifest.json").write_bytes((paths[1] / "manifest.json").read_bytes()[:-2])
    (paths[2] / "shard-00000-of-00001.safetensors").unlink()
    save(saving, checkpoint_of(4))
    save(saving, checkpoint_of(5))
    assert {path.name for path in paths} <= {path.name for path in folder.iterdir()}, "damaged checkpoints do not count"
    assert len(parsed) == 5


def test_a_replaced_manifest_is_read_again(folder: Path) -> None:
    saving = alone(folder, keep={"best": 1, "monitor": "eval/loss"})
    path = save(saving, checkpoint_of(5))
    assert saving.is_best({"eval/loss": 3.0})

    reseal(path, lambda manifest: manifest.update(metrics={"eval/loss": 2.0}))

    assert not saving.is_best({"eval/loss": 3.0})


# ---------------------------------------------------------------------------------------------- opening
def test_all_ranks_open_the_same_checkpoint(folder: Path) -> None:
    ten = write(folder, checkpoint_of(10))
    write(folder, checkpoint_of(20))

    assert on_each(folder, lambda saving, peers: step_of(saving)) == [20, 20]
    assert on_each(folder, lambda saving, peers: step_of(saving, ten)) == [10, 10]


def test_open_returns_none_on_every_rank_if_there_is_not_a_checkpoint(tmp_path: Path) -> None:
    assert on_each(tmp_path / "missing", lambda saving, peers: saving.open()) == [None, None]


def test_a_failure_to_open_on_rank_0_raises_peer_failed_on_the_others(tmp_path: Path) -> None:
    first, second = on_each(tmp_path, lambda saving, peers: saving.open(Path("nowhere")))

    assert isinstance(first, CheckpointError)
    assert isinstance(second, PeerFailed)
    assert second.exit_code == first.exit_code == ExitCode.ENVIRONMENT


def test_every_rank_skips_a_damaged_newest_checkpoint_with_a_warning(
    folder: Path, ddpforge_log: pytest.LogCaptureFixture
) -> None:
    write(folder, checkpoint_of(10))
    (write(folder, checkpoint_of(20)) / "shard-00000-of-00001.safetensors").write_bytes(b"")

    assert on_each(folder, lambda saving, peers: step_of(saving)) == [10, 10]
    assert "shard-00000-of-00001.safetensors is damaged: it has 0 bytes" in ddpforge_log.text


def test_each_rank_verifies_its_share_of_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share blocks, not files, because one rank may have written the whole checkpoint."""
    write(folder, checkpoint_of(20))
    seen: dict[str, list[tuple[str, int]]] = defaultdict(list)
    read = manifest.read_block

    def noting(file: PlainFile, begin: int, chunk: Any, number: int, buffer: memoryview) -> None:
        seen[threading.current_thread().name].append((chunk.entry, number))
        read(file, begin, chunk, number, buffer)

    monkeypatch.setattr(manifest, "read_block", noting)
    alone(folder).open()
    (every,) = seen.values()
    seen.clear()
    assert on_each(folder, lambda saving, peers: step_of(saving)) == [20, 20]
    first, second = seen.values()
    assert sorted(first + second) == sorted(every)
    assert abs(len(first) - len(second)) <= 1


@pytest.mark.parametrize("place", [-1, -20, -70, -130])
def test_a_checkpoint_that_any_rank_finds_damaged_is_skipped(
    folder: Path, ddpforge_log: pytest.LogCaptureFixture, place: int
) -> None:
    write(folder, checkpoint_of(10))
    file = next(write(folder, checkpoint_of(20)).glob("shard*"))
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)

    assert on_each(folder, lambda saving, peers: step_of(saving)) == [10, 10]
    assert ddpforge_log.text.count("are not as written") == 1


@pytest.mark.parametrize(("ranks", "seen"), [(2, True), (1, False)])
def test_each_of_several_ranks_verifies_its_reads(folder: Path, ranks: int, seen: bool) -> None:
    """Several ranks may see different disks. A single rank has already verified the whole checkpoint in `open`."""
    path = write(folder, checkpoint_of(20))

    def act(saving: Checkpoints, peers: WriterGroup) -> float:
        reader = saving.open()
        assert reader is not None
        peers.ranks.all_gather_object(None)  # barrier: all ranks have opened it
        shard = next(path.glob("shard*"))
        content = bytearray(shard.read_bytes())
        if peers.rank == peers.size - 1:
            begin = 8 + int.from_bytes(content[:8], "little")
            content[begin:] = bytes(len(content) - begin)
            shard.write_bytes(content)
        peers.ranks.all_gather_object(None)
        return float(reader.read("model", "layer.weight").sum())

    for result in on_each(folder, act, ranks=ranks):
        assert isinstance(result, CheckpointError) is seen, result


def test_open_raises_if_all_checkpoints_are_damaged(folder: Path) -> None:
    for step in (10, 20):
        (write(folder, checkpoint_of(step)) / "COMMIT").unlink()

    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact.*step-000000020") as caught:
        alone(folder).open()
    assert "--fresh" in caught.value.hints[0]


def test_a_named_checkpoint_is_never_replaced_by_another(folder: Path) -> None:
    write(folder, checkpoint_of(10))
    path = write(folder, checkpoint_of(20))
    (path / "COMMIT").unlink()

    with pytest.raises(CheckpointError, match="COMMIT"):
        alone(folder).open(path)


def test_open_removes_temporary_folders_of_a_killed_process(folder: Path) -> None:
    (folder / ".step-000000020-abcd.tmp").mkdir()

    assert alone(folder).open() is None
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------- ranks and devices
def test_replicas_of_shards_are_copied_and_written_once(folder: Path) -> None:
    """HSDP: ranks 2 and 3 hold the same shards as ranks 0 and 1."""
    tensor = counted(8, 1 << 18)

    def act(saving: Checkpoints, peers: WriterGroup) -> int:
        replica, shard = divmod(peers.rank, 2)
        part = TensorShard(
            tensor[shard * 4 : shard * 4 + 4], (8, 1 << 18), Box((shard * 4, 0), (4, 1 << 18)), replica, 2
        )
        saving.save(FACTS, RankState.of(CanonicalState({"w": part}, {})))
        assert torch.equal(read(saving.wait()).state.model["w"], tensor)
        return len(saving._staging._memory.bytes)  # type: ignore[union-attr]

    assert on_each(folder, act, ranks=4) == [2 << 20] * 4


def test_a_single_rank_needs_no_process_group() -> None:
    peers = WriterGroup.of(SingleRank(), timedelta(seconds=1))

    assert (peers.rank, peers.size, peers.ranks.all_gather_object(4), peers.patience) == (0, 1, [4], 1.0)


CUDA = device_kind("cuda")


def test_memory_that_cannot_be_page_locked_is_used_unlocked(
    monkeypatch: pytest.MonkeyPatch, ddpforge_log: pytest.LogCaptureFixture
) -> None:
    """Checks that locking is tried once per allocation, not at every save.

    A small CUDA operation clears CUDA's pending error, so that no kernel of the training raises it.
    """
    asked: list[int] = []
    took: list[int] = []

    def take(*shape: Any, device: str) -> None:
        assert device == "cuda"
        took.append(asked[-1])
        raise RuntimeError("CUDA error")

    library = SimpleNamespace(cudaHostRegister=lambda address, size, flags: asked.append(size) or 2)
    monkeypatch.setattr(staging, "_cuda", lambda: library)
    monkeypatch.setattr(torch, "zeros", take)
    memory = staging.Staging()
    first = memory._bytes(100, locked=CUDA)
    assert len(first) == 100
    assert memory._bytes(80, locked=CUDA).data_ptr() == first.data_ptr()
    assert len(memory._bytes(200, locked=CUDA)) == 200
    assert asked == took == [100, 200]
    assert "100 bytes of host memory could not be page-locked (CUDA error 2)" in ddpforge_log.text


def test_memory_is_page_locked_for_gpu_tensors_and_unlocked_when_it_is_freed(
    monkeypatch: pytest.MonkeyPatch, ddpforge_log: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, int]] = []
    library = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(("lock", address)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unlock", address)),
    )
    monkeypatch.setattr(staging, "_cuda", lambda: library)
    memory = staging.Staging()

    memory._bytes(100, locked=None)
    assert calls == []
    small = memory._bytes(100, locked=CUDA).data_ptr()
    assert memory._bytes(90, locked=None).data_ptr() == small
    assert calls == [("lock", small)]
    large = memory._bytes(200, locked=CUDA).data_ptr()
    assert calls == [("lock", small), ("unlock", small), ("lock", large)]
    del memory
    assert calls[3:] == [("unlock", large)]
    staging.Staging()._bytes(0, locked=CUDA)
    assert len(calls) == 4, "empty memory is not locked"
    assert "page-locked" not in ddpforge_log.text


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system copies all memory at a fork")
def test_forked_processes_do_not_have_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the cost of loader processes after a save: Linux copies page-locked memory at each fork."""
    nothing = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: None)
    monkeypatch.setattr(staging, "_cuda", lambda: nothing)
    memory = staging.Staging()
    locked = memory._bytes(100_000, locked=CUDA).fill_(7)
    flags, here = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= locked.data_ptr() < int(found[2], 16)
        if here and line.startswith("VmFlags:"):
            flags = line
    assert "dc" in flags.split(), "proc_pid_smaps(5): do not copy area on fork"
    assert int(locked.long().sum()) == 700_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_are_copied_to_page_locked_memory(folder: Path, written: list[Held]) -> None:
    weight, small = torch.randn(1 << 24, device="cuda"), torch.randn(7, 3, device="cuda").t()
    saving = alone(folder)
    for step in range(3):
        expected = {"w": weight.cpu(), "small": small.cpu(), "host": torch.ones(5)}
        saving.save(
            replace(FACTS, step=step), RankState.of(CanonicalState({**expected, "w": weight, "small": small}, {}))
        )
        weight.add_(1)
        small.mul_(2)
        found = read(saving.wait()).state.model
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    assert all(part.tensor.is_pinned() for parts in written[0]["model"].values() for part in parts)
    assert addresses(written[1]) == addresses(written[0])


# ---------------------------------------------------------------------------------------------- slow and dead disks
class FakeClock:
    """Clock that a test advances by hours: with the real clock, a rank that waits for a CPU would look like a hang."""

    def __init__(self) -> None:
        self.now = 0
        self.runs = False

    def __call__(self) -> int:
        """Returns the time; advances it by an hour per call once `runs` is set."""
        self.now += 3600 * self.runs
        return self.now


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    clock = FakeClock()
    with monkeypatch.context() as patch:
        patch.setattr("ddpforge.ranks.writers.time.monotonic", clock)
        yield clock


def impatient(peers: WriterGroup) -> WriterGroup:
    """Returns a group that polls often, and gives up a rank that has written nothing for two polls."""
    return replace(peers, patience=2.5 * 3600, look=0.001)


@pytest.mark.parametrize("background", [True, False])
def test_all_ranks_give_up_a_rank_whose_disk_hangs_and_name_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hours: FakeClock, background: bool
) -> None:
    answers, real = threading.Event(), disk.write

    def hang(file: Any, data: Any) -> None:
        if threading.current_thread().name.endswith("rank-1"):
            for thread in threading.enumerate():
                if thread.name == "checkpoint work of rank-0":  # rank 0 began first
                    thread.join(HANGS)
            hours.runs = True
            answers.wait(HANGS)
        real(file, data)

    monkeypatch.setattr(disk, "write", hang)
    checkpoint = checkpoint_of(3)

    def act(peers: WriterGroup) -> Path:
        saving = checkpoints(folder, impatient(peers), async_save=background)
        saving.save(checkpoint, share_of(checkpoint, peers.rank, 2))
        return saving.wait()

    results = World(2).run(act)
    stuck = [thread.daemon for thread in threading.enumerate() if thread.name == "checkpoint work of rank-1"]
    answers.set()
    assert stuck, "rank 1 is still blocked in its write"
    assert all(stuck), "a daemon thread: the process can end without it"
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert str(results[0]).startswith("rank 1: nothing could be written for")
    assert str(results[1]) == str(results[0])
    assert list(folder.glob("step-*")) == []


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_waits_for_a_slow_disk_as_long_as_it_makes_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hours: FakeClock, slow: int
) -> None:
    """Each exchange between the ranks permits one write, and each write takes an hour."""
    permits, real, began = threading.Semaphore(0), disk.write, hours.now

    def crawl(file: Any, data: Any) -> None:
        if threading.current_thread().name.endswith(f"rank-{slow}"):
            permits.acquire(timeout=HANGS)
            hours.now += 3600
        real(file, data)

    monkeypatch.setattr(disk, "write", crawl)
    checkpoint = checkpoint_of(3)

    def act(peers: WriterGroup) -> Path:
        everyone = peers.ranks.all_gather_object

        def talk(value: Any) -> Any:
            if peers.rank == slow:
                permits.release()
            return everyone(value)

        peers.ranks.all_gather_object = talk  # type: ignore[method-assign]
        saving = checkpoints(folder, impatient(peers), async_save=False)
        saving.save(checkpoint, share_of(checkpoint, peers.rank, 2))
        return saving.wait()

    results = World(2).run(act)
    assert all(isinstance(result, Path) for result in results), results
    assert hours.now - began > 4 * 3600, "longer than `patience`"
    assert steps_in(read(results[0])) == {3}


def test_before_commit_is_called_once_before_the_commit(folder: Path) -> None:
    found: list[list[Path]] = []
    section = CheckpointSection.model_validate({"async_save": False})

    def act(peers: WriterGroup) -> Path:
        saving = Checkpoints(
            folder,
            section,
            peers=peers,
            ranks=peers.ranks,
            before_commit=lambda: found.append(list(folder.glob("**/COMMIT"))),
        )
        saving.save(checkpoint_of(3), share_of(checkpoint_of(3), peers.rank, 2))
        return saving.wait()

    assert all(isinstance(result, Path) for result in World(2).run(act))
    assert found == [[]]  # once, on rank 0
