"""Checks of models: building on any device, finite numbers, used weights, and equal training on two ranks."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ddpforge.compat import tree_leaves
from ddpforge.components.errors import BuildFailed
from ddpforge.data.pytree import close
from ddpforge.errors import StrategyError
from ddpforge.strategies.pipeline.segments import Segment, declaration, declared_segments, held_by, named_tensors
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns, same_training
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable, blame, source_of
from ddpforge.testing.trial import ComponentTrial, fresh, trial_of


@check("finite", "model")
def finite(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the loss and the gradients of a batch are finite."""
    model = _after_backward(case)
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if bad:
        raise Breach("finite gradients at the initial weights", f"the gradient of `{bad[0]}` is not finite")


@check("stable-names", "model")
def stable_names(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the same seed gives the same named tensors, and that a forward pass keeps their names."""
    first, second = fresh(case, seed=5), fresh(case, seed=5)
    before, other = first.state_dict(), second.state_dict()
    if list(before) != list(other):
        raise Breach("the same state-dict names in every build of the model", _difference(set(before), set(other)))
    for name, tensor in before.items():
        if not close(tensor, other[name], 0.0):
            raise Breach(
                "initial weights that depend only on torch's seed, because they must be equal on every rank",
                f"`{name}` differs between two models built after torch.manual_seed(5)",
            )
    model = _after_backward(case)
    if set(model.state_dict()) != set(before):
        raise Breach("names that a forward pass does not change", _difference(set(before), set(model.state_dict())))


@check("unused-parameters", "model")
def unused(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that every trainable parameter gets a gradient, or is declared as unused."""
    declared = case.settings.get("unused", [])
    model = _after_backward(case)
    idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    undeclared = [name for name in idle if not any(fnmatchcase(name, glob) for glob in declared)]
    if undeclared:
        owner = model.get_submodule(undeclared[0].rpartition(".")[0])
        raise Breach(
            "forward to use every trainable parameter, because DDP waits for the gradients of all",
            f"{', '.join(f'`{name}`' for name in undeclared)} got no gradient"
            + (f" (of a {type(owner).__name__})" if owner is not model else ""),
            hints=[
                "remove unused parameters, or set requires_grad = False",
                f'or declare it: `unused = ["{undeclared[0]}"]` below [model.{case.name}] in'
                f" {case.said or 'ddpforge_testing.toml'}; users then need strategy.find_unused_parameters",
            ],
        )


@check("meta-device", "model")
def meta_device(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the model can be built on the meta device and initialized later, as for large sharded models."""
    if case.settings.get("meta", True) is False:
        raise NotApplicable("declared: meta = false")
    real = fresh(case)
    hints = [f"or declare `meta = false` below [model.{case.name}]: FSDP then needs strategy.meta = false"]
    try:
        with torch.device("meta"):
            model = case.build()
    except Exception as error:
        cause = error.__cause__ if isinstance(error, BuildFailed) else None
        breach = blame(cause or error, "a build on the meta device, without values of tensors", case.component)
        raise Breach(breach.expected, breach.found, where=breach.where, hints=hints) from error
    here = [name for name, tensor in model.state_dict().items() if not tensor.is_meta]
    if here:
        raise Breach("all tensors on the meta device", f"`{here[0]}` is on the {model.state_dict()[here[0]].device}")
    shapes, expected = ({name: list(t.shape) for name, t in one.state_dict().items()} for one in (model, real))
    if shapes != expected:
        raise Breach("the same tensors on the meta device", _difference(set(expected), set(shapes)))
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and not callable(getattr(module, "reset_parameters", None)):
            raise Breach(
                "reset_parameters in every module with its own parameters or buffers, to initialize them later",
                f"`{name or 'the model'}` ({type(module).__name__}) has `{own[0][0]}`, but no reset_parameters",
                where=source_of(type(module)),
                hints=[f"give {type(module).__name__} a method reset_parameters, and call it in __init__", *hints],
            )


@check("pipeline-steps", "model")
def pipeline_steps(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the declared pipeline steps equal the forward pass, and that each uses only its declared modules."""
    trial = trial_of(case)
    if declaration(trial.model) is None:
        return
    model, (args, named, expected) = trial.model.eval(), _called(trial)
    try:
        steps = declared_segments(model)
    except StrategyError as error:
        raise Breach("a `pipeline` that is its forward pass", error.message, hints=error.hints) from error
    found: Any = args
    for number, step in enumerate(steps):
        taken = found if isinstance(found, tuple) else (found,)
        found = step.call(*taken, **named)
        alone = _without_others(model, number).call(*taken, **named)
        named = {}
        if not _alike(alone, found):
            raise Breach(
                f"step `{step.name}` to use only its entries in `pipeline`: {', '.join(step.uses) or 'nothing'}",
                "another result without all other weights",
                hints=[f'add the other modules that it uses: ("{step.name}", …)'],
            )
    if not _alike(found, expected):
        raise Breach("the steps of `pipeline`, one after the other, to be its forward pass", "another result")


def _called(trial: ComponentTrial) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Returns the arguments of the task's call of the model, and the result."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    hook = trial.model.register_forward_hook(
        lambda _, args, named, out: calls.append((args, named, out)), with_kwargs=True
    )
    with torch.no_grad():
        trial.task.loss(trial.model, trial.batch)
    hook.remove()
    if len(calls) != 1:
        raise NotApplicable(f"the task calls it {len(calls)} times")
    return calls[0]


def _without_others(model: nn.Module, number: int) -> Segment:
    """Returns a step of a copy of the model, in which all weights that the step does not declare are NaN."""
    alone = copy.deepcopy(model)
    step = declared_segments(alone)[number]
    kept = {id(tensor) for tensor in held_by(alone, step)}
    for _, tensor in named_tensors(alone):
        if id(tensor) not in kept and tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
    return step


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(close(a, b, 1e-6) for a, b in pairs if isinstance(a, torch.Tensor))


@check("same-on-two-ranks", "model", ranks=True)
def same_on_two_ranks(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that training with DDP on two ranks equals training on one."""
    drift = same_training(worlds.outcome(case, "train", 2), worlds.outcome(case, "train", 1))
    if drift:
        raise Breach(
            "the same training on one rank and on two",
            drift,
            hints=["forward must not depend on the rank, the batch size, or random numbers from outside torch"],
        )


def _after_backward(case: Case) -> nn.Module:
    trial = trial_of(case)
    torch.manual_seed(0)
    loss = sum((update.loss(trial.model, trial.batch)[0] for update in trial.updates), torch.zeros(()))
    if not loss.isfinite():
        raise Breach("a finite loss at the initial weights", f"{loss.item()}")
    try:
        loss.backward()
    except RuntimeError as error:
        raise blame(error, "a loss with a backward pass", case.component) from error
    return trial.model


def _difference(one: set[str], other: set[str]) -> str:
    return f"only in one: {', '.join(sorted(one ^ other)[:5]) or 'nothing; shapes or order differ'}"
