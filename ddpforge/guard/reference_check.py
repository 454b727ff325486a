"""Compares, before the first step, a model that ranks compute together with the whole model, as it was built."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ddpforge.compat import tree_leaves, tree_map_only
from ddpforge.components.errors import where_raised
from ddpforge.data import MicroBatch, mix, seed_all, to_device
from ddpforge.data.pytree import take
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import ForgeError, UsageError, says_memory_is_full
from ddpforge.guard.rounding import difference_norms, norm_of, ratio, relative
from ddpforge.guard.sum_reduction import compare_halves
from ddpforge.interfaces import Contract, Pass, Replica, SupportsMultiPass, Task, TensorShard, World, device_kind
from ddpforge.interfaces.regions import copy as copy_region
from ddpforge.interfaces.regions import whole as all_of
from ddpforge.ranks import heartbeat
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.failures import is_symptom
from ddpforge.strategies import named_state
from ddpforge.strategies.torch_replica import TorchReplica
from ddpforge.training.buffers import unchanged
from ddpforge.training.checks import FirstStepCheck
from ddpforge.training.contract import SMALL, contract_of
from ddpforge.training.stages import Built, Dealt

__all__ = ["CHECKS", "ReferenceCheck", "prepare_reference_check"]

log = logging.getLogger("ddpforge")

_FEW = 2  # samples
_SEED = 0x3B1E  # separates the seeds of these passes from those of training
_LOSS, _GRADIENT = 1e-4, 1e-3  # largest relative differences by rounding in float32
_ROUNDED = 5e-2  # the same if weights are gathered in lower precision
_NOISE = 10.0  # times the difference after a change of all weights by `_NUDGE`: a difference that rounding explains
_NUDGE = 1e-6
_CHAOS = 2e-3  # a model with a larger difference after such a change cannot be compared

_HINTS = {
    "layers": (
        "check the plan (strategy.plan, or the model's `tensor_plan`): a weight that stacks three others is "
        '"colwise:3"',
        'no operation that mixes channels (a norm, a softmax) may be between "colwise" and "rowwise"',
    ),
    "positions": (
        "the model must not mix positions (a convolution, a mean, a norm over them), except in modules that use their "
        "`context`; `by_position` is for a loss that is a sum over positions",
    ),
    "experts": ("modules must use their experts only by `self.experts.compute`",),
    "steps": (
        "the model's `pipeline` must name all steps of `forward`, in its order: put operations between modules into a "
        "method, and name the method as a step",
    ),
}


def compare_with_whole(dealt: Dealt, world: World) -> FirstStepCheck | None:
    """Returns the check of the first step of a strategy that cuts forward passes; see `prepare_reference_check`."""
    whole = prepare_reference_check(dealt, contract_of(dealt.strategy), world)
    return None if whole is None else lambda replica, task, module, first: whole.compare(replica, world, first)


def prepare_reference_check(parts: Built, contract: Contract, world: World) -> ReferenceCheck | None:
    """Copies model and task before a strategy that cuts forward passes shards the model; collective.

    Returns None if the strategy does not cut them. Returns None and logs the reason if no comparison is possible.
    """
    if not contract.splits_forward or not parts.trains:
        return None
    whole, why = None, _hindrance(parts)
    if not why:
        try:
            whole = ReferenceCheck(parts.model, parts.task, contract.splits_forward)
        except Exception as error:  # not every part can be copied
            why = f"a copy of the model and the task fails: {type(error).__name__}: {error}"
    if why := next(filter(None, world.global_ranks.all_gather_object(why)), ""):
        _leave_out(why)
        return None
    return whole


def _hindrance(parts: Built) -> str:
    """Returns the reason why a comparison with the whole model is not possible; empty if it is."""
    if any(parameter.is_meta for parameter in parts.model.parameters()):
        return "it is built without memory"
    if any(tensor.is_complex() for tensor in (*parts.model.parameters(), *parts.model.buffers())):
        return "it has complex weights"
    if parts.size.all > SMALL:
        return f"its {parts.size.all:,} parameters are too many for one rank; the limit is {SMALL:,}"
    if parts.recipe.train.compile != "off" or parts.recipe.train.fp8 != "off":
        return "train.compile and train.fp8 change the results of modules"
    hindrances = (
        (parts.updates, "the task has several updates"),
        (parts.auxiliary, "the task uses auxiliary modules"),
        (parts.task.whole_batch, "the task compares samples"),
    )
    return next((why for hinders, why in hindrances if hinders), "")


def _leave_out(why: str) -> None:
    log.info("the model on ranks together was not compared with the whole model: %s", why)


class _Found(NamedTuple):
    """Mean loss over the items of a batch, and the gradient of this loss with its norm."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]

    def distance(self, other: Mapping[str, Tensor]) -> float:
        """Returns the norm of the difference between two gradients, relative to the norm of this one."""
        return ratio(math.hypot(*difference_norms(other, self.gradients).values()), self.norm) if self.norm else 0.0


class ReferenceCheck:
    """Model and task as they were before a strategy sharded the model."""

    def __init__(self, model: nn.Module, task: Task, cuts: Sequence[str]) -> None:
        kept = {id(x): x for x in (*model.modules(), *model.parameters(), *model.buffers())}
        self._twin = copy.deepcopy(task, kept)  # for the sharded model; the run's own task may store its inputs
        self._model, self._task = copy.deepcopy((model, task))
        self._cuts, self._items = cuts, 1.0
        self._worst = 0.0, ""  # the square of the largest difference between gradients, and the parameter's name
        for one in (self._twin, self._task):
            one.__dict__.pop("log_media", None)

    def compare(self, replica: Replica, world: World, first: MicroBatch) -> None:
        """Raises UsageError if ranks compute another loss, or another gradient, than the whole model; collective.

        It uses a few samples of rank 0's `first` micro-batch, without dropout and in float32. It restores the model,
        its gradients, the RNG state and the task.
        """
        heartbeat.beat(heartbeat.FORWARD)
        with ExitStack() as stack:
            stack.enter_context(_random_numbers(world.device))
            stack.enter_context(unchanged(replica.unwrapped))
            stack.enter_context(_evaluating(replica.unwrapped))
            exact = not isinstance(replica, TorchReplica) or stack.enter_context(replica.exact())
            self._compare(replica, world, first, exact=exact)
        self._model.to("meta")
        device_kind(world.device).reset_peak_memory(world.device)  # the peak of a step must not include this

    def _compare(self, replica: Replica, world: World, first: MicroBatch, *, exact: bool) -> None:
        batch, why = self._prepared(replica, world, first)
        found = nudged = None
        if not why:
            self._copy_weights(replica, world)
            try:
                found, nudged = self._reference(batch)
            except Exception as error:  # some losses can be computed only in training
                why = f"its loss cannot be computed outside of training: {type(error).__name__}: {error}"
        if not why and found and nudged:
            why = _unfit(found, nudged)
        if why := next(filter(None, world.global_ranks.all_gather_object(why)), ""):
            _leave_out(why)
            return
        assert found is not None
        assert nudged is not None

        noise = max(_off(found.loss, nudged.loss), found.distance(nudged.gradients)) * _NOISE
        rounding = noise if exact else max(_ROUNDED, noise)
        # Ranks may round differently: all use the numbers of rank 0.
        rounding, expected = world.global_ranks.broadcast((rounding, (found.loss, found.norm)))
        try:
            loss, norm, distance = self._together(replica, world, batch, found)
        except Exception as error:
            self._reject_failed(replica, error)
            raise
        log.debug("together %g, %g and whole %s: off by %g, rounding %g", loss, norm, expected, distance, rounding)
        if _off(loss, expected[0]) > max(_LOSS, rounding) or not distance <= max(_GRADIENT, rounding):
            place = self._first_apart(replica, world, batch, max(_GRADIENT, rounding))
            worst = max(world.global_ranks.all_gather_object(self._worst))[1]
            self._reject(loss, norm, distance, expected, place, worst)

    # -- computing both
    def _prepared(self, replica: Replica, world: World, first: MicroBatch) -> tuple[Any, str]:
        """Returns a few samples of rank 0's micro-batch on all ranks, or the reason for none; starts the task."""
        why, batch = "", None
        if not isinstance(replica, SupportsMultiPass):
            why = f"{type(replica).__name__} cannot read gradients without an update"
        elif world.is_rank_zero:
            try:
                batch, samples = self._samples(first)
                counted = self._task.count(batch)
                self._items = float(samples if counted is None else counted)
                pickle.dumps(batch)  # raises here if it cannot be sent, and not while other ranks wait
                why = "" if self._items > 0 else "no target counts in the first micro-batch"
            except Exception as error:
                why = f"its first micro-batch cannot be given to all ranks: {type(error).__name__}: {error}"
        why, self._items, batch = world.global_ranks.broadcast((why, self._items, None if why else batch))
        if not why:
            self._device = world.device
            self._model.to(world.device).eval()
            self._twin.start(replica.unwrapped, world)
        return batch, why

    def _samples(self, first: MicroBatch) -> tuple[Any, int]:
        """Returns a micro-batch's first samples and their number; all if it cannot be cut, or these have no target."""
        try:
            few = min(_FEW, first.samples)
            batch = tree_map_only(
                Tensor, Tensor.clone, take(first.data, 0, few, first.samples)
            )  # sent without the other samples
            counted = self._task.count(batch)
            if counted is None or float(counted) > 0:
                return batch, few
        except ValueError:
            pass
        return first.data, first.samples

    @torch.no_grad()
    def _copy_weights(self, replica: Replica, world: World) -> None:
        """Gives the copy the values that ranks hold together, which may be initial weights from elsewhere."""
        held = replica.state().model
        for name, tensor in named_state.tensors(self._model)[0].items():
            value = torch.zeros(tensor.shape, dtype=_sums_as(tensor.dtype), device=world.device)
            part = held.get(name)
            if isinstance(part, TensorShard) and part.replica == 0:
                for one in part.as_boxes():
                    copy_region(one.shape, one.simple_region, _held(one), all_of(one.shape), value.view(-1))
            elif isinstance(part, Tensor) and world.is_rank_zero:
                value.copy_(part)
            tensor.copy_(world.global_ranks.all_reduce_sum(value) + 0)

    def _reference(self, batch: Any) -> tuple[_Found, _Found]:
        """Computes loss and gradient of the whole model, and again with slightly changed weights and another seed.

        The difference is the noise: the effect of rounding and of random numbers is no difference between models.
        """
        alone = SingleRank(self._device)
        self._task.start(self._model, World(global_ranks=alone, dp_ranks=alone, device=self._device, local_rank=0))
        found = self._of_whole(batch, seed=_SEED)
        before = [parameter.detach().clone() for parameter in self._model.parameters()]
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + _NUDGE * torch.randn_like(parameter))
        nudged = self._of_whole(batch, seed=_SEED + 1)
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), before, strict=True):
                parameter.copy_(value)
        return found, nudged

    def _of_whole(self, batch: Any, *, seed: int) -> _Found:
        seed_all(mix(seed), self._device)
        with unchanged(self._model):
            loss = self._task.loss(self._model, to_device(batch, self._device))[0] / self._items
            loss.backward()
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if missing := [name for name, p in trained.items() if p.grad is None]:
            raise ValueError(f"in evaluation mode it does not use `{missing[0]}`")
        gradients = {name: p.grad.detach() for name, p in trained.items() if p.grad is not None}
        self._model.zero_grad(set_to_none=True)
        return _Found(float(loss.detach()), norm_of(gradients.values()), gradients)

    def _together(self, replica: Replica, world: World, batch: Any, found: _Found) -> tuple[float, float, float]:
        """Computes on all ranks together; returns the loss, the norm of its gradient, and the gradient's difference.

        The difference is relative to the norm of the whole model's gradient.
        """
        losses = self._passes(replica, batch, trains=True)
        reading = _Reading(lambda: self._square_off(replica, found))
        assert isinstance(replica, SupportsMultiPass)
        norm = float(replica.perturb(reading))
        totals = torch.tensor([sum(losses), len(losses), reading.square], dtype=torch.float64)
        total, count, square = (world.global_ranks.all_reduce_sum(totals) + 0).tolist()
        off = math.sqrt(square) / found.norm if found.norm else math.sqrt(square)
        return total / max(count, 1), norm, off if math.isfinite(norm) else math.inf

    def _passes(self, replica: Replica, batch: Any, *, trains: bool) -> list[float]:
        """Runs a forward pass and, if it `trains`, a backward pass; returns the mean losses that this rank has."""
        own = replica.local_batch(to_device(batch, self._device))
        seed = partial(seed_all, mix(_SEED), self._device)
        one = Pass(batch=own, seed=seed, scale=lambda: 1 / self._items, needs_outputs=False)
        results = list(replica.run_microbatches([one], self._compute, trains=trains))
        return [float(result[0].detach()) / self._items for result in results if result is not None]

    def _compute(self, module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
        one.seed()
        return self._twin.loss(module, one.batch)[0], {}

    def _square_off(self, replica: Replica, found: _Found) -> float:
        """Adds up the squared differences between this rank's parts of the gradient and the whole one."""
        squares: dict[str, float] = {}
        for name, part in replica.gradients_by_name().items():
            if name not in found.gradients:  # the strategy trains it, and the model as built does not
                continue
            whole = found.gradients[name].reshape(-1)
            squares[name] = 0.0
            for one in part.as_boxes():
                expected = torch.empty_like(_held(one), dtype=whole.dtype)
                copy_region(one.shape, all_of(one.shape), whole, one.simple_region, expected)
                squares[name] += float((_held(one) - expected).double().square().sum()) / one.replicas
        self._worst = max(((square, name) for name, square in squares.items()), default=(0.0, ""))
        return sum(squares.values())

    # -- finding the difference
    def _first_apart(self, replica: Replica, world: World, batch: Any, tolerance: float) -> tuple[str, str] | None:
        """Returns the names of the first module with a different output, and of the last one before it that ranks cut.

        The second name may be empty. None if no output differs.
        """
        whole: dict[str, list[Tensor]] = {}
        mine: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            with _noting(self._model, whole), unchanged(self._model):
                seed_all(mix(_SEED), self._device)
                self._task.loss(self._model, to_device(batch, self._device))
            with _noting(replica.unwrapped, mine):
                self._passes(replica, batch, trains=False)
        order = list(whole)
        alike = {name: _alike(replica, mine[name], whole[name], tolerance) for name in order if name in mine}
        apart = next((place for place, name in enumerate(order) if alike.get(name) is False), len(order))
        cut = {name for name, same in alike.items() if same is None}
        everyone = world.global_ranks.all_gather_object((apart, cut))
        place = min(place for place, _ in everyone)
        if place == len(order):
            return None
        before = [name for name in order[:place] if any(name in cut for _, cut in everyone)]
        return order[place], before[-1] if before else ""

    def _reject_failed(self, replica: Replica, error: Exception) -> None:
        """Raises UsageError for an error of ranks together, unless another rank or full memory is its cause."""
        if isinstance(error, ForgeError) or is_symptom(error) or says_memory_is_full(error):
            return
        names = {id(module): name for name, module in replica.unwrapped.named_modules() if name}
        inside = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
        within = [f"`{names[each]}`" for each in inside if each in names]
        raise UsageError(
            f"ranks together do not compute the same as the whole model: {within[-1] if within else 'it'} fails, but "
            f"does not fail in the whole model: {type(error).__name__}: {error}",
            hints=[*where_raised(error), *self._hints()],
        ) from error

    def _hints(self) -> list[str]:
        return [hint for cut in self._cuts for hint in _HINTS[cut]]

    def _reject(
        self,
        loss: float,
        norm: float,
        distance: float,
        whole: tuple[float, float],
        place: tuple[str, str] | None,
        worst: str,
    ) -> NoReturn:
        if place is None:
            where = (
                f"no module has a different output, and the gradient of `{worst}` differs most: check the operations "
                "of the model and the task between and after their modules"
            )
        else:
            where = f"the first module with a different output is `{place[0]}`"
            if place[1]:
                where += f"; before it, each rank has only a part of the output of `{place[1]}`"
        raise UsageError(
            f"ranks together do not compute the same as the whole model: for a few samples the loss is {loss:.6g} and "
            f"the gradient norm {norm:.6g}, for the whole model they are {whole[0]:.6g} and {whole[1]:.6g}, and the "
            f"gradients differ by {distance:.2g} of that norm",
            hints=[where, *self._hints()],
        )


class _Reading:
    """Substitute for an optimizer that only reads the gradient."""

    passes = 2
    square = 0.0
    param_groups: Sequence[Any] = ()

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def perturb(self, norm: float) -> None:
        """Reads the gradient, and moves no weights."""
        self.square = self._read()

    def restore(self) -> None:
        """Does nothing: no weights were moved."""


# ---------------------------------------------------------------------------------------------- contexts
@contextmanager
def _random_numbers(device: torch.device) -> Iterator[None]:
    """Restores the state of all RNGs at the end, including the RNG of a GPU."""
    kind = device_kind(device)
    state = kind.rng_state(device)
    with isolated_rng():
        yield
    kind.set_rng_state(state, device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts all modules into evaluation mode inside: without dropout, with running statistics."""
    were = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in were.items():
            module.training = training


@contextmanager
def _noting(model: nn.Module, outputs: dict[str, list[Tensor]]) -> Iterator[None]:
    """Copies the output of each module's first call into `outputs`, by name, in the order of these outputs."""

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name not in outputs:
            found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
            outputs[name] = [getattr(x, "_local_tensor", x).detach().clone() for x in found]

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
        yield


# ---------------------------------------------------------------------------------------------- comparing numbers
def _alike(replica: Replica, mine: Sequence[Tensor], whole: Sequence[Tensor], tolerance: float) -> bool | None:
    """Returns whether outputs are equal; None if this rank has only parts of them, which cannot be compared."""
    if len(mine) != len(whole):
        return None
    answers = [_same(replica, one, other, tolerance) for one, other in zip(mine, whole, strict=True)]
    return False if False in answers else None if None in answers else True


def _same(replica: Replica, mine: Tensor, whole: Tensor, tolerance: float) -> bool | None:
    if mine.shape != whole.shape and whole.ndim > 1:
        try:
            whole = replica.local_batch(whole)  # this rank's positions
        except UsageError:
            return None
    if mine.shape != whole.shape:
        return None
    return difference_norms({"": mine}, {"": whole})[""] <= tolerance * norm_of([whole]) + 1e-12


def _off(one: float, other: float) -> float:
    """Returns the difference of two losses, relative to the larger one or to 0.01."""
    # For a loss near 0, the size of its summands counts.
    return relative(one, other, max(abs(one), 1e-2))


def _unfit(found: _Found, nudged: _Found) -> str:
    """Returns the reason why these results cannot be compared; empty if they can."""
    if not math.isfinite(found.loss) or not math.isfinite(found.norm):
        return "the loss or its gradient is not finite"
    noise = max(_off(found.loss, nudged.loss), found.distance(nudged.gradients))
    if not noise < _CHAOS:
        return f"its loss is random, or rounding alone changes it (its gradient differs by {noise:.2g})"
    return ""


def _held(part: TensorShard) -> Tensor:
    """Returns the elements of a part as a flat tensor, or of a range as they are."""
    return part.tensor if hasattr(part.region, "size") else part.tensor.reshape(-1)


def _sums_as(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of a real `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64


CHECKS = (("", compare_with_whole), ("", compare_halves))
"""The checks of the first step."""
