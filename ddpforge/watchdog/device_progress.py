"""Progress of a rank's device, which runs behind the host: the newest step whose forward passes it has finished."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ddpforge.interfaces import device_kind
from ddpforge.ranks import heartbeat

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceProgress"]

_LOOK = 1.0  # seconds between two queries


class DeviceProgress:
    """Records an event in each step after its last forward pass, and reports finished ones by the heartbeat.

    The event is before the collectives of backward passes: a device that hangs in a step does not reach it, the devices
    that wait for it in a collective do. A thread queries the events while the host may wait for the device; a query
    does not wait. Without streams, and in a strategy whose ranks run only parts of a forward pass, there is no report.
    """

    def __init__(self, device: torch.device, look: float = _LOOK) -> None:
        """`look` is the number of seconds between two queries."""
        self._device, self._kind, self._seconds = device, device_kind(device), look
        self._unfinished: deque[tuple[int, Any]] = deque()  # the queue of a device holds a thousand kernels: few steps
        self._free: list[Any] = []  # finished events, to be recorded again
        self._step = 0
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._kind.has_streams:
            self._thread = threading.Thread(target=self._follow, name="progress of the device", daemon=True)
            self._thread.start()
            heartbeat.follow_forward(self.mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the queries."""
        heartbeat.follow_forward(None)
        self._ended.set()

    def mark(self, step: int) -> None:
        """Records an event on the current stream, once in a step."""
        if step == self._step:  # a step may have several updates
            return
        self._step = step
        event = self._free.pop() if self._free else self._kind.new_event()
        self._kind.current_stream(self._device).record_event(event)
        self._unfinished.append((step, event))

    def look(self) -> None:
        """Reports the newest step whose event the device has reached; does not wait for the device."""
        while self._unfinished and self._unfinished[0][1].query():
            step, event = self._unfinished.popleft()
            self._free.append(event)
            heartbeat.finish_on_device(step)

    def _follow(self) -> None:
        self._kind.make_current(self._device.index)  # a new thread has device 0
        while not self._ended.wait(self._seconds):
            self.look()
