"""Linux's own calls and the portable ways have equal results."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpforge import machine

if not hasattr(signal, "SIGRTMIN"):
    pytest.skip("compares Linux's own calls with the portable ways", allow_module_level=True)

ROOT = Path(__file__).parent.parent
PORTABLE = ROOT / "tests/portable"
LINUX_ONLY = r"sched_\w+|posix_fadvise|memfd_create|pidfd_open|SIGRTMIN|prctl\b|/proc/|/dev/nvidia|\bepoll\b"


def hidden(program: str) -> str:
    """Returns the output of a program without Linux's own calls."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(PORTABLE), str(ROOT)])}
    program = f"import os\nfrom ddpforge import machine\n{program}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """Process with a child, both in a group of their own."""
    program = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        process.stdout.readline()
        yield psutil.Process(process.pid)
        os.killpg(process.pid, signal.SIGKILL)


def test_calls_that_only_linux_has_are_in_two_modules() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ddpforge").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and re.fullmatch(LINUX_ONLY, node.attr))
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(LINUX_ONLY, node.value))
    }
    assert found == {"ddpforge/machine.py", "ddpforge/launchers/scheduling.py"}


def test_creation_of_this_process_is_that_of_psutil() -> None:
    # psutil rounds the time of boot down to seconds.
    assert machine.process_created() == pytest.approx(psutil.Process().create_time(), abs=1.1)
    began = time.time()
    assert began - 1 < float(hidden("print(machine.process_created())")) < time.time()


def test_portable_state_and_descendants_are_those_of_linux(sleeper: psutil.Process) -> None:
    (child,) = sleeper.children()
    assert list(machine.descendants(sleeper.pid)) == [child.pid]
    assert hidden(f"print(list(machine.descendants({sleeper.pid})))") == f"[{child.pid}]"
    assert list(machine.descendants(sleeper.pid, without=[child.pid])) == []
    sleeper.suspend()
    while sleeper.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert machine.process_state(sleeper.pid) == "T"
    assert hidden(f"print(machine.process_state({sleeper.pid}))") == "T"
    sleeper.kill()
    while machine.process_state(sleeper.pid) != "Z":
        time.sleep(0.01)
    assert hidden(f"print(machine.process_state({sleeper.pid}), machine.wait_status({sleeper.pid}))") == "Z None"
    assert machine.wait_status(sleeper.pid) == signal.SIGKILL
    sleeper.wait()
    assert machine.process_state(sleeper.pid) == "X"
    assert hidden(f"print(machine.process_state({sleeper.pid}))") == "X"


def test_portable_memory_and_files_are_those_of_linux() -> None:
    assert machine.resident_memory() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert machine.peak_memory() >= machine.resident_memory() * 0.95
    mine = f"print(machine.resident_memory({os.getpid()}))"
    assert int(hidden(mine)) == pytest.approx(machine.resident_memory(), rel=0.05)
    assert hidden("print(machine.shared_memory_folder(), machine.ephemeral_ports())") == "None 49152-65535"
    assert 0 < int(hidden("print(machine.usable_cores())")) <= (os.cpu_count() or 1)
    shared = "file = machine.create_shared_file('a'); os.write(file, b'12'); print(os.pread(file, 2, 0).decode())"
    assert hidden(shared) == "12"


def test_end_of_the_parent_is_noticed_without_pidfd() -> None:
    """Ends a process after 0.2 s; its child sees the end within seconds."""
    waits = """
import time
begin, poll = time.monotonic(), machine.end_poll(os.getppid())
if os.fork() == 0:
    parent = os.getppid()
    print(poll, machine.wait_for_end(parent, poll, 0.05), end=" ")
    print(machine.wait_for_end(parent, None, 30), time.monotonic() - begin < 10, flush=True)
    os._exit(0)
time.sleep(0.2)
"""
    assert hidden(waits) == "None False True True"


def test_stacks_have_a_signal_without_realtime_signals() -> None:
    assert machine.STACKS == signal.SIGRTMIN + 7
    assert hidden("import signal; print(machine.STACKS == signal.SIGUSR2)") == "True"
