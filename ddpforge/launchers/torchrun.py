"""Command that starts ranks with torchrun, and a program that runs torchrun with changes.

The program ignores signals that only its parent handles, suppresses torchrun's own output, and does not restart ranks
if that cannot help.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ddpforge.errors import ExitCode, SetupError
from ddpforge.fast_import import gc_paused
from ddpforge.launchers.exit_record import ExitRecords, is_final, record_death
from ddpforge.launchers.nodes import ALONE, ENDPOINT, NODES
from ddpforge.launchers.rendezvous import LOST, QUIET, meet, saying_after
from ddpforge.launchers.store import ADDRESS
from ddpforge.local_world import VERDICT, cores_per_rank
from ddpforge.machine import terminate_with_parent

__all__ = ["NO_GPUS", "main", "names_rendezvous", "torchrun_command", "use_agent", "variables_for"]

NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}  # for ranks that must compute on the CPU
_GRACE = 5.0  # seconds for ranks to end by themselves
_HOOKS = (
    "_monitor_workers",
    "_rendezvous",
    "_restart_workers",
    "_shutdown",
)  # documented by torch for subclasses of its agent

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


def torchrun_command(arguments: Sequence[str], *, nproc: int, flags: Sequence[str] = ()) -> list[str]:
    """Returns the command that runs `ddpforge run ARGUMENTS` in `nproc` processes on this machine.

    `flags` are for torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html). If they name no rendezvous, this
    is the only machine.
    """
    alone = [] if names_rendezvous(flags) else ALONE
    # -P: a file random.py in the current folder must not replace that of the standard library.
    torchrun = [sys.executable, "-P", "-u", "-m", "ddpforge.launchers.torchrun"]
    torchrun += [*alone, f"--nproc-per-node={nproc}", *flags, "--no-python"]
    return [*torchrun, sys.executable, "-P", "-u", "-m", "ddpforge", "run", *arguments]


def names_rendezvous(flags: Sequence[str]) -> bool:
    """True if torchrun's flags name a rendezvous."""
    wanted = ("--rdzv", "--master", "--nnodes", "--standalone")
    return any(flag.startswith(wanted) for flag in flags)


def variables_for(nproc: int) -> dict[str, str]:
    """Returns default environment variables for `nproc` ranks on this machine."""
    return {
        "OMP_NUM_THREADS": str(cores_per_rank(nproc)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds for the last checkpoint; torchrun's 30 s are too short
        # torchrun's shared store keeps the addresses of dead ranks: restarted ranks would wait for them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # If a node ends first, the store's warnings are pages of C++ frames; ranks and launcher report the cause.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


# ---------------------------------------------------------------------------------------------- in torchrun itself
def _let_pass(number: int, frame: FrameType | None) -> None:
    """Ignores a signal. Unlike SIG_IGN, the ranks do not inherit this handler."""


def _listen_to_the_launch_alone() -> None:
    """Ignores SIGUSR1 and SIGHUP. Schedulers send them to every process of a job; the parent handles them."""
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, _let_pass)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGHUP))


def use_agent() -> bool:
    """Makes torchrun use an agent that reads the ranks' exit codes. False if this torch version has no such hooks.

    In that case torchrun's own agent restarts ranks after every failure, at most `--max-restarts` times.
    https://docs.pytorch.org/docs/stable/elastic/agent.html#extending-the-agent
    """
    import torch.distributed.launcher.api as launcher

    base = getattr(launcher, "LocalElasticAgent", None)
    if base is None or not all(hasattr(base, name) for name in _HOOKS):
        return False
    vars(launcher)["LocalElasticAgent"] = _extended(base)
    return True


def _extended(base: Any) -> Any:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    class Agent(base):  # type: ignore[misc]
        _closed: float | None = None  # time since which the rendezvous is closed

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            nodes = os.environ.get(NODES, "1")
            words = f"waiting for the other nodes (--nnodes {nodes}): start `ddpforge launch` on each of them"
            with saying_after(QUIET, words) if nodes != "1" else nullcontext():
                super()._rendezvous(worker_group)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            """Restarts ranks at once if a node has left. Raises ChildFailedError if no restart can help."""
            result: RunResult = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()] if result.is_failed() else []
            if codes and set(codes) == {ExitCode.PREEMPTED} and _is_elastic(worker_group) and not _halted(codes):
                self._restart_workers(worker_group)  # restarted here, so that torchrun does not count a failure
                return RunResult(WorkerState.HEALTHY)
            if ExitCode.PREEMPTED in codes or is_final(codes):
                name: str = worker_group.spec.get_entrypoint_name()  # type: ignore[no-untyped-call]
                raise ChildFailedError(name, result.failures)
            if result.state == WorkerState.SUCCEEDED:
                # The agents now disconnect. C++ code warns if one does so before another, which is harmless.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if result.state == WorkerState.HEALTHY and (worker_group.group_world_size or 1) > 1:
                self._leave_a_dead_meeting(worker_group)
            return result

        def _leave_a_dead_meeting(self, group: WorkerGroup) -> None:
            """Kills ranks that wait for a node without a running launcher, and raises RendezvousClosedError."""
            # A launcher that fails closes the rendezvous for all. Ranks that have begun detect that by themselves, and
            # may be saving.
            if _have_begun(group.spec.local_world_size) or not group.spec.rdzv_handler.is_closed():
                self._closed = None
                return
            self._closed = self._closed or time.monotonic()
            if time.monotonic() - self._closed > _GRACE:
                super()._shutdown(signal.SIGKILL)
                raise RendezvousClosedError

        def _shutdown(self, *signals: signal.Signals, **options: Any) -> None:
            if signals:  # a stop request: a second signal would raise an exception here, and kill ranks that are saving
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, _let_pass)
            super()._shutdown(*signals, **options)

    return Agent


def _is_elastic(group: WorkerGroup) -> bool:
    settings = getattr(group.spec.rdzv_handler, "settings", None)
    return settings is not None and settings.min_nodes < settings.max_nodes


def _have_begun(nproc: int) -> bool:
    return VERDICT not in os.environ or ExitRecords(Path(os.environ[VERDICT]), nproc).begun


def _halted(codes: list[int]) -> bool:
    return VERDICT in os.environ and ExitRecords(Path(os.environ[VERDICT]), len(codes)).halted


def main() -> None:
    """Runs torchrun with the arguments of this process. Prints no traceback for the failure of a rank."""
    if VERDICT in os.environ:
        terminate_with_parent()
        _listen_to_the_launch_alone()

    with gc_paused():
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import (
            RendezvousClosedError,
            RendezvousError,
            RendezvousTimeoutError,
        )
        from torch.distributed.run import main as torchrun

    if VERDICT in os.environ and "LOGLEVEL" not in os.environ:  # LOGLEVEL is torchrun's own variable
        logging.disable(logging.ERROR)  # the ranks report the cause of their end
    use_agent()
    try:
        if endpoint := os.environ.get(ENDPOINT):
            meet(endpoint, os.environ.get(ADDRESS), os.environ[NODES])
        torchrun()
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))  # the first failure; torchrun itself killed the later ones
        if failure.exitcode < 0:
            record_death(rank, -failure.exitcode)
        sys.exit(1)
    except SignalException:
        sys.exit(1)
    except RendezvousClosedError:
        said = "the launcher of another node ended before all ranks had joined"
        _end(SetupError(said, hints=["see the output of that launcher"]))
    except (RendezvousError, DistError) as error:
        if isinstance(error, RendezvousTimeoutError):
            said = f"not all nodes (--nnodes {os.environ.get(NODES)}) came in time: start `ddpforge launch` on each"
        else:
            said = str(error.__cause__ or error).strip().partition("\n")[0]  # the further lines are C++ frames
        _end(SetupError(f"the rendezvous of the nodes failed: {said or type(error).__name__}", hints=LOST))
    except SetupError as error:
        _end(error)


def _end(error: SetupError) -> NoReturn:
    print(
        "\n".join([f"error: {error.message}", *(f"  = help: {hint}" for hint in error.hints)]),
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.ENVIRONMENT)  # a normal exit could abort: a thread may still wait in C++ code


if __name__ == "__main__":
    main()
