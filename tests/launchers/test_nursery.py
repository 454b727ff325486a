"""Ranks that are copies of a process which has imported what they need: each is as one that started by itself."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpforge.launchers import nursery

REPOSITORY = Path(__file__).parents[2]

# A nursery without imports, whose ranks run a module of the test's: what it brings up is `rank`.
BEFORE = """
import json, os, signal, subprocess, sys, time
from ddpforge.launchers import nursery
from ddpforge.launchers.requests import dispositions

def bring(*words, streams=(1, 2), **environment):
    return place.bring((sys.executable, "-u", "-m", "probe", *words), {**os.environ, **environment}, streams)

nursery._IMPORTED, nursery.RANK = (), ("-u", "-m", "probe")
signals = dispositions()
for number in (signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
place = nursery.Nursery(signals)
"""


def asking(folder: Path, probe: str, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process prints that runs `script` with a nursery, whose ranks run `probe`."""
    (folder / "probe.py").write_text(probe)
    paths = {"PYTHONPATH": f"{folder}:{REPOSITORY}"}
    command = [sys.executable, "-u", "-c", BEFORE + script]
    return subprocess.run(command, text=True, capture_output=True, env=os.environ | paths | environment, timeout=60)


FACTS = """
import json, os, random, signal, sys
print(json.dumps({
    "words": sys.argv[1:], "name": __name__, "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(),
    "said": os.environ.get("SAID"), "left": os.environ.get("LEFT"), "byte": list(os.environb[b"BYTE"]),
    "numbers": random.random(),
    "usr1": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "hup": signal.getsignal(signal.SIGHUP).name,
    "int": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
}))
"""


def test_a_rank_is_as_one_that_started_by_itself(tmp_path: Path) -> None:
    script = """
del os.environ["LEFT"]
ranks = [bring("run", "a b", SAID=str(n), BYTE=os.fsdecode(b"\\xff")) for n in range(2)]
print(json.dumps({"pid": os.getpid(), "ends": [rank.wait(20) for rank in ranks]}))
"""
    nohup = f"import signal, os; signal.signal(signal.SIGHUP, signal.SIG_IGN); exec({BEFORE + script!r})"
    (tmp_path / "probe.py").write_text(FACTS)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "LEFT": "behind"}
    command = [sys.executable, "-u", "-c", nohup]
    ended = subprocess.run(command, text=True, capture_output=True, env=environment, timeout=60)
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    (asker,) = [line for line in said if "ends" in line]
    ranks: list[dict[str, Any]] = sorted((line for line in said if "words" in line), key=lambda line: line["said"])

    assert asker["ends"] == [0, 0]
    assert [rank["said"] for rank in ranks] == ["0", "1"]
    for rank in ranks:
        assert (rank["words"], rank["name"]) == (["run", "a b"], "__main__")
        assert (rank["parent"], rank["leads"]) == (asker["pid"], True)  # so that torchrun can end its whole group
        assert (rank["left"], rank["byte"]) == (None, [0xFF])
        assert (rank["usr1"], rank["hup"], rank["int"]) == (True, "SIG_IGN", True)  # not as this asker has them
        assert rank["files"] == [0, 1, 2]
    assert ranks[0]["numbers"] != ranks[1]["numbers"]


def test_the_asker_learns_how_a_rank_ends(tmp_path: Path) -> None:
    probe = """
import os, signal, sys, time
how = sys.argv[1]
if how == "word":
    sys.exit("a word")
if how == "raise":
    raise ValueError("raised here")
if how == "wait":
    time.sleep(60)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""
    script = """
ends = {how: bring(how).wait(20) for how in ("0", "75", "word", "raise", "killed")}
waits = bring("wait")
try:
    waits.wait(0.05)
except subprocess.TimeoutExpired as error:
    ends["late"] = error.cmd[-1]
assert waits.poll() is None
os.killpg(waits.pid, signal.SIGTERM)
ends["ended"] = waits.wait(20)
assert waits.poll() == waits.returncode == ends["ended"]
print(json.dumps(ends))
"""
    ended = asking(tmp_path, probe, script)
    expected = {"0": 0, "75": 75, "word": 1, "raise": 1, "killed": -9, "late": "wait", "ended": -15}
    assert json.loads(ended.stdout) == expected
    assert "a word\n" in ended.stderr
    assert "ValueError: raised here" in ended.stderr


def test_what_a_rank_prints_goes_where_it_is_told_to(tmp_path: Path) -> None:
    script = f"""
with open({str(tmp_path / "out")!r}, "w") as out, open({str(tmp_path / "err")!r}, "w") as err:
    rank = bring(streams=(out.fileno(), err.fileno()))
rank.wait(20)
"""
    ended = asking(tmp_path, "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos._exit(0)", script)
    assert (ended.stdout, ended.stderr) == ("", "")
    assert [(tmp_path / name).read_text() for name in ("out", "err")] == ["out\n", "err\n"]


def test_whoever_asks_in_vain_starts_a_rank_by_itself(tmp_path: Path) -> None:
    """numactl before Python, another Python, a kernel that gives orphans to another, or a nursery that has ended."""
    script = """
assert place.bring(("numactl", sys.executable, "-u", "-m", "probe"), {}, (1, 2)) is None
assert place.bring((sys.executable, "-m", "probe"), {}, (1, 2)) is None
nursery._prctl(nursery._SUBREAPER, 0)
assert bring() is None  # it could not wait for the rank
(child,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
os.kill(int(child), signal.SIGKILL)
os.waitpid(int(child), 0)
assert bring() is None
assert bring() is None
print("well")
"""
    ended = asking(tmp_path, "print('never')", script)
    assert (ended.stdout, ended.stderr) == ("well\n", "")


def test_the_nursery_ends_with_the_asker(tmp_path: Path) -> None:
    """Else whoever reads what a launch prints would wait for the end of it."""
    script = """
(child,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(child, flush=True)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = asking(tmp_path, "", script)  # which returns when nobody can write any more
    assert ended.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{int(ended.stdout)}/exe").exists()


def test_where_it_is_not_safe_ranks_start_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    assert not nursery.is_safe()  # it keeps back what is printed
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), write_through=True))
    assert nursery.is_safe()
    monkeypatch.setenv(nursery.FORK, "0")
    assert not nursery.is_safe()
    monkeypatch.delenv(nursery.FORK)
    monkeypatch.setattr(threading, "active_count", lambda: 2)  # what a profiler or debugger has started
    assert not nursery.is_safe()
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not nursery.is_safe()


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch knows no CUDA")
def test_what_is_imported_for_all_ranks_looks_for_no_device_and_starts_no_thread() -> None:
    """A process that has asked CUDA anything cannot hand it on to its copies."""
    script = """
import sys, threading
import torch
asked = []
def noting(name, function):
    return lambda *words: asked.append(name) or function(*words)
for name in dir(torch._C):
    if name.startswith("_cuda_"):
        setattr(torch._C, name, noting(name, getattr(torch._C, name)))
import torch.distributed.launcher.api, torch.distributed.run
from ddpforge.launchers import nursery
for name in nursery._IMPORTED:
    __import__(name)
print(asked, threading.active_count())
torch.cuda.is_available()
print(asked)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, text=True, capture_output=True, env=environment, check=True, timeout=60)
    imported, looked = ended.stdout.splitlines()
    assert imported == "[] 1"
    assert "_cuda_getDeviceCount" in looked  # which is how an import would have been found out
