"""Imports what the environment names, once for all ranks of tests: they are forked from here (`ranks.py`)."""

import os
from contextlib import suppress
from importlib import import_module

from ddpforge.components.registry import Registry
from ddpforge.importing import uncollected
from ddpforge.testing.ranks import WARMED

with uncollected():
    for name in filter(None, os.environ.pop(WARMED, "").split(",")):
        with suppress(ImportError):  # a rank that needs it will say so
            import_module(name)
Registry.installed()
