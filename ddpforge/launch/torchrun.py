"""torchrun without the traceback with which it ends every run that failed or was stopped: the ranks have said why."""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except (ChildFailedError, SignalException):
        sys.exit(1)
