"""W&B receives every metric at its own step, one run per run folder, and can neither stop nor delay training.

The client is the real one. Offline runs are read back from its own files; online ones are sent to a small server
on 127.0.0.1 that can fail. No test connects to another server.
"""

import json
import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from pydantic import ValidationError
from support.wandb_stub import Fault, WandbStub

from ddpforge.builtin.trackers import wandb as wandb_tracker
from ddpforge.builtin.trackers.wandb import WandbTracker
from ddpforge.components.registry import Registry
from ddpforge.interfaces import Histogram, Tracker
from ddpforge.training.trackers import TrackerGroup

Table = dict[str, Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provides a home of a logged-in user without settings: no proxy, no server but 127.0.0.1."""
    for name in os.environ:
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home / name.lower()))
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    yield home

    import wandb

    with suppress(Exception, SystemExit):
        wandb.teardown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbStub]:
    with WandbStub() as stub:
        monkeypatch.setenv("WANDB_BASE_URL", stub.url)
        yield stub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "digits"
    folder.mkdir(parents=True)
    return folder


def start(tracker: Tracker, folder: Path, resumed_at: int | None = None, **config: float) -> Tracker:
    tracker.start(name="digits", folder=folder, config={"train": {"seed": 7}, **config}, resumed_at=resumed_at)
    return tracker


def log(tracker: Tracker, steps: range, attempt: int = 1) -> None:
    for step in steps:
        tracker.log(step, {"train/loss": step + attempt / 10, "samples": 8 * step})


def finish(tracker: Tracker, state: str = "done") -> None:
    tracker.finish(state=state, summary={"eval/accuracy": 0.975})


# ---------------------------------------------------------------------------------------- reading back
def records(file: Path) -> Iterator[Any]:
    """Yields the records of a `.wandb` file: LevelDB's log format (blocks of 32 KiB) after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, at, payload = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        payload += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(payload)
            payload = b""


def segments(folder: Path, kind: str = "offline-run") -> list[Path]:
    return sorted((folder / "wandb").glob(f"{kind}-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)


def history(*files: Path) -> list[Table]:
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for file in files
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def config_of(file: Path) -> Table:
    config = {}
    for record in records(file):
        for update in (*record.run.config.update, *record.config.update):
            config[update.key] = json.loads(update.value_json)
    return config


def losses(rows: list[Table]) -> dict[int, float]:
    """Returns the newest training loss at each `trainer/step`."""
    return {row["trainer/step"]: row["train/loss"] for row in rows if "train/loss" in row}


# --------------------------------------------------------------------------------------------- media
def test_media_become_wandb_media_at_their_step(folder: Path) -> None:
    tracker = start(WandbTracker(project="forge", mode="offline"), folder)
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    tracker.log_media(7, "samples/ema", image, "image")
    tracker.log_media(7, "gradients", Histogram((1, 2), (0.0, 0.5, 1.0)), "histogram")
    tracker.log_media(7, "story", "once\n<upon>", "text")
    tracker.log_media(7, "worst", [{"id": 3, "loss": 0.5}, {"id": 4, "loss": None}], "table")
    finish(tracker)
    (file,) = segments(folder)
    rows = [row for row in history(file) if row["trainer/step"] == 7]
    shown: Table = {name.partition(".")[0]: {} for row in rows for name in row if "." in name}
    for row in rows:
        for name, value in row.items():
            if "." in name:
                shown[name.partition(".")[0]][name.partition(".")[2]] = value
    files = file.parent / "files"
    assert (shown["samples/ema"]["_type"], shown["samples/ema"]["width"]) == ("image-file", 4)
    assert np.array_equal(np.asarray(Image.open(files / shown["samples/ema"]["path"])), image)
    assert shown["gradients"] == {"_type": "histogram", "values": [1, 2], "bins": [0.0, 0.5, 1.0]}
    assert (files / shown["story"]["path"]).read_text() == "<pre>once\n&lt;upon&gt;</pre>"
    table = json.loads((files / shown["worst"]["path"]).read_text())
    assert (table["columns"], table["data"]) == (["id", "loss"], [[3, 0.5], [4, None]])


@pytest.mark.parametrize("asked", [True, False])
def test_checkpoints_option_logs_artifact_references(folder: Path, asked: bool) -> None:
    checkpoint = folder / "checkpoints" / "step-000000012-abcd"
    checkpoint.mkdir(parents=True)
    (checkpoint / "shard.safetensors").write_bytes(b"weights")
    tracker = start(WandbTracker(project="forge", mode="offline", checkpoints=asked), folder)
    tracker.checkpoint(12, checkpoint)
    finish(tracker)
    (file,) = segments(folder)
    artifacts = [r.request.log_artifact.artifact for r in records(file) if r.request.HasField("log_artifact")]
    artifacts += [record.artifact for record in records(file) if record.WhichOneof("record_type") == "artifact"]
    assert [sorted(artifact.aliases) for artifact in artifacts] == [["latest", "step-12"]] * asked
    for artifact in artifacts:
        (entry,) = artifact.manifest.contents
        assert (entry.ref, entry.local_path) == ((checkpoint / "shard.safetensors").as_uri(), "")


# --------------------------------------------------------------------------------------------- offline
def test_offline_run_has_the_recipe_and_every_metric_at_its_step(folder: Path) -> None:
    tracker = start(WandbTracker(project="forge", mode="offline", tags=("a", "b"), group="g"), folder, lr=1e-3)
    log(tracker, range(1, 51))
    tracker.log(50, {"eval/accuracy": 0.975})
    finish(tracker)

    (file,) = segments(folder)
    assert config_of(file).items() >= {"train": {"seed": 7}, "lr": 1e-3}.items()
    rows = history(file)
    assert losses(rows) == {step: step + 0.1 for step in range(1, 51)}
    assert [(row["trainer/step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row] == [(50, 0.975)]

    run = next(record.run for record in records(file) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == (
        "forge",
        "digits",
        "g",
        ["a", "b"],
    )
    assert run.run_id == json.loads((folder / "wandb.json").read_text())["id"]


def test_step_metric_of_every_metric_is_trainer_step(folder: Path) -> None:
    finish(start(WandbTracker(project="forge", mode="offline"), folder))
    metrics = [r.metric for r in records(*segments(folder)) if r.WhichOneof("record_type") == "metric"]
    assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == ["trainer/step"]


def test_wandb_is_not_imported_before_a_run_starts() -> None:
    code = (
        "import sys, ddpforge.builtin.trackers.wandb as ours; ours.WandbTracker('forge'); print('wandb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"


def test_reader_of_these_tests_agrees_with_that_of_wandb(folder: Path) -> None:
    import wandb

    tracker = start(WandbTracker(project="forge", mode="offline"), folder)
    log(tracker, range(1, 301))  # more than one block
    finish(tracker)
    (file,) = segments(folder)

    core = str(Path(wandb.__file__).parent / "bin" / "wandb-core")
    command = [core, "leet", "inspect", "--no-observability", "--json", "--run-file", str(file), str(file.parent)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    theirs = [json.loads(line)["type"] for line in output.splitlines()]
    assert theirs == [record.WhichOneof("record_type") for record in records(file)]
    assert theirs.count("history") == 300


def test_resumed_run_keeps_its_id_and_later_values_win(folder: Path) -> None:
    first = start(WandbTracker(project="forge", mode="offline"), folder)
    log(first, range(0, 10), attempt=1)
    finish(first, "failed")
    second = start(WandbTracker(project="forge", mode="offline"), folder, resumed_at=5)
    log(second, range(6, 15), attempt=2)
    finish(second)

    files = segments(folder)
    assert len({file.name for file in files}) == 1
    assert len(files) == 2
    rows = history(*files)
    assert losses(rows) == {s: s + 0.1 for s in range(6)} | {s: s + 0.2 for s in range(6, 15)}
    assert [row["trainer/step"] for row in rows if "trainer/resumed_at" in row] == [5]


def test_rewind_logs_resumed_at(folder: Path) -> None:
    tracker = start(WandbTracker(project="forge", mode="offline"), folder)
    log(tracker, range(1, 4))
    tracker.rewind(1)
    log(tracker, range(2, 4), attempt=2)
    finish(tracker)
    rows = history(*segments(folder))
    assert losses(rows) == {1: 1.1, 2: 2.2, 3: 3.2}
    assert [row["trainer/resumed_at"] for row in rows if "trainer/resumed_at" in row] == [1]


def test_environment_overrides_the_recipe(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"MODE": "offline", "PROJECT": "theirs", "RUN_GROUP": "their-group", "NAME": "their-name"}
    for name, value in wanted.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_RUN_ID", "theirid")
    tracker = start(WandbTracker(project="ours", mode="online", group="our-group", name="our-name"), folder)
    finish(tracker)

    (file,) = segments(tmp_path)
    run = next(record.run for record in records(file) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.display_name) == ("theirs", "their-group", "their-name")
    assert run.run_id == json.loads((folder / "wandb.json").read_text())["id"] == "theirid"


def test_disabled_mode_writes_nothing(folder: Path) -> None:
    tracker = start(WandbTracker(project="forge", mode="disabled"), folder, resumed_at=3)
    log(tracker, range(4, 6))
    finish(tracker)
    assert not (folder / "wandb").exists()


def test_wandb_writes_only_into_the_run_folder(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name)
    finish(start(WandbTracker(project="forge", mode="offline"), folder))
    assert list(home.iterdir()) == []


# ---------------------------------------------------------------------------------------------- online
def test_online_run_is_uploaded_and_resumed(server: WandbStub, folder: Path) -> None:
    first = start(WandbTracker(project="forge", mode="online"), folder, world_size=2)
    log(first, range(0, 10), attempt=1)
    finish(first, "failed")
    ((run_id, run),) = server.runs.items()
    assert run_id == json.loads((folder / "wandb.json").read_text())["id"]
    assert run.exit_code == 1

    second = start(WandbTracker(project="forge", mode="online"), folder, resumed_at=5, world_size=1)
    log(second, range(6, 15), attempt=2)
    finish(second)
    assert list(server.runs) == [run_id]
    assert losses(run.history) == {s: s + 0.1 for s in range(6)} | {s: s + 0.2 for s in range(6, 15)}
    assert run.config["train"]["value"] == {"seed": 7}
    assert run.config["world_size"]["value"] == 1
    assert run.summary.items() >= {"eval/accuracy": 0.975, "state": "done"}.items()
    assert run.exit_code == 0


# ---------------------------------------------------------------------------------------- links
def test_url_of_the_run_is_logged(server: WandbStub, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpforge")
    finish(start(WandbTracker(project="forge"), folder))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "ddpforge")
    assert line.startswith("W&B: http")
    assert line.endswith(f"/runs/{json.loads((folder / 'wandb.json').read_text())['id']}")


def test_upload_command_of_an_offline_run_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpforge")
    finish(start(WandbTracker(project="forge", mode="offline"), folder))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "ddpforge")
    (file,) = segments(folder)
    assert line == f"W&B: recording offline; upload it with: wandb sync {file.parent}"


@pytest.mark.parametrize("project", ["a/b", "a?", "a#", "a%", "a:b", "a\\b", "a\nb", ""])
def test_invalid_project_name_is_refused_before_training(project: str) -> None:
    model = Registry.installed().options_model("tracker", "wandb")
    assert model.model_validate_json('{"project": "a b-c.d"}')
    with pytest.raises(ValidationError):
        model.model_validate_json(json.dumps({"project": project}))


# ---------------------------------------------------------------------------------------- failures
def only_line(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (record for record in caplog.records if record.name == "ddpforge")
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_run_without_an_api_key_is_recorded_offline(
    server: WandbStub, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    tracker = start(WandbTracker(project="forge"), folder)
    log(tracker, range(1, 4))
    finish(tracker)

    (file,) = segments(folder)
    assert only_line(caplog) == (
        f"W&B: no API key (`wandb login` stores one); recording offline, upload it later with: wandb sync {file.parent}"
    )
    assert losses(history(file)) == {1: 1.1, 2: 2.1, 3: 3.1}
    assert server.runs == {}


def test_run_is_recorded_offline_if_the_server_refuses_connections(
    server: WandbStub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail("gone")
    tracker = start(WandbTracker(project="forge", mode="online"), folder)
    log(tracker, range(1, 4))
    finish(tracker)
    assert f"{server.url} cannot be reached" in only_line(caplog)
    assert losses(history(*segments(folder))) == {1: 1.1, 2: 2.1, 3: 3.1}


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records connection attempts and their timeouts; no server is reached, not even by wandb's login."""
    import wandb

    found: list[Any] = []

    def connect(address: tuple[str, int], timeout: float | None = None) -> None:
        found.append((address, timeout))
        raise TimeoutError("timed out")

    monkeypatch.setattr(wandb_tracker.socket, "create_connection", connect)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    return found


@pytest.mark.parametrize(("url", "port"), [("http://wandb.example", 80), ("https://wandb.example", 443)])
def test_silent_server_delays_the_start_by_two_seconds(url: str, port: int, probes: list[Any]) -> None:
    import wandb

    with pytest.raises(wandb.Error, match=rf"{url} cannot be reached \(timed out\)"):
        wandb_tracker._check_server(wandb.Settings(mode="online", base_url=url))
    assert probes == [(("wandb.example", port), 2)]


def test_server_is_not_checked_behind_a_proxy(probes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    wandb_tracker._check_server(wandb.Settings(mode="online", base_url="https://wandb.example"))
    assert probes == []
    with pytest.raises(wandb.Error, match="cannot be reached"):  # that proxy is for https
        wandb_tracker._check_server(wandb.Settings(mode="online", base_url="http://wandb.example"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "hang"])
def test_run_is_recorded_if_the_server_fails_at_the_start(
    fault: Fault, server: WandbStub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail(fault)
    tracker = start(WandbTracker(project="forge", init_timeout=1), folder)
    log(tracker, range(1, 4))
    finish(tracker)
    assert "\n" not in only_line(caplog)
    assert losses(history(*segments(folder))) == {1: 1.1, 2: 2.1, 3: 3.1}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "hang", pytest.param("gone", marks=pytest.mark.full)])
def test_run_is_recorded_if_the_server_fails_during_training(
    fault: Fault, server: WandbStub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = start(WandbTracker(project="forge", finish_timeout=1), folder)
    log(tracker, range(1, 20))
    server.fail(fault)
    log(tracker, range(20, 1000))
    finish(tracker)

    (file,) = segments(folder, "run")
    assert only_line(caplog) == f"W&B: the upload is incomplete; complete it with: wandb sync {file.parent}"
    assert losses(history(file)) == {step: step + 0.1 for step in range(1, 1000)}


def test_death_of_the_wandb_process_disables_the_tracker_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = start(TrackerGroup({"wandb": WandbTracker(project="forge", mode="offline")}), folder)
    log(tracker, range(1, 20))
    (core,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
    core.send_signal(signal.SIGKILL)
    core.wait()
    log(tracker, range(20, 1000))
    finish(tracker)
    assert only_line(caplog).startswith("tracker wandb failed and is off for the rest of the run: ConnectionResetError")


def test_failed_row_ends_the_wandb_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expects an immediate end: wandb's exit hook would print a traceback after the run."""

    def refuse(row: Table) -> None:
        raise ConnectionResetError("Connection lost")

    tracker = WandbTracker(project="forge", mode="offline")
    start(tracker, folder)
    (core,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
    monkeypatch.setattr(tracker._run, "log", refuse)
    with pytest.raises(ConnectionResetError):
        tracker.log(1, {"train/loss": 1.0})
    assert not core.is_running()
