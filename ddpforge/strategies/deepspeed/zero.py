"""Access to DeepSpeed's internals: starts its engine, reads and writes the sharded weights and optimizer state.

ZeRO flattens the parameters of each group into one tensor. Every rank receives a piece of it, which the optimizer
updates. So a rank holds a contiguous range of the elements of some parameters, and the optimizer's state is stored by
flat tensor, not by parameter.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.components.installed import version
from ddpforge.errors import CheckpointError, StrategyError, pip_install
from ddpforge.interfaces import (
    CanonicalState,
    FlatRange,
    Ranks,
    Region,
    SavedTensor,
    TensorShard,
    Weights,
    World,
    read_all,
)
from ddpforge.local_world import local_world_size
from ddpforge.strategies import named_state
from ddpforge.strategies.optimizer_probe import check_same_update
from ddpforge.strategies.parameter_guard import ParameterGuard, PartialWeights

__all__ = [
    "TESTED",
    "AuxiliaryWeights",
    "Keys",
    "ZeroWeights",
    "import_deepspeed",
    "keys_of",
    "require_deepspeed",
    "start",
]

TESTED = SpecifierSet(">=0.19.8,<0.20")  # versions whose internals this module supports


# ---------------------------------------------------------------------------------------------- the library
def require_deepspeed() -> None:
    """Raises StrategyError unless a tested version of DeepSpeed is installed; imports nothing."""
    found = version("deepspeed")
    if found is None:
        raise StrategyError(
            'strategy.use = "deepspeed" needs DeepSpeed, which is not installed', hints=[pip_install("deepspeed")]
        )
    if not TESTED.contains(found, prereleases=True):
        raise StrategyError(
            f"DeepSpeed {found} is installed, but ddpforge is tested with deepspeed{TESTED}: it reads weights and "
            "optimizer state from DeepSpeed's internals, which change between versions",
            hints=[pip_install("deepspeed")],
        )


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for `device` and redirects its log to stderr; raises StrategyError for another device."""
    if (other := os.environ.get("DS_ACCELERATOR", device.type)) != device.type:
        raise StrategyError(
            f"the environment has DS_ACCELERATOR={other}, but this run is on {device.type}",
            hints=["unset DS_ACCELERATOR"],
        )
    os.environ["DS_ACCELERATOR"] = device.type
    with _lightly():
        deepspeed = import_module("deepspeed")
        import_module("deepspeed.runtime.zero.muon.original_muon")  # its engine imports this
    chosen = deepspeed.get_accelerator().device_name()
    if chosen != device.type:
        raise StrategyError(
            f"DeepSpeed was imported for {chosen} before this run began on {device.type}",
            hints=[f"set DS_ACCELERATOR={device.type}"],
        )
    # Only inference uses this extension, and to build it every machine would need a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


@contextmanager
def _lightly() -> Iterator[None]:
    """Skips two slow parts of DeepSpeed's import: MLflow for its autotuner, and torch.compile for its Muon."""
    # They take half of the time of the import.
    absent: dict[str, Any] = {} if "mlflow" in sys.modules else {"mlflow": None}
    sys.modules.update(absent)
    try:
        with patch.object(torch, "compile", lambda model=None, **_: model or (lambda one: one)):
            yield
    finally:
        for name in absent:
            del sys.modules[name]


def start(
    deepspeed: Any, model: nn.Module, optimizer: Optimizer | None, config: Mapping[str, Any], world: World
) -> Any:
    """Returns a DeepSpeed engine around `model`, in the existing process group; without an optimizer it trains nothing.

    Under stage 3 the model may be on the CPU and need not fit into one device: its parameters are moved to the device
    and sharded one by one.
    """
    try:
        deepspeed.DeepSpeedConfig(dict(config))
    except Exception as error:
        raise StrategyError(f"DeepSpeed rejects its configuration: {error}") from error

    # DeepSpeed uses it as the index of the GPU (stage 3 in every pass), but each rank may have one visible GPU only.
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    # Without it, DeepSpeed on CPUs starts a process (numactl) to count the ranks whenever it reduces gradients.
    os.environ.setdefault("LOCAL_SIZE", str(local_world_size()))
    with _sharing_ourselves(world.global_ranks):
        deepspeed.init_distributed(dist_init_required=False)
        if config["zero_optimization"]["stage"] == 3:
            deepspeed.zero.Init(module=model, config_dict_or_path=dict(config))  # a dtype here means bf16 on CPUs
        else:
            _share(model.parameters(), world.device, world.global_ranks)
        _share(model.buffers(), world.device, world.global_ranks)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    del engine.training  # it would stay True; without it the engine returns the model's attribute
    return engine


@contextmanager
def _sharing_ourselves(ranks: Ranks) -> Iterator[None]:
    """Replaces DeepSpeed's broadcasts of parameters within the block."""
    # DeepSpeed 0.19.8 fails to broadcast a 0-d parameter, and does not broadcast buffers.
    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    init = import_module("deepspeed.runtime.zero.partition_parameters").Init

    def partition(self: Any, parameter: Any) -> None:
        self._convert_to_deepspeed_param(parameter)
        _share([parameter], self.local_device, ranks)
        parameter.partition()

    theirs = engine._broadcast_model, init._zero_init_param
    engine._broadcast_model, init._zero_init_param = lambda self: None, partition
    try:
        yield
    finally:
        engine._broadcast_model, init._zero_init_param = theirs


def _share(tensors: Iterable[Tensor], device: torch.device, ranks: Ranks) -> None:
    """Moves tensors to the device and broadcasts rank 0's values."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
        ranks.broadcast(tensor.data)


# ---------------------------------------------------------------------------------------------- the optimizer
_ROWS = 6  # of the tested weight: 24 elements, in pieces for four ranks


class Keys(NamedTuple):
    """Keys of an optimizer's state: values per parameter (`step`), and values per element (`exp_avg`)."""

    per_parameter: set[str]
    per_element: set[str]


def keys_of(optimizer: Optimizer, device: torch.device) -> Keys:
    """Returns the keys of the optimizer's state, after test steps with another optimizer like it.

    Raises StrategyError for an optimizer that is not element-wise (Adafactor, Muon, LAMB): ZeRO passes it flat pieces
    of many parameters, so it would train another curve.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        raise StrategyError(
            "DeepSpeed replaces Adagrad by its own, which ignores the recipe's parameter groups",
            hints=['set strategy.use = "ddp" or "fsdp", or use another optimizer'],
        )
    kept = check_same_update(
        optimizer,
        device,
        [partial(_piece, number) for number in range(4)],
        fails="cannot be used under ZeRO, which passes it flat pieces of many parameters",
        differs="does not update each element of a parameter by itself, but ZeRO passes it flat pieces of many "
        "parameters: training would differ from other strategies",
        hints=['set strategy.use = "ddp", or use AdamW, SGD or another element-wise optimizer'],
        rows=_ROWS,
        flat=True,
    )
    per_element = {key for key, value in kept.items() if getattr(value, "shape", ()) == (_ROWS, 4)}
    return Keys(kept.keys() - per_element, per_element)


def _piece(number: int, whole: Tensor) -> Tensor:
    """Returns the quarter number `number` of a flattened tensor, as one of four ranks holds it."""
    return whole.flatten().tensor_split(4)[number]


# ---------------------------------------------------------------------------------------------- weights and state
class _Place(NamedTuple):
    """Place of a part of a parameter in the flat tensors that the optimizer updates."""

    flat: Tensor  # the optimizer's key of it
    inside: slice


class ZeroWeights(Weights):
    """fp32 weights that a ZeRO optimizer updates, and their state for checkpoints."""

    def __init__(self, engine: Any, model: nn.Module, per_parameter: set[str], partial: PartialWeights) -> None:
        self._zero, self._model, self._per_parameter = engine.optimizer, model, per_parameter
        self._stage: int = engine.zero_optimization_stage()
        self._compared, self._partial = False, partial

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names[id(p)]: (part, place) for p, part, place in self._trained_parts()}
        self._parts = {name: found[name][0] for name in names.values() if name in found}
        self._places = {name: found[name][1] for name in self._parts}
        self._frozen = {names[id(p)]: part for p, part in self._frozen_parts()}
        # Trained weights are copied from the optimizer's; under stage 3 all weights are gathered again.
        self._guard = ParameterGuard(model, set(names.values()) if self._stage == 3 else set(self._parts))

    def shards(self) -> Mapping[str, TensorShard]:
        """Returns this rank's ranges of the flattened trained parameters."""
        return self._parts

    def frozen(self) -> Mapping[str, TensorShard]:
        """Returns the weights that are not trained: whole on every rank below stage 3, sharded under stage 3."""
        return self._frozen

    def callback_guard(self) -> AbstractContextManager[Any]:
        """Raises an error within the block if a callback writes into parameters that DeepSpeed overwrites."""
        return self._guard.on()

    def whole_guard(self) -> AbstractContextManager[Any]:
        """Raises StrategyError for reads of weights that DeepSpeed has not gathered."""
        return self._partial.refused()

    @torch.no_grad()
    def mark_changed(self) -> None:
        """Copies the parts into the weights of forward passes; gathers the weights that stay whole."""
        self._guard.off = True
        try:
            self._changed()
        finally:
            self._guard.off = False

    def _changed(self) -> None:
        zero = self._zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        # The same calls as before and after the update of a step: no old values may stay gathered.
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()

    # -- where ZeRO stores weights
    def _trained_parts(self) -> Iterator[tuple[Any, TensorShard, _Place]]:
        """Yields each trained parameter, this rank's range of it (a view of the optimizer's tensor), and its place."""
        zero = self._zero
        if self._stage < 3:
            for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
                for parameter in parameters:
                    start, first, count = 0, 0, 0
                    if held := parameter._hp_mapping:
                        start, first = held.lp_fragment_address.start, held.hp_fragment_address.start
                        count = held.hp_fragment_address.numel
                    yield parameter, *_part(tuple(parameter.shape), start, count, flat, first)
            return
        for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            for parameter in parameters:
                _, first, _ = zero.grad_position[zero.get_param_id(parameter)]
                yield parameter, *_part(tuple(parameter.ds_shape), *_range(parameter), flat, first)

    def _frozen_parts(self) -> Iterator[tuple[Any, TensorShard]]:
        """Yields each frozen parameter and this rank's part: all of it, or a shard under stage 3."""
        parameter: Any
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                continue
            if self._stage < 3:
                yield (
                    parameter,
                    TensorShard.whole(parameter.detach(), replica=dist.get_rank(), replicas=dist.get_world_size()),
                )
                continue
            start, count = _range(parameter)
            held = self._used(parameter)[:count]
            yield parameter, TensorShard(held, tuple(parameter.ds_shape), FlatRange(start, start + count))

    def elements(self, name: str, region: Region) -> Tensor:
        """Returns elements of the weights in forward passes; below stage 3 every rank holds all of them."""
        parameter: Any = self._model.get_parameter(name)
        if self._stage < 3:
            return TensorShard.whole(parameter.detach()).elements(region)
        start, count = _range(parameter)
        part = TensorShard(self._used(parameter)[:count], tuple(parameter.ds_shape), FlatRange(start, start + count))
        return part.elements(region)

    # -- to disk
    def capture(self, optimizer: Optimizer) -> CanonicalState[Tensor | TensorShard]:
        """Returns this rank's part of the state of the model and the optimizer."""
        if not self._compared:
            self._compare_used()
            self._compared = True
        tensors, aliases = named_state.tensors(self._model)
        held = self._parts | self._frozen
        model = {name: held.get(name, tensor.detach()) for name, tensor in tensors.items()}
        state = {name: self._entry(name, optimizer) for name in self._parts}
        return CanonicalState(model, {name: entry for name, entry in state.items() if entry}, aliases)

    def _entry(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state of this rank's part of a parameter."""
        part, place = self._parts[name], self._places[name]
        entry: dict[str, Any] = {}
        for key, value in (optimizer.state.get(place.flat) or {}).items():
            if isinstance(value, Tensor) and value.ndim:
                if value.shape != (place.flat.numel(),) or key in self._per_parameter:
                    raise CheckpointError(
                        f"the optimizer keeps `{key}` in the shape {list(value.shape)} for a flat piece of "
                        f"{place.flat.numel()} elements: it cannot be split by parameter"
                    )
                value = part.of(value[place.inside])
            entry[key] = value
        return entry

    def compare(self) -> None:
        """Compares the parts with the weights of the forward pass, and three of them with DeepSpeed's own reading.

        Raises StrategyError if they differ.
        """
        self._compare_used()
        parameters = dict(self._model.named_parameters())
        names = list(self._parts)
        # That function communicates and is slow, hence only three. It is not always right either: with
        # `round_robin_gradients`, DeepSpeed 0.19.8 confuses parameters.
        say = import_module("deepspeed.utils").safe_get_full_fp32_param
        for name in dict.fromkeys((names[0], names[len(names) // 2], names[-1])):  # in one order on every rank
            self._same(name, self._of_whole(name, say(parameters[name])))

    def _compare_used(self) -> None:
        """Compares the parts with the weights of the forward pass, without communication."""
        parameter: Any
        for name, parameter in self._model.named_parameters():
            if name in self._parts:
                used = self._used(parameter) if self._stage == 3 else self._of_whole(name, parameter.detach())
                self._same(name, used[: self._parts[name].tensor.numel()])

    def _used(self, parameter: Any) -> Tensor:
        """Returns this rank's shard of the weights that forward passes gather (stage 3 only)."""
        held: Tensor = parameter.ds_tensor.detach()
        return held

    def _of_whole(self, name: str, whole: Tensor) -> Tensor:
        region = self._parts[name].region
        assert isinstance(region, FlatRange)
        return whole.reshape(-1)[region.start : region.stop]

    def _same(self, name: str, weights: Tensor) -> None:
        held = self._parts[name].tensor
        if not torch.equal(weights.to(held.device), held):
            raise StrategyError(
                f"DeepSpeed's values of `{name}` on rank {dist.get_rank()} are not where ddpforge expects them",
                hints=[f"ddpforge is tested with deepspeed{TESTED}; please report the version that you use"],
            )

    # -- and back
    def restore(self, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Reads this rank's parts; the optimizer keeps the recipe's hyper-parameters.

        If `partial`, tensors that the state lacks keep their values.
        """
        tensors, _ = named_state.tensors(self._model)
        named_state.match(set(tensors), set(state.model) - set(state.aliases), partial=partial)
        whole = {name: TensorShard.whole(tensor.detach()) for name, tensor in tensors.items()}
        held = {name: part for name, part in (whole | self._parts | self._frozen).items() if name in state.model}
        for name, part in held.items():
            named_state.match_form(name, part.shape, part.tensor.dtype, state.model[name])
        read_all((state.model[name], part.region, part.tensor) for name, part in held.items())
        self.mark_changed()
        if state.optimizer or not partial:
            self._restore_optimizer(optimizer, state.optimizer)

    def _restore_optimizer(self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
        unknown = sorted(set(state) - set(self._parts))
        if unknown:
            raise CheckpointError(f"the checkpoint holds optimizer state of `{unknown[0]}`, which is not trained here")
        groups: dict[Tensor, list[str]] = {}  # the names of the parameters in each flat tensor
        for name, place in self._places.items():
            groups.setdefault(place.flat, []).append(name)
        entries = {flat: self._numbers(names, state) for flat, names in groups.items()}
        for flat, names in groups.items():
            if flat.numel():
                entries[flat] |= self._elements(flat, names, state)
        with self._flats_in(optimizer):
            flats = [flat for group in optimizer.param_groups for flat in group["params"]]
            packed = optimizer.state_dict()
            packed["state"] = {number: entries[flat] for number, flat in enumerate(flats) if entries[flat]}
            optimizer.load_state_dict(packed)
        self._zero._hp_optimizer_states_linked = False  # DeepSpeed links its view of the state again in the next step

    def _numbers(self, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the optimizer's numbers of these parameters; raises CheckpointError if they are not all the same."""
        first = names[0]
        found: dict[str, Any] = {}
        for name in names:
            saved = state.get(name, {})
            if saved.keys() != state.get(first, {}).keys():
                raise CheckpointError(
                    f"the checkpoint's optimizer has {_listed(saved)} for `{name}` and "
                    f"{_listed(state.get(first, {}))} for `{first}`, but ZeRO updates both as one tensor",
                    hints=['resume with strategy.use = "ddp", "single" or "fsdp"'],
                )
            for key, value in saved.items():
                if self._is_per_element(key, value):
                    named_state.match_form(f"{key} of {name}", self._parts[name].shape, value.dtype, value)
                    continue
                if hasattr(value, "read_into"):
                    named_state.match_form(f"{key} of {name}", (), value.dtype, value)
                    value = value.read()
                if found.setdefault(key, value) != value:
                    here, there = (torch.as_tensor(number).item() for number in (value, found[key]))
                    raise CheckpointError(
                        f"the checkpoint's optimizer has `{key}` {here:g} for `{name}` and {there:g} for `{first}`, "
                        "but ZeRO has one value for both",
                        hints=['resume with strategy.use = "ddp", "single" or "fsdp"'],
                    )
        return found

    def _elements(
        self, flat: Tensor, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """Returns the per-element state of a flat tensor, read from the state of its parameters."""
        found: dict[str, Tensor] = {}
        reads: list[tuple[SavedTensor, Region, Tensor]] = []
        for name in names:
            for key, value in state.get(name, {}).items():
                if self._is_per_element(key, value):
                    whole = found.setdefault(key, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
                    target = whole[self._places[name].inside]
                    if isinstance(value, Tensor):  # 0-d tensors of 0-d parameters may have been saved as numbers
                        target.fill_(value)
                    else:
                        reads.append((value, self._parts[name].region, target))
        read_all(reads)
        return found

    def _is_per_element(self, key: str, value: Any) -> bool:
        return hasattr(value, "dtype") and key not in self._per_parameter

    @contextmanager
    def _flats_in(self, optimizer: Optimizer) -> Iterator[None]:
        """Puts the flat tensors into the optimizer's groups within the block."""
        # Under stage 3 DeepSpeed puts them there only while the optimizer steps.
        if self._stage < 3:
            yield
            return
        self._zero._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._zero._clear_fp32_optimizer_param_groups()


class AuxiliaryWeights(Weights):
    """Weights of an auxiliary module that is not trained, sharded by stage 3."""

    def __init__(self, engine: Any, module: nn.Module) -> None:
        self._engine = engine
        self._frozen = {name: _held(parameter) for name, parameter in module.named_parameters()}

    def shards(self) -> Mapping[str, TensorShard]:
        """Returns nothing: no parameter is trained."""
        return {}

    def frozen(self) -> Mapping[str, TensorShard]:
        """Returns this rank's ranges of all parameters."""
        return self._frozen

    def mark_changed(self) -> None:
        """Frees gathered weights, so that forward passes gather them again."""
        self._engine.optimizer.partition_all_parameters()


def _held(parameter: Any) -> TensorShard:
    """Returns this rank's shard of a parameter that is in memory (stage 3 only)."""
    start, count = _range(parameter)
    return TensorShard(parameter.ds_tensor.detach()[:count], tuple(parameter.ds_shape), FlatRange(start, start + count))


def _part(shape: tuple[int, ...], start: int, count: int, flat: Tensor, first: int) -> tuple[TensorShard, _Place]:
    """Returns the part of a parameter, and its place.

    The part is `count` elements of the parameter from `start`, stored in `flat` from `first`.
    """
    inside = slice(first, first + count)
    return TensorShard(flat.detach()[inside], shape, FlatRange(start, start + count)), _Place(flat, inside)


def _range(parameter: Any) -> tuple[int, int]:
    """Returns the start and the length (without padding) of this rank's shard in the parameter (stage 3 only)."""
    start = min(dist.get_rank() * parameter.partition_numel(), parameter.ds_numel)
    return start, min(parameter.partition_numel(), parameter.ds_numel - start)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) or "nothing"
