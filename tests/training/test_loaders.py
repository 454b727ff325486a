"""Number of loader processes for `data.workers = "auto"`; loader processes do not change the batches."""

import os
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.doubles import Clock
from torch import Tensor
from torch.utils.data import IterableDataset

from ddpforge.builtin.datasets.views import TwoViews
from ddpforge.builtin.datasets.vision import torchvision_dataset
from ddpforge.data import Batches, RankShare
from ddpforge.recipe.schema import DataSection
from ddpforge.training.loaders import open_data, served

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SLOW, FAST = 0.2, 0.004  # seconds per micro-batch


class Images:
    """Sixteen images of 4 KiB. Fetching one takes a quarter of `seconds` on `clock`, and is recorded."""

    forkable = True
    random = False

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        self.fetched.append(index)
        self.clock.now += self.seconds / 4
        return torch.full((1024,), float(index))


class Stream(IterableDataset[Tensor]):
    forkable = True

    def __iter__(self) -> Any:
        return iter(torch.arange(16.0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets cores, ranks and free bytes of shared memory of this machine."""

    def has(cores: int, ranks: int = 1, free: int = 2**40) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    has(16)
    return has


def opened(data: Any) -> Batches:
    options: dict[str, Any] = {"seed": 0, "drop_last": False, "workers": 0, "prefetch": 2, "pin": False}
    return open_data(data, global_batch=4, share=RankShare(0, 1, 4), **options)


def chosen(data: Any, clock: Clock, device: torch.device = GPU) -> Batches:
    batches = opened(data)
    return served("train", data, batches, device, trains=True, clock=clock)


# ---------------------------------------------------------------------------------------------- number of workers
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("seconds", "device", "workers"), [(SLOW, GPU, 8), (FAST, GPU, 0), (SLOW, CPU, 0)], ids=["slow", "fast", "cpu"]
)
def test_slow_data_for_a_gpu_uses_loader_processes(seconds: float, device: torch.device, workers: int) -> None:
    clock = Clock()
    assert chosen(Images(clock, seconds), clock, device).workers == workers


@pytest.mark.parametrize(
    ("cores", "ranks", "free", "workers"),
    [
        (64, 1, 2**40, 8),
        (16, 4, 2**40, 3),  # one of four cores belongs to the rank itself
        (8, 8, 2**40, 0),
        (16, 1, 2**16 * 2, 2),  # four images of 4 KiB, two batches per process, in half of 128 KiB
        (16, 2, 2**16 * 2, 1),
        (16, 1, 2**14, 0),
    ],
)
def test_cores_and_shared_memory_limit_the_workers(
    machine: Callable[..., None], cores: int, ranks: int, free: int, workers: int
) -> None:
    machine(cores, ranks, free)
    clock = Clock()
    assert chosen(Images(clock, SLOW), clock).workers == workers


@pytest.mark.usefixtures("machine")
def test_datasets_that_are_not_forkable_use_no_workers_and_are_not_timed() -> None:
    clock = Clock()
    data = Images(clock, SLOW)
    data.forkable = False  # type: ignore[misc]
    assert chosen(data, clock).workers == 0
    assert data.fetched == []
    assert chosen(Stream(), clock).workers == 0


def test_image_datasets_are_forkable_and_views_inherit_it() -> None:
    images = torchvision_dataset(name="FakeData", split="train")
    assert images.forkable
    assert TwoViews(of=images).forkable
    assert not TwoViews(of=[0]).forkable  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- fetched batches
@pytest.mark.parametrize("cores", [1, 3])
def test_workers_return_the_same_batches_and_fetch_the_first_batch_once(
    machine: Callable[..., None], cores: int
) -> None:
    machine(cores)
    clock = Clock()
    data = Images(clock, SLOW)
    wanted = [micro.data for micro in opened(Images(clock, SLOW)).evaluation()]
    batches = chosen(data, clock)
    assert batches.workers == cores - 1
    source = batches.training(0)
    for batch in wanted:
        assert torch.equal(next(source).data, batch)
    assert data.fetched == list(range(16 if cores == 1 else 4))  # other processes fetch the rest


@pytest.mark.usefixtures("machine")
def test_the_log_reports_the_chosen_workers_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level("INFO", "ddpforge"):
        chosen(Images(clock, SLOW), clock)
    assert caplog.messages == ['[data.train]: fetching a micro-batch takes 200 ms; data.workers = "auto" is 8 here']


# ---------------------------------------------------------------------------------------------- recipe
def test_workers_is_auto_or_a_number() -> None:
    assert DataSection.model_validate({"train": {"use": "digits"}}).workers == "auto"
    assert DataSection.model_validate({"train": {"use": "digits"}, "workers": 3}).workers == 3
    for wrong in (-1, 2000, "many", True):
        with pytest.raises(ValueError, match="workers"):
            DataSection.model_validate({"train": {"use": "digits"}, "workers": wrong})
