"""Compatibility: without any private name of another library, the public fallback trains the same."""

import atexit
import builtins
import importlib
import inspect
import multiprocessing.queues
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.small_gpt import DDP, PIPELINE, train
from support.torch_versions import needs_pipelines
from support.trained import Trained, trained
from torch import nn
from torch.utils import data as torch_data

from ddpforge import compat
from ddpforge.data.workers import reporting_context
from ddpforge.errors import PluginError, StrategyError
from ddpforge.features import activation_checkpointing, block_forwards, memory_tracker
from ddpforge.strategies.fsdp.wrap_units import check_shardable

NORMS = """
recipe = 2
name = "run"
model = { use = "./odd_models.py:NormedBlocks" }
data.train = { use = "./parts.py:Points", samples = 36 }
data.eval = { use = "./parts.py:Points", samples = 11 }
task = { use = "regression" }
optimizer = { use = "sgd", lr = 0.01 }
strategy = { use = "ddp" }
train = { length = "6st", global_batch = 12, micro_batch = 3, virtual_ranks = 4, device = "cpu", eval_every = "3st" }
checkpoint = { every = "3st" }
track.every = "1st"
"""


def gpt(strategy: str, **text: str) -> list[Trained]:
    return train(strategy, 2, length="4st", **text)


RUNS: dict[str, Callable[[Path], list[Trained]]] = {
    "ddp": lambda _: gpt(DDP),
    "selective": lambda _: gpt(DDP, train='activation_checkpointing = "selective"'),
    "context": lambda _: gpt('use = "fsdp"\ncontext = 2'),
    "pipeline": lambda _: gpt(PIPELINE.format("1F1B")),
    "norms": lambda folder: trained(folder, NORMS, 2),
}


@cache
def expected(run: str, folder: Path) -> list[Trained]:
    return RUNS[run](folder)


# ------------------------------------------------------------------------------------------------ removing names
def lack(*names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Hides attributes with these names from compat.py only: torch itself needs them."""

    def take(monkeypatch: pytest.MonkeyPatch) -> None:
        def get(one: Any, name: str, *default: Any) -> Any:
            return getattr(one, f"absent {name}" if name in names else name, *default)

        monkeypatch.setattr(compat, "getattr", get, raising=False)
        monkeypatch.setattr(
            compat, "hasattr", lambda one, name: name not in names and hasattr(one, name), raising=False
        )

    take.__name__ = names[0]
    return take


def hide(module: str, name: str, *then: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Makes `from module import name` fail, in compat.py only."""

    def take(monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(wanted: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            if wanted == module and (globals_ or {}).get("__name__") == compat.__name__ and name in (fromlist or ()):
                raise ImportError(f"no {name} in {module}")
            return real(wanted, globals_, locals_, fromlist, level)

        monkeypatch.setattr(builtins, "__import__", without)
        for each in then:
            each(monkeypatch)

    take.__name__ = name
    return take


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creates the classes of recomputed blocks again, with the current names of compat.py."""
    spec = activation_checkpointing.__spec__
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    monkeypatch.setattr(block_forwards, "checkpointed", again.checkpointed)


def attention(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    lack(*(f"_scaled_dot_product_{name}" for name in names))(monkeypatch)
    anew(monkeypatch)


def broadcast_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "leaves_buffers", lambda: {"broadcast_buffers": False})


def finds_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "finds_shapes", lambda: False)


_DISPATCH = "torch.utils._python_dispatch"
foreach = lack(*(f"_foreach_{name}" for name in ("zero_", "copy_", "norm", "mul_", "add_", "div_", "lerp_")))
pytree = hide("torch.utils", "_pytree")
version, is_view = lack("_version"), lack("_is_view")
batch_norms = hide("torch.nn.modules.batchnorm", "_BatchNorm")
modes = hide(_DISPATCH, "TorchDispatchMode", anew)
wrappers = hide(_DISPATCH, "is_traceable_wrapper_subclass")
without_modes = hide(_DISPATCH, "_disable_current_modes")
collectives = lack("all_gather_single", "reduce_scatter_single")
reducer = lack("_check_reducer_finalized")
timeout = lack("set_timeout", "_set_pg_timeout")


leaves_buffers = compat.leaves_buffers  # a test replaces it


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clears the caches of compat.py before and after a test."""

    def forget() -> None:
        for one in (compat.batch_norms, compat.attention_operators, leaves_buffers):
            one.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expected")


# `make test` takes one name from each run; the functions that use the others have tests of their own below.
@pytest.mark.parametrize(
    ("take", "run"),
    [
        (foreach, "ddp"),
        pytest.param(foreach, "norms", marks=pytest.mark.full),
        pytest.param(foreach, "pipeline", marks=pytest.mark.full),
        (pytree, "pipeline"),
        pytest.param(pytree, "context", marks=pytest.mark.full),
        pytest.param(version, "ddp", marks=pytest.mark.full),
        pytest.param(version, "selective", marks=pytest.mark.full),
        pytest.param(is_view, "pipeline", marks=pytest.mark.full),
        (batch_norms, "norms"),
        pytest.param(modes, "selective", marks=pytest.mark.full),
        (attention, "selective"),
        pytest.param(wrappers, "selective", marks=pytest.mark.full),
        pytest.param(without_modes, "context", marks=pytest.mark.full),
        (collectives, "context"),
        pytest.param(reducer, "ddp", marks=pytest.mark.full),
        pytest.param(timeout, "context", marks=pytest.mark.full),
        pytest.param(broadcast_buffers, "norms", marks=pytest.mark.full),
        pytest.param(finds_shapes, "pipeline", marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@needs_pipelines
def test_training_without_a_private_name_is_the_same(
    take: Callable[[pytest.MonkeyPatch], None], run: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = expected(run, folder)
    take(monkeypatch)
    found = RUNS[run](tmp_path)
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert [one.column(key) for one in found] == [pytest.approx(one.column(key), rel=1e-6) for one in whole], key
    assert len(whole[0].column()) >= 4


# ------------------------------------------------------------------------------------------------ trees
class Pair(NamedTuple):
    a: Any
    b: Any


TREE = {"x": [1, (2, 3)], "y": Pair({"z": 4}, []), "n": None}


@pytest.mark.parametrize("is_there", [True, False])
def test_trees_are_flattened_and_rebuilt(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there:
        pytree(monkeypatch)
    leaves, structure = compat.tree_flatten(TREE)
    assert leaves == compat.tree_leaves(TREE) == [1, 2, 3, 4, None]
    assert compat.tree_unflatten([5, 6, 7, 8, 9], structure) == {"x": [5, (6, 7)], "y": Pair({"z": 8}, []), "n": 9}
    doubled = compat.tree_map_only(int, lambda x: 2 * x, TREE)
    assert doubled == {"x": [2, (4, 6)], "y": Pair({"z": 8}, []), "n": None}
    assert isinstance(doubled["y"], Pair)


@pytest.mark.parametrize("is_there", [True, False])
def test_foreach_accepts_a_list_or_one_value(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there:
        foreach(monkeypatch)
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [norm.item() for norm in compat.foreach("norm", tensors)] == [5.0, 1.0]
    compat.foreach("mul_", tensors, 2.0)
    compat.foreach("add_", tensors, [torch.ones(2), torch.ones(1)])
    compat.foreach("lerp_", tensors, [torch.zeros(2), torch.zeros(1)], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[3.5, 4.5], [1.5]]
    compat.foreach("copy_", tensors, [torch.ones(2), torch.ones(1)])
    compat.foreach("div_", tensors, 4)
    assert [tensor.tolist() for tensor in tensors] == [[0.25, 0.25], [0.25]]
    compat.foreach("zero_", tensors)
    assert not any(map(torch.any, tensors))


# ------------------------------------------------------------------------------------------------ tensors, operators
def test_sparse_parts_returns_indices_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], torch.ones(2), (3,), check_invariants=True)
    assert [part.tolist() for part in compat.sparse_parts(sparse)] == [[[0, 0]], [1.0, 1.0]]
    assert len(memory_tracker.storages(sparse)) == 2
    lack("_indices", "_values")(monkeypatch)
    assert compat.sparse_parts(sparse) == []
    assert [part.tolist() for part in compat.sparse_parts(sparse.coalesce())] == [[[0]], [2.0]]


def test_hidden_gradient_hooks_are_not_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: gradient)
    with pytest.raises(StrategyError, match="has a gradient hook"):
        check_shardable("weight", weight)
    lack("_backward_hooks", "_post_accumulate_grad_hooks")(monkeypatch)
    check_shardable("weight", weight)


def test_written_tensors_of_an_operator_are_found_by_schema_or_name() -> None:
    x, y, kept = torch.ones(2), torch.ones(2), torch.ops.aten
    named: Any = SimpleNamespace(__name__="add_.Tensor")
    out: Any = SimpleNamespace(__name__="add.out")
    for operator, args, kwargs, place in (
        (kept.add_.Tensor, (x, y), {}, x),
        (kept.add.out, (x, y), {"out": y}, y),
        (named, (x, y), {}, x),
        (out, (x, x), {"out": y}, y),
    ):
        (found,) = compat.written(operator, args, kwargs)
        assert found is place
    for operator in (kept.add.Tensor, SimpleNamespace(__name__="add.Tensor")):
        assert [*compat.written(operator, (x, y), {})] == []


def test_argument_of_an_operator_is_found_by_position_name_or_default() -> None:
    dropout = torch.ops.aten.dropout.default
    assert compat.argument(dropout, "p", (torch.ones(1), 0.5, True), {}) == 0.5
    assert compat.argument(dropout, "p", (torch.ones(1),), {"p": 0.3}) == 0.3
    assert compat.argument(dropout, "dropout_p", (torch.ones(1),), {}) is None
    named = SimpleNamespace(__name__="dropout")
    assert compat.argument(named, "p", (), {"p": 0.3}) == 0.3
    assert compat.argument(named, "p", (), {}) is None


def test_operators_with_missing_private_names_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    known = compat.attention_operators()
    assert torch.ops.aten.mm.default not in known
    assert len(known) == 4
    waits = torch.ops._c10d_functional.wait_tensor.default
    assert compat.waits(waits)
    assert not compat.waits(torch.ops.aten.mm.default)
    compat.attention_operators.cache_clear()
    lack(*(f"_scaled_dot_product_{one.name().partition('product_')[2]}" for one in known), "wait_tensor")(monkeypatch)
    assert compat.attention_operators() == frozenset()
    assert not compat.waits(waits)


def test_tensor_wrappers_are_recognized_by_their_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for _ in range(2):
        assert compat.is_wrapper(held)
        assert not compat.is_wrapper(torch.ones(2))
        wrappers(monkeypatch)


def test_leaves_buffers_supports_the_older_option_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = compat.leaves_buffers()
    assert name in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    compat.leaves_buffers.cache_clear()

    class Older:
        def __init__(self, module: nn.Module, broadcast_buffers: bool = True) -> None: ...

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Older)
    assert compat.leaves_buffers() == {"broadcast_buffers": False}


# ------------------------------------------------------------------------------------------------ optimizers
def test_decides_on_device_is_true_for_fused_optimizers() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    assert compat.decides_on_device(torch.optim.SGD(weights, fused=True))
    assert not compat.decides_on_device(torch.optim.SGD(weights))


def test_loss_scale_is_restored_without_its_growth_count() -> None:
    scaler = torch.amp.GradScaler("cpu")
    compat.set_scale(scaler, 8.0, 5)
    assert (scaler.get_scale(), compat.growth_of(scaler)) == (8.0, 5)

    class Other:
        def __init__(self) -> None:
            self.state = {"scale": 1.0}

        def state_dict(self) -> dict[str, float]:
            return self.state

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.state = state

    other: Any = Other()
    compat.set_scale(other, 8.0, 5)
    assert (other.state, compat.growth_of(other)) == ({"scale": 8.0}, 0)


# ------------------------------------------------------------------------------------------------ processes
@pytest.mark.parametrize("is_there", [True, False])
def test_hide_worker_removes_the_worker_info(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import _utils

    info: Any = SimpleNamespace(id=0, num_workers=2)

    def known() -> Any:
        return info

    if is_there:
        monkeypatch.setattr(_utils.worker, "_worker_info", info)
    else:
        monkeypatch.delattr(_utils.worker, "_worker_info")
        for module in (torch_data, _utils.worker):
            monkeypatch.setattr(module, "get_worker_info", known)
    assert torch_data.get_worker_info() is info
    compat.hide_worker()
    assert torch_data.get_worker_info() is None


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize("is_there", [True, False])
def test_queue_sends_an_error_instead_of_an_unpicklable_object(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there:
        monkeypatch.delattr(multiprocessing.queues.Queue, "_on_queue_feeder_error")
    queue = reporting_context().Queue()
    queue.put((1, "word"))
    queue.put((7, Unpicklable()))
    (one, word), (number, error) = queue.get(timeout=30), queue.get(timeout=30)
    assert (one, word, number) == (1, "word", 7)
    assert isinstance(error, PluginError)
    assert "could not send a micro-batch" in error.message
    queue.close()


def test_exit_functions_run_if_python_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: called.append(1))
    compat.run_exit_functions()
    monkeypatch.delattr(atexit, "_run_exitfuncs")
    compat.run_exit_functions()
    assert called == [1]


def test_trial_id_falls_back_to_the_trials_number() -> None:
    assert compat.trial_id(SimpleNamespace(_trial_id=5, number=3)) == 5
    assert compat.trial_id(SimpleNamespace(number=3)) == 3


def test_in_backward_is_true_within_a_backward_pass_and_false_without_torch_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[bool] = []
    weight = torch.ones(2, requires_grad=True)
    total = (weight * 2).sum()
    total.register_hook(lambda _: found.append(compat.in_backward()))  # type: ignore[no-untyped-call]
    found.append(compat.in_backward())
    total.backward()
    lack("_current_graph_task_id")(monkeypatch)
    again = (weight * 3).sum()
    again.register_hook(lambda _: found.append(compat.in_backward()))  # type: ignore[no-untyped-call]
    again.backward()
    assert found == [False, True, False]


def test_torch_has_compares_versions() -> None:
    assert compat.torch_has("2.9")
    assert not compat.torch_has("99.0")


def test_unknown_names_of_compat_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        compat.absent  # noqa: B018


def test_on_compile_is_called_around_a_compilation_and_never_without_torch_s_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo import callback

    called: list[str] = []
    for name in ("start_callbacks", "end_callbacks"):
        monkeypatch.setattr(callback.callback_handler, name, [*getattr(callback.callback_handler, name)])
    compat.on_compile(lambda *_: called.append("begin"), lambda *_: called.append("end"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert called == ["begin", "end"]

    for hook in ("on_compile_start", "on_compile_end"):
        monkeypatch.delattr(callback, hook)
    compat.on_compile(lambda *_: called.append("begin"), lambda *_: called.append("end"))  # registers nothing
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert called == ["begin", "end"] * 2
