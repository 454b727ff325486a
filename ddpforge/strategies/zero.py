"""All that touches DeepSpeed's private parts: how its engine starts, and the weights and optimizer state it spreads.

ZeRO flattens the parameters of each group into one tensor, gives every rank a piece of it, and lets the optimizer
update that piece. So a rank holds a contiguous range of the elements of some parameters, and the optimizer's state
is kept by flat tensor, not by parameter.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError, StrategyError
from ddpforge.interfaces import CanonicalState, Weights, World
from ddpforge.strategies import replicated

__all__ = ["TESTED", "ZeroWeights", "import_deepspeed", "keys_per_parameter", "require_deepspeed", "start"]

TESTED = SpecifierSet(">=0.19.8,<0.20")  # the versions whose private parts are what this module takes them for
_INSTALL = "pip install 'ddpforge[deepspeed]'"


# ---------------------------------------------------------------------------------------------- the library
def require_deepspeed() -> None:
    """Raises StrategyError unless a version is installed that this module is tested with; imports nothing."""
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise StrategyError(
            'strategy.use = "deepspeed" needs DeepSpeed, which is not installed', hints=[_INSTALL]
        ) from None
    if not TESTED.contains(found, prereleases=True):
        raise StrategyError(
            f"DeepSpeed {found} is installed, and ddpforge is tested with deepspeed{TESTED}: it reads weights and "
            "optimizer state where DeepSpeed keeps them, and that changes between versions",
            hints=[_INSTALL],
        )


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, for ranks on `device`, with what it has to say on stderr."""
    said = os.environ.setdefault("DS_ACCELERATOR", device.type)
    if said != device.type:
        raise StrategyError(
            f"DS_ACCELERATOR={said} in the environment, and this run is on {device.type}",
            hints=["unset DS_ACCELERATOR"],
        )
    deepspeed = import_module("deepspeed")
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


def start(deepspeed: Any, model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], world: World) -> Any:
    """A DeepSpeed engine around `model`, in the process group that there is.

    Under stage 3 the model may come on the CPU: a parameter goes to the device when it is its turn to be cut up, so
    the model need not fit into one device.
    """
    try:
        deepspeed.DeepSpeedConfig(dict(config))
    except Exception as error:
        raise StrategyError(f"DeepSpeed refuses its configuration: {error}") from error

    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # stage 3 reads it at every pass, launcher or not
    with _sharing_ourselves():
        deepspeed.init_distributed(dist_init_required=False)
        if config["zero_optimization"]["stage"] == 3:
            deepspeed.zero.Init(module=model, config_dict_or_path=dict(config), dtype=torch.float32)
        else:
            _share(model.parameters(), world.device)
        _share(model.buffers(), world.device)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    return engine


@contextmanager
def _sharing_ourselves() -> Iterator[None]:
    """DeepSpeed 0.19.8 fails when it broadcasts a 0-d parameter, and does not broadcast buffers."""
    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    init = import_module("deepspeed.runtime.zero.partition_parameters").Init

    def partition(self: Any, parameter: Any) -> None:
        self._convert_to_deepspeed_param(parameter)
        _share([parameter], self.local_device)
        parameter.partition()

    theirs = engine._broadcast_model, init._zero_init_param
    engine._broadcast_model, init._zero_init_param = lambda self: None, partition
    try:
        yield
    finally:
        engine._broadcast_model, init._zero_init_param = theirs


def _share(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Moves tensors to the device and gives every rank rank 0's values."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
        dist.broadcast(tensor.data.view(-1).view(torch.uint8), src=0)


# ---------------------------------------------------------------------------------------------- the optimizer
def keys_per_parameter(optimizer: Optimizer, device: torch.device) -> set[str]:
    """Which of its state `optimizer` keeps once per parameter (`step`), not once per element (`exp_avg`).

    Finds out by using it. Raises StrategyError for an optimizer that does not treat each element by itself (Adafactor,
    Muon, LAMB): under ZeRO it sees flat pieces of many parameters, and would train another curve.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        raise StrategyError(
            "DeepSpeed replaces Adagrad by one of its own, without the recipe's parameter groups",
            hints=['set strategy.use = "ddp" or "fsdp", or use another optimizer'],
        )
    keys: set[str] = set()
    for group in optimizer.param_groups:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(6, 4, generator=generator).to(device) for _ in range(4)]
        whole, state = _tried(optimizer, group, [[value] for value in values])
        pieces, _ = _tried(optimizer, group, [torch.split(value.flatten(), 7) for value in values])
        if (whole - pieces).abs().max() > 1e-3 * (whole - values[0].flatten()).abs().max():
            raise StrategyError(
                f"{type(optimizer).__name__} does not update each element of a parameter by itself, and under ZeRO it "
                "would see flat pieces of many parameters: it would train another curve than elsewhere",
                hints=['set strategy.use = "ddp" or "fsdp", or use AdamW, SGD or another element-wise optimizer'],
            )
        keys |= {key for key, value in state.items() if getattr(value, "shape", ()) != values[0].shape}
    return keys


def _tried(
    optimizer: Optimizer, group: Mapping[str, Any], values: Iterable[Iterable[Tensor]]
) -> tuple[Tensor, dict[str, Any]]:
    """The weights after some steps from the first of `values` with the others as gradients; the first one's state."""
    weights, *gradients = [list(pieces) for pieces in values]
    weights = [weight.clone().requires_grad_() for weight in weights]
    double: Optimizer = object.__new__(type(optimizer))
    double.__dict__ = vars(optimizer) | {
        "state": defaultdict(dict),
        "param_groups": [{**group, "params": weights, "lr": 0.1}],
    }
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        try:
            double.step()
        except Exception as error:
            raise StrategyError(
                f"{type(optimizer).__name__} cannot be used under ZeRO, where it would see flat pieces of many "
                f"parameters: {error}",
                hints=['set strategy.use = "ddp" or "fsdp", or use AdamW, SGD or another element-wise optimizer'],
            ) from error
    return torch.cat([weight.detach().flatten() for weight in weights]), double.state[weights[0]]


# ---------------------------------------------------------------------------------------------- weights and state
@dataclass(frozen=True)
class _Piece:
    """What this rank holds of a parameter: `part`, whose first element is number `start` of the whole one's."""

    shape: tuple[int, ...]
    part: Tensor  # 1-d and live, possibly empty
    start: int
    flat: Tensor | None = None  # the tensor that the optimizer updates, of which the part is one
    first: int = 0  # where it begins in there

    @property
    def range(self) -> slice:
        """Where the part lies in the whole parameter, flattened."""
        return slice(self.start, self.start + self.part.numel())

    @property
    def inside(self) -> slice:
        """Where the part lies in the flat tensor."""
        return slice(self.first, self.first + self.part.numel())


class ZeroWeights(Weights):
    """The fp32 weights that a ZeRO optimizer updates, and what goes from and to checkpoints."""

    def __init__(self, engine: Any, model: nn.Module, device: torch.device, per_parameter: set[str]) -> None:
        super().__init__(model)
        self._zero, self._device, self._per_parameter = engine.optimizer, device, per_parameter
        self._stage: int = engine.zero_optimization_stage()
        self._compared = False

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names[id(p)]: piece for p, piece in self._trained_pieces()}
        self._pieces = {name: found[name] for name in names.values() if name in found}
        self._frozen = {names[id(p)]: piece for p, piece in self._frozen_pieces(model)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As DeepSpeed remembers them."""
        return {name: piece.shape for name, piece in self._pieces.items()}

    def parts(self) -> dict[str, Tensor]:
        """Contiguous ranges of the flattened weights, and views of what the optimizer updates."""
        return {name: piece.part for name, piece in self._pieces.items()}

    @torch.no_grad()
    def changed(self) -> None:
        """Copies the parts to where forward passes take weights from, and gathers those that are kept whole."""
        zero = self._zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        # What a step does after the update, beginning with what it does before: nothing old may stay gathered.
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0's CPU, one after the other."""
        gathered = ((name, self._whole(self._pieces[name], part)) for name, part in parts.items())
        return {name: whole for name, whole in gathered if whole is not None}

    def split(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the devices of this rank's parts."""
        pieces = ((name, tensor, self._pieces[name]) for name, tensor in whole.items())
        return {name: tensor.reshape(-1)[piece.range].to(piece.part.device) for name, tensor, piece in pieces}

    def _whole(self, piece: _Piece, part: Tensor) -> Tensor | None:
        """A parameter, or something of its shape, on rank 0's CPU."""
        whole = torch.zeros(piece.shape, dtype=part.dtype, device=self._device)
        whole.view(-1)[piece.range] = part.to(self._device)
        # Bytes are summed, not numbers: everything but one is zero, and so not even the sign of a zero gets lost.
        dist.reduce(whole.view(-1).view(torch.uint8), dst=0)
        return whole.cpu() if dist.get_rank() == 0 else None

    # -- where ZeRO keeps it
    def _trained_pieces(self) -> Iterator[tuple[Any, _Piece]]:
        zero = self._zero
        if self._stage < 3:
            for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
                for parameter in parameters:
                    start, first, count = 0, 0, 0
                    if held := parameter._hp_mapping:
                        start, first = held.lp_fragment_address.start, held.hp_fragment_address.start
                        count = held.hp_fragment_address.numel
                    part = flat.detach()[first : first + count]
                    yield parameter, _Piece(tuple(parameter.shape), part, start, flat, first)
            return
        for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            for parameter in parameters:
                _, first, _ = zero.grad_position[zero.get_param_id(parameter)]
                start, count = _range(parameter)
                part = flat.detach()[first : first + count]
                yield parameter, _Piece(tuple(parameter.ds_shape), part, start, flat, first)

    def _frozen_pieces(self, model: nn.Module) -> Iterator[tuple[Any, _Piece]]:
        parameter: Any
        for parameter in model.parameters():
            if hasattr(parameter, "ds_tensor") and not parameter.requires_grad:
                start, count = _range(parameter)
                yield parameter, _Piece(tuple(parameter.ds_shape), parameter.ds_tensor.detach()[:count], start)

    def _flats(self) -> dict[Tensor, dict[str, _Piece]]:
        """The parameters in each tensor that the optimizer updates."""
        flats: dict[Tensor, dict[str, _Piece]] = {}
        for name, piece in self._pieces.items():
            assert piece.flat is not None
            flats.setdefault(piece.flat, {})[name] = piece
        return flats

    # -- to disk
    def capture(self, optimizer: Optimizer) -> CanonicalState:
        """Model and optimizer by parameter name, whole, on rank 0; nothing but aliases elsewhere."""
        if not self._compared:
            self.compare()
            self._compared = True
        tensors, aliases = replicated.tensors(self._model)
        held = self._pieces | self._frozen
        model: dict[str, Tensor | None] = {
            name: self._whole(held[name], held[name].part) if name in held else tensor.detach().cpu()
            for name, tensor in tensors.items()
        }
        state: dict[str, dict[str, Any]] = {}
        for flat, pieces in self._flats().items():
            entry = optimizer.state.get(flat) or {}
            for name, piece in pieces.items():
                for key, value in entry.items():
                    state.setdefault(name, {})[key] = self._of_parameter(key, value, piece)
        if dist.get_rank() != 0:
            return CanonicalState({}, {}, aliases)
        return CanonicalState(
            {name: whole for name, whole in model.items() if whole is not None},
            {name: state[name] for name in self._pieces if name in state},
            aliases,
        )

    def _of_parameter(self, key: str, value: Any, piece: _Piece) -> Any:
        assert piece.flat is not None
        if isinstance(value, Tensor) and value.shape == piece.flat.shape and key not in self._per_parameter:
            return self._whole(piece, value[piece.inside])
        if isinstance(value, Tensor) and value.ndim:
            raise CheckpointError(
                f"the optimizer keeps `{key}` in the shape {list(value.shape)} for a flat piece of "
                f"{piece.flat.numel()} elements, and it cannot be told what of it belongs to which parameter"
            )
        return value.detach().clone() if isinstance(value, Tensor) else value

    def compare(self) -> None:
        """Checks the parts against the weights of the forward pass, and a few against what DeepSpeed says they are.

        DeepSpeed's own reading is too slow for the rest, and not always right: with `round_robin_gradients` 0.19.8
        takes one parameter for another.
        """
        parameter: Any
        for name, parameter in self._model.named_parameters():
            if (piece := self._pieces.get(name)) is not None:
                used = parameter.ds_tensor if self._stage == 3 else parameter.detach().reshape(-1)[piece.range]
                self._same(name, used.detach()[: piece.part.numel()])
        parameters = dict(self._model.named_parameters())
        names = list(self._pieces)
        say = import_module("deepspeed.utils").safe_get_full_fp32_param
        for name in dict.fromkeys((names[0], names[len(names) // 2], names[-1])):  # in one order on every rank
            self._same(name, say(parameters[name]).reshape(-1)[self._pieces[name].range])

    def _same(self, name: str, weights: Tensor) -> None:
        part = self._pieces[name].part
        if not torch.equal(weights.to(part.device), part):
            raise StrategyError(
                f"what DeepSpeed holds of `{name}` on rank {dist.get_rank()} is not where ddpforge looks for it",
                hints=[f"ddpforge is tested with deepspeed{TESTED}; please report the version that you use"],
            )

    # -- and back
    @torch.no_grad()
    def restore(self, optimizer: Optimizer, state: CanonicalState) -> None:
        """Takes this rank's parts of a whole state; the optimizer keeps the recipe's hyper-parameters."""
        tensors, _ = replicated.tensors(self._model)
        replicated.match(set(tensors), set(state.model) - set(state.aliases))
        held = self._pieces | self._frozen
        for name, tensor in tensors.items():
            piece = held.get(name)
            shape, target = (piece.shape, piece.part) if piece else (tuple(tensor.shape), tensor)
            saved = state.model[name]
            replicated.match_form(name, shape, target.dtype, saved)
            target.copy_(saved.reshape(-1)[piece.range] if piece else saved)
        self.changed()
        self._restore_optimizer(optimizer, state.optimizer)

    def _restore_optimizer(self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
        unknown = sorted(set(state) - set(self._pieces))
        if unknown:
            raise CheckpointError(f"the checkpoint holds optimizer state of `{unknown[0]}`, which is not trained here")
        entries = {flat: self._of_flat(flat, pieces, state) for flat, pieces in self._flats().items()}
        with self._flats_in(optimizer):
            flats = [flat for group in optimizer.param_groups for flat in group["params"]]
            packed = optimizer.state_dict()
            packed["state"] = {number: entries[flat] for number, flat in enumerate(flats) if entries[flat]}
            optimizer.load_state_dict(packed)
        self._zero._hp_optimizer_states_linked = False  # DeepSpeed's own view of the state: made anew at the next step

    def _of_flat(
        self, flat: Tensor, pieces: Mapping[str, _Piece], state: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The optimizer's entry for a flat tensor, made of those of its parameters."""
        first = next(iter(pieces))
        entry: dict[str, Any] = {}
        for name, piece in pieces.items():
            saved = state.get(name, {})
            if saved.keys() != state.get(first, {}).keys():
                raise CheckpointError(
                    f"the checkpoint holds {_listed(saved)} of the optimizer for `{name}` and "
                    f"{_listed(state.get(first, {}))} for `{first}`, and ZeRO updates both in one",
                    hints=['resume with strategy.use = "ddp", "single" or "fsdp"'],
                )
            for key, value in saved.items():
                if isinstance(value, Tensor) and key not in self._per_parameter:
                    replicated.match_form(f"{key} of {name}", piece.shape, value.dtype, value)
                    target = entry.setdefault(key, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
                    target[piece.inside] = value.reshape(-1)[piece.range].to(flat.device)
                elif entry.setdefault(key, value) != value:
                    here, there = (torch.as_tensor(number).item() for number in (value, entry[key]))
                    raise CheckpointError(
                        f"the checkpoint's optimizer has `{key}` {here:g} for `{name}` and {there:g} for `{first}`, "
                        "and ZeRO keeps one for both",
                        hints=['resume with strategy.use = "ddp", "single" or "fsdp"'],
                    )
        return entry

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


def _range(parameter: Any) -> tuple[int, int]:
    """Under stage 3: where this rank's part begins in the parameter, and how many elements it has without padding."""
    start = min(dist.get_rank() * parameter.partition_numel(), parameter.ds_numel)
    return start, min(parameter.partition_numel(), parameter.ds_numel - start)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) or "nothing"
