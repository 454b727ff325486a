"""All that touches DeepSpeed's internals: how its engine starts, and the weights and optimizer state it spreads.

ZeRO flattens the parameters of each group into one tensor, gives every rank a piece of it, and lets the optimizer
update that piece. So a rank holds a contiguous range of the elements of some parameters, and the optimizer's state
is kept by flat tensor, not by parameter.
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
from ddpforge.cores import ranks_here
from ddpforge.errors import CheckpointError, StrategyError
from ddpforge.interfaces import CanonicalState, Part, Range, Ranks, Region, SavedTensor, Weights, World, read_all
from ddpforge.strategies import named_state
from ddpforge.strategies.deepspeed.nvme import SwapFiles
from ddpforge.strategies.optimizer_trial import refuse_unlike
from ddpforge.strategies.watch import Guard

__all__ = [
    "TESTED",
    "BesideWeights",
    "Keys",
    "ZeroWeights",
    "import_deepspeed",
    "keys_of",
    "require_deepspeed",
    "start",
]

TESTED = SpecifierSet(">=0.19.8,<0.20")  # the versions whose internals are what this module takes them for
_INSTALL = "pip install 'ddpforge[deepspeed]'"


# ---------------------------------------------------------------------------------------------- the library
def require_deepspeed() -> None:
    """Raises StrategyError unless a version is installed that this module is tested with; imports nothing."""
    found = version("deepspeed")
    if found is None:
        raise StrategyError('strategy.use = "deepspeed" needs DeepSpeed, which is not installed', hints=[_INSTALL])
    if not TESTED.contains(found, prereleases=True):
        raise StrategyError(
            f"DeepSpeed {found} is installed, and ddpforge is tested with deepspeed{TESTED}: it reads weights and "
            "optimizer state where DeepSpeed keeps them, and that changes between versions",
            hints=[_INSTALL],
        )


def _refuse_other_accelerator(device: str) -> None:
    """Raises StrategyError where DeepSpeed is told to use something else than ranks on `device` do."""
    said = os.environ.get("DS_ACCELERATOR", device)
    if said != device:
        raise StrategyError(
            f"DS_ACCELERATOR={said} in the environment, and this run is on {device}",
            hints=["unset DS_ACCELERATOR"],
        )


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, for ranks on `device`, with what it has to say on stderr."""
    _refuse_other_accelerator(device.type)
    os.environ["DS_ACCELERATOR"] = device.type
    with _lightly():
        deepspeed = import_module("deepspeed")
        import_module("deepspeed.runtime.zero.muon.original_muon")  # which its engine imports
    chosen = deepspeed.get_accelerator().device_name()
    if chosen != device.type:
        raise StrategyError(
            f"DeepSpeed was imported for {chosen} before this run began on {device.type}",
            hints=[f"set DS_ACCELERATOR={device.type}"],
        )
    # An extension that only inference uses, and for which every machine would need a C++ compiler at the start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


@contextmanager
def _lightly() -> Iterator[None]:
    """Has DeepSpeed leave out what takes half of its import: MLflow for its autotuner, and a compiler for its Muon."""
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
    """A DeepSpeed engine around `model`, in the process group that there is; without an optimizer it trains nothing.

    Under stage 3 the model may come on the CPU: a parameter goes to the device when it is its turn to be cut up, so
    the model need not fit into one device.
    """
    try:
        deepspeed.DeepSpeedConfig(dict(config))
    except Exception as error:
        raise StrategyError(f"DeepSpeed refuses its configuration: {error}") from error

    # DeepSpeed takes it for the number of the GPU, stage 3 at every pass; but ranks may see one GPU each.
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    # On CPUs it would start a process (numactl) to count them whenever it reduces gradients.
    os.environ.setdefault("LOCAL_SIZE", str(ranks_here()))
    with _sharing_ourselves(world.all):
        deepspeed.init_distributed(dist_init_required=False)
        if config["zero_optimization"]["stage"] == 3:
            deepspeed.zero.Init(module=model, config_dict_or_path=dict(config))  # a dtype here means bf16 on CPUs
        else:
            _share(model.parameters(), world.device, world.all)
        _share(model.buffers(), world.device, world.all)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    del engine.training  # it would be true for ever; without it the engine answers with the model's
    return engine


@contextmanager
def _sharing_ourselves(ranks: Ranks) -> Iterator[None]:
    """DeepSpeed 0.19.8 fails when it broadcasts a 0-d parameter, and does not broadcast buffers."""
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
    """Moves tensors to the device and gives every rank rank 0's values."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
        ranks.broadcast(tensor.data)


# ---------------------------------------------------------------------------------------------- the optimizer
_ROWS = 6  # of the weight that an optimizer is tried on: 24 elements, which four ranks share


class Keys(NamedTuple):
    """The state of an optimizer: what it keeps once per parameter (`step`), and once per element (`exp_avg`)."""

    per_parameter: set[str]
    per_element: set[str]


def keys_of(optimizer: Optimizer, device: torch.device) -> Keys:
    """Lists the state that `optimizer` keeps.

    Finds out by using it. Raises StrategyError for an optimizer that does not treat each element by itself (Adafactor,
    Muon, LAMB): under ZeRO it sees flat pieces of many parameters, and would train another curve.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        raise StrategyError(
            "DeepSpeed replaces Adagrad by one of its own, without the recipe's parameter groups",
            hints=['set strategy.use = "ddp" or "fsdp", or use another optimizer'],
        )
    kept = refuse_unlike(
        optimizer,
        device,
        [partial(_piece, number) for number in range(4)],
        fails="cannot be used under ZeRO, where it would see flat pieces of many parameters",
        differs="does not update each element of a parameter by itself, and under ZeRO it would see flat pieces of "
        "many parameters: it would train another curve than elsewhere",
        hints=['set strategy.use = "ddp", or use AdamW, SGD or another element-wise optimizer'],
        rows=_ROWS,
        flat=True,
    )
    per_element = {key for key, value in kept.items() if getattr(value, "shape", ()) == (_ROWS, 4)}
    return Keys(kept.keys() - per_element, per_element)


def _piece(number: int, whole: Tensor) -> Tensor:
    """A quarter of a flattened tensor, as one of four ranks has it."""
    return whole.flatten().tensor_split(4)[number]


# ---------------------------------------------------------------------------------------------- weights and state
class _Place(NamedTuple):
    """The place of a part of a parameter in the tensors that the optimizer updates."""

    flat: Tensor  # under which the optimizer knows it; empty while it is swapped out
    numel: int  # of that tensor
    inside: slice


class ZeroWeights(Weights):
    """The fp32 weights that a ZeRO optimizer updates, and what goes from and to checkpoints."""

    def __init__(self, engine: Any, model: nn.Module, per_parameter: set[str]) -> None:
        self._zero, self._model, self._per_parameter = engine.optimizer, model, per_parameter
        self._stage: int = engine.zero_optimization_stage()
        self._files = SwapFiles(self._zero) if self._stage == 3 else None
        self._compared = False

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names[id(p)]: (part, place) for p, part, place in self._trained_parts()}
        self._parts = {name: found[name][0] for name in names.values() if name in found}
        self._places = {name: found[name][1] for name in self._parts}
        self._frozen = {names[id(p)]: part for p, part in self._frozen_parts()}
        # Trained weights are copied from the optimizer's, and under stage 3 all are gathered again.
        self._guard = Guard(model, set(names.values()) if self._stage == 3 else set(self._parts))

    def parts(self) -> Mapping[str, Part]:
        """This rank's ranges of the flattened parameters that are trained."""
        return self._parts

    def frozen(self) -> Mapping[str, Part]:
        """The weights that are not trained: whole on every rank below stage 3, and cut up there."""
        return self._frozen

    def observing(self) -> AbstractContextManager[Any]:
        """Refuses what callbacks write into parameters that DeepSpeed copies from elsewhere."""
        return self._guard.on()

    @torch.no_grad()
    def changed(self) -> None:
        """Copies the parts to where forward passes take weights from, and gathers those that are kept whole."""
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
        # What a step does after the update, beginning with what it does before: nothing old may stay gathered.
        zero._partition_all_parameters()
        assert self._files is not None
        self._files.flush()
        for number in range(len(zero.fp16_groups)):
            with self._in_memory(number):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()

    @contextmanager
    def _in_memory(self, number: int) -> Iterator[None]:
        """Has what the optimizer updates and keeps of a group in memory; swaps it out again if it was."""
        swapped = self._stage == 3 and self._zero._swappable_optimizer_subgroup(number)
        if swapped:
            self._zero._optimizer_states_and_gradient_swap_in(number)
        yield
        if swapped:
            self._zero._optimizer_states_and_gradient_swap_out(number)

    # -- where ZeRO keeps it
    def _trained_parts(self) -> Iterator[tuple[Any, Part, _Place]]:
        """Contiguous ranges of the flattened parameters, as views of what the optimizer updates."""
        zero = self._zero
        if self._stage < 3:
            for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
                for parameter in parameters:
                    start, first, count = 0, 0, 0
                    if held := parameter._hp_mapping:
                        start, first = held.lp_fragment_address.start, held.hp_fragment_address.start
                        count = held.hp_fragment_address.numel
                    yield parameter, *_part(tuple(parameter.shape), start, count, flat, flat.detach(), first)
            return
        assert self._files is not None
        for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            held = self._files.optimizers(flat, flat)
            for parameter in parameters:
                _, first, _ = zero.grad_position[zero.get_param_id(parameter)]
                yield parameter, *_part(tuple(parameter.ds_shape), *_range(parameter), flat, held, first)

    def _frozen_parts(self) -> Iterator[tuple[Any, Part]]:
        """Yields the parts of weights that are not trained, and under stage 3 cut up all the same."""
        parameter: Any
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                continue
            if self._stage < 3:
                yield parameter, Part.whole(parameter.detach(), replica=dist.get_rank(), replicas=dist.get_world_size())
                continue
            start, count = _range(parameter)
            held = self._used(parameter)[:count]
            yield parameter, Part(held, tuple(parameter.ds_shape), Range(start, start + count))

    def elements(self, name: str, region: Region) -> Tensor:
        """As forward passes use them: below stage 3 every rank has all of them."""
        parameter: Any = self._model.get_parameter(name)
        if self._stage < 3:
            return Part.whole(parameter.detach()).elements(region)
        start, count = _range(parameter)
        part = Part(self._used(parameter)[:count], tuple(parameter.ds_shape), Range(start, start + count))
        return part.elements(region)

    def _flats(self) -> dict[Tensor, list[str]]:
        """The parameters in each tensor that the optimizer updates."""
        flats: dict[Tensor, list[str]] = {}
        for name, place in self._places.items():
            flats.setdefault(place.flat, []).append(name)
        return flats

    # -- to disk
    def capture(self, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
        """Captures this rank's part of the model and of the optimizer."""
        if not self._compared:
            self._compare_used()
            self._compared = True
        tensors, aliases = named_state.tensors(self._model)
        held = self._parts | self._frozen
        model = {name: held.get(name, tensor.detach()) for name, tensor in tensors.items()}
        state = {name: self._entry(name, optimizer) for name in self._parts}
        return CanonicalState(model, {name: entry for name, entry in state.items() if entry}, aliases)

    def _entry(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of a parameter."""
        part, place = self._parts[name], self._places[name]
        entry: dict[str, Any] = {}
        for key, value in (optimizer.state.get(place.flat) or {}).items():
            if isinstance(value, Tensor) and value.ndim:
                held = self._files.optimizers(place.flat, value) if self._files else value
                if held.shape != (place.numel,) or key in self._per_parameter:
                    raise CheckpointError(
                        f"the optimizer keeps `{key}` in the shape {list(held.shape)} for a flat piece of "
                        f"{place.numel} elements, and it cannot be told what of it belongs to which parameter"
                    )
                value = part.of(held[place.inside])
            entry[key] = value
        return entry

    def compare(self) -> None:
        """Checks the parts against the weights of the forward pass, and a few against what DeepSpeed says they are.

        DeepSpeed's own reading communicates, is too slow for the rest, and not always right: with
        `round_robin_gradients` 0.19.8 takes one parameter for another.
        """
        self._compare_used()
        parameters = dict(self._model.named_parameters())
        names = list(self._parts)
        say = import_module("deepspeed.utils").safe_get_full_fp32_param
        for name in dict.fromkeys((names[0], names[len(names) // 2], names[-1])):  # in one order on every rank
            self._same(name, self._of_whole(name, say(parameters[name])))

    def _compare_used(self) -> None:
        """Checks the parts against the weights of the forward pass, without communication."""
        parameter: Any
        for name, parameter in self._model.named_parameters():
            if name in self._parts:
                used = self._used(parameter) if self._stage == 3 else self._of_whole(name, parameter.detach())
                self._same(name, used[: self._parts[name].tensor.numel()])

    def _used(self, parameter: Any) -> Tensor:
        """Under stage 3: this rank's part of what forward passes gather."""
        assert self._files is not None
        return self._files.parameters(parameter)

    def _of_whole(self, name: str, whole: Tensor) -> Tensor:
        region = self._parts[name].region
        assert isinstance(region, Range)
        return whole.reshape(-1)[region.start : region.stop]

    def _same(self, name: str, weights: Tensor) -> None:
        held = self._parts[name].tensor
        if not torch.equal(weights.to(held.device), held):
            raise StrategyError(
                f"what DeepSpeed holds of `{name}` on rank {dist.get_rank()} is not where ddpforge looks for it",
                hints=[f"ddpforge is tested with deepspeed{TESTED}; please report the version that you use"],
            )

    # -- and back
    def restore(self, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Reads this rank's parts; the optimizer keeps the recipe's hyper-parameters.

        Where `partial`, what the state lacks stays as it is.
        """
        tensors, _ = named_state.tensors(self._model)
        named_state.match(set(tensors), set(state.model) - set(state.aliases), partial=partial)
        whole = {name: Part.whole(tensor.detach()) for name, tensor in tensors.items()}
        held = {name: part for name, part in (whole | self._parts | self._frozen).items() if name in state.model}
        for name, part in held.items():
            named_state.match_form(name, part.shape, part.tensor.dtype, state.model[name])
        read_all((state.model[name], part.region, part.tensor) for name, part in held.items())
        self.changed()
        if state.optimizer or not partial:
            self._restore_optimizer(optimizer, state.optimizer)

    def _restore_optimizer(self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
        unknown = sorted(set(state) - set(self._parts))
        if unknown:
            raise CheckpointError(f"the checkpoint holds optimizer state of `{unknown[0]}`, which is not trained here")
        groups = self._flats()
        entries = {flat: self._numbers(names, state) for flat, names in groups.items()}
        for flat, names in groups.items():
            if flat.numel():
                entries[flat] |= self._elements(flat, names, state)
        with self._flats_in(optimizer):
            flats = [flat for group in optimizer.param_groups for flat in group["params"]]
            packed = optimizer.state_dict()
            packed["state"] = {number: entries[flat] for number, flat in enumerate(flats) if entries[flat]}
            optimizer.load_state_dict(packed)
        if self._stage == 3 and self._zero.swap_optimizer:
            self._restore_swapped(optimizer, groups, state)
        self._zero._hp_optimizer_states_linked = False  # DeepSpeed's own view of the state: made again at the next step

    def _restore_swapped(
        self, optimizer: Optimizer, groups: Mapping[Tensor, list[str]], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Makes the state of what is swapped out, one group at a time."""
        self._zero.optimizer_swapper.purge_state()
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            if not flat.numel():
                with self._in_memory(number):
                    if elements := self._elements(flat, groups[flat], state):
                        optimizer.state[flat].update(elements)

    def _numbers(self, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The optimizer's numbers of these parameters, which must be the same for all."""
        first = names[0]
        found: dict[str, Any] = {}
        for name in names:
            saved = state.get(name, {})
            if saved.keys() != state.get(first, {}).keys():
                raise CheckpointError(
                    f"the checkpoint holds {_listed(saved)} of the optimizer for `{name}` and "
                    f"{_listed(state.get(first, {}))} for `{first}`, and ZeRO updates both in one",
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
                        "and ZeRO keeps one for both",
                        hints=['resume with strategy.use = "ddp", "single" or "fsdp"'],
                    )
        return found

    def _elements(
        self, flat: Tensor, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """The optimizer's state for each element of a flat tensor, put together from that of its parameters."""
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
        """The flat tensors in the optimizer's groups, which under stage 3 are there only while it steps."""
        if self._stage < 3:
            yield
            return
        self._zero._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._zero._clear_fp32_optimizer_param_groups()


class BesideWeights(Weights):
    """The weights of a module that is not trained and that stage 3 has cut up, none of which stays gathered."""

    def __init__(self, engine: Any, module: nn.Module) -> None:
        self._engine = engine
        self._frozen = {name: _held(parameter) for name, parameter in module.named_parameters()}

    def parts(self) -> Mapping[str, Part]:
        """Nothing is trained."""
        return {}

    def frozen(self) -> Mapping[str, Part]:
        """This rank's ranges of all parameters."""
        return self._frozen

    def changed(self) -> None:
        """Gives back what is gathered, so that forward passes gather it again."""
        self._engine.optimizer.partition_all_parameters()


def _held(parameter: Any) -> Part:
    """Under stage 3: this rank's part of a parameter that is in memory."""
    start, count = _range(parameter)
    return Part(parameter.ds_tensor.detach()[:count], tuple(parameter.ds_shape), Range(start, start + count))


def _part(
    shape: tuple[int, ...], start: int, count: int, flat: Tensor, held: Tensor, first: int
) -> tuple[Part, _Place]:
    """`count` elements from `start` on of a parameter, which are those from `first` on of what is held of `flat`."""
    inside = slice(first, first + count)
    return Part(held[inside], shape, Range(start, start + count)), _Place(flat, held.numel(), inside)


def _range(parameter: Any) -> tuple[int, int]:
    """Under stage 3: where this rank's part begins in the parameter, and how many elements it has without padding."""
    start = min(dist.get_rank() * parameter.partition_numel(), parameter.ds_numel)
    return start, min(parameter.partition_numel(), parameter.ds_numel - start)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) or "nothing"
