"""Finding, listing, describing and verifying the checkpoints of a run."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.doubles import checkpoint_of, read, reseal, tensors_of_every_kind, write
from checkpoint.worlds import write_sharded

from ddpforge.checkpoint.manifest import damages, read_manifest
from ddpforge.errors import CheckpointError, SetupError, UsageError
from ddpforge.interfaces import CanonicalState
from ddpforge.recipe.schema import KeepSection
from ddpforge.runs.checkpoints import (
    CheckpointFolder,
    choose,
    describe,
    find,
    keep_of,
    newest_first,
    notable,
    parse,
    rows,
    tensors,
    totals,
)
from ddpforge.runs.folder import RunFolder

RESOLVED = '[checkpoint.keep]\nlast = 9\nbest = 1\nmonitor = "eval/loss"\n'
SHARD = "shard-00000-of-00001.safetensors"


def steps_in(paths: list[Path]) -> list[int]:
    return [int(path.name.split("-")[1]) for path in paths]


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Makes the run runs/digits with checkpoints of steps 1 to 4: 2 is the best, 3 has no finite metric."""
    monkeypatch.chdir(tmp_path)
    return made("digits", {1: 3.0, 2: 1.0, 3: math.nan, 4: 2.0})


def made(name: str, losses: dict[int, float], resolved: str = RESOLVED) -> RunFolder:
    folder = RunFolder(Path("runs") / name)
    folder.create(text="", resolved=resolved, local_files={})
    for step, loss in losses.items():
        write(folder.checkpoints, checkpoint_of(step, metrics={"eval/loss": loss}))
    return folder


def path_of(run: RunFolder, step: int) -> Path:
    (path,) = run.checkpoints.glob(f"step-{step:09d}-*")
    return path


def broken(run: RunFolder, step: int) -> Path:
    """Truncates the shard of a checkpoint; returns the checkpoint's path."""
    path = path_of(run, step)
    (path / SHARD).write_bytes(b"")
    return path


def damaged(run: RunFolder, step: int) -> Path:
    """Flips a bit in a tensor of a checkpoint; returns the checkpoint's path."""
    path = path_of(run, step)
    content = bytearray((path / SHARD).read_bytes())
    content[-1] ^= 1
    (path / SHARD).write_bytes(content)
    return path


@pytest.fixture
def ddpforge_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    return caplog


# ---------------------------------------------------------------------------------------------- choosing
def test_choose_returns_the_checkpoint_by_step_the_best_or_the_newest_intact_one(
    run: RunFolder, ddpforge_log: pytest.LogCaptureFixture
) -> None:
    assert choose(run) == path_of(run, 4)
    assert choose(run, step=3) == path_of(run, 3)
    assert choose(run, best=True) == path_of(run, 2)
    assert ddpforge_log.text == ""

    damaged(run, 4)
    assert choose(run) == path_of(run, 3)
    assert "passed over: the checkpoint file" in ddpforge_log.text
    assert choose(run, step=4) == path_of(run, 4), "an explicit step is not verified"


def test_choose_refuses_a_missing_checkpoint_and_lists_the_steps(run: RunFolder) -> None:
    empty, nameless = made("empty", {}), made("nameless", {5: 1.0, 6: 2.0}, resolved="")
    odd = made("odd", {7: math.inf})

    for folder, options, complaint, hint in (
        (run, {"step": 1, "best": True}, "--best and --step exclude each other", "give one of them"),
        (run, {"step": 9}, f"{run.path} has no checkpoint of step 9", "it has checkpoints of step 1, 2, 3, 4"),
        (run, {"step": 0}, f"{run.path} has no checkpoint of step 0", "it has checkpoints of step 1, 2, 3, 4"),
        (empty, {}, f"{empty.path} has no intact checkpoint", "it has checkpoints of step none"),
        (empty, {"best": True}, f"no checkpoint of {empty.path} has a finite eval/loss", "it has checkpoints of step"),
        (odd, {"best": True}, f"no checkpoint of {odd.path} has a finite eval/loss", "it has checkpoints of step 7"),
        (nameless, {"best": True}, "does not set checkpoint.keep.monitor", "it has checkpoints of step 5, 6"),
    ):
        with pytest.raises(UsageError) as caught:
            choose(folder, **options)
        assert complaint in caught.value.message
        assert caught.value.hints[0].startswith(hint)


def test_choose_raises_if_every_checkpoint_is_damaged(run: RunFolder) -> None:
    for step in (1, 2, 3, 4):
        damaged(run, step)

    with pytest.raises(UsageError, match="has no intact checkpoint"):
        choose(run)


def test_keep_of_reads_the_keep_section_or_names_the_invalid_file(run: RunFolder) -> None:
    assert keep_of(run) == KeepSection(last=9, best=1, monitor="eval/loss")
    assert keep_of(made("plain", {}, resolved="")) == KeepSection()
    odd = made("odd", {}, resolved="[checkpoint.keep]\nlast = -1\n")
    with pytest.raises(SetupError, match=f"checkpoint.keep in {odd.resolved} cannot be read: "):
        keep_of(odd)


# ---------------------------------------------------------------------------------------------- finding
def test_find_accepts_a_run_or_a_folder_of_checkpoints(run: RunFolder) -> None:
    alone = Path("alone")
    write(alone, checkpoint_of(7))

    for source in ("digits", "runs/digits"):
        assert CheckpointFolder.find(source) == CheckpointFolder(run.checkpoints, RunFolder(Path("runs/digits")))
        assert CheckpointFolder.find(source).keep() == keep_of(run)
    assert CheckpointFolder.find("alone") == CheckpointFolder(alone, None)
    assert CheckpointFolder.find("alone").keep() == KeepSection()
    Path("hollow").mkdir()
    for source in ("nothing", "hollow"):
        with pytest.raises(UsageError, match=f"there is no run '{source}'"):
            CheckpointFolder.find(source)


def test_a_run_folder_with_an_entry_like_a_checkpoint_is_a_run(run: RunFolder) -> None:
    (run.path / "step-of-my-notes").mkdir()

    assert CheckpointFolder.find("runs/digits").folder == run.checkpoints


def test_the_newest_checkpoint_is_the_default(run: RunFolder, ddpforge_log: pytest.LogCaptureFixture) -> None:
    place = CheckpointFolder.find("digits")

    assert place.choose() == path_of(run, 4)
    assert place.choose(strict=True) == path_of(run, 4)
    assert place.choose(step=1) == path_of(run, 1)
    assert place.choose(best=True) == path_of(run, 2)
    damaged(run, 4)
    assert place.choose() == path_of(run, 4), "no tensor is read"
    assert ddpforge_log.text == ""
    assert place.choose(intact=True) == path_of(run, 3)


def test_a_broken_checkpoint_is_skipped_with_a_warning_only_if_it_is_newer(
    run: RunFolder, ddpforge_log: pytest.LogCaptureFixture
) -> None:
    place = CheckpointFolder.find("digits")
    broken(run, 1)
    assert place.choose(strict=True) == path_of(run, 4)
    assert ddpforge_log.text == ""

    broken(run, 4)
    assert place.choose() == path_of(run, 3)
    assert ddpforge_log.text.count("passed over: ") == 1
    with pytest.raises(CheckpointError, match=f"{SHARD} is damaged") as caught:
        place.choose(strict=True)
    assert caught.value.hints == ("choose one with --step: the newest unbroken one is of step 3",)
    assert place.choose(step=2, strict=True) == path_of(run, 2), "an explicit step ignores newer ones"
    assert ddpforge_log.text.count("passed over: ") == 1


def test_a_folder_with_a_name_like_a_checkpoint_does_not_count_as_newer() -> None:
    path = write(Path("alone"), checkpoint_of(0))
    Path("alone/step-by-step").mkdir()

    assert CheckpointFolder.find("alone").choose(strict=True) == path


def test_a_folder_without_a_run_has_no_best_and_the_error_lists_its_steps() -> None:
    paths = [write(Path("alone"), checkpoint_of(step)) for step in (5, 6, 7, 8, 9)]
    for path in paths[:4]:
        (path / "COMMIT").unlink()
    place = CheckpointFolder.find("alone")

    assert place.choose() == place.choose(intact=True) == paths[4]
    with pytest.raises(UsageError, match="alone is not a run") as caught:
        place.choose(best=True)
    assert caught.value.hints == ("choose by --step",)
    with pytest.raises(UsageError, match="alone has no checkpoint of step 5") as caught:
        place.choose(step=5)
    assert caught.value.hints[0] == "it has checkpoints of step 9"
    assert [hint[:8] for hint in caught.value.hints[1:]] == ["broken: "] * 3, (
        "at most three broken checkpoints are listed"
    )
    (paths[4] / "COMMIT").unlink()
    with pytest.raises(UsageError, match=r"(?m)alone has no checkpoint$") as caught:
        place.choose()
    assert caught.value.hints[0] == "it has checkpoints of step none"


def test_a_checkpoint_is_found_by_path_or_by_run_and_step(run: RunFolder) -> None:
    path = path_of(run, 3)

    assert find(str(path)) == parse(str(path)) == path
    assert find("digits") == parse("digits") == path_of(run, 4)
    assert find("digits", step=3) == parse("digits:3") == parse("runs/digits:3") == path
    assert find("digits", best=True) == parse("digits:best") == path_of(run, 2)
    damaged(run, 4)
    assert find("digits", intact=True) == path
    broken(run, 4)
    assert find("digits") == path
    with pytest.raises(CheckpointError, match="is damaged"):
        find("digits", strict=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        parse("digits")
    for options in ({"step": 3}, {"best": True}):
        with pytest.raises(UsageError, match="is a single checkpoint, but --step and --best choose"):
            find(str(path), **options)
    for text in ("digits:newest", "digits:-1", "digits:", "digits:1.0"):
        with pytest.raises(UsageError, match="is neither a step nor `best`"):
            parse(text)


@pytest.mark.parametrize("gone", [["COMMIT"], ["manifest.json"], ["COMMIT", "manifest.json"]])
def test_a_broken_checkpoint_is_found_by_its_path(run: RunFolder, gone: list[str]) -> None:
    path = path_of(run, 3)
    for name in gone:
        (path / name).unlink()

    assert find(str(path)) == path
    if len(gone) == 1:  # also after a rename
        assert find(str(path.rename("mine"))) == Path("mine")
    else:
        with pytest.raises(UsageError, match="there is no run 'mine'"):
            find(str(path.rename("mine")))
    Path("step-000000009-abcd").touch()
    with pytest.raises(UsageError, match="there is no run"):
        find("step-000000009-abcd")


def test_a_path_with_a_colon_is_accepted() -> None:
    path = write(Path("a:3"), checkpoint_of(7))

    assert parse("a:3") == path
    assert parse("a:3:7") == path


# ---------------------------------------------------------------------------------------------- listing
def test_rows_list_intact_checkpoints_newest_first_then_broken_ones(run: RunFolder) -> None:
    paths = {step: path_of(run, step) for step in (1, 2, 3, 4)}
    (paths[1] / "COMMIT").unlink()
    (paths[3] / "COMMIT").unlink()
    (run.checkpoints / "step-000000009-abcd").symlink_to(paths[4].name)
    (run.checkpoints / "step-000000008-abcd").write_bytes(b"some")

    found = rows(CheckpointFolder.find("digits"))

    assert [row.path for row in found[:2]] == [paths[4], paths[2]]
    assert [row.path.name[:14] for row in found[2:]] == [f"step-00000000{step}" for step in (9, 8, 3, 1)]
    assert [(row.latest, row.best) for row in found] == [(True, False), (False, True), *[(False, False)] * 4]
    assert [row.bytes for row in found[2:4]] == [0, 4], "a link counts as 0 bytes"
    manifest = read_manifest(paths[4])
    size = sum(file.stat().st_size for file in paths[4].iterdir())
    assert vars_of(found[0]) == {
        "path": paths[4],
        "bytes": size,
        "problem": None,
        "step": 4,
        "samples": 4,
        "created": manifest.created,
        "strategy": "single",
        "world_size": 1,
        "layout": "sharded",
        "metrics": {"eval/loss": 2.0},
        "latest": True,
        "best": False,
    }
    assert all(row.problem and row.step is None for row in found[2:])


def vars_of(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def test_newest_first_sorts_all_checkpoints_including_broken_ones(run: RunFolder) -> None:
    first = path_of(run, 4)
    second = write(run.checkpoints, checkpoint_of(4))
    (path_of(run, 3) / "COMMIT").unlink()
    strange = run.checkpoints / "step-by-step"
    strange.mkdir()

    found = newest_first(CheckpointFolder.find("digits"))

    assert found == [strange, second, first, *(path_of(run, step) for step in (3, 2, 1))]


def test_at_most_three_metrics_are_listed_with_the_monitor_first() -> None:
    values = {f"eval/{name}": 1.0 for name in ("a", "b", "c", "d")} | {"train/loss": 2.0}
    for step in (1, 2):
        write(Path("alone"), checkpoint_of(step, metrics=values if step == 1 else {"eval/z": math.inf}))
    found = rows(CheckpointFolder.find("alone"))

    assert [row.metrics for row in found] == [{"eval/z": None}, values]
    assert notable(found, KeepSection()) == ["eval/z", "eval/a", "eval/b"]
    assert notable(found, KeepSection(monitor="train/loss", mode="min")) == ["train/loss", "eval/z", "eval/a"]
    assert notable(found, KeepSection(monitor="eval/b", mode="min")) == ["eval/b", "eval/z", "eval/a"]
    assert notable(found, KeepSection(monitor="eval/none", mode="min")) == ["eval/z", "eval/a", "eval/b"]
    assert notable([], KeepSection(monitor="eval/none", mode="min")) == []


# ---------------------------------------------------------------------------------------------- contents
def test_tensors_are_listed_by_section_in_reading_order_and_counted() -> None:
    model = {f"layers.{n}.w": torch.zeros(2, 3) for n in (10, 9, 1)} | {"b": torch.zeros(5, dtype=torch.bfloat16)}
    state = CanonicalState(model=model, optimizer={"b": {"exp_avg": torch.zeros(5)}})
    path = write(Path("alone"), checkpoint_of(3, state=state, callbacks={}))

    manifest = read_manifest(path)

    found = [(each.section, each.name, each.shape, each.dtype, each.parts, each.bytes) for each in tensors(manifest)]
    assert found == [
        ("model", "b", (5,), "bfloat16", 1, 10),
        ("model", "layers.1.w", (2, 3), "float32", 1, 24),
        ("model", "layers.9.w", (2, 3), "float32", 1, 24),
        ("model", "layers.10.w", (2, 3), "float32", 1, 24),
        ("optimizer", "b/exp_avg", (5,), "float32", 1, 20),
    ]
    nothing = {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}}
    assert totals(manifest) == {
        "model": {"tensors": 4, "elements": 23, "bytes": 82, "dtypes": {"bfloat16": 1, "float32": 3}},
        "optimizer": {"tensors": 1, "elements": 5, "bytes": 20, "dtypes": {"float32": 1}},
        "callbacks": nothing,
    }


def test_the_bytes_of_every_dtype_equal_those_in_memory() -> None:
    state = CanonicalState(model=tensors_of_every_kind(), optimizer={})
    manifest = read_manifest(write(Path("alone"), checkpoint_of(3, state=state, callbacks={})))

    assert {each.name: each.bytes for each in tensors(manifest)} == {
        name: tensor.nbytes for name, tensor in state.model.items()
    }


def test_describe_returns_all_facts_of_a_checkpoint() -> None:
    checkpoint = checkpoint_of(
        7,
        metrics={"eval/loss": math.nan},
        recipe="x = 1",
        position={"skipped": 2},
        loop={"scale": 2.0},
        lineage=[{"step": 0}],
    )
    checkpoint.callbacks = {"ema": {"updates": math.inf, "on": True}}
    path = write_sharded(Path("alone"), checkpoint, full=True)
    manifest = read_manifest(path)

    assert {each.name: each.parts for each in tensors(manifest)}["layer.weight"] == 2
    assert describe(path, manifest) == {
        "path": str(path),
        "format": 2,
        "layout": "full",
        "step": 7,
        "samples": 7,
        "created": manifest.created,
        "strategy": "single",
        "world_size": 1,
        "versions": manifest.versions,
        "metrics": {"eval/loss": None},
        "position": {"skipped": 2},
        "loop": {"scale": 2.0},
        "lineage": [{"step": 0}],
        "recipe": "x = 1",
        "aliases": {"head.weight": "layer.weight"},
        "callbacks": {"ema": {"updates": "inf", "on": True}},
        "files": {name: (path / name).stat().st_size for name in manifest.files},
        "sections": totals(manifest),
    }


# ---------------------------------------------------------------------------------------------- damage
def test_damages_names_every_damaged_file_with_its_reason() -> None:
    path = write_sharded(Path("alone"), checkpoint_of(7), full=True)
    assert damages(path) == []
    (path / "rank-00000.json").unlink()
    (path / "rank-00001.json").write_bytes(b"{}")
    for name in ("shard-00000-of-00002.safetensors", "model.safetensors"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    found = {each.file: each.problem for each in damages(path)}

    assert found.keys() == {
        "rank-00000.json",
        "rank-00001.json",
        "shard-00000-of-00002.safetensors",
        "model.safetensors",
    }
    assert found["rank-00000.json"] == "it cannot be read (No such file or directory)"
    assert found["rank-00001.json"].startswith("it has 2 bytes; the manifest lists ")
    assert found["model.safetensors"] == "its sha256 is not the one in the manifest"
    assert found["shard-00000-of-00002.safetensors"].startswith("the contents of ")
    with pytest.raises(CheckpointError):
        read(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda m: weight(m)["chunks"][0].update(file="else"),
            "it puts layer.weight in the file 'else', which it does",
        ),
        (lambda m: weight(m).update(shape=[4, 5]), "layer.weight (model): element [3, 0] is missing"),
        (lambda m: m.update(position={"skipped": -1}), "position.skipped holds a value that no run writes"),
    ],
)
def test_a_contradictory_manifest_is_the_only_damage(change: Callable[[dict[str, Any]], object], problem: str) -> None:
    path = write(Path("alone"), checkpoint_of(7))
    reseal(path, change)

    (found,) = damages(path)

    assert found.file == "manifest.json"
    assert found.problem.startswith(problem)


def weight(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"]["model"]["layer.weight"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("file", "problem"), [("COMMIT", "it cannot be read"), ("manifest.json", "its sha256 is not")])
def test_an_invalid_manifest_is_the_only_damage(file: str, problem: str) -> None:
    path = write(Path("alone"), checkpoint_of(7))
    (path / SHARD).unlink()
    if file == "COMMIT":
        (path / file).unlink()
    else:
        (path / file).write_bytes((path / file).read_bytes() + b" ")

    (found,) = damages(path)

    assert found.file == file
    assert found.problem.startswith(problem)
