"""State of a model, and parallel reading of many tensors."""

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.saved_tensors import Saved
from torch import Tensor

from ddpforge.interfaces import FlatRange, Region, read_all

SIZE = 2048  # elements: smaller tensors are read by one thread
ALL = FlatRange(0, SIZE)


@dataclass(frozen=True)
class Meets(Saved):
    """Tensor that is read when another thread reads, too; gives up after `seconds`."""

    gate: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    seconds: float = 30.0

    def read_into(self, region: Region, target: Tensor) -> None:
        self.gate.wait(self.seconds)
        super().read_into(region, target)


class Unreadable(Saved):
    def read_into(self, region: Region, target: Tensor) -> None:
        raise OSError(f"{self.tensor[0]:g} cannot be read")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets the number of cores and ranks of this machine."""

    def set_cores(number: int, *, ranks: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return set_cores


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_cores_of_a_rank_read_two_tensors_at_a_time(cores: Any, ranks: int) -> None:
    cores(2 * ranks, ranks=ranks)
    gate = threading.Barrier(2)
    saved = [Meets(torch.arange(float(SIZE)) + n, gate) for n in range(4)]
    targets = [torch.zeros(SIZE) for _ in saved]
    read_all((one, ALL, target) for one, target in zip(saved, targets, strict=True))
    assert [target[:3].tolist() for target in targets] == [[n, n + 1, n + 2] for n in range(4)]


@pytest.mark.parametrize("number", [1, 3])
def test_a_rank_with_one_core_reads_one_tensor_at_a_time(cores: Any, number: int) -> None:
    cores(number, ranks=3)
    with pytest.raises(threading.BrokenBarrierError):
        read_all([(Meets(torch.ones(SIZE), seconds=0.2), ALL, torch.zeros(SIZE))] * 2)


@pytest.mark.parametrize("size", [3, SIZE])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_ends_the_reading_and_is_raised(cores: Any, threads: int, size: int) -> None:
    cores(threads, ranks=1)
    saved = [Saved(torch.zeros(size)), Unreadable(torch.ones(size)), *[Saved(torch.zeros(size))] * 2_000]
    targets = [torch.ones(size) for _ in saved]
    with pytest.raises(OSError, match=r"^1 cannot be read$"):
        read_all((one, FlatRange(0, size), target) for one, target in zip(saved, targets, strict=True))
    assert targets[-1][:3].tolist() == [1, 1, 1], "the remaining tensors are not read"


def test_an_error_in_another_thread_is_raised(cores: Any) -> None:
    """Either thread may fail; the other has started to read and finishes."""
    cores(2, ranks=1)
    gate = threading.Barrier(2)

    class Fails(Meets):
        def read_into(self, region: Region, target: Tensor) -> None:
            super().read_into(region, target)
            if threading.current_thread() is not threading.main_thread():
                raise OSError("cannot be read")

    with pytest.raises(OSError, match=r"^cannot be read$"):
        read_all([(Fails(torch.ones(SIZE), gate), ALL, torch.zeros(SIZE))] * 2)


def test_an_empty_list_can_be_read() -> None:
    read_all([])
