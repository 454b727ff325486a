"""torchrun as a launch needs it: deaf to what is not meant for it, no noise of its own, and no restart in vain."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddpforge.errors import ExitCode
from ddpforge.importing import ready_for_torch, uncollected
from ddpforge.launchers.nursery import Brought, Nursery, is_safe
from ddpforge.launchers.requests import dispositions, stop_with_parent
from ddpforge.launchers.verdict import VERDICT, Words, is_final, record_death

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
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    base: Any = LocalElasticAgent  # whose inner methods have no types

    class Agent(base):  # type: ignore[misc]
        _remaining_restarts: int

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()] if result.is_failed() else []
            if codes and set(codes) == {ExitCode.STOPPED} and _is_elastic(worker_group) and not _halted(codes):
                self._remaining_restarts += 1  # another node has left: no failure, and torchrun is about to count one
            elif ExitCode.STOPPED in codes or is_final(codes):
                self._remaining_restarts = 0
            return result

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
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.run import main as torchrun

    if is_safe():  # torchrun itself has threads
        _bring_up_in(Nursery(signals))
    if VERDICT in os.environ and "LOGLEVEL" not in os.environ:  # torchrun's own variable
        logging.disable(logging.ERROR)  # ranks say why they end, and nobody else knows better
    vars(launcher)["LocalElasticAgent"] = _agent()
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))  # the first that it saw; later ones it has ended itself
        if failure.exitcode < 0:
            record_death(rank, -failure.exitcode)
        sys.exit(1)
    except SignalException:
        sys.exit(1)
    except RendezvousError as error:
        print(f"error: the nodes lost each other, or never met: {error.__cause__ or error}", file=sys.stderr)
        sys.exit(ExitCode.ENVIRONMENT)


if __name__ == "__main__":
    main()
