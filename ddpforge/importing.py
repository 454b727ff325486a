"""Makes imports of large libraries cheaper."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ready_for_torch", "uncollected"]


def ready_for_torch() -> None:
    """Sets the variables that torch reads while it is imported, where the environment does not say otherwise."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # against memory in pieces
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler prints when it starts


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's garbage collector from going through what is imported inside, now and later: it is no garbage.

    To look for garbage again and again among a growing number of modules takes a fifth of the time that imports take.
    Where torch has been imported before, nothing is done: a process that has begun to work may hold garbage.
    """
    if "torch" in sys.modules:
        yield
        return
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # for extensions that complain, at the end, of what nobody has freed
        if is_on:
            gc.enable()
