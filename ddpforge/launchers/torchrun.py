"""torchrun as a launch needs it: deaf to what is not meant for it, no noise of its own, and no restart in vain."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ddpforge.errors import EnvironmentProblem, ExitCode
from ddpforge.importing import ready_for_torch, uncollected
from ddpforge.launchers.meeting import LOST, meet
from ddpforge.launchers.nodes import ENDPOINT, NODES
from ddpforge.launchers.nursery import Brought, Nursery, is_safe
from ddpforge.launchers.requests import dispositions, stop_with_parent
from ddpforge.launchers.store import ADDRESS
from ddpforge.launchers.verdict import VERDICT, Words, is_final, record_death

_GRACE = 5.0  # seconds in which ranks notice by themselves

if TYPE_CHECKING:
    from subprocess import Popen

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


def _let_pass(number: int, frame: FrameType | None) -> None:
    """Handles a signal; unlike SIG_IGN, the ranks do not inherit it."""


def _listen_to_the_launch_alone() -> None:
    """Schedulers signal every process of a job; the one that has started this passes on what concerns it."""
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, _let_pass)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGHUP))


def _agent() -> Any:
    """torchrun's agent, with an eye for what the ranks' exit codes mean."""
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    base: Any = LocalElasticAgent  # whose inner methods have no types

    class Agent(base):  # type: ignore[misc]
        _remaining_restarts: int
        _closed: float | None = None  # since when the rendezvous is

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()] if result.is_failed() else []
            if codes and set(codes) == {ExitCode.STOPPED} and _is_elastic(worker_group) and not _halted(codes):
                self._remaining_restarts += 1  # another node has left: no failure, and torchrun is about to count one
            elif ExitCode.STOPPED in codes or is_final(codes):
                self._remaining_restarts = 0
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

        def _exit_barrier(self) -> None:
            # All ranks here are done. The agents now part; where one is quicker, C++ complains, and means nothing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            super()._exit_barrier()

    return Agent


def _is_elastic(group: WorkerGroup) -> bool:
    settings = getattr(group.spec.rdzv_handler, "settings", None)
    return settings is not None and settings.min_nodes < settings.max_nodes


def _have_begun(nproc: int) -> bool:
    return VERDICT not in os.environ or Words(Path(os.environ[VERDICT]), nproc).begun


def _halted(codes: list[int]) -> bool:
    return VERDICT in os.environ and Words(Path(os.environ[VERDICT]), len(codes)).halted


def _bring_up_in(nursery: Nursery) -> None:
    """Has torchrun's ranks come from there."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    by_itself = SubprocessHandler._popen

    def start(handler: Any, words: tuple[str, ...], environment: dict[str, str]) -> Brought | Popen[bytes]:
        stdout, stderr = handler._stdout, handler._stderr  # None: where torchrun's own go
        streams = stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2
        return nursery.bring(words, environment, streams) or by_itself(handler, words, environment)

    patched: Any = SubprocessHandler
    patched._popen = start


def main() -> None:
    """Runs torchrun with this process' arguments; a traceback would only repeat that a rank has failed."""
    signals = dispositions()
    if VERDICT in os.environ:
        stop_with_parent()
        _listen_to_the_launch_alone()

    ready_for_torch()
    with uncollected():
        import torch.distributed.launcher.api as launcher
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
        from torch.distributed.run import main as torchrun

    if is_safe():  # torchrun itself has threads
        _bring_up_in(Nursery(signals))
    if VERDICT in os.environ and "LOGLEVEL" not in os.environ:  # torchrun's own variable
        logging.disable(logging.ERROR)  # ranks say why they end, and nobody else knows better
    vars(launcher)["LocalElasticAgent"] = _agent()
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
