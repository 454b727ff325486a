"""Entry point of `python -m ddpforge`, and of `python ddpforge/`, which `accelerate launch ddpforge` runs."""

import os
import sys
from pathlib import Path

if __package__ in (None, ""):
    # Started as a directory: Python has put the package folder first on sys.path. There its module names would
    # shadow those of the standard library. So its parent replaces it.
    here = Path(__file__).resolve().parent
    sys.path[0] = str(here.parent)

else:
    # Python puts the current folder first on sys.path. A random.py in it would replace the standard library's on every
    # rank. So the folder moves to the end: components that are not installed are still found in it. With -P or
    # PYTHONSAFEPATH it is not added.
    current = os.getcwd()
    if sys.path and sys.path[0] in ("", current):
        del sys.path[0]
    if not os.environ.get("PYTHONSAFEPATH") and current not in sys.path:
        sys.path.append(current)

from ddpforge.cli import main

if __name__ == "__main__":
    main(prog_name="ddpforge")
