"""Copies of the state for checkpoints, concurrent with training: order of CUDA calls, with a fake CUDA."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.worlds import FACTS, checkpoints
from torch import Tensor

from ddpforge.checkpoint import staging, writer
from ddpforge.checkpoint.staging import Staging
from ddpforge.checkpoint.state import RankState, flatten
from ddpforge.interfaces import CanonicalState
from ddpforge.ranks.writers import WriterGroup

GPU = torch.device("cuda", 0)


class Cuda:
    """Fake CUDA streams that record their calls; every tensor counts as a GPU tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[str, Tensor]) -> None:
        self.said: list[str] = []
        self.locked: list[tuple[int, str]] = []  # bytes, name of the thread
        known = {tensor.data_ptr(): name for name, tensor in names.items()}
        real = Tensor.copy_

        def copy(piece: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.said.append(f"copy {known[source.data_ptr()]}")
            return real(piece, source)

        def lock(address: int, size: int, flags: int) -> int:
            self.locked.append((size, threading.current_thread().name))
            return 0

        library = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=lambda address: None)
        monkeypatch.setattr(Tensor, "copy_", copy)
        monkeypatch.setattr(staging, "_cuda", lambda: library)
        monkeypatch.setattr(staging, "_gpus", lambda parts: {GPU})
        monkeypatch.setattr(staging, "_stream_for_copies", lambda gpu: self.stream("aside"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: self.stream("here"))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(synchronize=self.host_waits))

    def stream(self, name: str) -> Any:
        say = self.said.append
        return Stream(
            name=name,
            say=say,
            wait_stream=lambda other: say(f"{name} waits for {other.name}"),
            wait_event=lambda event: say(f"{name} waits for the end"),
            record_event=lambda event: (say(f"{name} marks the end"), event)[1],
        )

    def host_waits(self) -> None:
        self.said.append("the host waits for the end")


class Stream(SimpleNamespace):
    def __enter__(self) -> None:
        self.say(f"onto {self.name}")

    def __exit__(self, *error: Any) -> None:
        self.say(f"off {self.name}")


def named_state(*, of_weights: bool = True) -> tuple[dict[str, Tensor], RankState]:
    """Returns tensors by the test's names for them, and a state with these tensors."""
    names = ["weight", "mean", "momentum", "memory", "ema"]
    t = {name: torch.full((5,), float(number)) for number, name in enumerate(names)}
    model = {"layer.weight": t["weight"], "norm.mean": t["mean"]}
    optimizer = {"layer.weight": {"momentum": t["momentum"], "step": torch.tensor(3.0)}} if of_weights else {}
    shared = {"memory": t["memory"]}
    return t, RankState.of(CanonicalState(model, optimizer, extra_state=shared), {"ema": {"layer.weight": t["ema"]}})


def test_weights_and_optimizer_state_are_copied_during_the_next_passes_and_the_rest_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, rank_state = named_state()
    held = flatten(rank_state, rank=0, ranks=1).held
    cuda, copies = Cuda(monkeypatch, names), Staging()
    copied = copies.copy(held)
    cuda.said.append("passes")
    copies.before_update()
    copies.before_update()
    cuda.said.append("update")
    copies.wait()
    assert cuda.said == [
        *("aside waits for here", "onto aside", "copy mean", "copy memory", "copy ema", "off aside"),
        "here waits for aside",
        *("aside waits for here", "onto aside", "copy weight", "copy momentum", "off aside"),
        "aside marks the end",
        "passes",
        "here waits for the end",
        "update",
        "the host waits for the end",
    ]
    for section, found in held.items():
        for name, parts in found.items():
            for part, copy in zip(parts, copied()[section][name], strict=True):
                assert torch.equal(part.tensor, copy.tensor), name


def test_an_update_waits_for_the_thread_that_copies_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    names, rank_state = named_state()
    held, copies, gate = flatten(rank_state, rank=0, ranks=1).held, Staging(), threading.Event()
    real, later = Tensor.copy_, {names[name].data_ptr() for name in ("weight", "momentum")}

    def copy(piece: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert source.data_ptr() not in later or gate.wait(30)
        return real(piece, source)

    monkeypatch.setattr(Tensor, "copy_", copy)
    copied = copies.copy(held)
    for name in ("mean", "memory", "ema"):  # changed by forward passes and callbacks
        names[name].fill_(99.0)
    threading.Timer(0.1, gate.set).start()
    copies.before_update()
    names["weight"].fill_(99.0)
    names["momentum"].fill_(99.0)
    copies.wait()
    found = {part.tensor[0].item() for section in copied().values() for parts in section.values() for part in parts}
    assert found == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_a_copy_waits_for_the_one_before_even_if_nothing_else_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use the same memory."""
    _, rank_state = named_state()
    held, copies, events = flatten(rank_state, rank=0, ranks=1).held, Staging(), list[str]()
    copies.copy(held)
    copies.wait()
    memory = copies._bytes
    copies._copied = SimpleNamespace(result=lambda: events.append("the first copy ends"))  # type: ignore[assignment]
    monkeypatch.setattr(copies, "_bytes", lambda *given, **named: (events.append("memory"), memory(*given, **named))[1])
    copies.copy(held)
    copies.wait()
    assert events == ["the first copy ends", "memory"]


def test_weights_without_optimizer_state_are_copied_before_the_next_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They could be buffers, which a forward pass changes."""
    names, rank_state = named_state(of_weights=False)
    cuda = Cuda(monkeypatch, names)
    Staging().copy(flatten(rank_state, rank=0, ranks=1).held)
    assert cuda.said.index("copy weight") < cuda.said.index("here waits for aside")


def test_only_the_writing_thread_waits_for_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, rank_state = named_state()
    cuda, real = Cuda(monkeypatch, names), writer.write_shard
    threads: list[threading.Thread] = []

    def host_waits() -> None:
        threads.append(threading.current_thread())
        cuda.said.append("wait")

    def write(*arguments: Any) -> Any:
        cuda.said.append("write")
        return real(*arguments)

    monkeypatch.setattr(cuda, "host_waits", host_waits)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(synchronize=host_waits))
    monkeypatch.setattr(writer, "write_shard", write)
    saving = checkpoints(folder, WriterGroup.alone())
    saving.save(FACTS, rank_state)
    saving.wait()
    assert cuda.said[-2:] == ["wait", "write"]
    assert threading.current_thread() not in threads


# ---------------------------------------------------------------------------------------------- memory
def test_reserve_page_locks_memory_in_a_thread_and_the_first_save_uses_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rank_state = named_state()
    cuda, saving = Cuda(monkeypatch, names), checkpoints(folder, WriterGroup.alone())
    saving.reserve(rank_state)
    saving.save(FACTS, rank_state)
    saving.wait()
    assert cuda.locked == [(5 * 64, "page-locking for checkpoints")]
    assert "copy weight" in cuda.said


def test_reserve_does_nothing_during_a_save_or_for_synchronous_saves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rank_state = named_state()
    cuda = Cuda(monkeypatch, names)
    checkpoints(folder, WriterGroup.alone(), async_save=False).reserve(rank_state)
    saving = checkpoints(folder, WriterGroup.alone())
    saving.save(FACTS, rank_state)
    saving.reserve(rank_state)
    saving.wait()
    assert len(cuda.locked) == 1


def test_a_second_copy_waits_for_the_first_before_its_memory_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, rank_state = named_state()
    held = flatten(rank_state, rank=0, ranks=1).held
    cuda, copies = Cuda(monkeypatch, names), Staging()
    copies.copy({**held, "callbacks": {}})
    cuda.said.clear()
    copies.copy(held)
    assert cuda.said[0] == "the host waits for the end"
    assert len(cuda.locked) == 2


# ---------------------------------------------------------------------------------------------- numbers
def test_0d_tensors_on_a_device_are_copied_to_the_host_once_per_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused Adam keeps a step count per weight on the GPU."""
    stacked: list[int] = []
    real = torch.stack

    def stack(tensors: list[Tensor]) -> Tensor:
        stacked.append(len(tensors))
        return real(tensors)

    monkeypatch.setattr(torch, "stack", stack)
    steps = {f"w{n}": {"step": torch.tensor(float(n)), "seen": torch.tensor(n), "m": torch.ones(2)} for n in range(9)}
    found = flatten(RankState(model={}, optimizer=steps), rank=0, ranks=1).optimizer
    assert stacked == [9, 9]
    numbers = {name: [(x.dtype, x.value) for x in values.values()] for name, values in found.items()}  # type: ignore[union-attr]
    assert numbers == {f"w{n}": [("float32", float(n)), ("int64", n)] for n in range(9)}
