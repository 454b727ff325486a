"""Kinds of devices, and their calls of torch. The modules of Apple's and Intel's GPUs are doubles."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpforge.errors import SetupError
from ddpforge.interfaces import DeviceKind, active_kind, device_kind, device_kinds, in_float64
from ddpforge.interfaces import device as kinds

GIB = 1 << 30


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, DeviceKind]:
    """Returns the table of kinds; changes to it end with the test."""
    monkeypatch.setattr(kinds, "_KINDS", {**kinds._KINDS})
    return kinds._KINDS


class Calls:
    """Records calls of functions, by name with their arguments."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __call__(self, name: str, returns: Any = None) -> Any:
        def called(*args: Any) -> Any:
            self.made.append((name, *args))
            return returns

        return called


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", {"process_group": "gloo", "pins": False, "has_streams": False, "has_float64": True, "is_host": True}),
        ("cuda", {"process_group": "cuda:nccl,cpu:gloo", "pins": True, "has_streams": True, "has_float64": True}),
        ("xpu", {"process_group": "xpu:xccl,cpu:gloo", "pins": True, "has_streams": True, "has_float64": True}),
        ("mps", {"backend": None, "pins": False, "has_streams": False, "has_float64": False, "is_host": False}),
    ],
)
def test_each_kind_declares_what_its_devices_have(name: str, expected: dict[str, Any]) -> None:
    kind = device_kind(name)
    assert {key: getattr(kind, key) for key in expected} == expected
    assert kind.name == kind.type == name
    assert device_kind(torch.device(name, 0)) is kind


def test_meta_tensors_have_a_kind_that_no_recipe_can_name() -> None:
    kind = device_kind(torch.device("meta"))
    assert (kind.has_streams, kind.pins, kind.is_host) == (False, False, False)
    assert kind not in device_kinds()


def test_device_without_a_kind_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="no device kind for torch's `hpu`") as refused:
        device_kind(torch.device("hpu", 0))
    assert "docs/extend/device.md" in refused.value.hints[0]


def test_device_of_a_kind_has_its_name_unless_it_declares_another() -> None:
    class Named(DeviceKind):
        name = "tpu9"

    class Typed(DeviceKind):
        name, type = "lab", "privateuseone"

    assert (Named.type, Typed.type) == ("tpu9", "privateuseone")
    assert Named().count() == 0, "torch has no module torch.tpu9"
    assert not Named().is_available()
    assert Named().why_unavailable() == f"torch {torch.__version__} finds no tpu9 device"


# ---------------------------------------------------------------------------------------------- Apple's GPU
@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Puts a double in the place of torch.mps. It has 24 GiB; the allocator holds 9, and tensors take 4."""
    calls = Calls()
    double = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        driver_allocated_memory=lambda: 9 * GIB,
        current_allocated_memory=lambda: 4 * GIB,
        recommended_max_memory=lambda: 24 * GIB,
        empty_cache=calls("empty_cache"),
        synchronize=calls("synchronize"),
        manual_seed=calls("manual_seed"),
        get_rng_state=calls("get_rng_state", torch.tensor([1, 2])),
        set_rng_state=calls("set_rng_state"),
    )
    monkeypatch.setattr(torch, "get_device_module", {"mps": double, "xpu": torch.xpu, "cuda": torch.cuda}.get)
    return calls


def test_memory_of_mps_is_that_of_its_allocator(mps: Calls) -> None:
    kind, device = device_kind("mps"), torch.device("mps", 0)
    assert kind.peak_memory(device) == kind.peak_memory(device, reserved=True) == 9 * GIB
    assert kind.free_memory(device) == (15 * GIB, 24 * GIB)
    assert kind.unused_memory(device) == 20 * GIB
    kind.reset_peak_memory(device)
    assert mps.made == [("empty_cache",)]
    assert kind.describe() == [{"name": "MPS", "memory": 24 * GIB}]
    assert active_kind() is kind


def test_functions_of_mps_take_no_device(mps: Calls) -> None:
    """torch.mps has one device: its functions have no parameter for it."""
    kind, device = device_kind("mps"), torch.device("mps", 0)
    kind.seed(7, device)
    assert kind.rng_state(device).tolist() == [1, 2]
    kind.set_rng_state(state := torch.tensor([3]), device)
    kind.synchronize(device)
    assert mps.made == [("manual_seed", 7), ("get_rng_state",), ("set_rng_state", state), ("synchronize",)]
    assert kind.current() is None
    kind.make_current(kind.current())  # sets no device


# ---------------------------------------------------------------------------------------------- Intel's GPUs
def test_xpu_has_streams_events_and_memory_like_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, generators = Calls(), [torch.Generator(), torch.Generator()]
    double = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 1,
        set_device=calls("set_device"),
        get_device_name=lambda device: f"Max {device.index}",
        get_device_properties=lambda device: SimpleNamespace(name="Max", total_memory=48 * GIB, uuid="a-b"),
        Stream=calls("Stream", "aside"),
        Event=calls("Event", "end"),
        current_stream=calls("current_stream", "here"),
        stream=calls("stream", "context"),
        synchronize=calls("synchronize"),
        empty_cache=calls("empty_cache"),
        reset_peak_memory_stats=calls("reset_peak_memory_stats"),
        max_memory_allocated=lambda device: 5,
        max_memory_reserved=lambda device: 8,
        memory_reserved=lambda device: 6,
        mem_get_info=lambda device: (40, 48),
        default_generators=generators,
    )
    monkeypatch.setattr(torch, "get_device_module", {"xpu": double}.get)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1")
    kind, device = device_kind("xpu"), torch.device("xpu", 1)
    assert (kind.count(), kind.current(), kind.product(device), kind.is_active()) == (2, 1, "Max 1", True)
    assert kind.identity(device) == ["a-b", "0,1", 1]
    assert (kind.peak_memory(device), kind.peak_memory(device, reserved=True)) == (5, 8)
    assert (kind.free_memory(device), kind.unused_memory(device)) == ((40, 48), 46)
    assert (kind.new_stream(device), kind.current_stream(device), kind.new_event()) == ("aside", "here", "end")
    assert kind.on_stream("aside") == "context"  # type: ignore[comparison-overlap]
    kind.reset_peak_memory(device)
    kind.synchronize(device)
    kind.make_current(0)
    assert calls.made == [
        *(("Stream", device), ("current_stream", device), ("Event",), ("stream", "aside"), ("empty_cache",)),
        *(("reset_peak_memory_stats", device), ("synchronize", device), ("set_device", 0)),
    ]
    kind.seed(7, device)
    assert generators[1].initial_seed() == 7, "the generator of this device"
    assert generators[0].initial_seed() != 7
    state = kind.rng_state(device)
    first = torch.rand(3, generator=generators[1])
    kind.set_rng_state(state, device)
    assert torch.equal(torch.rand(3, generator=generators[1]), first)
    assert kind.describe() == [{"name": "Max", "memory": 48 * GIB}] * 2


# ---------------------------------------------------------------------------------------------- float64
def test_float64_is_made_on_the_host_if_the_device_lacks_it(known: dict[str, DeviceKind]) -> None:
    class Short(kinds.CPU):
        has_float64 = False

    values = torch.tensor([1.5, 2.5], requires_grad=True)
    for kind, widest in ((kinds.CPU(), torch.float64), (Short(), torch.float32)):
        known["cpu"] = kind
        assert in_float64(values).dtype == torch.float64
        assert not in_float64(values).requires_grad
        assert kind.widest_float == widest


def test_no_accelerator_is_active_on_a_machine_without_one() -> None:
    if not torch.accelerator.is_available():
        assert active_kind() is None
    assert [kind.name for kind in device_kinds()] == ["cuda", "xpu", "mps", "cpu"]
