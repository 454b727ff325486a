"""Ranks on pretended GPUs that die or hang are named, also if only the device of a rank hangs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks
from support.sharding import CNN, DDP, RECIPE

# Between rows the host reads nothing from the device. The first and the last step are such rows.
RUN = RECIPE.replace('every = "1st"', 'every = "1000st"')
FAULTS = '''
import ctypes
import os
import signal
import time

import torch

from ddpforge.interfaces import Callback


class Fault(Callback):
    """Fault of rank 1 at step 3. All ranks then wait for their devices."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_start(self, run):
        assert run.world.device.type == "cuda"
        self.here = run.world.global_ranks.rank == 1

    def on_step(self, info):
        if info.step == 3 and self.here:
            getattr(self, self.kind)()

    def on_gradient(self, step, norm):
        """The collectives of rank 0 wait for rank 1, whose device has not finished the forward pass of step 4."""
        if step == 4 and self.kind == "device_hangs":
            self.device_hangs()
            torch.cuda.synchronize()

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self):
        time.sleep(1000)

    def device_hangs(self):
        ctypes.CDLL(None).pretend_cuda_hang()
'''


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("killed", r"was killed by signal 9 \(SIGKILL\)|ended without a report"),
        pytest.param(
            "hangs",
            r"made no progress in callbacks of step 3 for \d+ s at .*faults\.py:\d+ in hangs",
            marks=pytest.mark.full,  # on CPUs: tests/distributed/test_culprit.py
        ),
        (
            "device_hangs",
            r"made no progress in optimizer of step 4 for \d+ s at torch/cuda/__init__\.py:\d+ in synchronize: its "
            "device has finished the forward passes of step 3, others those of step 4, and wait for it",
        ),
    ],
    ids=["killed", "hangs", "device_hangs"],
)
def test_rank_with_a_fault_is_named(tmp_path: Path, ddpforge: Callable[..., Ranks], kind: str, expected: str) -> None:
    more = f'[callbacks.fault]\nuse = "./faults.py:Fault"\nkind = "{kind}"\n'
    recipe = RUN.format(name="run", parts=CNN.format(model=""), strategy=DDP, length="20st", train="", more=more)
    (tmp_path / "run.toml").write_text(recipe)
    (tmp_path / "faults.py").write_text(FAULTS)
    ended = ddpforge("run", "run.toml", "--set=train.hang_timeout=3s", nproc=2, fails=True)
    assert all(ended.codes), ended.stderr
    failure: dict[str, Any] = json.loads((tmp_path / "runs/run/failure.json").read_text())
    assert (failure["rank"], failure["told_by"]) == (1, "watch")
    assert re.match(expected, failure["error"].removeprefix("rank 1 ")), failure["error"]
    if kind == "device_hangs":
        assert [(row["step"], row["on_device"]) for row in failure["ranks"]] == [(4, 4), (4, 3)]
