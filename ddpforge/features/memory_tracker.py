"""Records every tensor that is in memory during a step: its size, its purpose, and the module that made it."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddpforge import compat
from ddpforge.ranks import heartbeat

__all__ = [
    "COMMUNICATION",
    "EMPTY",
    "KINDS",
    "LOSS",
    "LiveTensor",
    "MemoryTracker",
    "is_fake",
    "storages",
    "tensors_in",
]

LOSS, COMMUNICATION = "logits and loss", "communication"
KINDS = (
    *("weights", "master weights", "gradients", "optimizer state", "buffers"),
    *("batch", "activations", LOSS, "backward", COMMUNICATION),
)
"""All kinds except "other"; "backward" is for intermediate results of backward passes."""
EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}
_DATA = heartbeat.NAMES[heartbeat.DATA]
_DEVICE = torch.ops.prim.device.default
_PLACES, _DEPTH = ("/torch/distributed/fsdp/", "/deepspeed/"), 8


@dataclass(slots=True)
class LiveTensor:
    """Piece of memory (of a storage), from the event that allocates it to the event that frees it."""

    bytes: int
    born: int
    kind: str  # "weights", "gradients", …, or the phase that made it
    made_by: str  # the module, and the operation
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    died: float = float("inf")


class MemoryTracker(compat.DispatchMode):
    """Record of all memory that operations on tensors allocate and free, for fake or real tensors.

    A view counts as part of the tensor that it views. `phase` and `module` return the current phase and module. `work`
    receives each operation, its arguments and its result. In a `real` run, memory from before the record is found when
    an operation reads it, and is counted separately: `older` is the number of its bytes that are still in use.
    """

    def __init__(
        self,
        phase: Callable[[], str],
        module: Callable[[], str] = str,
        work: Callable[[Any, Any, Mapping[str, Any], Any], None] | None = None,
        *,
        real: bool = False,
    ) -> None:
        super().__init__()
        self._work, self._phase, self._module, self._real = work, phase, module, real
        self._pieces: list[LiveTensor] = []
        self._now = self.live = 0
        self._of: dict[int, tuple[LiveTensor, weakref.ref[Any]]] = {}  # by storage
        self._older: dict[int, tuple[int, weakref.ref[Any]]] = {}  # bytes of memory from before, by storage
        self.restart()

    def restart(self) -> None:
        """Resets the peak, and drops the pieces that are freed."""
        self.peak, self.peak_at, self.peak_phase = self.live, self._now, self._phase()
        self._pieces = [piece for piece in self._pieces if piece.died > self._now]

    def note(self, tensors: Iterable[Any], kind: str) -> None:
        """Sets the kind of tensors, from their allocation on."""
        for tensor in tensors:
            for storage in storages(tensor):
                self._see(storage, tensor)
                self._of[id(storage)][0].kind = kind

    @property
    def older(self) -> int:
        """Returns the bytes that were in use before the record and still are."""
        return sum(size for size, _ in self._older.values())

    def alive(self) -> list[LiveTensor]:
        """Returns the pieces that are in use at the peak."""
        return [piece for piece in self._pieces if piece.born <= self.peak_at < piece.died]

    def living(self) -> list[LiveTensor]:
        """Returns the pieces that are in use now."""
        return [piece for piece, _ in self._of.values()]

    def kind_of(self, tensor: Tensor) -> str:
        """Returns the kind of a tensor's memory; empty if it was never recorded."""
        known = [self._of[id(one)][0].kind for one in storages(tensor) if id(one) in self._of]
        return known[0] if known else ""

    def by_kind(self) -> dict[str, int]:
        """Returns the bytes of each kind at the peak."""
        found: Counter[str] = Counter()
        for piece in self.alive():
            found[piece.kind if piece.kind in KINDS else "other"] += piece.bytes
        return dict(found)

    def __enter__(self) -> MemoryTracker:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if self._real:
                self._find(storage)
            found = self._resize(storage, size)
            if id(storage) in self._of or id(storage) in self._older:
                self._see(storage)
            return found

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and is_fake(args[0]):  # more than half of all calls: skips the other modes
            return args[0].device
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        kwargs = kwargs or {}
        others = self._given((args, kwargs)) if self._real else frozenset[int]()
        if not self._real and compat.waits(func):
            return args[0]
        found = func(*args, **kwargs)
        if func.namespace == "prim":
            return found
        made = list(tensors_in(found))
        if any(is_fake(one) and one.device.type == "meta" for one in made):
            return found  # torch infers shapes
        self._now += 1
        if self._work:
            self._work(func, args, kwargs, found)
        for one in made:
            for storage in storages(one):
                if id(storage) not in others:
                    self._see(storage, one, func)
        return found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing is compiled here, and the wrapper that disables dynamo costs a tenth of the time."""
        return False

    # -- pieces
    def _given(self, arguments: Any) -> frozenset[int]:
        """Records memory from before an operation; returns the storages that belong to the dataset, not to the step."""
        given = [x for one in tensors_in(arguments) for x in storages(one)]
        if self._phase() == _DATA:
            return frozenset(id(storage) for storage in given) - self._of.keys()
        for storage in given:
            self._find(storage)
        return frozenset()

    def _find(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._of and id(storage) not in self._older:
            gone = weakref.ref(storage, partial(self._forget, id(storage)))
            self._older[id(storage)] = storage.nbytes(), gone

    def _see(self, storage: torch.UntypedStorage, tensor: Tensor | None = None, func: Any = None) -> None:
        if id(storage) in self._older:
            if self._older[id(storage)][0] == storage.nbytes():
                return
            del self._older[id(storage)]
        if id(storage) in self._of:
            self._change(storage)
            return
        module = self._module()
        made_by = " ".join(filter(None, (module, f"({func.__name__.partition('.')[0]})" if func else "")))
        shape, dtype = (tuple(tensor.shape), tensor.dtype) if tensor is not None else ((), None)
        kind = self._phase()
        if kind == "forward":
            kind = "activations" if module else LOSS
        if func in EMPTY and _for_ranks():
            kind = COMMUNICATION
        piece = LiveTensor(storage.nbytes(), self._now, kind, made_by, shape, dtype)
        gone = weakref.ref(storage, partial(self._lose, id(storage)))
        self._of[id(storage)] = piece, gone
        self._pieces.append(piece)
        self._grow(piece.bytes)

    def _change(self, storage: torch.UntypedStorage) -> None:
        """Records a new size of a storage; the storages of gathered weights change theirs."""
        piece, gone = self._of[id(storage)]
        if piece.bytes == storage.nbytes():
            return
        self._now += 1
        piece.died = self._now
        now = LiveTensor(storage.nbytes(), self._now, piece.kind, piece.made_by, piece.shape, piece.dtype)
        self._of[id(storage)] = now, gone
        self._pieces.append(now)
        self._grow(now.bytes - piece.bytes)

    def _forget(self, key: int, _: object) -> None:
        self._older.pop(key, None)

    def _lose(self, key: int, _: object) -> None:
        piece, _ = self._of.pop(key)
        self._now += 1
        piece.died = self._now
        self.live -= piece.bytes

    def _grow(self, more: int) -> None:
        self.live += more
        if self.live > self.peak:
            self.peak, self.peak_at, self.peak_phase = self.live, self._now, self._phase()


def is_fake(tensor: Any) -> bool:
    """True for a tensor without values, from a simulated step."""
    return hasattr(tensor, "fake_device")


def _for_ranks() -> bool:
    """True if the code that allocates the memory is FSDP's or DeepSpeed's, for communication."""
    frame, depth = inspect.currentframe(), -2
    while frame is not None and depth < _DEPTH:
        if any(place in frame.f_code.co_filename for place in _PLACES):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in an operation's arguments or result; looks into tuples, lists and dicts only."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from tensors_in(one)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def storages(tensor: Any) -> list[torch.UntypedStorage]:
    """Returns the storages of a tensor; none if its layout has no storage."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    tensor = getattr(tensor, "elem", tensor)  # an AsyncCollectiveTensor: a collective still writes it
    if tensor.layout is torch.sparse_coo:
        return [storage for part in compat.sparse_parts(tensor) for storage in storages(part)]
    try:
        return [tensor.untyped_storage()]
    except NotImplementedError:  # other layouts
        return []
