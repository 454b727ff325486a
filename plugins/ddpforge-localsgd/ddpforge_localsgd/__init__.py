"""Local SGD: every rank trains on its own, and the ranks average their weights every so many steps.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019), https://arxiv.org/abs/1805.09767. With
`outer_lr` and `outer_momentum` the averaged change is a gradient for an outer optimizer: Douillard et al., "DiLoCo"
(2023), https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from ddpforge.errors import CheckpointError, StrategyError
from ddpforge.interfaces import CanonicalState, Contract, Part, Refusal, SavedTensor, Strategy, Weights, World
from ddpforge.strategies.devices import Agreement, choose_device
from ddpforge.strategies.precision import precision_for
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["LocalSGD"]

ddpforge_plugin_api = 1

T = TypeVar("T")

_OUTER = "outer_momentum"  # beside the keys of the recipe's optimizer
_BUCKET = 2**24  # elements that are averaged at once
_LAUNCHED = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # what launchers say, and where there is none


class LocalSGD(Strategy):
    """Every rank trains its own copy; every `period` steps the copies become one again.

    Then, with w the weights that the ranks last had in common and d = w - mean of theirs: v = outer_momentum * v + d,
    and w becomes w - outer_lr * v (with `nesterov`: d + outer_momentum * v for v). The defaults are plain averaging.

    An evaluation and a checkpoint bring the ranks together too, whenever they come, and the period begins anew. What
    the recipe's optimizer keeps of each rank is then averaged as well; between them it stays each rank's own.
    """

    contract = Contract(
        averages="weights",
        clips="every rank its own gradient, before its own update",
        accumulates="autograd, in the parameters' .grad",
    )

    def __init__(
        self,
        *,
        period: Annotated[int, Field(ge=1, le=1_000_000, description="Steps between two averagings.")] = 16,
        outer_lr: Annotated[
            float, Field(gt=0, le=10, description="How far to go from the last common weights to the mean.")
        ] = 1.0,
        outer_momentum: Annotated[
            float, Field(ge=0, lt=1, description="How much of the last outer step is repeated; DiLoCo: 0.9.")
        ] = 0.0,
        nesterov: Annotated[bool, Field(description="Nesterov's outer momentum, as in DiLoCo.")] = False,
    ) -> None:
        if nesterov and not outer_momentum:
            raise ValueError("nesterov needs outer_momentum")
        self.period, self.outer_lr, self.outer_momentum, self.nesterov = period, outer_lr, outer_momentum, nesterov

    # -- before the loop
    def refusals(self, train: TrainSection, ranks: int, device: str) -> Iterator[Refusal]:
        """Settings with which ranks would have to talk at every step."""
        if train.precision == "fp16":
            yield Refusal(
                "train.precision",
                "fp16 needs one loss scale for all ranks, and under localsgd they have no gradients in common",
                ('set train.precision = "bf16"',),
            )
        if train.sync_batchnorm:
            yield Refusal(
                "train.sync_batchnorm",
                "train.sync_batchnorm makes ranks wait for each other in every layer, which localsgd is there to avoid",
                ("leave train.sync_batchnorm out",),
            )

    def setup(self, train: TrainSection) -> World:
        """Joins the gloo (CPU) or NCCL (CUDA) group that the launcher's variables describe."""
        for refusal in self.refusals(train, int(os.environ.get("WORLD_SIZE", "1")), self.device_type(train)):
            raise StrategyError(refusal.message, hints=refusal.hints)
        rank, size, local = (int(os.environ.get(name, fallback)) for name, fallback in _LAUNCHED)
        device = choose_device(self.device_type(train), asked=train.device != "auto")
        self._agreement = Agreement(device, timedelta(seconds=train.timeout.seconds))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=train.timeout.seconds))
            if (dist.get_rank(), dist.get_world_size()) != (rank, size):
                raise StrategyError(
                    f"the launcher announced rank {rank} of {size}, and this became rank {dist.get_rank()} of "
                    f"{dist.get_world_size()}"
                )
        self.train = train
        self._precision = precision_for(train.precision, device)
        self.world = World(rank=rank, size=size, local_rank=local, device=device, data_rank=rank, data_size=size)
        return self.world

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """The model on the device."""
        return model.to(self.world.device)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Gives every rank rank 0's weights and buffers, and remembers the weights as those in common."""
        self._model, self._optimizer = model, optimizer
        for tensor in (*model.parameters(), *model.buffers()):
            self._from_rank_0(tensor.detach())
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._common = {name: p.detach().clone() for name, p in self._trained.items()}
        self._momentum = {name: torch.zeros_like(p) for name, p in self._common.items()} if self.outer_momentum else {}
        self._since = 0  # steps since the ranks had the same weights
        self._apart = False  # whether anything else differs
        if self.train.compile != "off" and not self.train.compile_blocks:
            model.compile(mode=self.train.compile)
        return model, optimizer

    # -- one step
    def forward(self) -> AbstractContextManager[Any]:
        """Autocast for bf16."""
        return self._precision.forward()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`; nothing is exchanged.

        The trainer's factor stays: on average over ranks these are the gradients of the global batch's mean. A rank
        with more tokens than others takes larger steps, as each of its tokens weighs what any other does.
        """
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """Clips and updates on this rank alone; every `period` steps brings the ranks together.

        The norm is the root of the mean over ranks of the squared norms, for which one number is exchanged. If it is
        not finite, no rank updates.
        """
        weights = list(self._trained.values())
        own = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        self._refuse_unused()
        if self.train.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(weights, self.train.clip_norm, own)

        square = own.detach().float().square()
        self._sum([square])
        norm = (square / self.world.all.size).sqrt()
        self._precision.update(optimizer, norm)
        for weight in weights:
            weight.grad = None
        self._since, self._apart = self._since + 1, True
        if self._since == self.period:
            self._come_together()
        return norm

    def _refuse_unused(self) -> None:
        """All ranks must have the same state of the optimizer to average."""
        unused = [name for name, weight in self._trained.items() if weight.grad is None]
        if unused:
            raise StrategyError(
                f"parameter `{unused[0]}` got no gradient on rank {self.world.all.rank}: forward did not use it",
                hints=["remove it from the model, or set requires_grad = False"],
            )

    @torch.no_grad()
    def _come_together(self) -> None:
        """One outer step. All ranks compute it, from the same numbers."""
        if not self._since:
            return
        weights = {name: weight.detach() for name, weight in self._trained.items()}
        self._average(weights.values())
        for name, mean in weights.items():
            common = self._common[name]
            if not self.outer_momentum:
                common.lerp_(mean, self.outer_lr)  # with 1 the mean exactly
            else:
                change = common - mean
                momentum = self._momentum[name].mul_(self.outer_momentum).add_(change)
                step = change.add_(momentum, alpha=self.outer_momentum) if self.nesterov else momentum
                common.sub_(step, alpha=self.outer_lr)
            mean.copy_(common)
        self._since = 0

    # -- agreement
    def total(self, values: Tensor) -> Tensor:
        """`values` summed over ranks."""
        values = values.to(self.world.device, non_blocking=True, copy=True)
        self._sum([values])
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`."""
        box = [value]
        if self.world.all.size > 1:
            dist.broadcast_object_list(box, src=0, device=self.world.device)
        return box[0]

    def sync_buffers(self, model: nn.Module) -> None:
        """Makes everything equal on all ranks, which the trainer asks for before evaluations and checkpoints."""
        self._come_together()
        if not self._apart:
            return
        averaged = list(_running_statistics(self._model))
        ids = {id(buffer) for buffer in averaged}
        for buffer in self._model.buffers():
            if id(buffer) not in ids:
                self._from_rank_0(buffer)
        self._average([*averaged, *self._kept()])
        self._apart = False

    def _kept(self) -> Iterator[Tensor]:
        """What this rank's optimizer keeps, in the same order on every rank; counters are the same anyway."""
        for weight in self._trained.values():
            entry = self._optimizer.state.get(weight, {})
            for key in sorted(entry):
                value = entry[key]
                if isinstance(value, Tensor) and value.is_floating_point() and value.device == weight.device:
                    yield value

    def _sum(self, tensors: Iterable[Tensor]) -> None:
        if self.world.all.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def _from_rank_0(self, tensor: Tensor) -> None:
        if self.world.all.size > 1:
            dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Gives every rank the mean over ranks of each tensor."""
        if self.world.all.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            flat /= self.world.all.size
            for tensor, mean in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    # -- to disk and back
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return self._model

    def weights(self, model: nn.Module, optimizer: Optimizer) -> Weights:
        """The weights that the ranks have in common, which change when they come together."""
        return _Common(self._model, self._common, self._trained, self.world)

    def state(self, model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
        """What every rank holds alike once `sync_buffers` was called; the outer momentum is with the optimizer's."""
        if self._since or self._apart:
            raise StrategyError("the state was asked for while ranks hold different weights: call `sync_buffers` first")
        tensors, aliases = _named(self._model)
        kept: dict[str, dict[str, Any]] = {}
        for name, weight in self._trained.items():
            entry = dict(optimizer.state.get(weight, {}))
            # Zeros are what a run begins with, and an optimizer that expects no state may take any for its own.
            if self.outer_momentum and self._momentum[name].any():
                entry[_OUTER] = self._momentum[name]
            if entry:
                kept[name] = entry
        return CanonicalState({name: tensor.detach() for name, tensor in tensors.items()}, kept, aliases)

    def load_state(
        self, model: nn.Module, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False
    ) -> None:
        """Every rank reads everything, also what another strategy saved; the outer momentum is then zero."""
        tensors, _ = _named(self._model)
        _match(tensors, state, partial=partial)
        for name, tensor in tensors.items():
            if name in state.model:
                _read(state.model[name], tensor.detach())
        for name, common in self._common.items():
            common.copy_(self._trained[name].detach())
        self._since, self._apart = 0, False
        if partial and not state.optimizer:
            return

        if unknown := sorted(set(state.optimizer) - set(self._trained)):
            raise CheckpointError(f"the checkpoint holds optimizer state of `{unknown[0]}`, which is not trained here")
        names = {id(weight): name for name, weight in self._trained.items()}
        order = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
        packed = optimizer.state_dict()
        packed["state"] = {}
        for number, name in enumerate(order):
            entry: dict[str, Any] = dict(state.optimizer.get(name, {}))
            momentum = entry.pop(_OUTER, None)
            if self.outer_momentum:
                self._momentum[name].zero_()
                if momentum is not None:
                    _read(momentum, self._momentum[name])
            if entry:
                packed["state"][number] = {k: v.read() if hasattr(v, "read_into") else v for k, v in entry.items()}
        optimizer.load_state_dict(packed)

    def close(self) -> None:
        """Waits for all ranks, then leaves the process group."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


class _Common(Weights):
    """The weights that the ranks last had in common: the same on every rank at every step."""

    def __init__(
        self, model: nn.Module, common: Mapping[str, Tensor], used: Mapping[str, nn.Parameter], world: World
    ) -> None:
        super().__init__(model, world)
        self._common, self._used = common, used
        self._parts = {
            name: Part.whole(tensor, replica=world.all.rank, replicas=world.all.size) for name, tensor in common.items()
        }

    @torch.no_grad()
    def changed(self) -> None:
        """Lets every rank use them."""
        for name, tensor in self._common.items():
            self._used[name].copy_(tensor)


def _named(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers, each under its first name, and that name for each other one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"`{name}` in the model's state_dict is a {type(tensor).__name__}, not a tensor")
        if (known := first.get(id(tensor), name)) == name:
            tensors[name] = tensor
        else:
            aliases[name] = known
    return tensors, aliases


def _match(tensors: Mapping[str, Tensor], state: CanonicalState[SavedTensor], *, partial: bool) -> None:
    """Raises CheckpointError unless the checkpoint's tensors are those of the model."""
    found = set(state.model) - set(state.aliases)
    missing, unexpected = sorted(set(tensors) - found), sorted(found - set(tensors))
    if unexpected or (missing and not partial):
        facts = (("missing from the checkpoint", missing), ("not in the model", unexpected))
        told = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in facts if names)
        raise CheckpointError(f"the checkpoint is of another model ({told})")
    for name in found:
        here, saved = tensors[name], state.model[name]
        if (tuple(here.shape), here.dtype) != (tuple(saved.shape), saved.dtype):
            raise CheckpointError(
                f"`{name}` is {here.dtype} {list(here.shape)} in the model and {saved.dtype} {list(saved.shape)} in "
                "the checkpoint"
            )


def _read(saved: SavedTensor, target: Tensor) -> None:
    part = Part.whole(target)
    saved.read_into(part.region, part.tensor)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, in order, in lists of one dtype with at most `_BUCKET` elements, unless one alone has more."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = by_dtype.setdefault(tensor.dtype, [])
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            by_dtype[tensor.dtype] = bucket = []
        bucket.append(tensor)
    yield from by_dtype.values()


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    """BatchNorm's, which are linear in the batches: their mean over ranks is that of all data."""
    for module in model.modules():
        for name in ("running_mean", "running_var"):
            if isinstance(buffer := getattr(module, name, None), Tensor):
                yield buffer
