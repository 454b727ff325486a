"""Progress of a device: one event per step, reported once the device has reached it; the host never waits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ddpforge.interfaces import DeviceKind
from ddpforge.ranks import heartbeat
from ddpforge.watchdog import device_progress
from ddpforge.watchdog.device_progress import DeviceProgress

GPU = torch.device("cuda", 1)


class Stream:
    """Stream on which the device has done `done` of the recorded events."""

    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.done = 0

    def record_event(self, event: "Event") -> None:
        event.place, event.stream = len(self.recorded), self
        self.recorded.append(event)


class Event:
    place: int
    stream: Stream

    def query(self) -> bool:
        return self.place < self.stream.done


class Kind(DeviceKind):
    """Devices with one stream. Only the methods that are called here work: the host cannot wait."""

    name = "double"

    def __init__(self) -> None:
        self.stream, self.events = Stream(), 0
        self.indices: list[int | None] = []

    def new_event(self) -> Any:
        self.events += 1
        return Event()

    def current_stream(self, device: torch.device) -> Any:
        assert device == GPU
        return self.stream

    def make_current(self, index: int | None) -> None:
        self.indices.append(index)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    kind = Kind()
    monkeypatch.setattr(device_progress, "device_kind", lambda device: kind)
    heartbeat.use_shared_memory(memoryview(bytearray(8 * heartbeat.WORDS)).cast("q"))
    yield kind
    heartbeat.use_shared_memory(memoryview(bytearray(8 * heartbeat.WORDS)).cast("q"))


def test_newest_step_that_the_device_has_finished_is_reported(kind: Kind) -> None:
    progress = DeviceProgress(GPU)
    for step in (7, 8, 9):
        progress.mark(step)
    progress.look()
    assert heartbeat.current().on_device == 0
    kind.stream.done = 2
    progress.look()
    assert heartbeat.current().on_device == 8


def test_device_that_hangs_keeps_its_step(kind: Kind) -> None:
    progress = DeviceProgress(GPU)
    progress.mark(3)
    kind.stream.done = 1
    for step in range(4, 40):
        progress.mark(step)
        progress.look()
    assert heartbeat.current().on_device == 3


def test_step_with_several_updates_has_one_event(kind: Kind) -> None:
    progress = DeviceProgress(GPU)
    for step in (1, 1, 1, 2):
        progress.mark(step)
    assert len(kind.stream.recorded) == 2


def test_finished_events_are_recorded_again(kind: Kind) -> None:
    progress = DeviceProgress(GPU)
    for step in range(1, 100):
        progress.mark(step)
        kind.stream.done = step
        progress.look()
    assert heartbeat.current().on_device == 99
    assert kind.events == 1


def test_thread_of_the_rank_s_device_reports_steps_until_the_end(kind: Kind) -> None:
    with DeviceProgress(GPU, look=0.001) as progress:
        heartbeat.enter_step(5)
        kind.stream.done = 1
        heartbeat.finish_forward()
        while not heartbeat.current().on_device:  # the thread queries it
            pass
        assert heartbeat.current().on_device == 5
    progress._thread.join(60)
    assert kind.indices == [1]
    heartbeat.enter_step(6)
    heartbeat.finish_forward()
    assert len(kind.stream.recorded) == 1


def test_device_without_streams_has_no_events(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kind, "has_streams", False)
    with DeviceProgress(GPU):
        heartbeat.enter_step(5)
        heartbeat.finish_forward()
    assert kind.stream.recorded == []
