"""Ranks for tests that start fast: a process that has imported all modules once forks them.

Each rank is `python -m ddpforge …` on the CPU, with the environment variables of torchrun. This is not a real launcher:
a test suite should start at least one run with a real one.
"""

import math
import multiprocessing
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING
from unittest import mock

from ddpforge.launchers.torchrun import NO_GPUS

if TYPE_CHECKING:
    from ddpforge.tools.parity.runs import StartRanks

__all__ = ["fork_ranks", "preload", "run_ddpforge", "run_ranks", "starter"]

_SERVER = multiprocessing.get_context("forkserver")
# DeepSpeed must not touch a GPU in a process that forks.
_ENVIRONMENT = {**NO_GPUS, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
# What most ranks would import themselves, e.g. torch._dynamo with the first optimizer. Modules that cannot be
# imported are skipped.
_warmed = [
    *("torch._dynamo", "torch.distributed.fsdp", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("rich._emoji_codes", "rich.progress", "tomlkit"),
    *("ddpforge.app.run", "ddpforge.cli.run", "ddpforge.builtin.trackers.console", "ddpforge.runs.metrics"),
    *("ddpforge.strategies.ddp_replica", "ddpforge.strategies.fsdp", "ddpforge.strategies.fsdp.replica"),
    *("ddpforge.features.installed", "ddpforge.launchers.environment", "ddpforge.launchers.slurm"),
    *(f"ddpforge.guard.{name}" for name in ("fit", "model", "node_consistency", "reference_check", "same_on_ranks")),
    *(f"ddpforge.guard.{name}" for name in ("samples", "sources", "static", "sum_reduction")),
]
_PATIENCE = 20.0  # seconds for the other ranks to end by themselves after one has failed


def preload(*modules: str) -> None:
    """Adds `modules` to the imports of the process that forks ranks; call it before the first run."""
    _warmed.extend(modules)


def run_ddpforge(*arguments: str, cwd: Path, ranks: int = 1, timeout: float = 80.0) -> CompletedProcess[str]:
    """Runs `ddpforge ARGUMENTS` in each of `ranks` processes, which are killed after `timeout` seconds.

    Returns the joined output of all ranks, and the largest exit code. A rank that was ended by a signal counts with the
    number of the signal.
    """
    return run_ranks("ddpforge", *arguments, cwd=cwd, ranks=ranks, timeout=timeout)


def fork_ranks(arguments: Sequence[str], ranks: int, output: Path, timeout: float = 600.0) -> int:
    """Runs `ddpforge run ARGUMENTS` on `ranks` ranks on the CPU; writes their output to a file, and returns the code.

    After `timeout` seconds the ranks are killed, and the last line of the output is an error.
    """
    began = time.monotonic()
    done = run_ddpforge("run", *arguments, cwd=Path.cwd(), ranks=ranks, timeout=timeout)
    late = done.returncode and time.monotonic() - began > timeout
    end = f"error: the ranks were killed, because they did not end within {timeout:g} seconds\n" if late else ""
    output.write_text(done.stdout + done.stderr + end, encoding="utf-8")
    return done.returncode


def starter(ranks: int, device: str, python: str | None = None) -> "StartRanks":
    """Returns the function that starts ranks of runs to compare: on GPUs, if there is one for each of `ranks` ranks.

    Otherwise they are forked, on the CPU. `python` is another interpreter, which torchrun starts on the same devices.
    """
    # torch is imported here: the process that forks ranks imports it with the garbage collector paused.
    from ddpforge.api import accelerators
    from ddpforge.tools.parity.runs import torchrun

    uses_gpus = device != "cpu" and accelerators() >= ranks
    if uses_gpus or python:
        return partial(torchrun, {} if uses_gpus else NO_GPUS, python=python)
    return fork_ranks


def run_ranks(module: str, *arguments: str, cwd: Path, ranks: int, timeout: float = math.inf) -> CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` in each of `ranks` processes, as `run_ddpforge` does."""
    _SERVER.set_forkserver_preload(_warmed)
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        forkserver.ensure_running()
    world: dict[str, object] = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    with TemporaryDirectory() as folder, reserved_port() as world["MASTER_PORT"]:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        started = []
        for rank, output in enumerate(outputs):
            place = {key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
            environment = {**os.environ, **_ENVIRONMENT, **(place if ranks > 1 else {})}
            started.append(_SERVER.Process(target=_rank, args=(module, arguments, cwd, environment, output)))
        try:
            with _without_main():
                for process in started:
                    process.start()
            _wait(started, timeout)
        finally:
            for process in started:
                if process.pid:
                    process.kill()
                    process.join()
        code = max(abs(process.exitcode or 0) for process in started)
        out, err = ("".join(path.with_suffix(kind).read_text() for path in outputs) for kind in (".out", ".err"))
    return CompletedProcess(arguments, code, out, err)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port of this machine that only a server with SO_REUSEADDR can take, as torch's rendezvous store has it.

    The port stays bound without listening. Otherwise the system may give it to another process, as a server's port or
    as the near end of a connection, before rank 0 listens on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _without_main() -> Iterator[None]:
    """Hides the main module of this process; otherwise multiprocessing would run it again in the new processes."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _wait(started: list[ForkServerProcess], timeout: float) -> None:
    limit = time.monotonic() + timeout
    while any(process.is_alive() for process in started):
        if any(process.exitcode for process in started):
            limit = min(limit, time.monotonic() + _PATIENCE)
        if time.monotonic() > limit:
            for process in started:
                process.kill()
        time.sleep(0.01)


def _rank(module: str, arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], output: Path) -> None:
    """Runs the module in the forked process; never returns."""
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    for stream, kind in ((1, ".out"), (2, ".err")):
        with output.with_suffix(kind).open("w") as file:
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_the_tests() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
