"""A run leaves its process as it was."""

import os

import torch
from forked import train

from ddpforge.ranks.arithmetic import set_arithmetic
from ddpforge.ranks.scheduling import run_as_batch
from ddpforge.ranks.switches import restored


def test_torchs_switches_and_the_policy_of_threads_are_those_from_before() -> None:
    with restored():
        set_arithmetic(train(tf32=True))
        run_as_batch()
        assert (torch.get_float32_matmul_precision(), os.sched_getscheduler(0)) == ("high", os.SCHED_BATCH)
    assert (torch.get_float32_matmul_precision(), os.sched_getscheduler(0)) == ("highest", os.SCHED_OTHER)
