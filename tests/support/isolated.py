"""Runs an action that changes process-wide state in a forked process."""

import pickle
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def apart(action: Callable[[], T]) -> T:
    """Returns the result of `action` in a forked process: torch caches shardings by ranks.

    Raises RuntimeError with type and message of an exception of `action`.
    """
    context: Any = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def be() -> None:
        torch.set_num_threads(1)  # libgomp's threads are not there after a fork
        try:
            found = True, action()
        except Exception as error:
            found = False, f"{type(error).__name__}: {error}"
        sender.send_bytes(pickle.dumps(found))

    process = context.Process(target=be)
    process.start()
    sender.close()
    well, found = pickle.loads(receiver.recv_bytes())
    process.join()
    if not well:
        raise RuntimeError(found)
    answer: T = found
    return answer
