"""`ddpforge ckpt`: lists, inspects, verifies and compares checkpoints, and imports those of other programs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.launched import Ranks, Zygote
from torch.distributed import checkpoint as dcp

from ddpforge.checkpoint import writer
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.cli import main
from ddpforge.ranks.writers import WriterGroup
from ddpforge.runs.folder import RunFolder

RESOLVED = '[checkpoint.keep]\nlast = 9\nbest = 1\nmonitor = "eval/loss"\n'
RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "adamw", lr = 0.1 }
train = { length = "6st", global_batch = 64 }
checkpoint = { every = "2st", keep = { last = 9 } }
"""


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Makes the run runs/digits with checkpoints of steps 1 to 3, whose weights equal their step; 2 is the best."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    folder = RunFolder(Path("runs/digits"))
    folder.create(text="", resolved=RESOLVED, local_files={})
    for step, loss in ((1, 3.0), (2, 1.0), (3, float("nan"))):
        save(folder.checkpoints, step, {"eval/loss": loss, "train/loss": 5.0})
    return folder


def save(folder: Path, step: int, metrics: Mapping[str, float] = MappingProxyType({}), **changes: Any) -> Path:
    share: dict[str, Any] = {
        "model": {"w": torch.full((2, 3), float(step)), "steps": torch.tensor([step])},
        "optimizer": {"w": {"step": torch.tensor(float(step)), "exp_avg": torch.zeros(2, 3)}},
        "callbacks": {"ema": {"w": torch.full((2, 3), step + 0.5), "updates": step}},
        "aliases": {"tied": "w"},
    }
    facts: dict[str, Any] = {"step": step, "samples": 10 * step, "strategy": "fsdp", "world_size": 4}
    facts |= {
        "recipe": f'name = "x"\n[optimizer]\nlr = {step}.0\n',
        "lineage": [{"step": 0, "recipe": "abcdef0123456789"}],
    }
    facts |= {name: changes.pop(name) for name in [*changes] if name in CheckpointMetadata.__dataclass_fields__}
    return writer.write(
        folder, CheckpointMetadata(**facts, metrics=metrics), RankState(**share | changes), WriterGroup.alone()
    )


def call(*arguments: str, code: int = 0) -> Result:
    """Runs `ddpforge ckpt`; fails the test unless it exits with `code` and without a traceback."""
    result = CliRunner().invoke(main, ["ckpt", *arguments], prog_name="ddpforge")
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def json_of(*arguments: str, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code).stdout)


def path_of(run: RunFolder, step: int) -> Path:
    (path,) = run.checkpoints.glob(f"step-{step:09d}-*")
    return path


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


# ---------------------------------------------------------------------------------------------- ls
def test_ls_sorts_by_step_and_marks_latest_and_best(run: RunFolder) -> None:
    rows = json_of("ls", "digits")["checkpoints"]

    assert [row["step"] for row in rows] == [3, 2, 1]
    assert [(row["latest"], row["best"]) for row in rows] == [(True, False), (False, True), (False, False)]
    assert rows[0]["metrics"] == {"eval/loss": None, "train/loss": 5.0}, "JSON has no NaN"
    facts = {"samples": 30, "strategy": "fsdp", "world_size": 4, "layout": "sharded", "problem": None}
    assert rows[0].items() >= facts.items()
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in path_of(run, 3).iterdir())

    header, first, second, *_ = call("ls", "digits").stdout.splitlines()
    assert header.split() == [
        "checkpoint",
        "step",
        "samples",
        "age",
        "strategy",
        "ranks",
        "layout",
        "size",
        "eval/loss",
    ]
    assert first.endswith("latest")
    assert second.split()[-2:] == ["1", "best"]


def test_ls_lists_broken_checkpoints_with_the_reason(run: RunFolder) -> None:
    (path_of(run, 3) / "COMMIT").unlink()
    (path_of(run, 1) / "shard-00000-of-00001.safetensors").write_bytes(b"")

    rows = json_of("ls", "digits")["checkpoints"]

    assert [(row["step"], row["problem"] is None) for row in rows] == [(2, True), (None, False), (None, False)]
    assert rows[0]["latest"]
    assert "COMMIT is damaged" in rows[1]["problem"]
    text = call("ls", "runs/digits").stdout
    assert text.count("broken: ") == 2
    assert "it has 0 bytes; the manifest lists" in text


def test_commands_accept_a_folder_of_checkpoints_without_a_run(tmp_path: Path) -> None:
    save(tmp_path / "alone", 5)

    assert [row["step"] for row in json_of("ls", "alone")["checkpoints"]] == [5]
    call("inspect", "alone", "--step", "5")
    assert "folder of checkpoints without" in call("--help").stdout
    assert "is not a run" in call("inspect", "alone", "--best", code=2).stderr


def test_a_run_without_checkpoints_is_listed_as_empty() -> None:
    RunFolder(Path("runs/new")).create(text="", resolved=RESOLVED, local_files={})

    assert call("ls", "new").stdout == "runs/new/checkpoints: no checkpoints\n"
    assert json_of("ls", "new")["checkpoints"] == []
    assert "it has checkpoints of step none" in call("inspect", "new", code=2).stderr
    assert "has no checkpoint" in call("verify", "new", code=2).stderr


def test_control_characters_in_names_are_escaped() -> None:
    name = "w\x1b[2J\r\nx"
    save_file({name: torch.ones(2, 2), "module.y": torch.ones(2, 2)}, "x.safetensors")

    said = call("import", "x.safetensors", "-o", "out").stdout + call("inspect", "out", "--tensors").stdout
    said += call("diff", "out", str(save(Path("other"), 0)), code=1).stdout

    assert "\x1b" not in said
    assert "\r" not in said
    assert r"w\x1b[2J\r\nx" in said


@pytest.mark.parametrize("full", [False, True])
def test_ls_shows_the_full_layout_only_for_a_checkpoint_with_a_model_file(*, full: bool) -> None:
    writer.write(
        Path("x"),
        CheckpointMetadata(step=1, samples=1, strategy="", world_size=1),
        RankState(model={"w": torch.ones(2)}),
        WriterGroup.alone(),
        full=full,
    )

    (row,) = json_of("ls", "x")["checkpoints"]
    assert row["layout"] == ("full" if full else "sharded")
    assert json_of("verify", "x")["checkpoints"][0]["intact"]


def test_an_unreadable_recipe_is_an_error_without_a_traceback(run: RunFolder) -> None:
    run.resolved.write_text("[checkpoint.keep]\nlast = -1\n")

    assert "checkpoint.keep in runs/digits/recipe.resolved.toml cannot be read" in call("ls", "digits", code=3).stderr


@pytest.mark.parametrize("command", [["ls", "digits"], ["inspect", "digits", "--tensors"], ["verify", "digits"]])
def test_ls_inspect_and_verify_import_no_torch(command: list[str]) -> None:
    script = f"""
import sys
from contextlib import suppress
from ddpforge.cli import main
with suppress(SystemExit):
    main({["ckpt", *command]}, prog_name="ddpforge")
print(*{{"torch", "numpy", "accelerate", "safetensors"}} & set(sys.modules), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr.split() == []
    assert "step-000000003" in ended.stdout


# ---------------------------------------------------------------------------------------------- inspect
def test_inspect_prints_the_manifest(run: RunFolder) -> None:
    facts = json_of("inspect", "digits", "--best")

    assert (facts["step"], facts["samples"], facts["strategy"], facts["world_size"]) == (2, 20, "fsdp", 4)
    assert facts["path"] == str(path_of(run, 2))
    assert facts["sections"]["model"] == {
        "tensors": 2,
        "elements": 7,
        "bytes": 32,
        "dtypes": {"float32": 1, "int64": 1},
    }
    assert facts["aliases"] == {"tied": "w"}
    assert facts["callbacks"] == {"ema": {"updates": 2}}
    assert facts["files"].keys() == {"shard-00000-of-00001.safetensors", "rank-00000.json"}
    assert facts["versions"].keys() == {"ddpforge", "torch", "python"}
    assert "tensors" not in facts
    text = call("inspect", str(path_of(run, 2)), "--tensors").stdout
    assert "abcdef012345 from step 0" in text
    assert "optimizer  w/exp_avg  [2, 3]  float32  1      24 B" in text


def test_inspect_counts_the_parts_of_a_tensor(run: RunFolder) -> None:
    (tensor, *_) = [each for each in json_of("inspect", "digits", "--tensors")["tensors"] if each["name"] == "w"]
    assert tensor == {"section": "model", "name": "w", "shape": [2, 3], "dtype": "float32", "parts": 1, "bytes": 24}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspect", "digit"], "did you mean digits?"),
        (["inspect", "digits", "--step", "9"], "it has checkpoints of step 1, 2, 3"),
        (["inspect", "digits", "--step", "1", "--best"], "give one of them"),
        (["verify", "digits", "--step", "9"], "it has checkpoints of step 1, 2, 3"),
        (["verify", "digits", "--step", "1", "--all"], "use one of them"),
        (["diff", "digits", "digits:9"], "it has checkpoints of step 1, 2, 3"),
        (["diff", "digits", "digits:newest"], "'newest' is neither a step nor `best`"),
        (["diff", "digits", "nothing"], "there is no run 'nothing'"),
        (["ls", "nothing"], "there is no run 'nothing'"),
        (["import", "nothing", "-o", "x"], "nothing does not exist"),
        (["import", "runs"], "Missing option '-o'"),
    ],
)
def test_usage_errors_exit_with_2_and_a_hint(arguments: list[str], complaint: str) -> None:
    assert complaint in call(*arguments, code=2).stderr


def test_a_damaged_manifest_is_an_error_without_a_traceback(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    flip(path_of(run, 3) / "manifest.json")

    stderr = call("inspect", str(path_of(run, 3)), code=3).stderr

    assert "manifest.json is damaged: its sha256 is not the one in COMMIT" in stderr
    assert json_of("inspect", "digits")["step"] == 2, "the newest readable checkpoint"
    assert "passed over: the checkpoint file" in caplog.text


def test_diff_fails_if_the_newest_checkpoint_is_broken(run: RunFolder) -> None:
    (path_of(run, 3) / "COMMIT").unlink()

    stderr = call("diff", "digits:2", "digits", code=3).stderr

    assert "COMMIT is damaged" in stderr
    assert "the newest unbroken one is of step 2" in stderr
    assert call("diff", "digits:2", "digits:2").stdout.endswith("equal\n")


def test_an_unreadable_folder_of_checkpoints_is_an_error(run: RunFolder) -> None:
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to("not-mounted")

    for command in ("ls", "inspect", "verify"):
        assert "checkpoints → not-mounted: No such file" in call(command, "digits", code=3).stderr


# ---------------------------------------------------------------------------------------------- verify
def test_verify_reports_intact_checkpoints(run: RunFolder) -> None:
    facts = json_of("verify", "digits", "--all")

    assert [each["intact"] for each in facts["checkpoints"]] == [True] * 3
    assert facts["resumes"] == str(path_of(run, 3))
    assert call("verify", str(path_of(run, 1))).stdout == f"{path_of(run, 1)}: intact\n"


def test_verify_names_damaged_files_and_the_checkpoint_to_resume_from(run: RunFolder) -> None:
    shard = path_of(run, 3) / "shard-00000-of-00001.safetensors"
    flip(shard)
    (path_of(run, 3) / "rank-00000.json").unlink()

    facts = json_of("verify", "digits", code=1)

    (checkpoint,) = facts["checkpoints"]
    assert [damage["file"] for damage in checkpoint["damages"]] == [shard.name, "rank-00000.json"]
    assert facts["resumes"] == str(path_of(run, 2))
    text = call("verify", "digits", "--all", code=1).stdout
    assert f"{path_of(run, 3)}: damaged\n  {shard.name}: the contents of" in text
    assert "  rank-00000.json: it cannot be read (No such file or directory)" in text
    assert f"a run would resume from {path_of(run, 2).name}" in text
    call("verify", "digits", "--step", "2")


@pytest.mark.parametrize("content", [None, "{}"])
@pytest.mark.parametrize("file", ["COMMIT", "manifest.json"])
def test_verify_checks_the_newest_checkpoint_even_if_it_was_not_committed(
    run: RunFolder, file: str, content: str | None
) -> None:
    (path_of(run, 3) / file).unlink()
    if content is not None:
        (path_of(run, 3) / file).write_text(content)

    (checkpoint,) = json_of("verify", "digits", code=1)["checkpoints"]

    assert [damage["file"] for damage in checkpoint["damages"]] == [file]


def test_verify_reports_that_no_checkpoint_is_intact(run: RunFolder) -> None:
    for path in run.checkpoints.glob("step-*"):
        (path / "COMMIT").write_text("{}")

    assert json_of("verify", "digits", code=1)["resumes"] is None
    assert "a run could not resume: none is intact" in call("verify", "digits", code=1).stdout


# ---------------------------------------------------------------------------------------------- diff
def test_a_checkpoint_equals_itself(run: RunFolder) -> None:
    facts = json_of("diff", "digits:2", "digits:best")

    assert facts["equal"]
    assert facts["compared"] == {"model": 2, "optimizer": 1, "callbacks": 1}
    assert call("diff", "digits", str(path_of(run, 3))).stdout.endswith("equal\n")


def test_differences_are_measured_for_each_tensor() -> None:
    facts = json_of("diff", "digits:1", "digits:3", code=1)

    tensors = {(each["section"], each["name"]): each for each in facts["tensors"]}
    assert tensors.keys() == {("model", "w"), ("model", "steps"), ("callbacks", "ema/w")}
    assert tensors["model", "w"].items() >= {"elements": 6, "absolute": 2.0, "relative": pytest.approx(2 / 3)}.items()
    facts_by_name = {each["name"]: (each["a"], each["b"]) for each in facts["facts"]}
    assert facts_by_name == {
        "step": (1, 3),
        "samples": (10, 30),
        "optimizer: w/step": (1.0, 3.0),
        "callbacks: ema/updates": (1, 3),
    }
    assert [(each["path"], each["old"], each["new"]) for each in facts["recipe"]] == [("optimizer.lr", 1.0, 3.0)]
    text = call("diff", "digits:1", "digits:3", code=1).stdout
    assert "recipe, tunable: optimizer.lr: 1.0 → 3.0" in text
    assert "model: 2 of 2 tensors differ" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"strategy": "ddp", "world_size": 1}, 0),  # the same state, saved by another strategy and world size
        ({"recipe": 'name = "y"\n[optimizer]\nlr = 4.0\n'}, 0),  # the name may change freely
        ({"recipe": 'name = "x"\n[optimizer]\nlr = 5.0\n'}, 1),
        ({"loop": {"scale": 2.0}}, 1),
        ({"position": {"seconds": 5.0}}, 0),
        ({"position": {"skipped": 5}}, 1),
        ({"aliases": {}}, 1),
        ({"callbacks": {}}, 1),
        ({"model": {"w": torch.full((2, 3), 4.0), "steps": torch.tensor([5])}}, 1),
        ({"model": {"w": torch.full((2, 3), 4.0, dtype=torch.float64), "steps": torch.tensor([4])}}, 1),
        ({"model": {"w": torch.full((3, 2), 4.0), "steps": torch.tensor([4])}}, 1),
        ({"model": {"w": torch.full((2, 3), 4.0)}}, 1),
        ({"model": {"w": torch.full((2, 3), 4.0), "steps": torch.tensor([4]), "new": torch.ones(1)}}, 1),
    ],
)
def test_diff_exits_with_1_for_differences_of_state_and_recipe(change: dict[str, Any], expected: int) -> None:
    one, other = save(Path("one"), 4), save(Path("other"), 4, **change)

    call("diff", str(one), str(other), code=expected)
    call("diff", str(other), str(one), code=expected)
    assert json_of("diff", "one", "other", code=expected)["equal"] == (not expected)


def test_diff_compares_nan_infinity_and_large_integers_exactly() -> None:
    odd = torch.tensor([float("nan"), float("inf"), 1.0])
    one = save(Path("one"), 4, model={"w": odd, "n": torch.tensor([2**60])})
    same = save(Path("same"), 4, model={"w": odd.clone(), "n": torch.tensor([2**60])})
    other = save(Path("other"), 4, model={"w": torch.tensor([0.0, float("inf"), 1.0]), "n": torch.tensor([2**60 + 1])})

    call("diff", str(one), str(same))
    tensors = {each["name"]: each for each in json_of("diff", str(one), str(other), code=1)["tensors"]}
    assert (tensors["w"]["elements"], tensors["w"]["absolute"]) == (1, "nan")
    assert tensors["n"]["elements"] == 1, "equal in float64"


def test_diff_with_a_damaged_checkpoint_is_an_error(run: RunFolder) -> None:
    flip(path_of(run, 3) / "shard-00000-of-00001.safetensors")

    assert "is damaged" in call("diff", "digits:2", "digits:3", code=3).stderr


# ---------------------------------------------------------------------------------------------- export, import
def test_an_imported_export_equals_the_original(run: RunFolder) -> None:
    call("export", "digits", "-o", "hf/", "--max-shard-size", "0.03KB")
    assert len(load_file("hf/model-00001-of-00002.safetensors")) == 1

    facts = json_of("import", "hf", "-o", "back", "--step", "3")

    reader = CheckpointReader(Path(facts["path"]))
    assert torch.equal(reader.read("model", "w"), torch.full((2, 3), 3.0))
    assert reader.aliases == {"tied": "w"}
    assert (facts["kind"], facts["tensors"], facts["optimizer"]) == ("safetensors", 2, 0)
    assert json_of("verify", "back")["resumes"] == facts["path"]


def test_import_reports_imported_and_skipped_parts() -> None:
    model = {"module.a": torch.ones(2), "module.b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save({"model": model, "optimizer": {"state": {}, "param_groups": []}}, "x.pt")

    text = call("import", "x.pt", "-o", "out").stdout

    assert "1 float32, 1 bfloat16 tensors, 12 B" in text
    assert "optimizer  none" in text
    assert "skipped    optimizer: optimizer state by number" in text
    assert r"--map '^module\.='" in text
    assert json_of("import", "x.pt", "-o", "out", "--map", r"^module\.=")["hints"] == []


def test_import_adds_a_checkpoint_to_a_run(run: RunFolder) -> None:
    save_file({"w": torch.ones(2, 3)}, "x.safetensors")

    facts = json_of("import", "x.safetensors", "-o", "digits")

    assert Path(facts["path"]).parent == run.checkpoints
    assert "the run resumes from step 3, which is newer" in facts["hints"][0]
    assert not json_of("import", "x.safetensors", "-o", "runs/digits", "--step", "9")["hints"]
    assert (
        json_of("ls", "digits")["checkpoints"][0].items()
        >= {"step": 9, "strategy": "imported from safetensors"}.items()
    )


@pytest.mark.parametrize("out", ["runs/new", "./runs/new/", "elsewhere/new"])
def test_import_refuses_a_future_run_folder(run: RunFolder, out: str) -> None:
    """Refused because a run of that name could not start in a folder that is not a run."""
    save_file({"w": torch.ones(2, 3)}, "x.safetensors")
    shutil.copytree(run.path, "elsewhere/digits")
    refused = call("import", "x.safetensors", "-o", out, code=2).stderr
    assert "would be the folder of a run called new" in refused
    assert "checkpoint.init_from" in refused
    assert not Path(out).exists()


def test_a_pickle_is_refused_with_2_and_a_hint() -> None:
    class Odd: ...

    sys.modules["odd"] = type(sys)("odd")
    Odd.__module__, Odd.__qualname__, sys.modules["odd"].Odd = "odd", "Odd", Odd  # type: ignore[attr-defined]
    try:
        torch.save({"w": torch.ones(1), "x": Odd()}, "x.pt")
        stderr = call("import", "x.pt", "-o", "out", code=2).stderr
        assert "can run any code" in stderr
        assert "add --trust" in stderr
        assert call("import", "x.pt", "-o", "out", "--trust").stdout.count("skipped    x: not a tensor") == 1
    finally:
        del sys.modules["odd"]
    assert "needs a package that is not installed" in call("import", "x.pt", "-o", "out", "--trust", code=2).stderr


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run of six steps, saved every two steps; returns the folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(RECIPE)
    zygote.run(["run", "tiny.toml"], nproc=1, cwd=folder).check()
    return folder


def test_a_run_resumes_from_an_imported_checkpoint(
    trained: Path, tmp_path: Path, ddpforge: Callable[..., Ranks]
) -> None:
    """Saves step 4 with torch.distributed.checkpoint and imports it; the last steps are bitwise identical."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    whole = Path("runs/tiny").rename("runs/whole")
    shutil.copytree(whole, "runs/tiny", ignore=shutil.ignore_patterns("step-*", "status.json", "latest.json"))
    state = CheckpointReader(next((whole / "checkpoints").glob("step-000000004-*"))).state()
    optimizer = {
        name: {key: x.read() if hasattr(x, "read") else x for key, x in values.items()}
        for name, values in state.optimizer.items()
    }
    weights = {name: saved.read() for name, saved in state.model.items()}
    dcp.save({"model": weights, "optim": {"state": optimizer}}, checkpoint_id="dcp")

    call("import", "dcp", "-o", "tiny", "--trust", "--step", "4", "--samples", "256")
    ddpforge("run", "tiny.toml")

    assert [row["step"] for row in json_of("ls", "tiny")["checkpoints"]] == [6, 4]
    assert call("diff", "whole:6", "tiny:6").stdout.endswith("equal\n")


def test_a_run_starts_from_imported_weights(trained: Path, tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    (source,) = trained.glob("runs/tiny/checkpoints/step-000000006-*")
    torch.save({name: saved.read() for name, saved in CheckpointReader(source).state().model.items()}, "weights.pt")
    path = json_of("import", "weights.pt", "-o", "start")["path"]
    (tmp_path / "next.toml").write_text(RECIPE.replace('"2st"', f'"2st", at_start = true, init_from = "{path}"'))

    ddpforge("run", "next.toml", "--set", "name=next")

    facts = json_of("diff", path, "next:0", code=1)
    assert not facts["tensors"], "all weights equal the imported ones"
    assert not facts["missing"]["model"]
