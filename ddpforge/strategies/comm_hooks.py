"""Communication hooks for DDP: one that postpones the all-reduce, and PowerSGD with state for checkpoints."""

# DDP inspects the annotations of a hook, which must not be strings: no `from __future__ import annotations` here.

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from ddpforge.errors import StrategyError
from ddpforge.interfaces import FlatRange, Ranks, TensorShard

__all__ = ["DeferredAllReduce", "PowerSGD"]

log = logging.getLogger("ddpforge")

_STEP, _ERROR, _FACTOR = "powersgd.step", "powersgd.error", "powersgd.q"
_Memory = tuple[Tensor, Tensor | None]  # a parameter's error (flat), and its factor Q if it is compressed


class DeferredAllReduce:
    """Communication hook that leaves gradients local while `held` is True, and otherwise reduces them with `hook`."""

    # It replaces `no_sync` for static graphs: DDP learns the graph in the first step of a process and cannot skip the
    # reducer in later steps.

    def __init__(self, hook: Callable[..., Future[Tensor]]) -> None:
        self._hook, self.held = hook, False

    def reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Reduces a bucket, or leaves it as it is; DDP calls this for each bucket of a backward pass."""
        if not self.held:
            return self._hook(None, bucket)
        gradients = bucket.buffer()
        done: Future[Tensor] = torch.futures.Future(devices=None if gradients.is_cpu else [gradients.device])
        done.set_result(gradients)
        return done


class PowerSGD:
    """torch's PowerSGD hook, with its memory kept by parameter instead of by bucket.

    The memory has two parts: the error of each rank (the part of its gradients that compression dropped), and the
    factor Q with which the next step starts. The index of a parameter seeds its first Q. See Vogels et al., "PowerSGD"
    (NeurIPS 2019), algorithms 1 and 2.
    """

    # DDP rebuilds its buckets in the second step of a process, so buckets after a resume differ from the checkpoint's.

    def __init__(self, rank: int, start: int, ranks: Ranks) -> None:
        self._rank, self._start, self._ranks = rank, start, ranks
        self._begin_with({}, step=0)

    def _begin_with(self, kept: dict[str, _Memory], *, step: int) -> None:
        # Without the epsilon, gradients of zeros, or of lower rank than the approximation, lead to a division by zero.
        self._state = PowerSGDState(None, self._rank, self._start, orthogonalization_epsilon=1e-8)
        self._state.iter = step
        self._kept = kept  # by parameter name: memory that is in no bucket yet
        self._buckets: dict[int, list[nn.Parameter]] = {}
        self._first: dict[int, Tensor] = {}  # initial factors, by bucket
        self._compressed = 0  # compressed steps since then

    def look_at(self, model: nn.Module) -> None:
        """Records the trained parameters of `model`; raises StrategyError if one is a scalar."""
        named = model.named_parameters()
        self._trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._names = {id(parameter): name for name, parameter in self._trained.items()}
        for name, parameter in self._trained.items():
            if not parameter.ndim:
                raise StrategyError(
                    f"parameter `{name}` is a scalar, and PowerSGD compresses matrices",
                    hints=["give it the shape [1]", 'or set strategy.compression = "none"'],
                )

    def reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Reduces a bucket; DDP calls this for each bucket of a backward pass."""
        state = self._state
        if state.iter >= state.start_powerSGD_iter:
            if bucket.index() == 0:  # no other bucket is being reduced
                if self._compressed == 1:
                    self._kept = self._memory()
                    self._buckets.clear()
                self._compressed += 1
            if bucket.index() not in self._buckets:
                self._fill(bucket)
            self._forget_nonfinite(bucket.index())
        reduced: Future[Tensor] = powerSGD_hook(state, bucket)
        if bucket.buffer().is_cpu:
            # The hook starts some all-reduces when others end. gloo uses several threads: two ranks could start those
            # of two buckets in different orders, and gloo would mix them up.
            reduced.wait()
        return reduced

    def _forget_nonfinite(self, index: int) -> None:
        """Resets the non-finite memory of a bucket: errors to zero, factors to their initial values."""
        # The step of a non-finite gradient is skipped; its memory must not spoil later steps.
        self._state.error_dict[index].nan_to_num_(0.0, 0.0, 0.0)
        factors = self._state.q_memory_dict[index]
        self._state.q_memory_dict[index] = torch.where(factors.isfinite().all(), factors, self._first[index])

    # -- memory by bucket and by parameter
    def _fill(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Moves the memory of the bucket's parameters into the state of torch's hook."""
        parameters = bucket.parameters()
        self._buckets[bucket.index()] = parameters
        held = {id(p): self._take(p) for p in parameters}
        factors = [held[id(p)][1] for p in self._compressible(parameters)]
        self._state.error_dict[bucket.index()] = torch.cat([held[id(p)][0].view(-1) for p in parameters])
        fresh = [self._fresh(p)[1] for p in self._compressible(parameters)]
        self._first[bucket.index()] = torch.cat([bucket.buffer()[:0], *(q for q in fresh if q is not None)])
        known = [factor for factor in factors if factor is not None]
        self._state.q_memory_dict[bucket.index()] = torch.cat([bucket.buffer()[:0], *known])
        size = sum(len(p) * self._rank_of(p) for p in self._compressible(parameters))
        self._state.p_memory_dict[bucket.index()] = bucket.buffer().new_empty(size)  # overwritten in every step

    def _take(self, parameter: nn.Parameter) -> _Memory:
        name = self._names[id(parameter)]
        return self._kept.pop(name) if name in self._kept else self._fresh(parameter)

    def _fresh(self, parameter: nn.Parameter) -> _Memory:
        error = torch.zeros_like(parameter, requires_grad=False).view(-1)
        if not (size := self._size_of_factor(parameter)):
            return error, None
        number = list(self._trained).index(self._names[id(parameter)])
        generator = torch.Generator().manual_seed(number)
        return error, torch.randn(size, generator=generator).to(error)

    def _memory(self) -> dict[str, _Memory]:
        """Copies the memory out of the buckets, by parameter name."""
        found = dict(self._kept)
        for index, parameters in self._buckets.items():
            errors = torch.split(self._state.error_dict[index], [p.numel() for p in parameters])
            compressible = self._compressible(parameters)
            sizes = [self._size_of_factor(p) for p in compressible]
            split = torch.split(self._state.q_memory_dict[index], sizes)
            factors = dict(zip(map(id, compressible), split, strict=True))
            for parameter, error in zip(parameters, errors, strict=True):
                factor = factors.get(id(parameter))
                found[self._names[id(parameter)]] = error.clone(), None if factor is None else factor.clone()
        return found

    # -- the order within a bucket of torch's hook
    def _compressible(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the compressed parameters in the order of the hook's memory: grouped by shape."""
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            if self._size_of_factor(parameter):
                by_shape.setdefault(_as_matrix(parameter), []).append(parameter)
        return [parameter for alike in by_shape.values() for parameter in alike]

    def _rank_of(self, parameter: nn.Parameter) -> int:
        return min(*_as_matrix(parameter), self._rank)

    def _size_of_factor(self, parameter: nn.Parameter) -> int:
        """Returns the number of elements of Q; 0 if the parameter is not compressed."""
        rows, columns = _as_matrix(parameter)
        rank = self._rank_of(parameter)
        worth_it = (rows + columns) * rank * self._state.min_compression_rate < rows * columns  # torch's condition
        return columns * rank if worth_it else 0

    # -- to disk and back
    def capture(self) -> dict[str, Tensor | TensorShard | int]:
        """Returns the state for a resume: this rank's errors, and the factors, which are equal on all ranks."""
        rank, ranks = self._ranks.rank, self._ranks.size
        found: dict[str, Tensor | TensorShard | int] = {_STEP: self._state.iter}
        for name, (error, factor) in self._memory().items():
            n = error.numel()
            found[_key(_ERROR, name)] = TensorShard(error, (ranks, n), FlatRange(rank * n, (rank + 1) * n))
            if factor is not None:
                found[_key(_FACTOR, name)] = factor
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the state from `capture`; with another number of ranks, each starts with the mean of the errors."""
        if _STEP not in saved:
            self._begin_with({}, step=0)
            self._warn("the checkpoint has no PowerSGD memory: compression starts from scratch")
            return
        ranks = {value.shape[0] for name, value in saved.items() if name.startswith(_ERROR)} - {self._ranks.size}
        if ranks:
            self._warn(f"the checkpoint has the errors of {min(ranks)} ranks: each rank starts with their mean")
        kept = {}
        for name, parameter in self._trained.items():
            error, factor = saved.get(_key(_ERROR, name)), saved.get(_key(_FACTOR, name))
            if error is not None and error.shape[1:] == (parameter.numel(),):
                fits = factor is not None and factor.shape == (self._size_of_factor(parameter),)
                begun = factor.read().to(parameter.device) if factor is not None and fits else self._fresh(parameter)[1]
                kept[name] = self._error(error, parameter), begun
        self._begin_with(kept, step=int(saved[_STEP]))

    def _error(self, saved: Any, parameter: nn.Parameter) -> Tensor:
        ranks, n = saved.shape
        if ranks != self._ranks.size:
            whole: Tensor = saved.read()
            return whole.mean(0).to(parameter.device)
        mine = torch.empty(n, dtype=saved.dtype, device=parameter.device)
        saved.read_into(FlatRange(self._ranks.rank * n, (self._ranks.rank + 1) * n), mine)
        return mine

    def _warn(self, what: str) -> None:
        if self._ranks.is_rank_zero:
            log.warning("powersgd: %s", what)


def _key(kind: str, name: str) -> str:
    return f"{kind}.{name}".replace("/", "|")  # a slash would end the owner's name in a key


def _as_matrix(parameter: nn.Parameter) -> tuple[int, int]:
    return len(parameter), parameter.numel() // len(parameter)
