"""Private or version-dependent names of other libraries that ddpforge uses, with a fallback for each.

Names of DeepSpeed are in `strategies/deepspeed/`, those for simulated steps in `tools/simulation/`. Each function here
describes its reason and its fallback. `tests/test_compat.py` removes each name and trains.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing.queues
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import repeat
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer


# ------------------------------------------------------------------------------------------------ versions
# The oldest torch for features that need a newer one than the package does. An older torch is refused by name, for
# these features only. tests/versions.toml has the same versions, for the table in docs/install.md.
PIPELINES = "2.14"
SHARDED_INTEGERS = "2.12"
COMPILED_STAGE_3 = "2.12"  # before: the compiled backward pass does not use the weights that ZeRO stage 3 gathered


def torch_has(least: str) -> bool:
    """Returns True if the installed torch is of version `least` or newer."""
    import torch
    from packaging.version import Version

    return Version(torch.__version__) >= Version(least)


# ------------------------------------------------------------------------------------------------ trees of values
def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of nested containers, and the structure for `tree_unflatten`.

    Uses torch's pytree, with which other libraries register their containers (transformers' `ModelOutput`). It has no
    public name. The fallback supports dictionaries, lists, tuples and named tuples.
    """
    if (pytree := _pytree()) is not None:
        found: tuple[list[Any], Any] = pytree.tree_flatten(tree)
        return found
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves)


def tree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Returns a tree of the same structure with other leaves."""
    if (pytree := _pytree()) is not None:
        return pytree.tree_unflatten(leaves, structure)
    return _built(structure, iter(leaves))


def tree_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of nested containers."""
    return tree_flatten(tree)[0]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the same tree with `function` applied to each leaf."""
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([function(leaf) for leaf in leaves], structure)


def tree_map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the same tree with `function` applied to each leaf of that type."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


def _pytree() -> Any:
    try:
        from torch.utils import _pytree as pytree
    except ImportError:
        return None
    return pytree


def _structure(tree: Any, leaves: list[Any]) -> Any:
    if isinstance(tree, dict):
        return type(tree), list(tree), [_structure(value, leaves) for value in tree.values()]
    if isinstance(tree, list | tuple):
        return type(tree), None, [_structure(value, leaves) for value in tree]
    leaves.append(tree)
    return None


def _built(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    kind, keys, parts = structure
    values = [_built(part, leaves) for part in parts]
    if keys is not None:
        return kind(zip(keys, values, strict=True))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


# ------------------------------------------------------------------------------------------------ tensors
def foreach(operation: str, tensors: Sequence[Tensor], *others: Any) -> Any:
    """Applies an operation of tensors ("mul_", "copy_", "norm", …) to each of `tensors`, in few kernels.

    An argument in `others` is a list with one entry per tensor, or one value for all. torch documents these operations
    under names that begin with an underscore. The fallback is a loop.
    """
    import torch

    if (together := getattr(torch, f"_foreach_{operation}", None)) is not None:
        return together(tensors, *others)
    rows = zip(
        tensors, *(other if isinstance(other, list | tuple) else repeat(other) for other in others), strict=False
    )
    return [getattr(one, operation)(*rest) for one, *rest in rows]


def version(tensor: Tensor) -> int | None:
    """Returns autograd's count of in-place writes to a tensor; None if torch does not have it.

    torch's notes on autograd describe the count, but it has no public name.
    """
    return getattr(tensor, "_version", None)


def is_view(tensor: Tensor) -> bool:
    """Returns True if a tensor is a view of another; also True if that is not known."""
    known = getattr(tensor, "_is_view", None)
    return bool(known()) if known else True


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the indices and values of a sparse COO tensor, without a copy that merges duplicates.

    The public methods raise for a tensor with duplicates. So the fallback returns no tensors for it, and its memory is
    not counted.
    """
    if hasattr(tensor, "_indices") and hasattr(tensor, "_values"):
        return [tensor._indices(), tensor._values()]
    return [tensor.indices(), tensor.values()] if tensor.is_coalesced() else []


def is_compiled(module: nn.Module) -> bool:
    """True for the module that `torch.compile(module)` returns, which has the original one inside."""
    return hasattr(module, "_orig_mod")  # of torch._dynamo.eval_frame.OptimizedModule


def on_compile(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Calls `begin` and `end` around all further compilations; neither, if torch has no longer its private hook."""
    from torch._dynamo import callback

    for hook, called in ("on_compile_start", begin), ("on_compile_end", end):
        getattr(callback, hook, lambda _: None)(called)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Returns True if a parameter has hooks on its gradient, which FSDP would not copy to its own parameters.

    Without the private names the result is False, and a model with hooks is not refused.
    """
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in names)


@cache
def batch_norms() -> tuple[type[nn.Module], ...]:
    """Returns the classes of BatchNorm: the private base class of all, or else torch's public classes."""
    from torch import nn

    try:
        from torch.nn.modules.batchnorm import _BatchNorm
    except ImportError:
        return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    return (_BatchNorm,)


# ------------------------------------------------------------------------------------------------ operators
if TYPE_CHECKING:

    class DispatchMode:
        """Context that calls its `__torch_dispatch__` for each operator that runs inside it."""

        def __enter__(self) -> Any: ...
        def __exit__(self, *error: Any) -> None: ...


def __getattr__(name: str) -> Any:
    if name != "DispatchMode":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return nullcontext  # no operator is observed: all are recomputed, and no memory is counted
    return TorchDispatchMode


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that an operator writes, by its schema; else by the rule for names: `add_`, `out=`."""
    import torch

    schema = getattr(operator, "_schema", None)
    if schema is None:
        in_place = getattr(operator, "__name__", "").partition(".")[0].endswith("_")
        places = [*([args[0]] if in_place and args else []), kwargs.get("out")]
    elif not schema.is_mutable:
        return
    else:
        places = [
            args[number] if number < len(args) else kwargs.get(argument.name)
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    for place in places:
        yield from (x for x in (place if isinstance(place, list | tuple) else [place]) if isinstance(x, torch.Tensor))


def argument(operator: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the argument `name` of a call of an operator, or its default; None if it has neither.

    Without a schema, only arguments that were passed by name are found.
    """
    schema = getattr(operator, "_schema", None)
    for place, one in enumerate(schema.arguments if schema is not None else ()):
        if one.name == name:
            return args[place] if place < len(args) else kwargs.get(name, one.default_value)
    return kwargs.get(name)


@cache
def attention_operators() -> frozenset[Any]:
    """Returns this torch's operators that compute attention. They have no public names."""
    import torch

    names = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    found = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None) for name in names)
    return frozenset(one.default for one in found if one is not None)


def waits(operator: Any) -> bool:
    """Returns True for the operator that waits for a collective; False if this torch has another name for it."""
    import torch

    known = getattr(getattr(torch.ops, "_c10d_functional", None), "wait_tensor", None)
    return known is not None and operator is known.default


def in_backward() -> bool:
    """Returns True within a backward pass, e.g. while a checkpointed block runs again. The fallback returns False."""
    import torch

    return bool(getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1)


def is_wrapper(tensor: Tensor) -> bool:
    """Returns True for a tensor subclass that wraps other tensors and has no memory of its own."""
    try:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass
    except ImportError:
        return hasattr(tensor, "__tensor_flatten__")
    return bool(is_traceable_wrapper_subclass(tensor))


def without_modes() -> AbstractContextManager[Any]:
    """Returns a context that disables all dispatch modes, because a mode would turn a causal bias into a plain tensor.

    The fallback keeps the modes: attention then receives the mask as a plain tensor, with the same result.
    """
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return nullcontext()
    return _disable_current_modes()


# ------------------------------------------------------------------------------------------------ optimizers
def decides_on_device(optimizer: Optimizer) -> bool:
    """Returns True if a fused optimizer itself skips its step when `found_inf` is set, without a wait for the device.

    GradScaler uses the same attribute. Without it, the host checks the gradient norm.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def growth_of(scaler: torch.amp.GradScaler) -> int:
    """Returns the number of steps since the last change of a loss scale; 0 if the scaler's state has no such entry."""
    return int(scaler.state_dict().get("_growth_tracker", 0))


def set_scale(scaler: torch.amp.GradScaler, scale: float, growth: int) -> None:
    """Sets a loss scale, and the number of steps since its last change."""
    state = scaler.state_dict()
    known = {"_growth_tracker": growth} if "_growth_tracker" in state else {}
    scaler.load_state_dict(state | {"scale": scale} | known)


# ------------------------------------------------------------------------------------------------ ranks
def all_gather(into: Tensor, rows: Tensor, group: ProcessGroup) -> None:
    """All-gathers `rows` (equal shapes) over a group; the function has another name before torch 2.14."""
    import torch.distributed as dist

    function: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(into, rows, group=group)


def reduce_scatter(into: Tensor, rows: Tensor, group: ProcessGroup) -> None:
    """Reduce-scatters the sum of `rows` over a group; the function has another name before torch 2.14."""
    import torch.distributed as dist

    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(into, rows, group=group)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of a group's collectives; without the function, torch's own timeout remains."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    function = getattr(dist, "set_timeout", None) or getattr(c10d, "_set_pg_timeout", None)
    if function is not None:
        function(timeout, group)


def has_pipelines() -> bool:
    """Returns True if torch's pipelines accept micro-batches that are already split, as of torch 2.14."""
    from torch.distributed import pipelining

    return "arg_mbs" in inspect.signature(pipelining.ScheduleGPipe.step).parameters


def finds_shapes() -> bool:
    """Returns True if a pipeline's loss is called in the pass in which torch only infers the shapes of gradients.

    If torch renames the function that makes this call, the result is always False. The task's loss then also runs once
    on uninitialized activations. This affects only tasks that store values from their batches.
    """
    frame = inspect.currentframe()
    for _ in range(5):
        if frame is None or frame.f_code.co_name == "_backward_metadata_inference":
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


@cache
def leaves_buffers() -> dict[str, bool]:
    """Returns the option that stops DistributedDataParallel's broadcasts of buffers; torch 2.14 renamed it.

    ddpforge makes buffers equal when they are read (evaluation, checkpoints), not in every forward pass.
    """
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def unreduced(module: DistributedDataParallel) -> Callable[[], list[int]] | None:
    """Returns a function that returns the indices of parameters without a gradient in the last backward pass.

    Returns None if the reducer has no such check. The caller then sets gradients to None, which costs memory, and
    checks which parameters have none.
    """
    # If gradients are set to zero and not to None, only the reducer has this information. It is parsed from the text
    # of its error, which may change: an unknown text is raised again.
    reducer: Any = module.reducer
    check = getattr(reducer, "_check_reducer_finalized", None)
    if check is None:
        return None

    def places() -> list[int]:
        try:
            check()
        except RuntimeError as error:
            found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            return [int(place) for place in found[1].split()]
        return []

    return places


# ------------------------------------------------------------------------------------------------ processes
def hide_worker() -> None:
    """Makes `torch.utils.data.get_worker_info` return None in this loader process, for good.

    Otherwise a dataset may distribute its samples to loader processes itself, which ddpforge already does. If torch
    stores the information under another name, the public function is replaced in all modules that have imported it.
    """
    from torch.utils import data
    from torch.utils.data import _utils

    worker: Any = getattr(_utils, "worker", None)
    if hasattr(worker, "_worker_info"):
        worker._worker_info = None
        return
    known = data.get_worker_info
    for module in list(sys.modules.values()):
        if getattr(module, "get_worker_info", None) is known:
            module.get_worker_info = _no_worker  # type: ignore[attr-defined]


def _no_worker() -> None:
    return None


def run_exit_functions() -> None:
    """Runs the functions registered with `atexit`, in a process that then ends without Python's clean-up.

    Python has no public function for this. Without the private one, they do not run.
    """
    getattr(atexit, "_run_exitfuncs", lambda: None)()


def trial_id(trial: Any) -> int:
    """Returns an Optuna trial's id in its storage; else its number, which is equal in a journal of one study."""
    return int(getattr(trial, "_trial_id", trial.number))


if TYPE_CHECKING:
    _Queue = multiprocessing.queues.Queue[Any]
else:
    _Queue = multiprocessing.queues.Queue


class ReportingQueue(_Queue):
    """Queue between processes that sends a replacement for an object that cannot be pickled.

    The queue's thread pickles the objects, and by default only prints an error. Python has a private hook for such
    errors, made for `concurrent.futures`. Without the hook, `put` pickles each object once more to find errors.
    """

    def instead_of(self, item: Any, error: Exception) -> Any:
        """Returns the replacement for `item`; subclasses implement it."""
        raise NotImplementedError

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts `obj` into the queue."""
        if not hasattr(_Queue, "_on_queue_feeder_error"):
            try:
                ForkingPickler.dumps(obj)
            except Exception as error:
                obj = self.instead_of(obj, error)
        super().put(obj, block, timeout)

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        self.put(self.instead_of(item, error))
