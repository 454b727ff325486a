"""Starts real ranks quickly: forks them from a process that has already imported torch; a launcher starts each anew.

Every rank is a process of its own with the environment that torchrun gives it, joins a real gloo group and leaves the
way a launched rank leaves. `tests/launchers/test_launch.py` covers the launchers themselves.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FORKED_PROGRAMS = "FORKED_PROGRAMS"
"""Variable for a rank whose own programs (`python -m MODULE`) are forked, too: each saves two seconds of a core."""

UNWATCHED = "UNWATCHED"
"""Variable for a rank without watchdogs: two programs, half of the cost of a short run."""


@dataclass(frozen=True)
class Ranks:
    """Exit codes and output of the ranks of one world."""

    codes: list[int]
    stdout: str
    stderr: str

    def check(self) -> "Ranks":
        """Fails the test with the ranks' output unless all of them succeeded."""
        assert not any(self.codes), f"exit codes {self.codes}\n{self.stdout}\n{self.stderr}"
        return self


class Zygote:
    """Process that forks ranks; started on first use, ended with the test session.

    It has the environment `env`, by default that of this process.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.env = env

    def run(
        self,
        arguments: Sequence[str],
        *,
        nproc: int,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        restarts: int | None = None,
        watched: bool = True,
    ) -> Ranks:
        """Runs `ddpforge ARGUMENTS` in each of `nproc` ranks; without watchdogs unless `watched`.

        With `restarts`, the launcher of `ddpforge launch` starts the ranks and restarts them up to `restarts` times;
        the only exit code is then that of the launch.
        """
        if self.process is None:
            command = [sys.executable, __file__]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.env
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None

        order = {
            "arguments": list(arguments),
            "nproc": nproc,
            "cwd": str(cwd),
            "env": {**(env or {}), **({} if watched else {UNWATCHED: "1"})},
            "timeout": timeout,
            "restarts": restarts,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Ranks(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


# ---------------------------------------------------------------------------------------------- in the zygote
# Modules that nearly every rank would import itself: a third of the time of a short run.
_IMPORTED = [
    *("click", "pydantic._internal._serializers", "rich._emoji_codes", "rich.progress", "tomlkit"),
    "torch._dynamo",  # by the first optimizer of every process: 2 seconds
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    *(f"ddpforge.cli.{command}" for command in ("run", "evaluate", "export")),
    *("ddpforge.components.options", "ddpforge.app.run"),
    *(f"ddpforge.strategies.{strategy}" for strategy in ("ddp", "fsdp", "pipeline")),
    *("ddpforge.builtin.trackers.console", "ddpforge.runs.metrics", "torch.nn.attention.bias"),
]
_IMPORTED_WHOLE = ("features", "guard", "launchers", "runs", "strategies", "training")  # folders of ddpforge
_IMPORTED_BY_DEEPSPEED = [
    "deepspeed.runtime.zero.muon.muon_optimizer",  # and with it torch._inductor: 1.4 seconds
    *("deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops"),
    *("deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.utils.pin_memory"),
    *("ddpforge.strategies.deepspeed.replica", "ddpforge.strategies.deepspeed.zero"),
    *("torch._subclasses.schema_check_mode", "torch.utils.cpp_extension"),
]


def _serve() -> None:
    import gc
    import logging
    from functools import cache
    from importlib import import_module, metadata
    from pkgutil import walk_packages

    from ddpforge.components.hooks import found
    from ddpforge.components.registry import Registry
    from ddpforge.fast_import import gc_paused
    from ddpforge.machine import has_nvidia_gpu

    modules = _IMPORTED + [
        module.name
        for folder in _IMPORTED_WHOLE
        for module in walk_packages([f"{ROOT}/ddpforge/{folder}"], f"ddpforge.{folder}.")
        if "deepspeed" not in module.name
    ]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    pretended = "PRETEND_CUDA_DEVICES" in os.environ
    # DeepSpeed might touch a GPU, which a process that forks must not.
    if hidden or not (pretended or has_nvidia_gpu()):
        os.environ["DS_ACCELERATOR"] = "cpu"
        modules = modules + _IMPORTED_BY_DEEPSPEED
    logging.disable(logging.WARNING)  # torch's, about a machine with CUDA and without a GPU
    with gc_paused():
        for module in modules:
            with suppress(ImportError):  # other versions of DeepSpeed and torch have other modules
                import_module(module)
    logging.disable(logging.NOTSET)
    for kind in ("model", "data", "task", "metric", "optimizer", "schedule", "callback"):
        for component in metadata.entry_points(group=f"ddpforge.{kind}"):
            if component.value.startswith("ddpforge."):
                component.load()
    Registry.installed()
    found("check")  # reads the entry points of all distributions
    metadata.entry_points = cache(metadata.entry_points)  # torch looks for backends in all distributions, in every rank
    metadata.entry_points(group="torch.distributed.backends")

    os.fsync = lambda fd: None  # type: ignore[assignment]  # tests need no durable files: see checkpoint/conftest.py
    gc.freeze()  # keeps the collector of a rank off these objects: a scan would copy their memory pages
    for line in sys.stdin:
        print(json.dumps(_start(**json.loads(line))), flush=True)
    os._exit(0)  # skips the collection of these objects at the end


def _start(
    arguments: list[str], nproc: int, cwd: str, env: dict[str, str], timeout: float, restarts: int | None
) -> dict[str, Any]:
    if restarts is not None:
        return _start_launcher(arguments, nproc, cwd, env, timeout, restarts)
    from ddpforge.testing.ranks import reserved_port

    output = Path(cwd) / ".ranks"
    output.mkdir(exist_ok=True)
    children = []
    with reserved_port() as port:
        for rank in range(nproc):
            world = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            child = os.fork()
            if child == 0:
                _rank(arguments, cwd, {key: str(value) for key, value in world.items()} | env, output)
            children.append(child)
        codes = _wait(children, timeout)
    texts = {
        kind: "".join((output / f"{kind}-{rank}").read_text() for rank in range(nproc)) for kind in ("stdout", "stderr")
    }
    return {"codes": codes, **texts}


def _start_launcher(
    arguments: list[str], nproc: int, cwd: str, env: dict[str, str], timeout: float, restarts: int
) -> dict[str, Any]:
    from ddpforge.launchers.exit_record import ExitRecords
    from ddpforge.launchers.torchrun import torchrun_command, variables_for
    from ddpforge.local_world import VERDICT

    output = Path(cwd) / ".ranks"
    output.mkdir(exist_ok=True)
    verdict = output / "verdict"
    verdict.write_text("")
    command = torchrun_command(arguments[1:], nproc=nproc, flags=[f"--max-restarts={restarts}"])
    variables = {**variables_for(nproc), "OMP_NUM_THREADS": "1", VERDICT: str(verdict), **env}
    child = os.fork()
    if child == 0:
        _launcher(command[command.index("-m") + 1 :], cwd, variables, output)
    (code,) = _wait([child], timeout)
    texts = {
        kind: "".join(path.read_text() for path in sorted(output.glob(f"{kind}-*"))) for kind in ("stdout", "stderr")
    }
    return {"codes": [ExitRecords(verdict, nproc).conclude(code, None).code], **texts}


def _launcher(command: list[str], cwd: str, env: dict[str, str], output: Path) -> None:
    """Becomes the launcher; never returns."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    from ddpforge.launchers import torchrun

    os.environ.update(env)
    for stream, kind in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / f"{kind}-launcher", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = command

    def fork(_: Any, args: Any, env: dict[str, str]) -> Any:
        return _Forked(list(args), cwd, env, output)

    SubprocessHandler._popen = fork  # type: ignore[method-assign]
    code: Any = 0
    try:
        torchrun.main()
    except SystemExit as ending:
        code = ending.code
    os._exit(code if isinstance(code, int) else 1)


class _Forked:
    """Rank forked by a launcher, with the parts of `subprocess.Popen` that torchrun uses."""

    def __init__(self, command: list[str], cwd: str, env: dict[str, str], output: Path) -> None:
        import signal

        self.args = command
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _rank(command[command.index("ddpforge") + 1 :], cwd, env, output)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        import time

        limit = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code


def unwatch() -> None:
    """Makes this process a rank without watchdogs."""
    from ddpforge.watchdog import watchdog

    watchdog._Agent = _NoAgent  # type: ignore[assignment, misc]


def unwatched_rank(*arguments: Any) -> None:
    """Becomes a rank of `ddpforge.testing.ranks` without watchdogs; never returns."""
    from ddpforge.testing import ranks

    unwatch()
    ranks._rank(*arguments)


class _NoAgent:
    """No watchdog process."""

    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    def end(self) -> None: ...


class _ForkedProgram:
    """`python -m MODULE` in a session of its own, forked by a rank, with the parts of `subprocess.Popen` in use."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: Any, **_: Any) -> None:
        import runpy
        import traceback

        if (child := os.fork()) != 0:
            self.pid = child
            return
        os.setsid()
        for number in (1, 2):
            os.dup2(stdout.fileno(), number)
        os.environ.clear()
        os.environ.update(env)
        sys.argv[1:] = command[3:]
        sys.path[0] = os.getcwd()
        code: Any = 0
        try:
            runpy.run_module(command[2], run_name="__main__")
        except SystemExit as ending:
            code = ending.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

    def wait(self) -> int:
        with suppress(ChildProcessError):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _wait(children: list[int], timeout: float) -> list[int]:
    """Returns exit codes. Like a launcher, ends the others once one has failed, and all of them at the time limit."""
    import signal
    import time

    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + 60)
        if time.monotonic() > deadline:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def _rank(arguments: list[str], cwd: str, env: dict[str, str], output: Path) -> None:
    """Becomes one rank; never returns."""
    import torch

    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for stream, kind in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / f"{kind}-{env['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    if env.get(UNWATCHED):
        unwatch()
    if env.get(FORKED_PROGRAMS):
        subprocess.Popen = _ForkedProgram  # type: ignore[assignment, misc]

    from ddpforge.cli import main

    try:
        main(arguments, prog_name="ddpforge")
    except SystemExit as ending:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code if isinstance(ending.code, int) else 1)
    os._exit(0)


if __name__ == "__main__":
    _serve()
