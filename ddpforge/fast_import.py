"""Makes imports of large libraries faster."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused", "set_torch_env"]


def set_torch_env() -> None:
    """Sets environment variables that torch reads during its import, unless they are already set."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # reduces fragmentation
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences torch's profiler


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection during imports inside, and excludes the imported objects from later collections.

    Does nothing if torch is already imported: a process that has begun to work may have garbage.
    """
    # Repeated collections over a growing number of modules take a fifth of the import time.
    if "torch" in sys.modules:
        yield
        return
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some extensions report objects that are not freed at exit
        if is_on:
            gc.enable()
