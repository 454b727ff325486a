"""Compares, before the first step, a model that ranks compute together with the whole one, as it was built."""

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
from ddpforge.data.nests import take
from ddpforge.data.randomness import own_random_numbers
from ddpforge.errors import ForgeError, UsageError, says_memory_is_full
from ddpforge.interfaces import Contract, Explores, Part, Pass, Replica, Task, World
from ddpforge.interfaces.regions import copy as copy_region
from ddpforge.interfaces.regions import whole as all_of
from ddpforge.ranks import phases
from ddpforge.ranks.collectives import Alone
from ddpforge.ranks.failures import is_symptom
from ddpforge.strategies import named_state
from ddpforge.strategies.torch_replica import TorchReplica
from ddpforge.training.batchnorm import unchanged
from ddpforge.training.stages import Built
from ddpforge.training.task_checks import SMALL

__all__ = ["Whole", "keep_whole"]

log = logging.getLogger("ddpforge")

_FEW = 2  # samples
_SEED = 0x3B1E  # keeps the random numbers of these passes apart from those of training
_LOSS, _GRADIENT = 1e-4, 1e-3  # relative differences that rounding in float32 stays below
_ROUNDED = 5e-2  # the same where weights are gathered in lower precision
_NOISE = 10.0  # times the differences that a change of all weights by `_NUDGE` makes are taken for rounding
_NUDGE = 1e-6
_CHAOS = 2e-3  # the difference that such a change makes in a model of which nothing can be said

_HINTS = {
    "layers": (
        "look at the plan (strategy.plan, or the model's `tensor_plan`): a weight of several, one below the other, is "
        '"colwise:3"',
        'nothing that mixes channels (a norm, a softmax) may lie between "colwise" and "rowwise"',
    ),
    "positions": (
        "what mixes positions (a convolution, a mean, a norm over them) must not be in the model, except in modules "
        "that ask their `context`; `by_position` is for a loss that is a sum over positions",
    ),
    "experts": ("let modules use their experts by `self.experts.compute` alone",),
    "steps": (
        "let the model's `pipeline` name all that `forward` does, in its order: what lies between modules belongs "
        "into a method, which is a step",
    ),
}


def keep_whole(parts: Built, contract: Contract, world: World) -> Whole | None:
    """Copies model and task before a strategy spreads them, where that cuts forward passes; collective.

    None where it does not, or where the whole model cannot be compared with; then a line of the log says so.
    """
    if not contract.cuts or not parts.trains:
        return None
    whole, why = None, _hindrance(parts)
    if not why:
        try:
            whole = Whole(parts.model, parts.task, contract.cuts)
        except Exception as error:  # not every part can be copied
            why = f"a copy of the model and the task fails: {type(error).__name__}: {error}"
    if why := next(filter(None, world.all.everyone(why)), ""):
        _leave_out(why)
        return None
    return whole


def _hindrance(parts: Built) -> str:
    """Says why the whole model cannot be compared with; empty if it can be."""
    if any(parameter.is_meta for parameter in parts.model.parameters()):
        return "it is built without memory"
    if any(tensor.is_complex() for tensor in (*parts.model.parameters(), *parts.model.buffers())):
        return "it has complex weights"
    if parts.size.all > SMALL:
        return f"its {parts.size.all:,} parameters are not put on one rank; up to {SMALL:,} would be"
    if parts.recipe.train.compile != "off" or parts.recipe.train.fp8 != "off":
        return "train.compile and train.fp8 change what modules compute"
    hindrances = (
        (parts.turns, "the task has several updates"),
        (parts.beside, "the task uses modules beside the model"),
        (parts.task.whole_batch, "the task compares samples"),
    )
    return next((why for hinders, why in hindrances if hinders), "")


def _leave_out(why: str) -> None:
    log.info("what ranks compute together was not compared with the whole model: %s", why)


class _Found(NamedTuple):
    """The mean loss of a batch's items, and the gradient of that with its norm."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]

    def distance(self, other: Mapping[str, Tensor]) -> float:
        """The norm of the difference between two gradients, relative to this one."""
        squares = [(self.gradients[name] - x).double().square().sum() for name, x in other.items()]
        return math.sqrt(float(sum(squares))) / self.norm if self.norm else 0.0


class Whole:
    """A model and its task as they were before a strategy spread the model over ranks."""

    def __init__(self, model: nn.Module, task: Task, cuts: Sequence[str]) -> None:
        kept = {id(x): x for x in (*model.modules(), *model.parameters(), *model.buffers())}
        self._twin = copy.deepcopy(task, kept)  # for the model itself; the run's own may remember what it sees
        self._model, self._task = copy.deepcopy((model, task))
        self._cuts, self._items = cuts, 1.0
        self._worst = 0.0, ""  # the square of the largest difference between gradients, and the parameter's name
        for one in (self._twin, self._task):
            one.__dict__.pop("show", None)

    def compare(self, replica: Replica, world: World, first: MicroBatch) -> None:
        """Raises UsageError where ranks compute another loss, or another gradient, than the whole model; collective.

        A few samples of rank 0's `first` micro-batch are used, without dropout and in float32. The model, its
        gradients, random numbers and task are afterwards as they were before.
        """
        phases.mark(phases.FORWARD)
        with ExitStack() as stack:
            stack.enter_context(_random_numbers(world.device))
            stack.enter_context(unchanged(replica.bare))
            stack.enter_context(_evaluating(replica.bare))
            exact = not isinstance(replica, TorchReplica) or stack.enter_context(replica.exact())
            self._compare(replica, world, first, exact=exact)
        self._model.to("meta")
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)  # that of a step is of interest

    def _compare(self, replica: Replica, world: World, first: MicroBatch, *, exact: bool) -> None:
        batch, why = self._prepared(replica, world, first)
        found = nudged = None
        if not why:
            self._copy_weights(replica, world)
            try:
                found, nudged = self._reference(batch)
            except Exception as error:  # it may need what only training gives it
                why = f"its loss cannot be computed apart from training: {type(error).__name__}: {error}"
        if not why and found and nudged:
            why = _unfit(found, nudged)
        if why := next(filter(None, world.all.everyone(why)), ""):
            _leave_out(why)
            return
        assert found is not None
        assert nudged is not None

        noise = max(_off(found.loss, nudged.loss), found.distance(nudged.gradients)) * _NOISE
        rounding = noise if exact else max(_ROUNDED, noise)
        # Ranks need not round alike: what rank 0 finds is what all do.
        rounding, expected = world.all.broadcast((rounding, (found.loss, found.norm)))
        try:
            loss, norm, distance = self._together(replica, world, batch, found)
        except Exception as error:
            self._refuse_failed(replica, error)
            raise
        log.debug("together %g, %g and whole %s: off by %g, rounding %g", loss, norm, expected, distance, rounding)
        if _off(loss, expected[0]) > max(_LOSS, rounding) or not distance <= max(_GRADIENT, rounding):
            place = self._first_apart(replica, world, batch, max(_GRADIENT, rounding))
            worst = max(world.all.everyone(self._worst))[1]
            self._refuse(loss, norm, distance, expected, place, worst)

    # -- what is computed
    def _prepared(self, replica: Replica, world: World, first: MicroBatch) -> tuple[Any, str]:
        """Gives all ranks a few samples of rank 0's micro-batch, or says why there are none; starts the task."""
        why, batch = "", None
        if not isinstance(replica, Explores):
            why = f"{type(replica).__name__} does not say how gradients are looked at without an update"
        elif world.is_main:
            try:
                batch, samples = self._samples(first)
                counted = self._task.count(batch)
                self._items = float(samples if counted is None else counted)
                pickle.dumps(batch)  # what cannot be sent is found out here, and not while others wait for it
                why = "" if self._items > 0 else "no target counts in the first micro-batch"
            except Exception as error:
                why = f"its first micro-batch cannot be given to all ranks: {type(error).__name__}: {error}"
        why, self._items, batch = world.all.broadcast((why, self._items, None if why else batch))
        if not why:
            self._device = world.device
            self._model.to(world.device).eval()
            self._twin.start(replica.bare, world)
        return batch, why

    def _samples(self, first: MicroBatch) -> tuple[Any, int]:
        """Takes the first samples of a micro-batch, and counts them; all if it cannot be cut, or none has a target."""
        try:
            few = min(_FEW, first.samples)
            batch = tree_map_only(Tensor, Tensor.clone, take(first.data, 0, few, first.samples))  # to travel alone
            counted = self._task.count(batch)
            if counted is None or float(counted) > 0:
                return batch, few
        except ValueError:
            pass
        return first.data, first.samples

    @torch.no_grad()
    def _copy_weights(self, replica: Replica, world: World) -> None:
        """Gives the copy the values that ranks hold together: rank 0's, or those that were loaded."""
        held = replica.state().model
        for name, tensor in named_state.tensors(self._model)[0].items():
            value = torch.zeros(tensor.shape, dtype=_sums_as(tensor.dtype), device=world.device)
            part = held.get(name)
            if isinstance(part, Part) and part.replica == 0:
                for one in part.simple():
                    copy_region(one.shape, one.simple_region, _held(one), all_of(one.shape), value.view(-1))
            elif isinstance(part, Tensor) and world.is_main:
                value.copy_(part)
            tensor.copy_(world.all.sum(value) + 0)

    def _reference(self, batch: Any) -> tuple[_Found, _Found]:
        """Computes loss and gradient of the whole model, and once more where all weights are a little other ones.

        Random numbers are other ones then, too: what a loss makes of them is no difference between models.
        """
        alone = Alone(self._device)
        self._task.start(self._model, World(all=alone, data=alone, device=self._device, local_rank=0))
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
            loss.backward()  # type: ignore[no-untyped-call]
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if missing := [name for name, p in trained.items() if p.grad is None]:
            raise ValueError(f"in evaluation it does not use `{missing[0]}`")
        gradients = {name: p.grad.detach() for name, p in trained.items() if p.grad is not None}
        self._model.zero_grad(set_to_none=True)
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        return _Found(float(loss.detach()), math.sqrt(float(sum(squares))), gradients)

    def _together(self, replica: Replica, world: World, batch: Any, found: _Found) -> tuple[float, float, float]:
        """Computes, on all ranks together, the loss and the norm of its gradient; also returns how far that is off."""
        losses = self._passes(replica, batch, trains=True)
        reading = _Reading(lambda: self._square_off(replica, found))
        assert isinstance(replica, Explores)
        norm = float(replica.explore(reading))
        totals = torch.tensor([sum(losses), len(losses), reading.square], dtype=torch.float64)
        total, count, square = (world.all.sum(totals) + 0).tolist()
        off = math.sqrt(square) / found.norm if found.norm else math.sqrt(square)
        return total / max(count, 1), norm, off if math.isfinite(norm) else math.inf

    def _passes(self, replica: Replica, batch: Any, *, trains: bool) -> list[float]:
        """Runs a forward pass, and a backward pass where it `trains`; returns the mean losses that this rank has."""
        own = replica.own_part(to_device(batch, self._device))
        seed = partial(seed_all, mix(_SEED), self._device)
        one = Pass(batch=own, seed=seed, scale=lambda: 1 / self._items, measured=False)
        results = list(replica.passes([one], self._compute, trains=trains))
        return [float(result[0].detach()) / self._items for result in results if result is not None]

    def _compute(self, module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
        one.seed()
        return self._twin.loss(module, one.batch)[0], {}

    def _square_off(self, replica: Replica, found: _Found) -> float:
        """Adds up the squared differences between this rank's parts of the gradient and the whole one."""
        squares: dict[str, float] = {}
        for name, part in replica.gradients_by_name().items():
            if name not in found.gradients:  # what a strategy has thawed is not the model's as it was built
                continue
            whole = found.gradients[name].reshape(-1)
            squares[name] = 0.0
            for one in part.simple():
                expected = torch.empty_like(_held(one), dtype=whole.dtype)
                copy_region(one.shape, all_of(one.shape), whole, one.simple_region, expected)
                squares[name] += float((_held(one) - expected).double().square().sum()) / one.replicas
        self._worst = max(((square, name) for name, square in squares.items()), default=(0.0, ""))
        return sum(squares.values())

    # -- where they part
    def _first_apart(self, replica: Replica, world: World, batch: Any, tolerance: float) -> tuple[str, str] | None:
        """Returns the first module whose output is another one, by name, and the last before it that ranks cut."""
        whole: dict[str, list[Tensor]] = {}
        mine: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            with _noting(self._model, whole), unchanged(self._model):
                seed_all(mix(_SEED), self._device)
                self._task.loss(self._model, to_device(batch, self._device))
            with _noting(replica.bare, mine):
                self._passes(replica, batch, trains=False)
        order = list(whole)
        alike = {name: _alike(replica, mine[name], whole[name], tolerance) for name in order if name in mine}
        apart = next((place for place, name in enumerate(order) if alike.get(name) is False), len(order))
        cut = {name for name, same in alike.items() if same is None}
        everyone = world.all.everyone((apart, cut))
        place = min(place for place, _ in everyone)
        if place == len(order):
            return None
        before = [name for name in order[:place] if any(name in cut for _, cut in everyone)]
        return order[place], before[-1] if before else ""

    def _refuse_failed(self, replica: Replica, error: Exception) -> None:
        """Raises UsageError for an error that only ranks together meet, and that says nothing of other ranks."""
        if isinstance(error, ForgeError) or is_symptom(error) or says_memory_is_full(error):
            return
        names = {id(module): name for name, module in replica.bare.named_modules() if name}
        inside = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
        within = [f"`{names[each]}`" for each in inside if each in names]
        raise UsageError(
            f"ranks together do not compute what the whole model does: {within[-1] if within else 'it'} fails, which "
            f"it does not in the whole model: {type(error).__name__}: {error}",
            hints=[*where_raised(error), *self._hints()],
        ) from error

    def _hints(self) -> list[str]:
        return [hint for cut in self._cuts for hint in _HINTS[cut]]

    def _refuse(
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
                f"no module's output is another one, and the gradient of `{worst}` differs most: look at what the "
                "model and the task do between and behind their modules"
            )
        else:
            where = f"the first module whose output is another one is `{place[0]}`"
            if place[1]:
                where += f"; before it, ranks have the output of `{place[1]}` in parts"
        raise UsageError(
            f"ranks together do not compute what the whole model does: of a few samples the loss is {loss:.6g} and the "
            f"norm of the gradient {norm:.6g}, of the whole model they are {whole[0]:.6g} and {whole[1]:.6g}, and the "
            f"gradients differ by {distance:.2g} of that",
            hints=[where, *self._hints()],
        )


class _Reading:
    """Stands in for an optimizer that only looks at the gradient."""

    passes = 2
    square = 0.0
    param_groups: Sequence[Any] = ()

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def explore(self, norm: float) -> None:
        """Reads, and moves nothing."""
        self.square = self._read()

    def restore(self) -> None:
        """Nothing was moved."""


# ---------------------------------------------------------------------------------------------- around it
@contextmanager
def _random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves all generators as they were, that of a GPU too."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with own_random_numbers():
        yield
    if state is not None:
        torch.cuda.set_rng_state(state, device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Has all modules compute as in an evaluation: without dropout, with the statistics that they have."""
    were = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in were.items():
            module.training = training


@contextmanager
def _noting(model: nn.Module, outputs: dict[str, list[Tensor]]) -> Iterator[None]:
    """Copies what each module returns at its first call, by name, in the order in which they return it."""

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name not in outputs:
            found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
            outputs[name] = [getattr(x, "_local_tensor", x).detach().clone() for x in found]

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
        yield


# ---------------------------------------------------------------------------------------------- what is alike
def _alike(replica: Replica, mine: Sequence[Tensor], whole: Sequence[Tensor], tolerance: float) -> bool | None:
    """Returns whether outputs are alike; None where this rank has parts of them, which cannot be told from others."""
    if len(mine) != len(whole):
        return None
    answers = [_same(replica, one, other, tolerance) for one, other in zip(mine, whole, strict=True)]
    return False if False in answers else None if None in answers else True


def _same(replica: Replica, mine: Tensor, whole: Tensor, tolerance: float) -> bool | None:
    if mine.shape != whole.shape and whole.ndim > 1:
        try:
            whole = replica.own_part(whole)  # this rank's positions
        except UsageError:
            return None
    if mine.shape != whole.shape:
        return None
    difference = float((mine.double() - whole.double()).norm())
    return difference <= tolerance * float(whole.double().norm()) + 1e-12


def _off(one: float, other: float) -> float:
    """Returns the relative difference of two losses; near 0 it is that of their summands that counts."""
    return abs(one - other) / max(abs(one), abs(other), 1e-2)


def _unfit(found: _Found, nudged: _Found) -> str:
    """Says why nothing can be told from these; empty if something can."""
    if not math.isfinite(found.loss) or not math.isfinite(found.norm):
        return "the loss or its gradient is not finite"
    noise = max(_off(found.loss, nudged.loss), found.distance(nudged.gradients))
    if not noise < _CHAOS:
        return f"its loss is random, or rounding alone changes it (its gradient differs by {noise:.2g})"
    return ""


def _held(part: Part) -> Tensor:
    """Returns the elements of a part: what is held of a range is flat."""
    return part.tensor if hasattr(part.region, "size") else part.tensor.reshape(-1)


def _sums_as(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of another, which is real, are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64
