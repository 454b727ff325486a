"""For `pytest plugins`, all plugins in one process: one import of each library, one process that forks ranks.

A plugin that is tested in its own folder, as its author would, does not read this file: it is above the plugin's root.
"""

import sys
from pathlib import Path

import torch
from support.launched import unwatched_rank

from ddpforge.testing import ranks

sys.path += [str(tests) for tests in Path(__file__).parent.glob("*/tests")]
ranks._rank = unwatched_rank
torch.set_num_threads(1)  # threads do not speed up small tensors, and disturb each other on a busy machine
