"""The mirror of a run folder: verified copies to another place, and the way back to a machine without the run."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile
from moto.server import ThreadedMotoServer
from support.forked import in_ranks, refused

import ddpforge
from ddpforge.checkpoint.schema import COMMIT
from ddpforge.errors import CheckpointError, RecipeError, SetupError, UsageError
from ddpforge.features.mirror import Mirror
from ddpforge.runs.folder import RunFolder

RECIPE = """
recipe = 2
name = "run"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
strategy = { use = "single" }
train = { length = "6st", global_batch = 8, device = "cpu" }
checkpoint = { every = "2st", keep = { last = 2 } }
track = { every = "1st" }
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Starts an S3 server on this machine; yields its address."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Creates a bucket for the test; returns an address in it."""
    import boto3  # type: ignore[import-untyped]

    for name, value in (("ENDPOINT_URL", server), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket-{abs(hash(request.node.name)):x}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/runs"


def run(folder: Path, *sets: str, fresh: bool = False, within: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Trains a run in `folder` in a new process; returns its status or raises its error."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)

    def rank(_: int) -> Any:
        within()
        try:
            return dict(ddpforge.run(folder / "recipe.toml", sets=sets, out=folder, fresh=fresh).status)
        except (SetupError, UsageError, RecipeError) as error:
            error.__cause__ = None
            return error if not isinstance(error, RecipeError) else UsageError(str(error.problems))

    ((found,),) = (in_ranks(1, rank),)
    if isinstance(found, Exception):
        raise found
    return found  # type: ignore[no-any-return]


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name[:14] for path in folder.glob(f"checkpoints/step-*/{COMMIT}"))


def test_a_run_resumes_from_a_bucket_on_a_machine_without_its_folder(tmp_path: Path, bucket: str) -> None:
    run(tmp_path / "straight")
    mirror = f'checkpoint.mirror="{bucket}"'
    run(tmp_path / "one", mirror, "train.length=4st")
    shutil.rmtree(tmp_path / "one/run")
    status = run(tmp_path / "one", mirror)
    assert (status["state"], status["step"]) == ("done", 6)
    assert losses(tmp_path / "one") == losses(tmp_path / "straight")
    assert len({RunFolder(tmp_path / name / "run").id for name in ("one", "straight")}) == 2


def test_the_mirror_has_the_same_files_as_the_run(tmp_path: Path) -> None:
    """Holds also for checkpoints removed by retention and the final status.json; logs are not copied."""
    run(tmp_path / "one", f'checkpoint.mirror="{(tmp_path / "there").as_uri()}"')
    here, there = tmp_path / "one/run", tmp_path / "there/run"
    assert checkpoints(here) == checkpoints(there) == ["step-000000004", "step-000000006"]
    files = {path.relative_to(here) for path in here.rglob("*") if path.is_file() and "logs" not in path.parts}
    files -= {Path("checkpoints/latest.json")}  # a hint, which is not copied
    assert {path.relative_to(there) for path in there.rglob("*") if path.is_file()} == files
    assert all((here / file).read_bytes() == (there / file).read_bytes() for file in files)
    assert json.loads((there / "status.json").read_text())["state"] == "done"


def test_a_damaged_copy_is_an_error_and_the_same_command_repairs_it(tmp_path: Path) -> None:
    mirror = f'checkpoint.mirror="{(tmp_path / "there").as_uri()}"'

    def flips() -> None:
        put = LocalFileSystem.put_file

        def damaged(self: Any, here: str, there: str, *rest: Any, **more: Any) -> None:
            put(self, here, there, *rest, **more)
            if there.endswith(".safetensors"):
                content = bytearray(Path(there).read_bytes())
                content[-1] ^= 1
                Path(there).write_bytes(content)

        LocalFileSystem.put_file = damaged  # this process ends with the run

    message = refused(CheckpointError, lambda: run(tmp_path / "one", mirror, within=flips))
    assert "differs from the file that was copied there" in message
    assert message.endswith("the run here is complete: run the same command again to copy the missing files")
    assert checkpoints(tmp_path / "there/run") == []
    assert json.loads((tmp_path / "one/run/status.json").read_text())["state"] == "done"

    assert run(tmp_path / "one", mirror)["step"] == 6
    assert checkpoints(tmp_path / "there/run") == ["step-000000004", "step-000000006"]


def test_a_copy_that_disappears_is_an_error(tmp_path: Path) -> None:
    mirror = f'checkpoint.mirror="{(tmp_path / "there").as_uri()}"'

    def loses() -> None:
        put = LocalFileSystem.put_file

        def lost(self: Any, here: str, there: str, *rest: Any, **more: Any) -> None:
            put(self, here, there, *rest, **more)
            if there.endswith(".safetensors"):
                Path(there).unlink()

        LocalFileSystem.put_file = lost  # this process ends with the run

    message = refused(CheckpointError, lambda: run(tmp_path / "one", mirror, within=loses))
    assert "is incomplete" in message
    assert checkpoints(tmp_path / "there/run") == []


def test_a_partially_copied_checkpoint_does_not_count(tmp_path: Path) -> None:
    mirror = f'checkpoint.mirror="{(tmp_path / "there").as_uri()}"'
    run(tmp_path / "one", mirror)
    (newest,) = (tmp_path / "there/run/checkpoints").glob("step-000000006-*")
    (newest / COMMIT).unlink()
    shutil.rmtree(tmp_path / "one/run")
    run(tmp_path / "one", mirror)
    assert checkpoints(tmp_path / "one/run") == checkpoints(tmp_path / "there/run") == ["step-000000004"]


def small(folder: Path, steps: dict[int, bool]) -> RunFolder:
    """Makes a run folder with checkpoints of one file each; `steps` maps a step to whether it is complete."""
    for step, complete in steps.items():
        path = folder / f"checkpoints/step-{step:09d}-{step:04x}"
        path.mkdir(parents=True)
        (path / "weights").write_bytes(b"w" * step)
        if complete:
            (path / COMMIT).write_text("{}")
    (folder / "run.json").write_text('{"id": "mine"}')
    return RunFolder(folder)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/*"))


def test_fetch_skips_an_incomplete_checkpoint(tmp_path: Path) -> None:
    small(tmp_path / "there/run", {2: True, 4: False})
    here = tmp_path / "here"
    here.mkdir()
    Mirror(RunFolder(here / "run"), (tmp_path / "there").as_uri(), must=True).fetch(fresh=False)
    assert steps_in(here / "run") == ["step-000000002-0002"]


def test_complete_keeps_later_checkpoints_of_another_machine(tmp_path: Path) -> None:
    """Removes earlier ones that are not in the run folder, because retention has removed them there."""
    small(tmp_path / "there/run", {2: True, 9: True})
    mirror = Mirror(small(tmp_path / "here/run", {4: True}), (tmp_path / "there").as_uri(), must=True)
    mirror.complete()
    assert steps_in(tmp_path / "there/run") == ["step-000000004-0004", "step-000000009-0009"]


def test_complete_copies_changed_small_files_but_no_temporary_files(tmp_path: Path) -> None:
    folder = small(tmp_path / "here/run", {2: True})
    (folder.path / "status.json").write_text('{"step": 1}')
    (folder.path / ".status.json.tmp").write_text('{"st')
    mirror = Mirror(folder, (tmp_path / "there").as_uri(), must=True)
    mirror.complete()
    (folder.path / "status.json").write_text('{"step": 2}')  # of the same size
    mirror.complete()
    there = {path.name: path.read_text() for path in (tmp_path / "there/run").iterdir() if path.is_file()}
    assert there == {"run.json": '{"id": "mine"}', "status.json": '{"step": 2}'}


def test_a_failed_removal_leaves_no_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the line is down")

    small(tmp_path / "there/run", {2: True})
    monkeypatch.setattr(LocalFileSystem, "rm", fails)
    Mirror(small(tmp_path / "here/run", {4: True}), (tmp_path / "there").as_uri(), must=False).complete()
    assert checkpoints(tmp_path / "there/run") == ["step-000000004"]


def test_a_mirror_refuses_another_run(tmp_path: Path) -> None:
    mirror = f'checkpoint.mirror="{(tmp_path / "there").as_uri()}"'
    run(tmp_path / "one", mirror, "train.length=2st")
    shutil.copytree(tmp_path / "one", tmp_path / "old")
    run(tmp_path / "one", mirror)

    message = refused(UsageError, lambda: run(tmp_path / "old", mirror))
    assert "run is at step 6, but" in message
    message = refused(UsageError, lambda: run(tmp_path / "one", mirror, fresh=True))
    assert "already contains a run, and --fresh would mix" in message
    run(tmp_path / "other", "train.length=2st")
    message = refused(UsageError, lambda: run(tmp_path / "other", mirror))
    assert "contains another run than" in message


@pytest.mark.parametrize(
    ("address", "kind", "says"),
    [
        ("s3://nowhere/runs", SetupError, "s3://nowhere/runs/run cannot be"),
        ("gs://bucket/runs", SetupError, "pip install 'gcsfs>=2024.6'"),
        ("nonsense://x", UsageError, "fsspec does not accept the address nonsense://x"),
        ("runs", UsageError, "must be an address"),
    ],
)
def test_an_invalid_address_is_refused_before_training(
    tmp_path: Path, bucket: str, address: str, kind: type[Exception], says: str
) -> None:
    message = refused(kind, lambda: run(tmp_path / "one", f'checkpoint.mirror="{address}"'))
    assert says in message
    assert not [*tmp_path.rglob("step-*")]


# ---------------------------------------------------------------------------------------------- odd files
def mirror_of(tmp_path: Path) -> tuple[RunFolder, Mirror, Path]:
    """Returns a run folder, its mirror in the folder `there`, and a secret file elsewhere."""
    folder = RunFolder(tmp_path / "here/run")
    folder.create(text="recipe = 2", resolved="recipe = 2", local_files={})
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret").write_text("secret")
    return folder, Mirror(folder, f"file://{tmp_path / 'there'}", must=True), tmp_path / "elsewhere/secret"


def test_links_in_a_run_are_not_copied_to_its_mirror(tmp_path: Path) -> None:
    folder, mirror, secret = mirror_of(tmp_path)
    (folder.path / "shown").symlink_to(secret.parent)
    (folder.path / "link.txt").symlink_to(secret)
    os.mkfifo(folder.path / "pipe")
    mirror.complete()
    assert {path.name for path in (tmp_path / "there/run").iterdir()} == {
        "recipe.toml",
        "recipe.resolved.toml",
        "run.json",
    }


@pytest.mark.parametrize("name", ["recipe.toml", "run.json", "."])
def test_a_mirror_is_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    _, mirror, secret = mirror_of(tmp_path)
    there = tmp_path / "there/run" / name
    there.parent.mkdir(exist_ok=True, parents=True)
    if name == ".":
        (tmp_path / "there/run").rmdir() if (tmp_path / "there/run").exists() else None
        (tmp_path / "there/run").symlink_to(secret.parent)
    else:
        there.symlink_to(secret)
    with pytest.raises(SetupError, match=r"cannot be written: .*is a link"):
        mirror.begin()
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("kind", ["link", "pipe", "zeros"])
@pytest.mark.parametrize("name", ["run.json", "recipe.toml"])
def test_fetch_refuses_links_and_special_files(tmp_path: Path, kind: str, name: str) -> None:
    folder, mirror, secret = mirror_of(tmp_path)
    mirror.complete()
    shutil.rmtree(folder.path)
    there = tmp_path / "there/run" / name
    there.unlink()
    make = {"link": lambda: there.symlink_to(secret), "pipe": lambda: os.mkfifo(there)}
    make.get(kind, lambda: there.symlink_to("/dev/zero"))()
    with pytest.raises(SetupError, match=r"cannot be read: .*is a link or a special file"):
        mirror.fetch(fresh=False)
    assert not folder.path.exists()


@pytest.mark.parametrize("content", ["", "[" * 200_000, "7", '{"id": [1]}', "{}"])
def test_a_mirror_with_an_invalid_run_json_counts_as_another_run(tmp_path: Path, content: str) -> None:
    _, mirror, _ = mirror_of(tmp_path)
    mirror.complete()
    (tmp_path / "there/run/run.json").write_text(content)
    with pytest.raises(UsageError, match="contains another run"):
        mirror.fetch(fresh=False)


@pytest.mark.parametrize("name", ["../evil", "x/../../evil", "checkpoints/../../evil", "checkpoints/.."])
def test_a_name_in_a_bucket_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Uses fsspec's store in memory: names in it are as free as those in a bucket."""
    store = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}-{abs(hash(name)):x}"
    for file, content in (("run.json", b'{"id": "mine"}'), ("recipe.toml", b"recipe = 2"), (name, b"evil")):
        store.store[f"{root}/run/{file}"] = MemoryFile(store, f"{root}/run/{file}", content)
    here = tmp_path / "here"
    here.mkdir()
    Mirror(RunFolder(here / "run"), f"memory:/{root}", must=True).fetch(fresh=False)
    assert {path.name for path in here.iterdir()} == {"run"}
    assert {path.name for path in (here / "run").rglob("*")} == {"run.json", "recipe.toml", "checkpoints"}
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def failing_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mirror:
    """Returns a mirror that has begun, and cannot be written any more."""
    _, mirror, _ = mirror_of(tmp_path)
    mirror.begin()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the line is down")

    monkeypatch.setattr(mirror, "_copy_all", fails)
    return mirror


def test_a_failed_copy_does_not_hide_the_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_mirror(tmp_path, monkeypatch).end(ZeroDivisionError())


def test_a_failed_copy_fails_a_run_that_did_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is incomplete: OSError: the line is down"):
        failing_mirror(tmp_path, monkeypatch).end()
