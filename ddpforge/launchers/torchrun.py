"""torchrun without what it says at the end of every run that failed or was stopped: the ranks have said why."""

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from ddpforge.launchers.verdict import record_death


def be_quiet() -> None:
    """Leaves out torchrun's own account of each process that failed or is ended, unless LOGLEVEL asks for it."""
    if "LOGLEVEL" not in os.environ:
        for name in ("multiprocessing.api", "agent.server.api"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    be_quiet()
    try:
        main()
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))  # the first that it saw; later ones it has ended itself
        if failure.exitcode < 0:
            record_death(rank, -failure.exitcode)
        sys.exit(1)
    except SignalException:
        sys.exit(1)
