"""Training of a sweep's runs: concurrently, each once, stopped together; with fakes of `ddpforge run`."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpforge.tools.sweeps.space import Variant
from ddpforge.tools.sweeps.training import Commands, Trained, train

STAND_IN = """
import json, os, signal, sys
from pathlib import Path
folder, how = Path(sys.argv[1]), sys.argv[2]
print("visible", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if how == "refused":
    sys.exit(print("error: no such thing") or 2)
if how == "waits":
    signal.signal(signal.SIGTERM, lambda *_: None)
    Path(folder.parent, folder.name + ".ready").touch()
    signal.pause()
state, code = {"waits": ("preempted", 75), "failed": ("failed", 1)}.get(how, ("done", 0))
folder.mkdir(parents=True)
(folder / "run.json").write_text(json.dumps({"id": "1", "created": "", "attempts": 1, "lineage": []}))
(folder / "recipe.resolved.toml").write_text("")
status = {"state": state, "exit_code": code, "step": 1, "samples": 1, "world_size": 1, "strategy": "ddp"}
status |= {"metrics": {"eval/loss": 0.5}, "error": "KeyError" if code == 1 else None}
(folder / "status.json").write_text(json.dumps(status))
sys.exit(code)
"""


@dataclass(frozen=True, kw_only=True)
class StandIns(Commands):
    def line(self, variant: Variant) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(self.folder / variant.name), *variant.sets]


def variants(*hows: str) -> list[Variant]:
    return [Variant(f"{number}-{how}", (how,)) for number, how in enumerate(hows)]


def test_every_run_is_trained_once_and_a_failure_does_not_stop_others(tmp_path: Path) -> None:
    begun: list[str] = []
    told: list[Trained] = []
    ended, stopped = train(
        variants("done", "failed", "refused", "done"),
        StandIns(recipe="", folder=tmp_path, jobs=2),
        begins=lambda variant: begun.append(variant.name),
        on_result=lambda _, trained: told.append(trained),
    )
    assert (begun, stopped) == (["0-done", "1-failed", "2-refused", "3-done"], False)
    assert ended == told
    found = {one.name: (one.state, one.error) for one in ended}
    assert found == {
        "0-done": ("done", None),
        "1-failed": ("failed", "KeyError"),
        "2-refused": ("refused", "error: no such thing"),
        "3-done": ("done", None),
    }
    assert ended[0].metrics == {"eval/loss": 0.5}
    assert "visible None" in (tmp_path / "logs/0-done.log").read_text().replace("visible \n", "visible None\n")


def test_signal_stops_running_runs_with_a_save_and_starts_no_more(tmp_path: Path) -> None:
    def stop() -> None:
        while len(list(tmp_path.glob("*.ready"))) < 2:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopper = threading.Thread(target=stop)
    stopper.start()
    ended, stopped = train(variants("waits", "waits", "done"), StandIns(recipe="", folder=tmp_path, jobs=2))
    stopper.join()
    assert stopped
    assert sorted((one.name, one.state) for one in ended) == [("0-waits", "preempted"), ("1-waits", "preempted")]
    assert signal.getsignal(signal.SIGTERM) == before


def test_error_in_a_callback_ends_the_sweep(tmp_path: Path) -> None:
    def told(*_: object) -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        train(variants("refused", "refused"), StandIns(recipe="", folder=tmp_path), on_result=told)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["0-refused.log"]


def test_concurrent_runs_have_separate_gpus_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    commands = Commands(recipe="r.toml", folder=Path("s"), nproc=2, jobs=2, devices=["4", "5", "6", "7"])
    assert [commands.variables(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["4,5", "6,7"]
    assert commands.variables(0)["OMP_NUM_THREADS"] == "4"
    variant = Variant("lr-1", ("lr=1",))
    line = ["launch", "--nproc=2", "r.toml", "--out=s", "--set=lr=1", "--set=name=lr-1"]
    assert commands.line(variant)[1:] == ["-P", "-m", "ddpforge", *line]
    assert Commands(recipe="r.toml", folder=Path("s")).line(variant)[4] == "run"
