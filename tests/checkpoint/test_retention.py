"""Retention: `newest` finds the highest intact step, and `prune` keeps the last and the best checkpoints."""

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from checkpoint.doubles import checkpoint_of, write

from ddpforge.checkpoint.manifest import read_manifest, sealed
from ddpforge.checkpoint.retention import Known, best, clean, committed, is_best, newest, prune
from ddpforge.errors import CheckpointError
from ddpforge.recipe.schema import KeepSection


def save(folder: Path, steps: Iterable[int], **metrics: Iterable[float]) -> list[Path]:
    """Saves checkpoints of `steps`; `loss=[…]` is the metric "eval/loss" of each."""
    rows = zip(*metrics.values(), strict=True) if metrics else ((),) * len(list(steps))
    named = [{f"eval/{name}": value for name, value in zip(metrics, row, strict=True)} for row in rows]
    return [write(folder, checkpoint_of(step, metrics=row)) for step, row in zip(steps, named, strict=True)]


def steps(folder: Path) -> list[int]:
    return sorted(read_manifest(path).step for path in folder.glob("step-*"))


def record_manifest_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of checkpoints whose manifests are read from now on."""
    found: list[str] = []

    def noted(path: Path) -> tuple[bytearray, str]:
        found.append(path.name)
        return sealed(path)

    monkeypatch.setattr("ddpforge.checkpoint.retention.sealed", noted)
    return found


# ---------------------------------------------------------------------------------------------- newest
def test_an_empty_or_missing_folder_has_no_newest(folder: Path) -> None:
    assert newest(folder) == (None, [])
    assert newest(folder / "missing") == (None, [])


def test_newest_raises_if_the_folder_cannot_be_listed(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("not-mounted")
    with pytest.raises(CheckpointError, match="file: Not a directory"):
        newest(folder / "file")
    with pytest.raises(CheckpointError, match="link → not-mounted: No such file or directory"):
        newest(folder / "link")


def test_newest_compares_steps_not_modification_times(folder: Path) -> None:
    ten, twenty, thirty = save(folder, [10, 20, 30])
    for age, path in enumerate((thirty, twenty, ten)):
        os.utime(path, (1000 + age, 1000 + age))

    assert newest(folder) == (thirty, [])


def test_steps_are_compared_as_numbers(folder: Path) -> None:
    _, later = save(folder, [999_999_999, 1_000_000_000])

    assert newest(folder) == (later, [])


def test_newest_of_equal_steps_is_the_one_written_last(folder: Path) -> None:
    for _ in range(5):  # names are random: five in the right order by chance have a probability of 1 in 120
        (last,) = save(folder, [10])
        assert newest(folder)[0] == last


def test_newest_skips_an_incomplete_checkpoint_and_returns_the_reason(folder: Path) -> None:
    ten, twenty = save(folder, [10, 20])
    (folder / "step-000000030-abcd").mkdir()
    shutil.rmtree(twenty)
    twenty.mkdir()

    chosen, skipped = newest(folder)

    assert chosen == ten
    assert {path.name for path, _ in skipped} == {twenty.name, "step-000000030-abcd"}
    assert all("COMMIT is damaged: it cannot be read" in reason for _, reason in skipped)


def test_newest_does_not_report_broken_checkpoints_older_than_the_chosen_one(folder: Path) -> None:
    ten, twenty = save(folder, [10, 20])
    (ten / "COMMIT").unlink()

    assert newest(folder) == (twenty, [])


def test_newest_lists_skipped_checkpoints_from_new_to_old_down_to_the_chosen_step(folder: Path) -> None:
    ten, twenty, thirty, forty = save(folder, [10, 20, 30, 40])
    (again,) = save(folder, [20])
    for path in (ten, twenty, forty):
        (path / "COMMIT").unlink()
    shard = thirty / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")  # detected only from the file's contents
    strange = folder / "step-by-step"
    strange.mkdir()

    chosen, skipped = newest(folder)

    assert chosen == again
    assert [path for path, _ in skipped] == [strange, forty, thirty, twenty]


@pytest.mark.parametrize("count", [3, 30])
def test_newest_does_not_open_older_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    *_, before, last = save(folder, range(10, 10 * count + 10, 10))
    (last / "COMMIT").unlink()
    looked_at = record_manifest_reads(monkeypatch)

    assert newest(folder)[0] == before
    assert looked_at == [last.name, before.name]


def test_listed_checkpoints_keep_no_tensor_entries_in_memory(folder: Path) -> None:
    save(folder, [10, 20])
    assert [dict(each.manifest.tensors) for each in committed(folder)[0]] == [{}, {}]


def test_prune_does_not_parse_a_known_manifest_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, (ten,) = Known(), save(folder, [10])
    assert known.read(ten) == read_manifest(ten)
    monkeypatch.setattr("ddpforge.checkpoint.retention.parse_manifest", None)
    assert prune(folder, KeepSection(last=1), known=known) == []


def test_newest_skips_renamed_and_linked_checkpoints(folder: Path) -> None:
    ten, twenty = save(folder, [10, 20])
    twenty.rename(folder / "step-000000030-abcd")
    (folder / "step-000000040-abcd").symlink_to(ten)
    (folder / "step-latest").symlink_to(ten)

    chosen, skipped = newest(folder)

    assert chosen == ten
    assert len(skipped) == 3
    assert any("is the checkpoint of step 20, but its name has another step" in reason for _, reason in skipped)


# ---------------------------------------------------------------------------------------------- pruning
def test_prune_keeps_the_last_checkpoints(folder: Path) -> None:
    paths = save(folder, [10, 20, 30, 40])

    assert set(prune(folder, KeepSection(last=2))) == set(paths[:2])
    assert steps(folder) == [30, 40]


def test_prune_keeps_the_best_checkpoints_in_addition_to_the_last(folder: Path) -> None:
    save(folder, [10, 20, 30, 40, 50], loss=[3.0, 1.0, 2.0, math.nan, 5.0])

    prune(folder, KeepSection(last=1, best=2, monitor="eval/loss"))

    assert steps(folder) == [20, 30, 50]


@pytest.mark.parametrize(
    ("by", "mode", "kept"),
    [
        ("eval/loss", None, 10),
        ("eval/perplexity", None, 10),
        ("eval/bits_per_byte", None, 10),
        ("eval/word_error_rate", None, 10),
        ("eval/mae", None, 10),
        ("eval/accuracy", None, 30),
        ("eval/loss", "max", 30),
        ("eval/accuracy", "min", 10),
    ],
)
def test_lower_is_better_for_losses_and_higher_for_other_metrics_unless_mode_is_set(
    folder: Path, by: str, mode: str | None, kept: int
) -> None:
    save(folder, [10, 20, 30, 40], **{by.removeprefix("eval/"): [1.0, 2.0, 3.0, math.nan]})

    prune(folder, KeepSection.model_validate({"last": 1, "best": 1, "monitor": by, "mode": mode}))

    assert steps(folder) == [kept, 40]


def test_prune_keeps_the_newer_of_equally_good_checkpoints(folder: Path) -> None:
    save(folder, [10, 20, 30], loss=[1.0, 1.0, 2.0])

    prune(folder, KeepSection(last=1, best=1, monitor="eval/loss"))

    assert steps(folder) == [20, 30]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_checkpoint_with_a_nonfinite_metric_is_never_best(folder: Path, odd: float) -> None:
    save(folder, [10, 20], loss=[odd, odd])
    keep = KeepSection(last=1, best=5, monitor="eval/loss")
    found, _ = committed(folder)

    assert best(found, keep) == []
    assert not is_best({"eval/loss": odd}, keep, [])
    assert not is_best({}, keep, [])
    assert is_best({"eval/loss": 1e9}, keep, found)


def test_no_checkpoint_is_best_if_the_direction_of_the_metric_is_unknown(folder: Path) -> None:
    save(folder, [10, 20], wobble=[2.0, 1.0])
    keep = KeepSection(last=1, best=1, monitor="eval/wobble")
    found, _ = committed(folder)

    assert best(found, keep) == []
    assert not is_best({"eval/wobble": 0.5}, keep, found)
    for mode, step, better in (("min", 20, 0.5), ("max", 10, 3.0)):
        keep = KeepSection.model_validate({"last": 1, "best": 1, "monitor": "eval/wobble", "mode": mode})
        assert best(found, keep)[0].manifest.step == step
        assert is_best({"eval/wobble": better}, keep, found)
        assert not is_best({"eval/wobble": 1.5}, keep, found)


def test_is_best_compares_with_all_kept_checkpoints(folder: Path) -> None:
    save(folder, [10, 20], loss=[2.0, 1.0])
    keep = KeepSection(best=1, monitor="eval/loss")
    found, _ = committed(folder)

    assert [is_best({"eval/loss": value}, keep, found) for value in (0.9, 1.0, 1.5)] == [True, False, False]
    assert not is_best({"eval/loss": 0.9}, KeepSection(monitor="eval/loss"), found), "`best` is not set"
    assert not is_best({"eval/loss": 0.9}, KeepSection(best=1), found), "`monitor` is not set"


@pytest.mark.parametrize("known", [None, Known()], ids=["anew", "with a memory"])
@pytest.mark.parametrize("seen", [False, True], ids=["broken at first", "broken later"])
def test_prune_neither_counts_nor_removes_a_broken_checkpoint(folder: Path, known: Known | None, *, seen: bool) -> None:
    _, twenty, thirty = save(folder, [10, 20, 30])
    if seen:
        assert len(committed(folder, known)[0]) == 3
    (thirty / "shard-00000-of-00001.safetensors").write_bytes(b"")

    prune(folder, KeepSection(last=1), known=known)

    assert {path.name for path in folder.glob("step-*")} == {twenty.name, thirty.name}


def test_prune_never_removes_the_checkpoint_of_the_hint(folder: Path) -> None:
    save(folder, [30, 10])  # a run that returned to an earlier step

    prune(folder, KeepSection(last=1))

    assert steps(folder) == [10, 30]


@pytest.mark.parametrize("hint", [None, "", "[]", "{}", '{"dir": "../.."}'])
def test_prune_ignores_an_invalid_hint(folder: Path, hint: str | None) -> None:
    save(folder, [10, 20])
    (folder / "latest.json").unlink()
    if hint is not None:
        (folder / "latest.json").write_text(hint)

    prune(folder, KeepSection(last=1))

    assert steps(folder) == [20]


def test_error_names_a_checkpoint_that_cannot_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ten, _ = save(folder, [10, 20])

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ddpforge.disk.put_away", refuse)

    with pytest.raises(CheckpointError, match=f"{ten} could not be removed: Permission denied"):
        prune(folder, KeepSection(last=1))


def test_error_names_garbage_that_cannot_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trash = folder / ".trash-step-000000005-abcd"
    trash.mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ddpforge.disk.remove", refuse)

    with pytest.raises(CheckpointError, match=f"{trash} could not be removed: Permission denied"):
        clean(folder)


def test_clean_removes_only_garbage(folder: Path) -> None:
    (path,) = save(folder, [10])
    (folder / ".step-000000020-abcd.tmp").mkdir()
    (folder / ".step-000000020-abcd.tmp" / "model.safetensors").write_bytes(b"half")
    (folder / ".trash-step-000000005-abcd").mkdir()
    (folder / ".latest.json.tmp").write_bytes(b"half")
    (folder / "notes.tmp").write_bytes(b"mine")

    clean(folder)

    assert {each.name for each in folder.iterdir()} == {path.name, "latest.json", "notes.tmp"}


# --------------------------------------------------------------------------------------------- evaluations by followers
def test_a_checkpoint_that_waits_for_its_evaluation_is_not_removed(folder: Path) -> None:
    two, four, six = save(folder, [2, 4, 6])
    keep = KeepSection(last=1, best=1, monitor="eval/loss")
    assert prune(folder, keep, evaluated={}) == []
    assert prune(folder, keep, evaluated={two.name: {"eval/loss": 1.0}}) == []  # the best evaluated one
    better = {two.name: {"eval/loss": 1.0}, four.name: {"step": 4, "eval/loss": 0.5}}
    assert prune(folder, keep, evaluated=better) == [two]
    assert prune(folder, keep, evaluated=better | {six.name: {}}) == []  # without metrics: damaged
    assert steps(folder) == [4, 6]


def test_metrics_of_an_evaluation_by_a_follower_choose_the_best(folder: Path) -> None:
    two, four = save(folder, [2, 4], loss=[0.1, 0.2])
    keep = KeepSection(best=1, monitor="eval/loss")
    found, _ = committed(folder, evaluated={two.name: {"step": 2, "eval/loss": None}})
    assert [each.path for each in best(found, keep)] == [four]  # null is NaN
    assert "step" not in found[1].manifest.metrics


def test_many_waiting_checkpoints_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(folder, range(1, 11))
    prune(folder, KeepSection(last=1), evaluated={})
    assert "10 checkpoints wait for their evaluation, and none of them is removed" in caplog.text
