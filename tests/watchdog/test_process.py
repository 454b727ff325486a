"""Monitored process of a rank: its stacks and the stacks of its data workers, one after the other."""

import faulthandler
import os
import signal
import threading
import time

import pytest

from ddpforge.machine import STACKS, create_shared_file
from ddpforge.ranks.heartbeat import WORDS
from ddpforge.watchdog.process import Process


def in_the_rank(pipe: int) -> None:
    os.write(pipe, b"r")
    time.sleep(1000)


def in_a_loader(pipe: int, number: int) -> None:
    if number:
        in_a_loader(pipe, number - 1)  # long stacks, which would mix
    os.write(pipe, b"l")
    time.sleep(1000)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="only Linux shows which signals a process catches")
def test_stacks_of_a_rank_and_of_its_data_workers_do_not_mix() -> None:
    stacks, (ready, pipe) = create_shared_file("stacks"), os.pipe()
    rank = os.fork()
    if rank == 0:
        os.setpgid(0, 0)
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        for _ in range(4):
            if os.fork() == 0:
                in_a_loader(pipe, 60)
        in_the_rank(pipe)
    try:
        for _ in range(5):
            os.read(ready, 1)
        words = memoryview(bytearray(WORDS * 8)).cast("q")
        process = Process(rank, words, stacks, threading.get_ident())
        for _ in range(2):  # two requests, each with the current stacks
            found = process.stacks()
            own, *loaders = found.split("forked by the rank:\n")
            assert "in in_the_rank" in own
            assert "in_a_loader" not in own
            assert len(loaders) == 4
            assert [one.count("in in_a_loader") for one in loaders] == [61] * 4
            assert process.line(found).endswith(" in in_the_rank")
    finally:
        os.killpg(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
