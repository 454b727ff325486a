"""Checks of tasks and optimizers by relations that need no oracle, those of `ddpforge prove`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.api import PERTURBED, Rounding, excesses, perturb, relative, select
from ddpforge.testing.cases import Case
from ddpforge.testing.checks.optimizer import build_optimizer, fill_gradients, weights_of
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable, source_of
from ddpforge.testing.trial import ComponentTrial, trial_of
from ddpforge.tools.prove.trained import changed_rows

_SCALE = 4.0  # a power of two: products are exact
_OF_TASKS = {
    "order": "the samples of a batch in reverse order have the same gradient",
    "split": "the gradients of the pieces of a batch add up to its own",
    "doubled": "each sample twice has twice the gradient",
    "scale": "a loss that is multiplied has a gradient that is multiplied",
}
_OF_OPTIMIZERS = {
    "order": "parameters in reverse order have the same updates",
    "split": "two groups with the same settings have the same updates as one",
    "frozen": "a parameter without gradient does not change the updates of others",
}
_STEPS = 3
_SUM = 1e-3  # relative difference

Gradients = Mapping[str, Tensor]


@check("keeps-relations", "task")
def task_keeps_relations(case: Case, worlds: MultiRankRuns) -> None:
    """Checks gradients under relations: order, split, doubled, scale."""
    trial = trial_of(case)
    if trial.task.whole_batch:
        raise NotApplicable("declared: whole_batch; loss-is-a-sum compares gradients of two ranks")

    def gradients(batches: Sequence[Any], factor: float = 1.0, *, seed: int = 0, perturbed: int = 0) -> Gradients:
        model, task = deepcopy((trial.model, trial.task))
        model.eval()  # dropout and BatchNorm make samples depend on their neighbours
        if perturbed:
            perturb(dict(model.named_parameters()), seed=perturbed)
        torch.manual_seed(seed)
        for batch in batches:
            (task.loss(model, batch)[0] * factor).backward()
        return {name: one.grad / factor for name, one in model.named_parameters() if one.grad is not None}

    whole = gradients([trial.batch])
    near = [gradients([trial.batch], perturbed=one) for one in range(1, 1 + PERTURBED)]
    rounding = Rounding.measured([whole], *([one] for one in near))
    if excesses(gradients([trial.batch], seed=1), whole, lambda name: 0.0):
        raise NotApplicable("its loss draws random numbers")
    if not _is_sum(trial):
        raise NotApplicable("not possible: loss-is-a-sum failed")
    compare = _comparison(rounding, _OF_TASKS, source_of(getattr(case.component, "loss", case.component)))
    with suppress(ValueError):  # an object that cannot be cut
        compare("order", gradients([_reversed(trial)]), whole)
    compare("split", gradients(trial.pieces(2)), whole)
    if (twice := _doubled(trial)) is not None:
        compare("doubled", {name: one / 2 for name, one in gradients([twice]).items()}, whole)
    compare("scale", gradients([trial.batch], _SCALE), whole)


@check("keeps-relations", "optimizer")
def optimizer_keeps_relations(case: Case, worlds: MultiRankRuns) -> None:
    """Checks updates under relations: order, split, frozen."""

    def updates(arrange: Callable[[list[nn.Parameter]], list[dict[str, Any]]], perturbed: int = 0) -> Gradients:
        weights = weights_of(case)
        before = [one.detach().clone() for one in weights]
        if perturbed:
            perturb({str(place): one for place, one in enumerate(weights)}, seed=perturbed)
            before = [one.detach().clone() for one in weights]
        optimizer = build_optimizer(case, arrange(weights))
        for step in range(1, 1 + _STEPS):
            fill_gradients(weights, step)
            optimizer.step()
        pairs = zip(weights, before, strict=True)
        return {f"parameter {place}": one.detach() - old for place, (one, old) in enumerate(pairs)}

    def frozen(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": [nn.Parameter(torch.ones_like(weights[0])), *weights]}]

    def one_group(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": weights}]

    whole = updates(one_group)
    near = [updates(one_group, perturbed=one) for one in range(1, 1 + PERTURBED)]
    component = case.component
    where = source_of(getattr(component, "step", component))
    compare = _comparison(Rounding.measured([whole], *([one] for one in near)), _OF_OPTIMIZERS, where)
    compare("order", updates(lambda weights: [{"params": weights[::-1]}]), whole)
    compare("split", updates(lambda weights: [{"params": weights[:1]}, {"params": weights[1:]}]), whole)
    compare("frozen", updates(frozen), whole)


def _comparison(
    rounding: Rounding, relations: Mapping[str, str], where: str
) -> Callable[[str, Gradients, Gradients], None]:
    """Returns a function that raises Breach, with the relation's name, if two results differ by more than rounding."""

    def compare(relation: str, found: Gradients, expected: Gradients) -> None:
        worst = excesses(found, expected, lambda name: rounding.allowed(1, name))
        if worst:
            factors = [
                f"`{one.name}` " + (f"× {one.multiple:.4g}" if one.multiple else f"differs by {one.difference:.1e}")
                for one in worst
            ]
            raise Breach(f"relation `{relation}`: {relations[relation]}", ", ".join(factors), where=where)

    return compare


def _is_sum(trial: ComponentTrial) -> bool:
    model, task = deepcopy((trial.model, trial.task))
    model.eval()
    with torch.no_grad():
        whole, *pieces = (float(task.loss(model, batch)[0]) for batch in [trial.batch, *trial.pieces(2)])
    return relative(sum(pieces), whole) < _SUM


def _reversed(trial: ComponentTrial) -> Any:
    return select(trial.batch, list(reversed(range(trial.samples))), trial.samples)


def _doubled(trial: ComponentTrial) -> Any | None:
    """Returns the batch with each sample twice; None if it has parts other than tensors."""
    if not _has_only_tensors(trial.batch):
        return None
    return changed_rows(trial.batch, trial.samples, lambda one: torch.cat([one, one]))


def _has_only_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping | tuple):
        return all(map(_has_only_tensors, tree.values() if isinstance(tree, Mapping) else tree))
    return isinstance(tree, Tensor)
