"""`python -m ddpforge`, and `python ddpforge/`, which is what `accelerate launch ddpforge` makes of the word."""

import sys
from pathlib import Path

if __package__ in (None, ""):
    # Started as a directory: Python put the package folder itself first on sys.path, where our module names
    # would shadow the standard library's. Its parent is what belongs there.
    here = Path(__file__).resolve().parent
    sys.path[0] = str(here.parent)

from ddpforge.cli import main

if __name__ == "__main__":
    main(prog_name="ddpforge")
