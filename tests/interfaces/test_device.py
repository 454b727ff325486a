"""Kinds of devices, and their calls of torch. The module of a plugin's devices is a double."""

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


# ---------------------------------------------------------------------------------------------- a plugin's devices
class Lab(DeviceKind):
    """Accelerator of a laboratory, in torch's slot for other backends, with all functions of torch.cuda."""

    name, type, backend, visible = "lab", "privateuseone", "labccl", "LAB_DEVICES"


def test_kind_of_a_plugin_calls_its_module_by_the_convention_of_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(torch, "get_device_module", {"privateuseone": double}.get)
    monkeypatch.setattr(torch, "privateuseone", double, raising=False)
    monkeypatch.setenv("LAB_DEVICES", "0,1")
    kind, device = Lab(), torch.device("privateuseone", 1)
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
    assert kind.process_group == "privateuseone:labccl,cpu:gloo"


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
    assert [kind.name for kind in device_kinds()] == ["cuda", "cpu"]
