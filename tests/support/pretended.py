"""Python processes that see CUDA devices on a machine without one: `tests/pretend_cuda/README.md`.

python tests/support/pretended.py 2 COMMAND…    runs a command that sees two devices, which compute
"""

import fcntl
import os
import subprocess
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/pretend_cuda"
BUILT = ROOT / "build/pretend_cuda"


def _builder() -> Any:
    spec = spec_from_file_location("pretend_cuda_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def built() -> Path:
    """Builds the pretended device if it has changed, and returns its folder. Skips the test if it cannot be built."""
    builder = _builder()
    if reason := builder.missing():
        pytest.skip(f"the pretended CUDA device needs {reason}")
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder.build(BUILT)
    return BUILT


def on_path(*folders: Path) -> str:
    """Returns PYTHONPATH with `folders` before the ones of this process: these may hold a changed ddpforge."""
    return ":".join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(devices: int, *, computes: bool) -> dict[str, str | None]:
    """Returns the variables of a process that sees `devices` GPUs; None for one that must be absent.

    `computes`: kernels compute, on the CPU. Otherwise they do nothing, so that launches and memory are those of CUDA.
    """
    folder = built()
    return {
        "LD_PRELOAD": str(folder / "libpretend_cuda.so"),
        "LD_LIBRARY_PATH": f"{folder / 'lib'}:{folder}",
        "PYTHONPATH": on_path(FOLDER / "site"),
        "PRETEND_CUDA_DEVICES": str(devices),
        "PRETEND_CUDA_KERNELS": str(folder / "cpu_kernels.so") if computes else None,
        "PRETEND_CUDA_COLLECTIVES": None if computes else str(folder / "collectives.so"),
        "CUDA_VISIBLE_DEVICES": None,
        "OMP_NUM_THREADS": "1",
    }


def python(code: str, cwd: Path, *arguments: str, devices: int = 1, computes: bool = False) -> str:
    """Runs Python code in a process of its own and returns its standard output. Fails the test if it fails."""
    env = with_changes(environment(devices, computes=computes))
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def with_changes(changes: dict[str, str | None]) -> dict[str, str]:
    """Returns this process's environment with other values; without variables that are None."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


if __name__ == "__main__":
    os.execvpe(sys.argv[2], sys.argv[2:], with_changes(environment(int(sys.argv[1]), computes=True)))
