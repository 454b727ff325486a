"""What ranks of tests are forked from (`ranks.py`): imports, once for all of them, what the environment names."""

import os
from contextlib import suppress
from importlib import import_module

from ddpforge.components.registry import Registry
from ddpforge.importing import uncollected
from ddpforge.testing.ranks import WARMED

with uncollected():
    for name in os.environ.pop(WARMED, "").split(","):
        with suppress(ImportError, ValueError):  # a rank that needs it will say so
            import_module(name)
Registry.installed()
