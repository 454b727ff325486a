"""Copies for checkpoints beside what GPUs compute: what is asked of CUDA, which is not here, in which order."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.worlds import FACTS, checkpoints
from torch import Tensor

from ddpforge.checkpoint import contents, staging, writer
from ddpforge.checkpoint.contents import RankState, flatten
from ddpforge.checkpoint.staging import Staging
from ddpforge.interfaces import CanonicalState
from ddpforge.ranks.writers import Peers

GPU = torch.device("cuda", 0)


class Cuda:
    """Streams that note what they are asked for; every tensor counts as one on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[str, Tensor]) -> None:
        self.said: list[str] = []
        self.locked: list[tuple[int, str]] = []  # how many bytes, by which thread
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


def state(*, of_weights: bool = True) -> tuple[dict[str, Tensor], RankState]:
    """Tensors by a name of the test, and the state made of them."""
    names = ["weight", "mean", "momentum", "memory", "ema"]
    t = {name: torch.full((5,), float(number)) for number, name in enumerate(names)}
    model = {"layer.weight": t["weight"], "norm.mean": t["mean"]}
    optimizer = {"layer.weight": {"momentum": t["momentum"], "step": torch.tensor(3.0)}} if of_weights else {}
    shared = {"powersgd": t["memory"]}
    return t, RankState.of(CanonicalState(model, optimizer, shared=shared), {"ema": {"layer.weight": t["ema"]}})


def test_what_only_updates_change_is_copied_under_the_next_passes_and_all_else_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, rank_state = state()
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
            for part, copy in zip(parts, copied[section][name], strict=True):
                assert torch.equal(part.tensor, copy.tensor), name


def test_the_host_copies_weights_in_a_thread_for_which_an_update_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    names, rank_state = state()
    held, copies, gate = flatten(rank_state, rank=0, ranks=1).held, Staging(), threading.Event()
    real, later = Tensor.copy_, {names[name].data_ptr() for name in ("weight", "momentum")}

    def copy(piece: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert source.data_ptr() not in later or gate.wait(30)
        return real(piece, source)

    monkeypatch.setattr(Tensor, "copy_", copy)
    copied = copies.copy(held)
    for name in ("mean", "memory", "ema"):  # what passes and callbacks change
        names[name].fill_(99.0)
    threading.Timer(0.1, gate.set).start()
    copies.before_update()
    names["weight"].fill_(99.0)
    names["momentum"].fill_(99.0)
    copies.wait()
    found = {part.tensor[0].item() for section in copied.values() for parts in section.values() for part in parts}
    assert found == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_weights_of_which_the_optimizer_knows_nothing_are_copied_before_the_next_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody says which of them are buffers."""
    names, rank_state = state(of_weights=False)
    cuda = Cuda(monkeypatch, names)
    Staging().copy(flatten(rank_state, rank=0, ranks=1).held)
    assert cuda.said.index("copy weight") < cuda.said.index("here waits for aside")


def test_the_thread_that_writes_waits_for_the_copy_and_the_one_that_trains_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rank_state = state()
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
    saving = checkpoints(folder, Peers.alone())
    saving.save(FACTS, rank_state)
    saving.wait()
    assert cuda.said[-2:] == ["wait", "write"]
    assert threading.current_thread() not in threads


# ---------------------------------------------------------------------------------------------- memory
def test_memory_is_locked_by_a_thread_before_the_first_save_which_takes_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rank_state = state()
    cuda, saving = Cuda(monkeypatch, names), checkpoints(folder, Peers.alone())
    saving.reserve(rank_state)
    saving.save(FACTS, rank_state)
    saving.wait()
    assert cuda.locked == [(5 * 64, "page-locking for checkpoints")]
    assert "copy weight" in cuda.said


def test_nothing_is_reserved_while_a_copy_is_used_nor_where_there_are_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rank_state = state()
    cuda = Cuda(monkeypatch, names)
    checkpoints(folder, Peers.alone(), async_save=False).reserve(rank_state)
    saving = checkpoints(folder, Peers.alone())
    saving.save(FACTS, rank_state)
    saving.reserve(rank_state)
    saving.wait()
    assert len(cuda.locked) == 1


def test_memory_of_a_copy_that_nobody_waited_for_is_given_back_once_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, rank_state = state()
    held = flatten(rank_state, rank=0, ranks=1).held
    cuda, copies = Cuda(monkeypatch, names), Staging()
    copies.copy({**held, "callbacks": {}})
    cuda.said.clear()
    copies.copy(held)
    assert cuda.said[0] == "the host waits for the end"
    assert len(cuda.locked) == 2


# ---------------------------------------------------------------------------------------------- numbers
def test_numbers_on_a_device_come_to_the_host_in_one_copy_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused Adam counts the steps of every weight on the GPU."""
    stacked: list[int] = []
    real = torch.stack

    def stack(tensors: list[Tensor]) -> Tensor:
        stacked.append(len(tensors))
        return real(tensors)

    monkeypatch.setattr(contents, "_is_away", lambda tensor: True)
    monkeypatch.setattr(torch, "stack", stack)
    steps = {f"w{n}": {"step": torch.tensor(float(n)), "seen": torch.tensor(n), "m": torch.ones(2)} for n in range(9)}
    found = flatten(RankState(model={}, optimizer=steps), rank=0, ranks=1).optimizer
    assert stacked == [9, 9]
    numbers = {name: [(x.dtype, x.value) for x in values.values()] for name, values in found.items()}  # type: ignore[union-attr]
    assert numbers == {f"w{n}": [("float32", float(n)), ("int64", n)] for n in range(9)}
