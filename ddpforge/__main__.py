"""`python -m ddpforge`, and `python ddpforge/`, which is what `accelerate launch ddpforge` makes of the word."""

import os
import sys
from pathlib import Path

if __package__ in (None, ""):
    # Started as a directory: Python put the package folder itself first on sys.path, where our module names
    # would shadow the standard library's. Its parent is what belongs there.
    here = Path(__file__).resolve().parent
    sys.path[0] = str(here.parent)

else:
    # Python puts the current folder in front of sys.path, where a random.py in it would be the standard library's for
    # every rank. Behind all else it is where components that are not installed are found. With -P it is not there.
    current = os.getcwd()
    if sys.path and sys.path[0] in ("", current):
        del sys.path[0]
    if not os.environ.get("PYTHONSAFEPATH") and current not in sys.path:
        sys.path.append(current)

from ddpforge.cli import main

if __name__ == "__main__":
    main(prog_name="ddpforge")
