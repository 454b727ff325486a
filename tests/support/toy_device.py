"""A kind of devices for tests: the CPU, with the limits of Apple's GPU, and with an account of its calls."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpforge.interfaces import DeviceKind
from support.fake_distributions import install


class Toy(DeviceKind):
    """One device without float64, pinned memory, streams and collectives; its tensors are the CPU's."""

    name = "toy"
    type = "cpu"
    noun = "a toy"
    precisions = ("fp32", "bf16")
    has_float64 = pins = has_streams = False
    profiler_activity = None

    def count(self) -> int:
        return 1

    def is_active(self) -> bool:
        return True

    def product(self, device: torch.device) -> str | None:
        return "Toy 1"

    def identity(self, device: torch.device) -> list[Any] | None:
        return ["toy"]

    def current(self) -> int | None:
        return None

    def make_current(self, index: int | None) -> None:
        _note("make_current")

    def peak_memory(self, device: torch.device, *, reserved: bool = False) -> int | None:
        return 3 << 30

    def reset_peak_memory(self, device: torch.device) -> None:
        _note("reset_peak_memory")

    def free_memory(self, device: torch.device | None = None) -> tuple[int, int] | None:
        return 5 << 30, 8 << 30

    def unused_memory(self, device: torch.device) -> int:
        return 5 << 30

    def synchronize(self, device: torch.device) -> None:
        _note("synchronize")

    def seed(self, seed: int, device: torch.device) -> None:
        torch.default_generator.manual_seed(seed)
        _note("seed")

    def rng_state(self, device: torch.device) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        torch.default_generator.set_state(state)

    def describe(self) -> list[Mapping[str, Any]]:
        return [{"name": "Toy 1", "memory": 8 << 30}]


class ToyPair(Toy):
    """A device for each rank, which communicate over gloo."""

    name, type = "toy_pair", "cpu"
    backend = "gloo"
    process_group = "gloo"  # type: ignore[assignment]  # the tensors are the CPU's: torch takes one backend for these

    def identity(self, device: torch.device) -> list[Any] | None:
        return None


def _note(call: str) -> None:
    if account := os.environ.get("TOY_ACCOUNT"):
        with open(account, "a") as file:
            file.write(f"{call}\n")


def install_toy(site: Path) -> None:
    """Installs a plugin with the two kinds in the folder `site`, for processes that have it on their path."""
    names = {"toy": "support.toy_device:Toy", "toy_pair": "support.toy_device:ToyPair"}
    install(site, "toy-device", {"ddpforge.device": names})


def install_private(site: Path) -> None:
    """Installs a plugin with the kind `toyacc` in the folder `site`. Its import registers a backend with torch."""
    install(site, "private-device", {"ddpforge.device": {"toyacc": "support.private_device:Private"}})
