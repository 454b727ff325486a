"""torchrun without the traceback with which it ends every run that failed or was stopped: the ranks have said why."""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from ddpforge.launchers.verdict import record_death

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))  # the first that it saw; later ones it has ended itself
        if failure.exitcode < 0:
            record_death(rank, -failure.exitcode)
        sys.exit(1)
    except SignalException:
        sys.exit(1)
