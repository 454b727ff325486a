"""Checks of tasks and metrics: sums, counts and rows do not depend on how a batch is split."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ddpforge.api import SingleRank, digest, select, take
from ddpforge.checkpoint.state import RankState, flatten
from ddpforge.errors import PluginError
from ddpforge.features.source_losses import has_loss_from_outputs
from ddpforge.features.task_state import NAME, has_state
from ddpforge.interfaces import Metric, Ranks, SampleColumns, Total, World
from ddpforge.testing.cases import Case
from ddpforge.testing.doubles import in_threads
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, blame, source_of
from ddpforge.testing.trial import ComponentTrial, trial_of

_SIZES = (1, 2)  # of pieces of a batch, in samples
_DRAWS = 64  # evaluations of a loss that uses random numbers


@check("loss-is-a-sum", "task")
def loss_is_a_sum(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the loss of a batch is the sum of the losses of its pieces; with `whole_batch`, of two ranks."""
    trial = _trial(case)
    loss, _ = _loss(case, trial, trial.batch)
    if loss.ndim or not loss.requires_grad:
        found = f"shape {list(loss.shape)}" + ("" if loss.requires_grad else " without gradients")
        raise Breach("a loss of no dimensions, with gradients", found, where=_method(case, "loss"))

    if trial.task.whole_batch:
        _same_on_two_ranks(case, trial)
        return

    def whole_and_pieces(seed: int, pieces: list[Any]) -> tuple[float, float]:
        torch.manual_seed(seed)
        with torch.no_grad():
            whole = float(_loss(case, trial, trial.batch)[0])
            return whole, sum(float(_loss(case, trial, piece)[0]) for piece in pieces)

    random = whole_and_pieces(1, [])[0] != whole_and_pieces(2, [])[0]
    for size in _SIZES:
        cut = trial.pieces(size)
        draws = [whole_and_pieces(seed, cut) for seed in range(_DRAWS if random else 1)]
        whole, pieces = (torch.tensor(values, dtype=torch.float64) for values in zip(*draws, strict=True))
        noise = float(((whole.var() + pieces.var()) / len(draws)).sqrt()) if random else 0.0
        allowed = 1e-4 * float(whole.abs().mean()) + 1e-6 + 5 * noise
        if not abs(float((whole - pieces).mean())) <= allowed:
            raise Breach(
                "the loss *summed* over the batch, so that accumulation and ranks give every item the same weight",
                f"{float(whole.mean()):.6g} for {trial.samples} samples, and {float(pieces.mean()):.6g} for the same in"
                f" {len(cut)} pieces: it averages within a batch",
                where=_method(case, "loss"),
                hints=['use reduction="sum"; ddpforge divides by the total of `count`'],
            )


def _same_on_two_ranks(case: Case, trial: ComponentTrial) -> None:
    """Checks that a `whole_batch` loss and its gradients are the same on one rank and summed over two."""

    def half(one: Ranks) -> tuple[float, dict[str, Tensor]]:
        model, task = deepcopy((trial.model, trial.task))
        task.start(model, World(global_ranks=one, dp_ranks=one, device=torch.device("cpu"), local_rank=one.rank))
        loss, _ = task.loss(model, trial.pieces(-(-trial.samples // one.size))[one.rank])
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def together(ranks: int) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)
        losses, gradients = zip(*in_threads(ranks, half), strict=True)
        return sum(losses), {name: sum(one[name] for one in gradients) for name in gradients[0]}

    try:
        again, (alone, whole), (apart, summed) = together(1)[0], together(1), together(2)
    except Exception as error:
        raise blame(error, "the loss of a half of the batch on each of two ranks", type(trial.task)) from error
    if again != alone:
        return  # it uses random numbers: no comparison is possible
    expected, where = "the same on one rank, and summed over two with half of the batch each", _method(case, "loss")
    if not abs(alone - apart) <= 1e-4 * abs(alone) + 1e-6:
        found = f"a loss of {alone:.6g} on one, and of {apart:.6g} on two"
        hint = (
            "compare with the samples of all ranks (`world.dp_ranks.all_gather`), and sum over this rank's own samples"
        )
        raise Breach(expected, found, where=where, hints=[hint])
    for name, gradient in whole.items():
        if not torch.allclose(gradient, summed[name], rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-7):
            hint = (
                "gradients must flow back to the ranks of the samples: use `world.dp_ranks.all_gather`, which does this"
            )
            raise Breach(expected, f"another gradient of `{name}` on two", where=where, hints=[hint])


@check("loss-from-outputs", "task")
def loss_from_outputs(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the losses of pieces of a batch, from the outputs of the whole batch, add up to its loss."""
    trial = _trial(case)
    if not has_loss_from_outputs(type(trial.task)) or trial.task.loss_in_model or trial.task.whole_batch:
        return
    with torch.no_grad():
        loss, outputs = _loss(case, trial, trial.batch)
        places = [slice(start, start + 2) for start in range(0, trial.samples, 2)]
        try:
            cut = [(select(outputs, one, trial.samples), select(trial.batch, one, trial.samples)) for one in places]
        except ValueError:  # an object that cannot be cut; training reports no losses of sources then
            return
        pieces = sum(float(trial.task.loss_from_outputs(*one)) for one in cut)
    if not abs(float(loss) - pieces) <= 1e-4 * abs(float(loss)) + 1e-6:
        raise Breach(
            "`loss_from_outputs` of pieces of a batch to add up to `loss` of the batch",
            f"{pieces:.6g} instead of {float(loss):.6g}",
            where=_method(case, "loss_from_outputs"),
            hints=["return the same sum as `loss`, computed from outputs and batch; or do not override it"],
        )


@check("count-is-additive", "task")
def count_is_additive(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the count of a batch is the sum of the counts of its pieces."""
    trial = _trial(case)
    counted = trial.task.count(trial.batch)
    if counted is None:
        return
    where = _method(case, "count")
    if not isinstance(counted, Tensor) or counted.ndim or counted.is_floating_point():
        raise Breach("None, or an integer tensor of no dimensions", f"{counted!r}", where=where)
    for size in _SIZES:
        pieces = [trial.task.count(piece) for piece in trial.pieces(size)]
        found = sum(int(piece) for piece in pieces if piece is not None)
        if int(counted) != found:
            raise Breach("as many items in a batch as in its pieces", f"{int(counted)} instead of {found}", where=where)


@check("metrics-are-additive", "task")
def metrics_are_additive(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the totals of `metrics` are additive over pieces of a batch, and that `finish` accepts the means."""
    trial = _trial(case)

    def measure(batch: Any) -> Mapping[str, Total | SampleColumns]:
        with torch.no_grad():
            torch.manual_seed(0)
            return trial.task.metrics(_loss(case, trial, batch)[1], batch)

    if not trial.task.whole_batch:
        cuts = [[measure(piece) for piece in trial.pieces(size)] for size in _SIZES]
        _additive(measure(trial.batch), cuts, _method(case, "metrics"))
    means = {"loss": 0.5} | _means(measure(trial.batch), trial.task.reports)
    try:
        finished = trial.task.finish(dict(means))
    except Exception as error:
        raise blame(error, "`finish` to take means", type(trial.task)) from error
    wrong = {name: value for name, value in finished.items() if not isinstance(value, int | float)}
    if wrong:
        raise Breach("plain numbers from `finish`", f"{wrong}", where=_method(case, "finish"))


@check("state-comes-back", "task")
def state_comes_back(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a checkpoint can store the result of `state`, and that `load_state` restores it."""
    trials = [_trial(case) for _ in range(2)]
    old, new = (getattr(trial.task, "task", trial.task) for trial in trials)
    if not has_state(old):
        return
    trials[0].model.train()
    _loss(case, trials[0], trials[0].batch)
    where = _method(case, "state")
    try:
        state = {key: x.detach().clone() if isinstance(x, Tensor) else x for key, x in old.state().items()}
        flatten(RankState(model={}, callbacks={NAME: state}), rank=0, ranks=1)
    except Exception as error:
        raise Breach("a mapping of tensors, numbers and text from `state`", str(error), where=where) from error
    try:
        new.load_state(state)
    except Exception as error:
        raise blame(error, "`load_state` to accept the result of `state`", type(new)) from error
    again = new.state()
    for key in sorted({*state, *again}):
        if digest(state.get(key)) != digest(again.get(key)):
            raise Breach("the same state after `load_state`", f"another `{key}`", where=_method(case, "load_state"))


@check("total-is-additive", "metric")
def total_is_additive(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the metric's total of a batch is the sum of the totals of its pieces."""
    trial = _trial(case)
    metric = case.build()
    if not isinstance(getattr(metric, "name", None), str) or not metric.name:
        raise Breach("a `name` under which it is reported", f"{getattr(metric, 'name', None)!r}")
    with torch.no_grad():
        outputs = _loss(case, trial, trial.batch)[1]

    def measure(start: int, stop: int) -> Mapping[str, Total | SampleColumns]:
        return {metric.name: metric(*take((outputs, trial.batch[1]), start, stop, trial.samples))}

    cuts = [[measure(start, start + size) for start in range(0, trial.samples, size)] for size in _SIZES]
    whole = measure(0, trial.samples)
    _additive(whole, cuts, _method(case, "__call__"))
    _means(whole, {metric.name: metric})


def _trial(case: Case) -> ComponentTrial:
    trial = trial_of(case)
    # In training mode, dropout and BatchNorm would make samples depend on their neighbours.
    trial.model.train(not trial.task.evaluation_loss)
    return trial


def _loss(case: Case, trial: ComponentTrial, batch: Any) -> tuple[Tensor, Any]:
    try:
        return trial.task.loss(trial.model, batch)
    except Exception as error:
        raise blame(error, "the loss of any number of samples", type(trial.task)) from error


def _means(found: Mapping[str, Total | SampleColumns], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns the final values of a batch's totals; raises Breach if `finish` of a metric fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class may be missing in the few samples
        try:
            return SingleRank().reduce_metrics(found, metrics)
        except PluginError:
            raise
        except Exception as error:
            blamed = next((type(metrics[name]) for name in found if name in metrics), type(error))
            raise blame(error, "`finish` to return numbers for a total", blamed) from error


def _additive(
    whole: Mapping[str, Total | SampleColumns],
    cuts: Iterable[Sequence[Mapping[str, Total | SampleColumns]]],
    where: str,
) -> None:
    """Raises Breach if the totals of a batch are not the sum of the totals of its pieces, for each cut."""
    for name, value in whole.items():
        if not isinstance(value, Total | SampleColumns):
            raise Breach(
                "totals: Total(sum, count), or SampleColumns", f"{name} is a {type(value).__name__}", where=where
            )
        if isinstance(value, Total) and not float(torch.as_tensor(value.count).sum()) > 0:
            raise Breach("a count of the items in a batch", f"{name} counts {value.count}", where=where)
    for pieces in cuts:
        for name, value in whole.items():
            if any(name not in piece for piece in pieces):
                raise Breach("the same metrics for every batch", f"{name} is missing for some", where=where)
            together = reduce(add, [piece[name] for piece in pieces])
            for (what, mine), (_, theirs) in zip(_tensors(value), _tensors(together), strict=True):
                if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
                    raise Breach(
                        "quantities that are additive over the pieces of a batch: sums and counts, or rows",
                        f"the {what} of {name} is {_short(mine)} for a batch, and {_short(theirs)} for its pieces",
                        where=where,
                        hints=["return the sum over items, not the mean, and the number of items"],
                    )


def _tensors(quantity: Total | SampleColumns) -> list[tuple[str, Tensor]]:
    if isinstance(quantity, SampleColumns):
        columns = (torch.cat(column) if isinstance(column, list) else column for column in quantity.columns)
        return [(f"column {i}", column.double()) for i, column in enumerate(columns)]
    parts = ("sum", quantity.sum), ("count", quantity.count)
    return [(what, torch.as_tensor(part, dtype=torch.float64).cpu()) for what, part in parts]


def _short(values: Tensor) -> str:
    return f"{values.item():.6g}" if values.ndim == 0 else f"{values.sum().item():.6g} in all, of {list(values.shape)}"


def _method(case: Case, name: str) -> str:
    return source_of(getattr(case.component, name, case.component))
