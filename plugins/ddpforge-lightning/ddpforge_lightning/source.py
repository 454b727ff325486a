"""Reads the source of a module's steps and hooks for what needs a Trainer, so that all of it is known at once."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["INDEX", "NONE", "TRAINER", "Finding", "findings"]

_OF_TRAINER = {"logger", "loggers", "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer"}
_READS = (ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.FormattedValue, ast.Slice, ast.AugAssign)
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)

TRAINER = (
    "it may read max_epochs, max_steps, estimated_stepping_batches, num_training_batches, current_epoch, "
    "global_step, world_size, global_rank and is_global_zero"
)
INDEX = "remove the condition: ddpforge logs at the steps in track.every"
NONE = (
    "leave these samples out of the dataset, or return a loss of zero, `0.0 * outputs.sum()`: the samples then count "
    'with a loss of 0; steps with a gradient that is not finite: train.on_nonfinite = "skip"'
)
PLATEAU = 'return the optimizer alone, and write [callbacks.plateau] use = "reduce_on_plateau"'


@dataclass(frozen=True)
class Finding:
    """Place in the source that needs a Trainer. `certain` is True if every run comes to it."""

    what: str
    hint: str
    place: str
    certain: bool


@dataclass(frozen=True)
class _Scope:
    """Method that is read: the name of its batch number, and whether it is a hook or the training step."""

    method: str
    index: str | None
    owner: str  # the step or hook that calls it


class _Source:
    """Source of the methods of a module's own classes."""

    def __init__(self, own: Collection[type], known: Collection[str], metrics: Collection[str]) -> None:
        self._methods: dict[str, Any] = {}
        for kind in own:
            for name, value in vars(kind).items():
                if inspect.isfunction(value):
                    self._methods.setdefault(name, value)
        self._known, self._metrics = known, {path.split(".")[0] for path in metrics}
        self._seen: set[tuple[_Scope, bool]] = set()

    def read(self, scope: _Scope, *, certain: bool) -> Iterator[Finding]:
        """Yields the findings in a method, and in methods of the module that it calls."""
        if (scope, certain) in self._seen or scope.method not in self._methods:
            return
        self._seen.add((scope, certain))
        method = inspect.unwrap(self._methods[scope.method])
        try:
            lines, first = inspect.getsourcelines(method)
            (function,) = ast.parse(textwrap.dedent("".join(lines))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return  # e.g. a class of a notebook's earlier cell
        if not isinstance(function, ast.FunctionDef):
            return  # e.g. a lambda
        file = Path(inspect.getsourcefile(method) or "").name
        if scope.index is None and scope.method == scope.owner and scope.owner.endswith("_step"):
            parameters = [one.arg for one in function.args.args]
            scope = _Scope(scope.method, parameters[2] if len(parameters) > 2 else "", scope.owner)
        ast.increment_lineno(function, first - 1)
        yield from self._block(function.body, scope, file, certain)

    # -- statements
    def _block(self, body: Sequence[ast.stmt], scope: _Scope, file: str, certain: bool) -> Iterator[Finding]:
        for one in body:
            yield from self._statement(one, scope, file, certain)
            if not isinstance(one, ast.FunctionDef | ast.ClassDef):
                certain = certain and not any(isinstance(inner, _ENDS) for inner in ast.walk(one))

    def _statement(self, one: ast.stmt, scope: _Scope, file: str, certain: bool) -> Iterator[Finding]:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield from self._block(one.body, _Scope("", scope.index, scope.owner), file, False)
            return
        if isinstance(one, ast.Return) and (one.value is None or _is_none(one.value)):
            if scope.method == scope.owner == "training_step":
                yield Finding(
                    "training_step returns None, with which Lightning skips a batch; ddpforge does not",
                    NONE,
                    f"{file}:{one.lineno}",
                    True,
                )
            return
        if isinstance(one, ast.Return) and scope.owner == "configure_optimizers":
            yield from _several(self._methods[scope.method], one, file)
        for field, value in ast.iter_fields(one):
            values = value if isinstance(value, list) else [value]
            statements = [x for x in values if isinstance(x, ast.stmt)]
            if statements:
                runs = certain and isinstance(one, ast.With) and field == "body"
                yield from self._block(statements, scope, file, runs)
            for x in values:
                if isinstance(x, ast.ExceptHandler | ast.match_case):
                    yield from self._block(x.body, scope, file, False)
                elif isinstance(x, ast.withitem):
                    yield from self._expression(x.context_expr, scope, file, certain)
                elif isinstance(x, ast.expr):
                    reads = isinstance(one, ast.If | ast.While | ast.AugAssign)
                    yield from self._expression(x, scope, file, certain, read=reads)

    # -- expressions
    def _expression(
        self, one: ast.AST, scope: _Scope, file: str, certain: bool, *, read: bool = False
    ) -> Iterator[Finding]:
        place = f"{file}:{getattr(one, 'lineno', 0)}"
        if isinstance(one, ast.Name) and read and scope.index and one.id == scope.index:
            yield Finding(
                f"{scope.owner} reads `{one.id}`, and a batch has no number in ddpforge", INDEX, place, certain
            )
        if isinstance(one, ast.Attribute):
            yield from self._attribute(one, place, certain)
        if isinstance(one, ast.Call):
            yield from self._call(one, scope, file, certain)
        for field, value in ast.iter_fields(one):
            first = True
            for x in value if isinstance(value, list) else [value]:
                if isinstance(x, ast.AST) and not isinstance(x, ast.expr_context):
                    runs = certain and _always(one, field, first)
                    indexes = isinstance(one, ast.Subscript) and field == "slice"
                    yield from self._expression(x, scope, file, runs, read=isinstance(one, _READS) or indexes)
                    first = False

    def _attribute(self, one: ast.Attribute, place: str, certain: bool) -> Iterator[Finding]:
        owner, name = one.value, one.attr
        if not isinstance(one.ctx, ast.Load):
            return
        of_trainer = isinstance(owner, ast.Attribute) and owner.attr == "trainer" and _is_self(owner.value)
        if (of_trainer and name not in self._known) or (_is_self(owner) and name in _OF_TRAINER):
            yield Finding(f"the LightningModule reads `{name}` of its Trainer", TRAINER, place, certain)
        if name == "ReduceLROnPlateau":
            yield Finding("configure_optimizers has ReduceLROnPlateau", PLATEAU, place, False)

    def _call(self, one: ast.Call, scope: _Scope, file: str, certain: bool) -> Iterator[Finding]:
        place, function = f"{file}:{one.lineno}", one.func
        if isinstance(function, ast.Name) and function.id == "ReduceLROnPlateau":
            yield Finding("configure_optimizers has ReduceLROnPlateau", PLATEAU, place, False)
        if not isinstance(function, ast.Attribute):
            return
        name = function.attr
        ends = scope.owner in ("on_validation_epoch_end", "on_test_epoch_end")
        if scope.owner.startswith("on_") and _is_self(function.value) and name in ("log", "log_dict"):
            if not ends:
                hint = "log in training_step, validation_step or, results of metrics, in on_validation_epoch_end"
                yield Finding(f"the LightningModule logs in {scope.owner}", hint, place, certain)
            elif not self._metrics:
                hint = "log in validation_step: ddpforge reports the mean over all samples of all ranks"
                what = f"the LightningModule logs in {scope.owner}, and has no metric objects of torchmetrics"
                yield Finding(what, hint, place, certain)
        updated = name if _is_self(function.value) else None
        if name in ("update", "forward") and isinstance(function.value, ast.Attribute):
            updated = function.value.attr if _is_self(function.value.value) else None
        if scope.owner.startswith("on_") and updated in self._metrics:
            hint = "remove it; of the best value of a run keeps [checkpoint.keep] best the weights"
            what = f"{scope.owner} updates the metric self.{updated}, whose state no checkpoint holds"
            yield Finding(what, hint, place, certain)
        called = _is_self(function.value) or _is_super(function.value)
        if called and name in self._methods and name != scope.method:
            yield from self.read(_Scope(name, self._passed(one, scope, name), scope.owner), certain=certain)

    def _passed(self, call: ast.Call, scope: _Scope, name: str) -> str:
        """Returns the name that the batch number has in the called method; "" if it does not receive it."""
        for keyword in call.keywords:
            if isinstance(keyword.value, ast.Name) and keyword.value.id == scope.index:
                return keyword.arg or ""
        parameters = [*inspect.signature(self._methods[name]).parameters][1:]
        for argument, parameter in zip(call.args, parameters, strict=False):
            if isinstance(argument, ast.Name) and argument.id == scope.index:
                return parameter
        return ""


def findings(
    own: Sequence[type], methods: Mapping[str, bool], known: Iterable[str], metrics: Collection[str]
) -> list[Finding]:
    """Returns all places that need a Trainer, in the order of `methods`.

    Args:
        own: the classes of the LightningModule that do not belong to Lightning, in the order of methods.
        methods: names of the methods to read; True if every run calls the method.
        known: attributes of the Trainer that ddpforge has.
        metrics: attributes of the module that are metrics.
    """
    source = _Source(own, frozenset(known), metrics)
    found: dict[tuple[str, str], Finding] = {}
    for name, certain in methods.items():
        for one in source.read(_Scope(name, None, name), certain=certain):
            before = found.get((one.what, one.place))
            if before is None or (one.certain and not before.certain):
                found[one.what, one.place] = one
    return [*found.values()]


def _several(method: Any, one: ast.Return, file: str) -> Iterator[Finding]:
    """Yields a finding if a `return` of configure_optimizers has several names of optimizers."""
    import torch

    assert one.value is not None
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    names = set()
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
            called = each.value.func
            kind = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            made = getattr(torch.optim, kind, None)
            if isinstance(made, type) and issubclass(made, torch.optim.Optimizer):
                names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    used = {each.id for each in ast.walk(one.value) if isinstance(each, ast.Name) and each.id in names}
    if len(used) > 1:
        yield Finding(
            f"configure_optimizers returns {len(used)} optimizers; ddpforge takes one",
            "write a task with `updates` for several: [optimizer.updates.NAME] has an optimizer for each",
            f"{file}:{one.lineno}",
            False,
        )


def _always(parent: ast.AST, field: str, first: bool) -> bool:
    """True if this part of an expression is computed whenever the expression is."""
    if isinstance(parent, ast.IfExp):
        return field == "test"
    if isinstance(parent, ast.BoolOp):
        return first
    return not isinstance(parent, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
