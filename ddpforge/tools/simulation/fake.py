"""Simulated ranks without processes, and tensors without memory; a strategy's own code runs on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import PipelineStage, schedules, stage
from torch.distributed.tensor import _sharding_prop, debug
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddpforge.api import SingleRank
from ddpforge.errors import UsageError
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import CollectiveRanks, ProcessGroup
from ddpforge.tools.simulation.fake_ops import FakeOps
from ddpforge.tools.simulation.zero import forget_groups, one_of_many

__all__ = ["NotSimulatable", "Post", "fake_batch", "fake_mode", "fake_world", "without_memory"]

_MIB = 2**20
_HOOKS = {default_hooks.fp16_compress_hook: torch.float16, default_hooks.bf16_compress_hook: torch.bfloat16}


Post = dict[tuple[int, int], Any]
"""Shapes of the tensors that pipeline stages have sent, by the numbers of sender and receiver."""


class NotSimulatable(Exception):
    """Raised for a feature that needs real ranks and devices; the message names it."""


# ---------------------------------------------------------------------------------------------- ranks
@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[World]:
    """Yields the world of one rank of `ranks`, without the other ranks: its collectives return at once.

    The values of other ranks are those of this one. Raises UsageError if this process is in a real process group.
    """
    if dist.is_initialized():
        raise UsageError(
            "this process has joined other ranks, so it cannot simulate ranks", hints=["use a new process"]
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # only when needed: the module is for tests

    device = torch.device("cpu")
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with ExitStack() as stack:
            for name, stand_in in {
                "all_gather_object": _same_of_all,
                "broadcast_object_list": _nothing,
                "gather_object": _nothing,
                "barrier": _nothing,
            }.items():
                stack.enter_context(patch.object(dist, name, stand_in))
            stack.enter_context(patch.object(CollectiveRanks, "all_gather", _as_many_of_all))
            stack.enter_context(patch.object(ProcessGroup, "broadcast", _same))
            group = cast(dist.ProcessGroup, dist.group.WORLD)
            everyone = ProcessGroup(group, device) if ranks > 1 else SingleRank(device)
            yield World(global_ranks=everyone, dp_ranks=everyone, device=device, local_rank=0)
    finally:
        dist.destroy_process_group()
        _forget_groups()


def _forget_groups() -> None:
    """Removes the simulated ranks from caches of torch and DeepSpeed, which live as long as the process."""
    for clear in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):  # older torch lacks some
        getattr(debug, clear, _nothing)()
    forget_groups()


def _same_of_all(found: list[Any], value: Any, group: Any = None) -> None:
    found[:] = [value] * len(found)


def _same(self: ProcessGroup, value: Any) -> Any:
    return value


def _as_many_of_all(self: CollectiveRanks, rows: Tensor) -> tuple[Tensor, int]:
    return self.all_gather_equal_autograd(rows), self.rank * len(rows)


def _nothing(*_: Any, **__: Any) -> None:
    pass


# ---------------------------------------------------------------------------------------------- tensors
@contextmanager
def fake_mode(post: Post | None = None) -> Iterator[FakeTensorMode]:
    """Makes every new tensor a fake one: it has a shape, a dtype and a device, but no values.

    A value that is read from a fake tensor passes all checks: nothing differs, nothing overflows (see `FakeOps`).
    `post` has the shapes that pipeline stages have sent in earlier simulations; this simulation adds its own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        for adapted in (_real_meshes, _in_place_conversions, _python_reducer, one_of_many, _many_shards):
            stack.enter_context(adapted())
        stack.enter_context(_posted({} if post is None else post))
        stack.enter_context(patch.object(torch, "_check_tensor_all_with", _nothing, create=True))  # of values
        # Fake tensors check this for each operation, and without a GPU the check is slow.
        known = torch.cuda.is_available()
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: known))
        stack.enter_context(mode)
        stack.enter_context(FakeOps(mode))
        yield mode


def without_memory(model: nn.Module) -> None:
    """Replaces the model's tensors by fake ones on the CPU, in place; call it in `fakes`. Ties and strides stay."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = made.setdefault(id(tensor), _like(tensor))  # type: ignore[assignment]


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # attributes that a plugin has set
    return parameter


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Returns the same pytree with fake tensors."""
    return tree_map_only(Tensor, mode.from_tensor, batch)


# ---------------------------------------------------------------------------------------------- patches for fakes
@contextmanager
def _real_meshes() -> Iterator[None]:
    """Makes DeviceMesh compute its ranks with real tensors."""

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily(), torch.device("cpu"):
                return function(*args, **kwargs)

        return wrapped

    names = ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "get_all_groups")
    with ExitStack() as stack:
        for name in names:
            found = DeviceMesh.__dict__.get(name)
            if isinstance(found, staticmethod | classmethod):
                stack.enter_context(patch.object(DeviceMesh, name, type(found)(real(found.__func__))))
            elif found is not None:
                stack.enter_context(patch.object(DeviceMesh, name, real(found)))
        yield


@contextmanager
def _in_place_conversions() -> Iterator[None]:
    """Makes `Module.to` replace parameters; torch would swap them, which fake tensors do not support."""

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        made: dict[int, Tensor] = {}
        for one in module.modules() if recurse else [module]:
            for held in (one._parameters, one._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = made.setdefault(id(tensor), _converted(tensor, convert))  # type: ignore[assignment]
        return module

    with patch.object(nn.Module, "_apply", apply):
        yield


def _converted(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        found = convert(tensor)
    if found is tensor or not isinstance(tensor, nn.Parameter):
        return found
    return nn.Parameter(found, requires_grad=tensor.requires_grad)


@contextmanager
def _python_reducer() -> Iterator[None]:
    """Makes DistributedDataParallel reduce gradients in Python; its own reducer is in C++ and reads memory."""
    members: dict[str, Any] = {
        "__init__": _wrap,
        "forward": _forward,
        "no_sync": _no_sync,
        "register_comm_hook": _register,
    }
    with patch.multiple(DistributedDataParallel, **members):
        yield


class _Chunks(Sequence[Tensor]):
    """Pieces of a tensor for `count` ranks, each made on access: a rank uses one of thousands."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._length = -(-tensor.shape[dim] // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        start = min(self._tensor.shape[self._dim], number * self._length)
        stop = min(self._tensor.shape[self._dim], start + self._length)
        return self._tensor.narrow(self._dim, start, stop - start) if stop > start else self._tensor.new_empty(0)


@contextmanager
def _many_shards() -> Iterator[None]:
    """Makes FSDP cut a weight for this rank only, and stops DTensor from comparing all shards with each other."""
    with (
        patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
        patch.object(_sharding_prop, "_propagate_use_strided_shard_flag", _nothing, create=True),
    ):
        yield


@contextmanager
def _posted(post: Post) -> Iterator[None]:
    """Passes the shapes of sent tensors between pipeline stages that are simulated one after another.

    If the sender of a stage is not simulated yet, the stage receives the shapes that were sent last. This happens if
    two parts of the model are on this rank, and the part between them is not.
    """

    if not hasattr(PipelineStage, "_send_meta"):  # an older torch, which the strategy refuses
        yield
        return
    torchs: Any = stage

    def send(self: PipelineStage, meta: Any, to: int) -> None:
        post[self.stage_index, to] = meta

    def receive(self: PipelineStage, source: int) -> Any:
        if source > self.stage_index:  # gradients, with the shapes of this stage's outputs
            return torchs._StageBackwardMeta(backward_metas=torchs._derive_grad_metas(self._stage_meta.outputs))
        return post.get((source, self.stage_index)) or next(reversed(post.values()))

    backend = dist.get_backend
    with (
        patch.multiple(PipelineStage, _send_meta=send, _recv_meta=receive),
        patch.object(dist, "get_backend", lambda *group: f"{backend(*group)}, simulated"),
        patch.object(schedules, "_preconnect_shared_p2p_edges", _nothing, create=True),
        patch.object(schedules, "_preconnect_p2p_edge_groups", _nothing, create=True),
    ):
        yield


class _Reducer:
    """Flat buckets of gradients, filled from the last parameter on; each is reduced when all of its gradients exist.

    The sizes are those of torch's reducer: https://docs.pytorch.org/docs/stable/notes/ddp.html.
    """

    def __init__(self, parameters: list[nn.Parameter], megabytes: float, *, views: bool) -> None:
        self.dtype: torch.dtype | None = None  # of compressed gradients
        self.held = self.skips = False
        self._views = views
        bucket: list[nn.Parameter] = []
        size, limit = 0, _MIB
        for parameter in reversed(parameters):
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                self._add(bucket)
                bucket, size, limit = [], 0, int(megabytes * _MIB)
        if bucket:
            self._add(bucket)

    def _add(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        waiting = {id(p) for p in bucket}
        left = set(waiting)
        places = torch.split(flat, [p.numel() for p in bucket])

        def arrived(place: Tensor, parameter: nn.Parameter) -> None:
            if self.held or parameter.grad is None:
                return
            with torch.no_grad():
                if parameter.grad is not place:
                    place.copy_(parameter.grad)
                if self._views:
                    parameter.grad = place
                left.discard(id(parameter))
                if not left:
                    left.update(waiting)
                    dist.all_reduce(flat if self.dtype is None else flat.to(self.dtype))

        for parameter, place in zip(bucket, places, strict=True):
            view = place.view(parameter.shape)
            register: Any = parameter.register_post_accumulate_grad_hook
            register(functools.partial(arrived, view))

    def _check_reducer_finalized(self) -> None:
        """Does nothing: all gradients have arrived."""


def _wrap(self: Any, module: nn.Module, *_: Any, **options: Any) -> None:
    nn.Module.__init__(self)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    own = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    self.module = module
    views = options.get("gradient_as_bucket_view", False)
    self.reducer = self.simulated = _Reducer(own, options.get("bucket_cap_mb") or 25, views=views)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.simulated.held = self.simulated.skips  # `no_sync` in a forward pass also applies to its backward pass
    return self.module(*args, **kwargs)


@contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    self.simulated.skips = True
    try:
        yield
    finally:
        self.simulated.skips = False


def _register(self: Any, state: Any, hook: Any) -> None:
    hook = getattr(getattr(hook, "__self__", None), "_hook", hook)  # the hook in a `DeferredAllReduce`
    if hook is not default_hooks.allreduce_hook:
        if hook not in _HOOKS:
            raise NotSimulatable("a communication hook that is not torch's compression")
        self.simulated.dtype = _HOOKS[hook]
