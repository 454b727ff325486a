"""Cuts a model's layers according to its plan, and communicates activations into and out of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ddpforge.errors import StrategyError, UsageError
from ddpforge.interfaces import device_kind
from ddpforge.ranks.collectives import CollectiveRanks
from ddpforge.strategies.tensor.activation_collectives import ActivationCollectives
from ddpforge.strategies.tensor.sharding_plan import ShardingPlan
from ddpforge.strategies.tensor.split_spec import SplitSpec

__all__ = ["TensorParallel", "TensorParallelGradients", "TensorParallelRNG", "check_divisible"]

_SEQUENCE = 1  # the dimension of activations [B, T, …] that is cut along the sequence


def check_divisible(positions: int, ranks: int) -> None:
    """Raises UsageError if a sequence of `positions` positions cannot be cut into `ranks` equal parts."""
    if positions % ranks:
        raise UsageError(
            f"strategy.sequence_parallel needs {ranks} equal parts, but a sequence has {positions} positions",
            hints=["pad sequences to a multiple of that number", "or set strategy.sequence_parallel = false"],
        )


class TensorParallel:
    """Share of a model that one of `ranks` holds and computes; its weights are plain tensors of the share's size.

    Args:
        sequence: Cuts activations between layers along the sequence, starting at the module with the style "scatter".
        logits: If given (a mesh of the ranks), logits stay cut along the vocabulary: a DTensor, for which torch's
            `loss_parallel` computes a cross-entropy.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        ranks: CollectiveRanks,
        device: torch.device,
        *,
        sequence: bool,
        logits: DeviceMesh | None,
    ) -> None:
        self.plan, self.ranks = plan, ranks
        self.cuts: Mapping[str, SplitSpec] = {name: cut.of(ranks.rank) for name, cut in plan.cuts.items()}
        self.moves, self.random = ActivationCollectives(ranks), TensorParallelRNG(ranks.rank, device)
        self._sequence, self._logits = sequence, logits
        self._done: set[str] = set()
        self.summed: Collection[str] = ()  # parameters whose gradients are summed over ranks

    # -- weights
    def cut(self, model: nn.Module, module: nn.Module) -> None:
        """Cuts the parameters of `module`, a part of the model, according to the plan; each parameter only once."""
        inside = {id(parameter) for parameter in module.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) in inside and name in self.cuts and name not in self._done:
                parameter.data = self.cuts[name].take(parameter.data)
                self._done.add(name)

    def _summed(self, model: nn.Module) -> set[str]:
        """Returns the names of whole parameters with partial gradients, which must be summed over ranks."""
        found = set()
        for owner, style in self.plan.styles.items():
            shares = style.word == "replicated_with_grad_allreduce" or (
                self._sequence and style.word in ("sequence_parallel", "gather")
            )
            if shares:
                found |= {f"{owner}.{key}" for key, _ in model.get_submodule(owner).named_parameters()}
            if (
                self._sequence
                and style.word == "rowwise"
                and getattr(model.get_submodule(owner), "bias", None) is not None
            ):
                found.add(f"{owner}.bias")
        return found

    # -- for a rank with only some of the model's layers
    def splits_behind(self, modules: Iterable[str]) -> bool:
        """True if activations are split over ranks after the modules of these names, in the order of their use."""
        opens, closes = (
            ({"scatter"}, {"gather", "colwise_gather_output"}) if self._sequence else ({"colwise"}, {"rowwise"})
        )
        split = False
        for name in modules:
            if style := self.plan.styles.get(name):
                split = style.word in opens or (split and style.word not in closes)
        return split

    def begin(self, *, split: bool) -> None:
        """Prepares the RNG for the first of this rank's layers: its own numbers if activations are already `split`."""
        self.random.forget()
        if split:
            self.random.begin()

    # -- activations
    def attach(self, model: nn.Module) -> None:
        """Changes the modules of `model` so that they compute their shares."""
        self.summed = self._summed(model)
        for name, style in self.plan.styles.items():
            module = model.get_submodule(name)
            if style.word == "colwise":
                if not self._sequence:
                    around = model.get_submodule(name.rpartition(".")[0])
                    around.register_forward_pre_hook(self._outside)
                module.register_forward_pre_hook(self._enter)
            elif style.word == "rowwise":
                module.forward = partial(self._rows, module)
            elif style.word == "embedding_rowwise":
                module.forward = partial(self._embed, module, self._cut_of(name))
            elif style.word == "colwise_gather_output":
                self._attach_logits(module, self._vocabulary(model, name))
            elif self._sequence and style.word == "scatter":
                module.register_forward_pre_hook(self._scatter)
            elif self._sequence and style.word == "gather":
                module.register_forward_hook(self._gather)

    def _outside(self, module: nn.Module, args: Any) -> None:
        self.random.forget()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if not self._sequence and module.training:
            self.random.begin()
        return (self.moves.enter_cut(x, _SEQUENCE) if self._sequence else self.moves.enter(x), *rest)

    def _rows(self, module: Any, x: Tensor) -> Tensor:
        """Computes a linear layer with some columns of the weight; sums results over ranks and adds the bias once."""
        summand = F.linear(x, module.weight)
        if self._sequence:
            out = self.moves.leave_cut(summand, _SEQUENCE)
        else:
            out = self.moves.leave(summand)
            self.random.end()
        return out if module.bias is None else out + module.bias.to(out.dtype)

    def _embed(self, module: Any, cut: SplitSpec, tokens: Tensor) -> Tensor:
        """Computes embeddings: each rank looks up the tokens that it holds, zeros for others; sums over ranks."""
        ((start, stop),) = cut.spans()
        here = (tokens >= start) & (tokens < stop)
        padding = module.padding_idx
        mine = padding - start if padding is not None and start <= padding < stop else None
        if stop == start:
            return self.moves.leave(module.weight.new_zeros(*tokens.shape, cut.shape[1]) + 0 * module.weight.sum())
        found = F.embedding(torch.where(here, tokens - start, 0), module.weight, mine)
        return self.moves.leave(found * here.unsqueeze(-1))

    def _scatter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        check_divisible(x.shape[_SEQUENCE], self.ranks.size)
        if module.training:
            self.random.begin()
        return (self.moves.cut(x, _SEQUENCE), *rest)

    def _gather(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.random.end()
        return self.moves.join(out, _SEQUENCE, out.shape[_SEQUENCE] * self.ranks.size)

    # -- the output layer
    def _attach_logits(self, module: nn.Module, vocabulary: int) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *rest = args
            if self._sequence:
                self.random.end()
            return (self.moves.enter_cut(x, _SEQUENCE) if self._sequence else self.moves.enter(x), *rest)

        def leave(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            if self._logits is None:
                return self.moves.join(out, -1, vocabulary)
            shape = torch.Size((*out.shape[:-1], vocabulary))
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                out.contiguous(), self._logits, [Shard(out.ndim - 1)], run_check=False, shape=shape, stride=stride
            )

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _cut_of(self, owner: str) -> SplitSpec:
        name = f"{owner}.weight"
        return self.cuts[self.plan.aliases.get(name, name)]

    def _vocabulary(self, model: nn.Module, owner: str) -> int:
        """Returns the number of logits; a layer without weights uses those of the only embedding that is cut."""
        source = (
            owner
            if any(True for _ in model.get_submodule(owner).parameters())
            else self.plan.owned("embedding_rowwise")[0]
        )
        return self._cut_of(source).shape[0]


# ---------------------------------------------------------------------------------------------- gradients
_TOLERANCE = 1e-3  # relative; sums in another order differ by less, a missing summand causes more


class TensorParallelGradients:
    """Sums and measures gradients under tensor parallelism; methods receive them by parameter name, as plain tensors.

    Args:
        ranks: The ranks that share layers.
        cut: Parameters that are split over ranks.
        summed: Parameters with partial gradients, to be summed over `ranks`; others have whole gradients on every rank.
    """

    def __init__(self, ranks: CollectiveRanks, *, cut: Collection[str], summed: Collection[str]) -> None:
        self._ranks, self._cut, self._summed = ranks, cut, summed
        self._compared: set[str] = set()

    @torch.no_grad()
    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Sums gradients over ranks in place; raises StrategyError if the first gradients of others differ by rank."""
        if mine := [gradient for name, gradient in gradients.items() if name in self._summed]:
            total = self._ranks.all_reduce_sum(torch.cat([gradient.flatten() for gradient in mine]))
            for gradient, summed in zip(mine, torch.split(total, [g.numel() for g in mine]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        new = {name: gradient for name, gradient in gradients.items() if name not in self._compared}
        if new:  # in the first step, or in the first update that trains them
            self._compared |= new.keys()
            self._reject_unlike({name: gradient for name, gradient in new.items() if name not in self._cut})

    def square(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Returns the square of the norm over ranks; gradients that are equal on all ranks count once."""
        shares = [gradient for name, gradient in gradients.items() if name in self._cut]
        others = [gradient for name, gradient in gradients.items() if name not in self._cut]
        mine = _square(shares) + _square(others) / self._ranks.size
        return self._ranks.all_reduce_sum(mine)

    def _reject_unlike(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients:
            return
        norms = torch.stack([gradient.double().norm() for gradient in gradients.values()])
        sums = torch.stack([gradient.double().sum() for gradient in gradients.values()])
        of_ranks = self._ranks.all_gather_equal(torch.stack([norms, sums])[None])
        spread = (of_ranks.amax(0) - of_ranks.amin(0)).tolist()
        sizes = [gradient.numel() ** 0.5 for gradient in gradients.values()]
        for name, size, norm, *differences in zip(gradients, sizes, norms.tolist(), *spread, strict=True):
            if any(found > _TOLERANCE * norm * times for found, times in zip(differences, (1.0, size), strict=True)):
                raise StrategyError(
                    f"parameter `{name}` is whole on every rank, but the ranks that share layers have different "
                    "gradients of it: each rank used it for a share only",
                    hints=[
                        'give its module the style "replicated_with_grad_allreduce" in the plan, or '
                        '"sequence_parallel" if the sequence is split there',
                        'look in the plan for "colwise" without "rowwise" after it, and the reverse',
                    ],
                )


def _square(gradients: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(gradients).square()


# ---------------------------------------------------------------------------------------------- random numbers
_GOLDEN = 0x9E3779B97F4A7C15  # spreads ranks' seeds


class TensorParallelRNG:
    """RNG of this rank between `begin` and `end`; outside, the RNG that all ranks have in common."""

    # The common RNG seeds the rank's own RNG, so a recomputed block draws the same numbers again.

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device, self._kind = rank, device, device_kind(device)
        self._outside: tuple[torch.Tensor, torch.Tensor] | None = None  # states of the RNGs of host and device

    def forget(self) -> None:
        """Forgets an open `begin` without `end`."""
        # A recomputation ends in the middle of a block.
        self._outside = None

    def begin(self) -> None:
        """Switches to this rank's RNG, unless it is active."""
        if self._outside is not None:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._outside = torch.default_generator.get_state(), self._kind.rng_state(self._device)
        mine = (seed + (self._rank + 1) * _GOLDEN) % 2**63
        torch.default_generator.manual_seed(mine)
        self._kind.seed(mine, self._device)

    def end(self) -> None:
        """Restores the common RNG, if this rank's is active."""
        if self._outside is None:
            return
        host, device = self._outside
        torch.default_generator.set_state(host)
        self._kind.set_rng_state(device, self._device)
        self._outside = None
