"""Reads DeepSpeed's native checkpoints, ZeRO stages 0 to 3: fp32 master weights and optimizer state in flat partitions.

A partition contains no names. The positions of parameters in it follow from their order and shapes in the files, and
the lengths must match. Stages 1 and 2 also save the weights of the forward pass. The master weights must round to
exactly these values; otherwise the checkpoint is refused. DeepSpeed's own `zero_to_fp32.py` checks only lengths, and
skips the optimizer state.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpforge.interfaces import CheckpointFormat, ForeignState
from ddpforge.interfaces.regions import FlatRange, TensorShard
from ddpforge.interop.foreign.foreign_state import (
    Held,
    inside,
    listed,
    load,
    regular,
    rejected,
    untrusted,
)

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_RECIPES = ("lr_scheduler", "data_sampler", "random_ltd")
_UNSUPPORTED = ("autoep_layers", "ds_autoep_layers", "universal_checkpoint_info")


class DeepSpeedZeRO(CheckpointFormat):
    """Folder of DeepSpeed's `save_checkpoint`."""

    def matches(self, path: Path) -> bool:
        """See `is_native`."""
        return is_native(path)

    def read(self, path: Path, *, trust: bool) -> ForeignState:
        """See `read`."""
        return read(path, trust=trust)


def is_native(folder: Path) -> bool:
    """True for a folder of DeepSpeed's `save_checkpoint`, or one of the folders in it."""
    if any(_MODEL.fullmatch(path.name) for path in folder.glob("*_model_states.pt")):
        return True
    return (folder / LATEST).is_file() and any(folder.glob("*/*_model_states.pt"))


def read(folder: Path, *, trust: bool) -> ForeignState:
    """Reads the trained weights in float32, the other weights and buffers, and the optimizer state.

    Large tensors stay on disk, mapped into memory. Raises UsageError if the files are not valid, and without `trust`,
    because they are pickles.
    """
    if not trust:
        raise untrusted(folder, "a checkpoint of DeepSpeed")
    tagged = _tagged(folder)
    try:
        return _Checkpoint(_Files(tagged)).found()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise rejected(tagged, f"its files are not in DeepSpeed's format ({type(error).__name__}: {error})") from error


def _tagged(folder: Path) -> Path:
    """Returns the folder with the files: `folder`, or the folder in it that `latest` names."""
    if not (folder / LATEST).exists():
        return folder
    try:
        tag = regular(folder / LATEST).read_text(encoding="utf-8").strip()
    except ValueError as error:
        raise rejected(folder / LATEST, "it is not text") from error
    if tag in ("", ".", "..") or Path(tag).name != tag or "\0" in tag:
        raise rejected(folder / LATEST, f"it names {tag!r}, which is not the name of a folder next to it")
    if (folder / tag).is_symlink() or not (folder / tag).is_dir():
        raise rejected(folder / LATEST, f"it names {tag}, but there is no such folder next to it")
    return folder / tag


class _Files:
    """Files of all ranks, in the order of the ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name for path in folder.iterdir())
        odd = [name for name in names if re.match(r"(expert_|layer_|.*mp_rank_(?!00))", name)]
        if odd:
            raise rejected(folder, f"its model is split over several processes or experts: {listed(odd)}")
        self.models = self._load(names, _MODEL)
        self.optimizers = self._load(names, _OPTIMIZER)

    def _load(self, names: Sequence[str], pattern: re.Pattern[str]) -> list[dict[str, Any]]:
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        found = {int(match[1] or 0): match[0] for match in matches}
        if len(found) < len(matches):
            raise rejected(self.folder, "it contains files of several checkpoints: two are of the same rank")
        if missing := sorted(set(range(len(found))) - found.keys()):
            raise rejected(self.folder, f"the file of rank {missing[0]} is missing")
        loaded = [load(inside(self.folder, found[rank]), trust=True) for rank in sorted(found)]
        if not all(isinstance(each, dict) for each in loaded):
            raise rejected(self.folder, "its files are not in DeepSpeed's format")
        return loaded


class _Slice(NamedTuple):
    """Elements of a parameter, and their place in a rank's flat partition of a parameter group."""

    rank: int
    group: int
    start: int
    region: FlatRange


class _Checkpoint:
    """Checkpoint that is assembled step by step; any contradiction between its files is refused."""

    def __init__(self, files: _Files) -> None:
        self.folder, self.models = files.folder, files.models
        self.head = files.models[0]
        self.optimizers = [self._get(each, "optimizer_state_dict") for each in files.optimizers]
        self.stage = int(self.optimizers[0].get("zero_stage", 0)) if self.optimizers else 0
        self.ranks = len(self.optimizers)
        self.left_out: list[str] = []
        self._check_kind()

    def found(self) -> ForeignState:
        module = {name: x for name, x in self._get(self.head, "module").items() if isinstance(x, Tensor)}
        aliases = dict(self.head.get("shared_params") or {})
        model: dict[str, Held] = {}
        optimizer: dict[str, dict[str, Any]] = {}
        if self.stage:
            shapes = {name: shape for group in self.groups for name, shape in group.items()}
            slices = self._slices_of_line() if self.stage < 3 else self._slices_of_each()
            model = {name: self._parts(shapes[name], mine, self.flats) for name, mine in slices.items()}
            if self.stage < 3:
                self._check_against(module, model)
            optimizer = self._optimizer(shapes, slices)
            module = self._whole_in(module, model, aliases)
        else:
            self.left_out.append("optimizer: without ZeRO its state is by number, not by name")
        model |= {name: tensor.detach() for name, tensor in module.items() if name not in aliases}
        if self.stage == 3:
            model |= self._frozen()
        if unknown := sorted(set(aliases.values()) - model.keys()):
            raise rejected(self.folder, f"tied parameters refer to {listed(unknown)}, which it does not contain")
        self.left_out += [f"{key}: a recipe sets this" for key in _RECIPES if self.head.get(key)]
        return ForeignState(
            kind=f"DeepSpeed ZeRO-{self.stage}" if self.stage else "DeepSpeed",
            model=model,
            optimizer=optimizer,
            aliases=aliases,
            step=_whole_number(self.head.get("global_steps")),
            samples=_whole_number(self.head.get("global_samples")),
            left_out=self.left_out,
        )

    # -- contents
    def _get(self, table: Mapping[str, Any], key: str) -> Any:
        if not isinstance(table, Mapping) or not isinstance(value := table.get(key), Mapping | list | tuple):
            raise rejected(self.folder, f"its files have no {key}: they are incomplete, or of another DeepSpeed")
        return value

    def _check_kind(self) -> None:
        for table in (*self.models, *self.optimizers):
            if odd := [key for key in _UNSUPPORTED if table.get(key)]:
                raise rejected(self.folder, f"it has {odd[0]}: parallelism that is not supported")
            if table.get("ds_zero_partition_groups"):
                raise rejected(self.folder, "its parameters are partitioned over several groups of ranks")
        if self.head.get("mp_world_size", 1) != 1:
            raise rejected(self.folder, "its model is split over several ranks (tensor parallelism)")
        if self.stage not in (0, 1, 2, 3):
            raise rejected(self.folder, f"its ZeRO stage is {self.stage}, not 0 to 3")
        for each in self.optimizers:
            counts = each.get("partition_count", self.ranks)
            counts = counts if isinstance(counts, list | tuple) else [counts]
            if int(each.get("zero_stage", 0)) != self.stage or any(count != self.ranks for count in counts):
                raise rejected(
                    self.folder,
                    f"it has files of {self.ranks} ranks, but in them the number of ranks is "
                    f"{listed(list(map(str, counts)))}",
                )
        if self.stage == 3 and len(self.models) != self.ranks:
            raise rejected(self.folder, f"it has {len(self.models)} files of weights and {self.ranks} of the optimizer")

    @cached_property
    def groups(self) -> list[dict[str, tuple[int, ...]]]:
        """Returns the shapes of the trained parameters by name: for each group, in its order."""
        groups = [
            {name: tuple(shape) for name, shape in group.items()} for group in self._get(self.head, "param_shapes")
        ]
        names = [name for group in groups for name in group]
        if len(set(names)) != len(names):
            raise rejected(self.folder, "a parameter is in two groups")
        return groups

    @cached_property
    def flats(self) -> list[list[Tensor]]:
        """Returns the partitions of the master weights, by rank and group."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        ranks = [list(self._get(each, key)) for each in self.optimizers]
        if any(not _is_flat(flat) for flats in ranks for flat in flats):
            raise rejected(self.folder, "its master weights are not flat partitions")
        if any(len(flats) != len(self.groups) for flats in ranks):
            raise rejected(self.folder, "its numbers of partitions and of parameter groups differ")
        return [[flat.detach() for flat in flats] for flats in ranks]

    # -- positions of parameters
    def _slices_of_line(self) -> dict[str, list[_Slice]]:
        """Returns the slices under stages 1 and 2: a group's parameters form a line, cut into one piece per rank.

        There may be gaps between parameters, and padding after the last one, up to the end of its rank's piece.
        """
        # DeepSpeed's `param_slice_mappings` gives slices by name, but wrong ones for round-robin gradients.
        found: dict[str, list[_Slice]] = {}
        gaps = self.optimizers[0].get("param_alignment_paddings") or [[0] * len(group) for group in self.groups]
        for number, (group, behind) in enumerate(zip(self.groups, gaps, strict=True)):
            ends = list(accumulate(len(flats[number]) for flats in self.flats))
            begin = 0
            for (name, shape), gap in zip(group.items(), behind, strict=True):
                found[name] = [
                    _Slice(
                        rank,
                        number,
                        max(begin, end - length) - (end - length),
                        FlatRange(max(end - length - begin, 0), min(end - begin, prod(shape))),
                    )
                    for rank, end in enumerate(ends)
                    if begin < end and begin + prod(shape) > end - (length := len(self.flats[rank][number]))
                ]
                begin += prod(shape) + int(gap)
            if not 0 <= ends[-1] - begin <= 2 * self.ranks * max(1, *map(int, behind)):
                raise rejected(self.folder, f"group {number} has {begin} elements, and its partitions have {ends[-1]}")
        return found

    def _slices_of_each(self) -> dict[str, list[_Slice]]:
        """Returns the slices under stage 3: a rank's piece is an equal part of every parameter, padded at the end."""
        found: dict[str, list[_Slice]] = {name: [] for group in self.groups for name in group}
        for group, named in enumerate(self.groups):
            start = 0
            for name, shape in named.items():
                size = -(-prod(shape) // self.ranks)
                for rank in range(self.ranks):
                    region = FlatRange(*(min(edge * size, prod(shape)) for edge in (rank, rank + 1)))
                    found[name].append(_Slice(rank, group, start, region))
                start += size
            lengths = {len(flats[group]) for flats in self.flats}
            if lengths != {start}:
                raise rejected(self.folder, f"its partitions of group {group} have {lengths} elements, not {start}")
        return found

    def _parts(
        self, shape: tuple[int, ...], slices: Sequence[_Slice], flats: Sequence[Sequence[Any]]
    ) -> list[TensorShard]:
        return [
            TensorShard(flats[each.rank][each.group][each.start : each.start + each.region.numel], shape, each.region)
            for each in slices
            if each.region.numel or not prod(shape)
        ]

    # -- checks
    def _check_against(self, module: Mapping[str, Tensor], model: Mapping[str, Held]) -> None:
        """Raises UsageError unless each element of the master weights rounds to its weight in the forward pass."""
        for name, parts in model.items():
            if name not in module:
                raise rejected(self.folder, f"it has no weights of the forward pass for {name}")
            line = module[name].detach().reshape(-1)
            for part in parts:
                assert isinstance(part, TensorShard)
                assert isinstance(part.region, FlatRange)
                theirs = line[part.region.start : part.region.stop]
                mine = part.tensor.to(theirs.dtype)
                if module[name].shape != part.shape or not bool(
                    ((mine == theirs) | (mine.isnan() & theirs.isnan())).all()
                ):
                    raise rejected(
                        self.folder,
                        f"the master weights of {name} do not round to the weights of the forward pass, so the "
                        "positions of parameters are uncertain",
                    )

    def _whole_in(
        self, module: Mapping[str, Tensor], model: Mapping[str, Held], aliases: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Returns the whole tensors in the file of weights: frozen weights and buffers; in stage 3 only buffers."""
        rest = {name: tensor for name, tensor in module.items() if name not in model and name not in aliases}
        if self.stage < 3:
            return rest
        names = set(self.head.get("buffer_names") or ())
        return {name: tensor for name, tensor in rest.items() if name in names}

    def _frozen(self) -> dict[str, Held]:
        """Returns the frozen weights under stage 3, which are sharded like the trained ones."""
        shapes = self.head.get("frozen_param_shapes") or {}
        found: dict[str, Held] = {}
        for name, size in shapes.items():
            shape = tuple(size)
            fragments = [self._get(each, "frozen_param_fragments")[name] for each in self.models]
            each = -(-prod(shape) // self.ranks)
            if any(fragment.numel() != each for fragment in fragments):
                raise rejected(self.folder, f"the parts of {name} have a wrong length")
            edges = [min(rank * each, prod(shape)) for rank in range(self.ranks + 1)]
            regions = [FlatRange(a, b) for a, b in pairwise(edges)]
            lines = (fragment.detach().reshape(-1) for fragment in fragments)
            pairs = zip(lines, regions, strict=True)
            parts = [TensorShard(line[: region.numel], shape, region) for line, region in pairs if region.numel]
            found[name] = parts or torch.empty(shape, dtype=fragments[0].dtype)
        return found

    # -- optimizer
    def _optimizer(
        self, shapes: Mapping[str, tuple[int, ...]], slices: Mapping[str, Sequence[_Slice]]
    ) -> dict[str, dict[str, Any]]:
        """Returns the optimizer state by parameter; empty if its layout differs from that of the master weights."""
        states = [self._states(each) for each in self.optimizers]
        paddings = [self._paddings(each) for each in self.optimizers]
        problem = self._odd_state(states, paddings)
        if problem:
            self.left_out.append(f"optimizer: {problem}")
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name, mine in slices.items():
            state = states[0][mine[0].group]
            found[name] = {
                key: self._parts(shapes[name], mine, [[group.get(key) for group in rank] for rank in states])
                if _is_flat(value)
                else value
                for key, value in state.items()
            }
        return {name: values for name, values in found.items() if values}

    def _states(self, optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns a rank's state of each group; empty if its groups differ from those of the weights."""
        inner = optimizer.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(inner, Mapping) or not {"state", "param_groups"} <= inner.keys():
            return []
        numbers = [(number, group) for group in inner["param_groups"] for number in group["params"]]
        if [number for number, _ in numbers] != list(range(len(self.groups))):
            return []
        # Some optimizers keep the step in the parameter group.
        steps = [{"step": group["step"]} if "step" in group else {} for _, group in numbers]
        return [
            {**(inner["state"].get(number) or {}), **(steps[number] if inner["state"].get(number) else {})}
            for number, _ in numbers
        ]

    def _paddings(self, optimizer: Mapping[str, Any]) -> list[int]:
        """Returns the padding of each group: a rank's state may exceed its saved master weights by this length."""
        paddings = optimizer.get("group_paddings")
        if self.stage == 3 or not isinstance(paddings, list):
            return [0] * len(self.groups)
        return [int(padding) for padding in paddings]

    def _odd_state(self, states: Sequence[Sequence[Mapping[str, Any]]], paddings: Sequence[Sequence[int]]) -> str:
        """Returns the reason why the optimizer state cannot be split by parameter; empty if it can."""
        if not all(states):
            return "its state is missing, or its groups differ from those of the weights"
        for rank, groups in enumerate(states):
            for number, state in enumerate(groups):
                if state.keys() != states[0][number].keys():
                    return "the keys of its state differ between ranks"
                for key, value in state.items():
                    if _is_flat(value):
                        length = len(self.flats[rank][number])
                        if len(value) not in (length, length + paddings[rank][number]):
                            return f"the layout of {key} differs from that of the weights"
                    elif _number(value) is None or _number(value) != _number(states[0][number][key]):
                        return f"{key} is not a number, or differs between ranks"
        return ""


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.ndim == 0 else None
    return value if isinstance(value, bool | int | float) else None


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
