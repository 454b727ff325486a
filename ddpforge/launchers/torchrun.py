"""The command that starts ranks by torchrun, and torchrun as a launch needs it.

It ignores signals that are not meant for it, prints nothing of its own, and restarts no ranks in vain.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ddpforge.cores import share_of_cores
from ddpforge.errors import EnvironmentProblem, ExitCode
from ddpforge.importing import uncollected
from ddpforge.launchers.meeting import LOST, meet
from ddpforge.launchers.nodes import ALONE, ENDPOINT, NODES
from ddpforge.launchers.requests import stop_with_parent
from ddpforge.launchers.store import ADDRESS
from ddpforge.launchers.verdict import VERDICT, Words, is_final, record_death

__all__ = ["NO_GPUS", "main", "names_rendezvous", "torchrun_command", "use_agent", "variables_for"]

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # for ranks that are to compute on the CPU whatever the recipe's parts think
_GRACE = 5.0  # seconds in which ranks notice by themselves
_HOOKS = ("_monitor_workers", "_restart_workers", "_shutdown")  # torch documents them for classes that extend its agent

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


def torchrun_command(arguments: Sequence[str], *, nproc: int, flags: Sequence[str] = ()) -> list[str]:
    """The command that runs `ddpforge run ARGUMENTS` in `nproc` processes on this machine.

    `flags` go to torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html); without a rendezvous among them the
    machine stands alone.
    """
    alone = [] if names_rendezvous(flags) else ALONE
    # -P: a file random.py in the current folder is not the standard library's.
    torchrun = [sys.executable, "-P", "-u", "-m", "ddpforge.launchers.torchrun"]
    torchrun += [*alone, f"--nproc-per-node={nproc}", *flags, "--no-python"]
    return [*torchrun, sys.executable, "-P", "-u", "-m", "ddpforge", "run", *arguments]


def names_rendezvous(flags: Sequence[str]) -> bool:
    """True if flags of torchrun say where machines meet."""
    wanted = ("--rdzv", "--master", "--nnodes", "--standalone")
    return any(flag.startswith(wanted) for flag in flags)


def variables_for(nproc: int) -> dict[str, str]:
    """The variables that `nproc` ranks on this machine get where the environment does not say otherwise."""
    return {
        "OMP_NUM_THREADS": str(share_of_cores(nproc)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds for the last checkpoint; torchrun's own 30 are short for it
        # The store that torchrun would share keeps the addresses of dead ranks: those restarted would wait for them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Where a node goes first, the store's warnings are pages of C++ frames; ranks and launcher say what it means.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


# ---------------------------------------------------------------------------------------------- in torchrun itself
def _let_pass(number: int, frame: FrameType | None) -> None:
    """Handles a signal; unlike SIG_IGN, the ranks do not inherit it."""


def _listen_to_the_launch_alone() -> None:
    """Schedulers signal every process of a job; the one that has started this passes on what concerns it."""
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, _let_pass)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGHUP))


def use_agent() -> bool:
    """Has torchrun run an agent that reads the ranks' exit codes; False if this torch has not the names for that.

    torchrun's own agent then starts ranks again after every failure, as often as `--max-restarts` allows.
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
        _closed: float | None = None  # since when the rendezvous is

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            """Restarts ranks at once where a node has left; raises ChildFailedError where no restart can help."""
            result: RunResult = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()] if result.is_failed() else []
            if codes and set(codes) == {ExitCode.PREEMPTED} and _is_elastic(worker_group) and not _halted(codes):
                self._restart_workers(worker_group)  # here, so that torchrun counts no failure
                return RunResult(WorkerState.HEALTHY)
            if ExitCode.PREEMPTED in codes or is_final(codes):
                name: str = worker_group.spec.get_entrypoint_name()  # type: ignore[no-untyped-call]
                raise ChildFailedError(name, result.failures)
            if result.state == WorkerState.SUCCEEDED:
                # The agents now part. C++ complains if one leaves earlier than another, and means nothing.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if result.state == WorkerState.HEALTHY and (worker_group.group_world_size or 1) > 1:
                self._leave_a_dead_meeting(worker_group)
            return result

        def _leave_a_dead_meeting(self, group: WorkerGroup) -> None:
            """Ends ranks that wait for those of a node whose launcher has ended; raises RendezvousClosedError.

            A launcher that fails closes the rendezvous for all. Ranks that have begun notice by themselves, and may be
            saving.
            """
            if _have_begun(group.spec.local_world_size) or not group.spec.rdzv_handler.is_closed():
                self._closed = None
                return
            self._closed = self._closed or time.monotonic()
            if time.monotonic() - self._closed > _GRACE:
                super()._shutdown(signal.SIGKILL)
                raise RendezvousClosedError

        def _shutdown(self, *signals: signal.Signals, **options: Any) -> None:
            if signals:  # asked to stop; a second signal would raise here, and end ranks that are saving
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, _let_pass)
            super()._shutdown(*signals, **options)

    return Agent


def _is_elastic(group: WorkerGroup) -> bool:
    settings = getattr(group.spec.rdzv_handler, "settings", None)
    return settings is not None and settings.min_nodes < settings.max_nodes


def _have_begun(nproc: int) -> bool:
    return VERDICT not in os.environ or Words(Path(os.environ[VERDICT]), nproc).begun


def _halted(codes: list[int]) -> bool:
    return VERDICT in os.environ and Words(Path(os.environ[VERDICT]), len(codes)).halted


def main() -> None:
    """Runs torchrun with this process' arguments; a traceback would only repeat that a rank has failed."""
    if VERDICT in os.environ:
        stop_with_parent()
        _listen_to_the_launch_alone()

    with uncollected():
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
        from torch.distributed.run import main as torchrun

    if VERDICT in os.environ and "LOGLEVEL" not in os.environ:  # torchrun's own variable
        logging.disable(logging.ERROR)  # ranks say why they end, and nobody else knows better
    use_agent()
    try:
        if endpoint := os.environ.get(ENDPOINT):
            meet(endpoint, os.environ.get(ADDRESS), os.environ[NODES])
        torchrun()
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))  # the first that it saw; later ones it has ended itself
        if failure.exitcode < 0:
            record_death(rank, -failure.exitcode)
        sys.exit(1)
    except SignalException:
        sys.exit(1)
    except RendezvousClosedError:
        said = "the launcher of another node ended before all ranks had joined"
        _end(EnvironmentProblem(said, hints=["its output says why"]))
    except (RendezvousError, DistError) as error:
        said = str(error.__cause__ or error).strip().partition("\n")[0]  # what follows are frames of C++
        _end(EnvironmentProblem(f"the nodes lost each other, or never met: {said}", hints=LOST))
    except EnvironmentProblem as error:
        _end(error)


def _end(error: EnvironmentProblem) -> NoReturn:
    print(
        "\n".join([f"error: {error.message}", *(f"  = help: {hint}" for hint in error.hints)]),
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.ENVIRONMENT)  # a thread may still wait in C++, which would abort a process that cleans up


if __name__ == "__main__":
    main()
