"""The run folder: its files, attempts, status and environment, also after crashes."""

import errno
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddpforge import disk
from ddpforge.errors import SetupError, UsageError
from ddpforge.machine import usable_cores
from ddpforge.recipe import LoadedRecipe
from ddpforge.runs.environment import describe_environment
from ddpforge.runs.folder import RunFolder, Status, snapshot

TEXT, RESOLVED = "# mine\nrecipe = 2\n", 'recipe = 2\nname = "digits"\n'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "digits")
    folder.create(text=TEXT, resolved=RESOLVED, local_files={})
    return folder


def begin(folder: RunFolder, step: int, resolved: str = RESOLVED) -> int:
    return folder.begin_attempt(step=step, text=TEXT, resolved=resolved, local_files={})


def status_of(**changes: Any) -> Status:
    status = Status(
        state="running",
        exit_code=None,
        step=5,
        total_steps=10,
        samples=40,
        world_size=2,
        strategy="ddp",
        metrics={"train/loss": 0.5},
        error=None,
    )
    return cast(Status, status | changes)


# ---------------------------------------------------------------------------------------------- creation
def test_a_new_folder_holds_the_recipe_as_given_and_as_resolved(folder: RunFolder) -> None:
    assert folder.exists()
    assert folder.recipe.read_text() == TEXT
    assert folder.resolved.read_text() == RESOLVED
    assert folder.tables() == {"recipe": 2, "name": "digits"}
    assert folder.checkpoints.is_dir()
    assert (folder.attempts(), folder.lineage(), folder.status()) == (0, [], None)
    assert [path.name for path in folder.path.parent.iterdir()] == ["digits"]


def test_local_code_is_copied_to_the_path_in_the_resolved_recipe(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "digits")

    folder.create(text=TEXT, resolved=RESOLVED, local_files={"./code/my_models.py": b"class Net: ..."})

    assert (folder.path / "code" / "my_models.py").read_text() == "class Net: ..."


def test_copies_of_local_code_keep_their_names_when_a_recipe_names_another_file(tmp_path: Path) -> None:
    """Needed because a resume compares resolved recipes, and these have the paths of the copies."""
    for name in ("a/parts.py", "b/model.py", "c/parts.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    loaded = SimpleNamespace(text="", dumps=str, local_files=lambda: dict.fromkeys(sorted(tmp_path.rglob("*.py"))))
    copies = snapshot(cast(LoadedRecipe, loaded))["local_files"]
    assert copies == {"code/parts.py": b"a/parts.py", "code/model.py": b"b/model.py", "code/1/parts.py": b"c/parts.py"}


def test_modules_imported_by_local_code_are_copied_to_the_same_folder(tmp_path: Path) -> None:
    """Includes indirect imports and packages. c/model.py gets a folder of its own, or it would import a/layers.py."""
    files = {
        "a/parts.py": "from .layers import X",
        "a/layers.py": "def f():\n    from .deep import blocks",
        "a/deep/__init__.py": "",
        "a/deep/blocks.py": "from .. import last",
        "a/last.py": "import os, layers\nfrom ..outside import Y",
        "a/unused.py": "",
        "outside.py": "",
        "c/model.py": "from .layers import Z",
        "c/layers.py": "Z = 1",
        "c/broken.py": "from .layers import (",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    named = dict.fromkeys(tmp_path / name for name in ("a/parts.py", "c/broken.py", "c/model.py"))
    loaded = SimpleNamespace(text="", dumps=lambda names: str(list(names.values())), local_files=lambda: named)
    found = snapshot(cast(LoadedRecipe, loaded))
    assert found["resolved"] == str(["code/parts.py", "code/broken.py", "code/1/model.py"])
    copies = {"parts", "layers", "deep/__init__", "deep/blocks", "last"}
    assert found["local_files"].keys() == {f"code/{name}.py" for name in copies} | {
        "code/broken.py",
        "code/1/model.py",
        "code/1/layers.py",
    }
    assert found["local_files"]["code/1/layers.py"] == b"Z = 1"


def test_files_that_local_code_imports_by_plain_names_are_copied_where_the_copy_finds_them(tmp_path: Path) -> None:
    """Proves it for files in the original's folder and in the recipe's folder: the copy has one folder for both."""
    files = {
        "nets/model.py": "import beside_model, json\nfrom shared_code.parts import X\nfrom beside_recipe import Y",
        "nets/beside_model.py": "",
        "beside_recipe.py": "",
        "shared_code/parts.py": "from .more import Z",
        "shared_code/more.py": "",
        "json.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    loaded = SimpleNamespace(text="", dumps=str, local_files=lambda: {tmp_path / "nets/model.py": tmp_path})
    names = ("model", "beside_model", "beside_recipe", "shared_code/parts", "shared_code/more")
    assert snapshot(cast(LoadedRecipe, loaded))["local_files"].keys() == {f"code/{name}.py" for name in names}


@pytest.mark.parametrize("name", ["../models.py", "/elsewhere/models.py", "code/../../models.py"])
def test_local_code_is_never_written_outside_the_folder(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "runs" / "digits")

    with pytest.raises(UsageError, match="is not below the recipe's folder"):
        folder.create(text=TEXT, resolved=RESOLVED, local_files={name: b""})
    assert not folder.exists()


def test_create_refuses_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "recipe.toml").write_text("precious")

    with pytest.raises(UsageError, match="exists and is not the folder of a run"):
        RunFolder(tmp_path / "digits").create(text=TEXT, resolved=RESOLVED, local_files={})
    assert (tmp_path / "digits" / "recipe.toml").read_text() == "precious"


def test_create_works_after_a_process_was_killed_during_create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*arguments: object) -> None:
        raise Killed

    folder = RunFolder(tmp_path / "runs" / "digits")
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", die)
        with pytest.raises(Killed):
            folder.create(text=TEXT, resolved=RESOLVED, local_files={})
    assert not folder.path.exists()

    folder.create(text=TEXT, resolved=RESOLVED, local_files={})
    assert [path.name for path in folder.path.parent.iterdir()] == ["digits"]


def test_only_one_of_two_concurrent_starts_creates_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the second before each disk operation of the first."""
    assert not any(_second_start_interrupts(tmp_path, moment, monkeypatch) for moment in range(25, 30)), (
        "create has fewer than 25 disk operations"
    )
    assert all(_second_start_interrupts(tmp_path, moment, monkeypatch) for moment in range(15))


def _second_start_interrupts(tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the other start ran before disk operation `moment`; asserts that one complete run is left."""
    folder, other = (RunFolder(tmp_path / str(moment) / "digits") for _ in range(2))
    laid_down: list[bool] = []
    moments = itertools.count()

    def interrupted(real: Any) -> Any:
        def operation(*arguments: Any) -> Any:
            if next(moments) == moment:
                with monkeypatch.context() as patch:
                    patch.setattr("os.getpid", lambda: 1)  # another live process
                    laid_down.append(other.create(text="other", resolved=RESOLVED, local_files={}))
            return real(*arguments)

        return operation

    with monkeypatch.context() as patch:
        for name in ("make_folder", "create", "write", "sync", "rename", "remove", "sync_folder"):
            patch.setattr(disk, name, interrupted(getattr(disk, name)))
        mine = folder.create(text=TEXT, resolved=RESOLVED, local_files={})

    assert [mine, *laid_down].count(True) == 1
    assert folder.recipe.read_text() == (TEXT if mine else "other")
    assert (folder.attempts(), folder.tables()) == (0, {"recipe": 2, "name": "digits"})
    assert [path.name for path in folder.path.parent.iterdir()] == ["digits"]
    return bool(laid_down)


def test_a_new_folder_is_claimed_before_it_is_visible(tmp_path: Path) -> None:
    """Tries to claim it from another process, because file locks do not exclude the process that holds them."""
    folder = RunFolder(tmp_path / "runs" / "digits")
    script = """
import sys
from pathlib import Path
from ddpforge.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).claim():
    pass
"""
    with folder.claim_new(text=TEXT, resolved=RESOLVED, local_files={}) as mine:
        assert mine
        tried = subprocess.run([sys.executable, "-c", script, folder.path], capture_output=True, text=True, check=False)
    assert "another training already uses" in tried.stderr


def test_the_error_names_an_unwritable_run_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")

    with pytest.raises(SetupError, match=r"the run's folder .*/runs/digits cannot be written"):
        RunFolder(tmp_path / "runs" / "digits").create(text=TEXT, resolved=RESOLVED, local_files={})


# ---------------------------------------------------------------------------------------------- attempts
def test_attempts_are_counted(folder: RunFolder) -> None:
    assert [begin(folder, step) for step in (0, 10, 10)] == [1, 2, 3]
    assert folder.attempts() == 3


def test_an_attempt_stores_its_recipe(folder: RunFolder) -> None:
    folder.begin_attempt(step=10, text="# new\n", resolved="recipe = 2\nx = 2\n", local_files={})

    assert folder.recipe.read_text() == "# new\n"
    assert folder.tables() == {"recipe": 2, "x": 2}


def test_the_lineage_has_the_first_step_of_each_recipe(folder: RunFolder) -> None:
    a, b, c = "lr = 1\n", "lr = 2\n", "lr = 3\n"
    for step, resolved in ((0, a), (10, a), (20, b), (30, c)):
        begin(folder, step, resolved)

    def entry(step: int, resolved: str) -> dict[str, Any]:
        return {"step": step, "recipe": sha256(resolved.encode()).hexdigest()}

    assert folder.lineage() == [entry(0, a), entry(20, b), entry(30, c)]

    begin(folder, 25, a)  # before the first step of c: no kept step was trained with c
    assert folder.lineage() == [entry(0, a), entry(20, b), entry(25, a)]

    begin(folder, 0, b)
    assert folder.lineage() == [entry(0, b)]


def test_retire_renames_the_folder_to_the_first_free_number(folder: RunFolder) -> None:
    first = folder.retire()
    folder.create(text="second", resolved=RESOLVED, local_files={})
    second = folder.retire()

    assert (first.name, second.name) == ("digits.1", "digits.2")
    assert RunFolder(first).recipe.read_text() == TEXT
    assert RunFolder(second).recipe.read_text() == "second"
    assert not folder.exists()


# ---------------------------------------------------------------------------------------------- status
def test_the_status_has_exactly_the_documented_keys(folder: RunFolder) -> None:
    folder.write_status(status_of())

    assert json.loads((folder.path / "status.json").read_text()) == status_of()
    assert folder.status() == status_of()
    assert list(Status.__annotations__) == list(status_of())


def test_the_status_is_strict_json_even_after_divergence(folder: RunFolder) -> None:
    folder.write_status(status_of(metrics={"train/loss": math.nan, "eval/loss": math.inf, "lr": 0.1}))

    assert json.loads((folder.path / "status.json").read_text())["metrics"] == {
        "train/loss": None,
        "eval/loss": None,
        "lr": 0.1,
    }


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_failed_write_keeps_the_last_status(
    folder: RunFolder, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    folder.write_status(status_of())
    monkeypatch.setattr(disk, operation, refuse)

    with pytest.raises(SetupError, match="Input/output error"):
        folder.write_status(status_of(state="done"))
    assert folder.status() == status_of()


def test_on_a_full_disk_the_status_file_is_overwritten_in_place(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the status would stay "running" after a run that failed because of the full disk."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder.write_status(status_of(metrics={f"train/{name}": 1.0 for name in range(20)}))
    monkeypatch.setattr(disk, "write", full)
    folder.write_status(status_of(state="failed", exit_code=3, error="rank 0: the disk is full"))
    assert folder.status() == status_of(state="failed", exit_code=3, error="rank 0: the disk is full")

    many = {f"train/{name}": 1.0 for name in range(1000)}
    folder.write_status(status_of(state="failed", exit_code=1, error="x" * 9000, metrics=many))
    found = folder.status()
    assert found is not None
    assert (found["state"], found["exit_code"], found["metrics"]) == ("failed", 1, {})
    assert str(found["error"]).startswith("xxx")


@pytest.mark.parametrize(
    ("state", "amended"), [("running", True), ("failed", True), ("done", False), ("preempted", False)]
)
def test_amend_failure_changes_only_running_and_failed_runs(folder: RunFolder, state: str, amended: bool) -> None:
    before = status_of(state=state)
    folder.write_status(before)
    folder.amend_failure("rank 1 was ended by signal 9 (SIGKILL)", 1)
    failed = {"state": "failed", "exit_code": 1, "error": "rank 1 was ended by signal 9 (SIGKILL)"}
    assert folder.status() == (before | failed if amended else before)


def test_sync_metrics_syncs_the_file_and_the_folder(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    folder.sync_metrics()  # no file, no fsync
    assert synced == []
    folder.metrics.write_text("{}\n")
    folder.sync_metrics()
    assert synced == [folder.metrics.stat().st_ino, folder.path.stat().st_ino]


@pytest.mark.parametrize("text", ["{", "3", '{"state": "done"}'])
def test_an_invalid_status_file_is_an_error(folder: RunFolder, text: str) -> None:
    (folder.path / "status.json").write_text(text)

    with pytest.raises(SetupError, match=r"status\.json cannot be read"):
        folder.status()


# ---------------------------------------------------------------------------------------------- finding runs
def test_a_run_is_found_by_folder_or_by_name(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.path.parent.parent)

    assert RunFolder.find("digits").path == Path("runs/digits")
    assert RunFolder.find(str(folder.path)).path == folder.path


@pytest.mark.parametrize(
    ("wanted", "hint"), [("digit", "did you mean digits?"), ("zzz", "runs there: digits"), ("", "runs there: digits")]
)
def test_a_missing_run_is_a_usage_error_with_a_similar_name(folder: RunFolder, wanted: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"there is no run '{wanted}'") as caught:
        RunFolder.find(wanted, folder.path.parent)
    assert caught.value.hints == (hint,)


# ---------------------------------------------------------------------------------------------- environment
def test_the_environment_is_recorded_without_secrets(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for secret in ("WANDB_API_KEY", "SLURM_JWT", "CUDA_SECRET_X", "TORCH_AUTH_TOKEN"):
        monkeypatch.setenv(secret, "hush")
    monkeypatch.setenv("HOME", "hush")
    begin(folder, 0)

    text = (folder.path / "env.json").read_text()
    recorded = json.loads(text)
    assert recorded["environment"].items() >= {"RANK": "0", "NCCL_DEBUG": "INFO"}.items()
    assert "hush" not in text
    assert recorded["packages"].keys() >= {"torch", "accelerate", "ddpforge"}
    assert recorded["command"] == sys.argv


def test_the_environment_has_the_gpus_and_their_software_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe_environment()
    assert found["cpus"] == usable_cores()
    assert found["cuda"] is None

    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=85_000_000_000)
    for name, value in (("is_initialized", True), ("device_count", 2), ("get_device_properties", gpu)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    kernel = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: gcc 12.2.0"
    )
    monkeypatch.setattr("ddpforge.runs.environment.nvidia_driver", lambda: kernel)
    assert describe_environment()["cuda"] == {
        "gpus": [{"name": "NVIDIA H100", "memory": 85_000_000_000}] * 2,
        "driver": "580.95.05",
        "runtime": "13.0",
        "cudnn": 92400,
        "nccl": "2.30.7",
    }


def test_the_environment_has_the_commit_and_whether_it_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_environment()["git"] is None

    git("init", "--quiet")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "--quiet", "-m", "a")
    assert describe_environment()["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}

    (tmp_path / "file").write_text("b")
    assert describe_environment()["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": True}

    monkeypatch.setenv("PATH", os.devnull)
    assert describe_environment()["git"] is None


def test_claim_warns_if_files_cannot_be_locked(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    with folder.claim():
        pass
    assert (
        f"digits cannot be locked ([Errno {errno.ENOLCK}] No locks available): make sure that no other process trains"
        in caplog.text
    )


# ---------------------------------------------------------------------------------------------- odd files
@pytest.mark.parametrize(
    "name", ["link.txt", "logs/rank-0.log", "shown/a/step-1.txt", "code/1/parts.py", "profile/x", "STOP"]
)
@pytest.mark.parametrize("kind", ["link", "pipe", "dangling"])
def test_links_and_pipes_in_a_folder_are_refused_by_name_before_training(
    folder: RunFolder, name: str, kind: str
) -> None:
    path = folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/etc/hostname" if kind == "link" else "/nowhere")
    with pytest.raises(SetupError, match=f"{name} is a link or a special file, which no run creates"):
        folder.reject_odd()


def test_linked_checkpoints_and_links_in_tracker_folders_are_accepted(folder: RunFolder, tmp_path: Path) -> None:
    folder.checkpoints.rmdir()
    (tmp_path / "large").mkdir()
    folder.checkpoints.symlink_to(tmp_path / "large")
    (folder.path / "wandb").mkdir()
    (folder.path / "wandb/latest-run").symlink_to("run-1")
    folder.reject_odd()


@pytest.mark.parametrize("kind", ["link", "pipe", "zeros", "dangling"])
def test_a_lock_file_that_is_a_link_or_a_pipe_is_refused(folder: RunFolder, tmp_path: Path, kind: str) -> None:
    lock = folder.logs / "lock"
    lock.unlink()
    target = tmp_path / "target"
    if kind == "link":
        target.write_text("mine")
    if kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to("/dev/zero" if kind == "zeros" else target)
    with pytest.raises(SetupError, match="is a link or a special file"), folder.claim():
        pass
    assert folder.is_claimed() is None
    assert (target.read_text() if target.exists() else None) == ("mine" if kind == "link" else None)


def test_a_status_with_unknown_keys_is_accepted(folder: RunFolder) -> None:
    (folder.path / "status.json").write_text(json.dumps({**status_of(), "more": [1]}))
    assert cast(dict[str, Any], folder.status())["more"] == [1]
