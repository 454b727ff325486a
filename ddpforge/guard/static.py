"""Checks of a recipe before data and model are built: settings that cannot work together, or on this machine."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddpforge.components.errors import NotImported
from ddpforge.components.local_code import component_name
from ddpforge.components.options import Nested
from ddpforge.components.registry import Registry, build
from ddpforge.errors import ForgeError, PluginError, UsageError, pip_install
from ddpforge.features.corruption_check import check_corruption
from ddpforge.interfaces import Callback, DeviceKind, Metric, Unsupported
from ddpforge.recipe.report import did_you_mean
from ddpforge.recipe.run_plan import RunPlan, no_sampler_of_streams, plan_batch
from ddpforge.recipe.schema import Component, TrainSection, settings_of
from ddpforge.training.callbacks import check_callback, overriding
from ddpforge.training.contract import contract_of
from ddpforge.training.metric_direction import missing_direction
from ddpforge.training.stages import MISSING, Chosen
from ddpforge.training.updates import accepts_update, update_names

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "CHECKS",
    "check_callbacks",
    "check_compile",
    "check_device",
    "check_evaluation_loss",
    "check_float8",
    "check_fused_loss",
    "check_initial_weights",
    "check_metric_direction",
    "check_metrics",
    "check_optimizer_options",
    "check_optimizers",
    "check_strategy",
    "check_stream",
    "check_updates",
    "check_whole_batch",
]

Errors = Iterator[ForgeError]

_OF_GROUPS = {
    "betas",
    "eps",
    "lr",
    "momentum",
    "ns_steps",
    "weight_decay",
}  # settings per group in ddpforge's own optimizers
_FLOAT8 = (8, 9)  # lowest compute capability whose tensor cores multiply in float8
_SEVERAL = ('set strategy.use = "ddp", "fsdp" or "single"',)
_CALLABLE = ('"single"', '"ddp"', '"fsdp"')  # strategies whose ranks can call the model


def device_of(chosen: Chosen) -> str:
    """Returns the name of the kind of devices that ranks compute on, e.g. "cuda"."""
    if (given := chosen.device or chosen.recipe.train.device) != "auto":
        return given
    from ddpforge.ranks.devices import device_type

    return device_type(chosen.recipe.train)


# ---------------------------------------------------------------------------------------------- machine and [train]
def check_device(chosen: Chosen) -> Errors:
    """Yields errors for settings that the devices of the ranks do not have."""
    train = chosen.recipe.train
    yield from _check_kind(chosen)
    for key, what in (("tf32", "multiplies in TF32"), ("cudnn_benchmark", "lets cuDNN choose")):
        if getattr(train, key) and (device := device_of(chosen)) != "cuda":
            message = f"train.{key} {what}, which needs CUDA, but this run is on {device}"
            yield UsageError(message, hints=[f"remove train.{key}"], key=f"train.{key}")
    if train.cudnn_benchmark and train.deterministic:
        message = (
            "train.cudnn_benchmark chooses algorithms by their measured time, and train.deterministic forbids that"
        )
        yield UsageError(message, hints=["remove one of them"], key="train.cudnn_benchmark")
    if train.sync_batchnorm and not kind_of(chosen).synchronizes_batchnorm:
        device = device_of(chosen)
        hint = f"torch.nn.SyncBatchNorm has no implementation for {device.upper()}; remove train.sync_batchnorm"
        message = f"train.sync_batchnorm needs CUDA, but this run is on {device}"
        yield UsageError(message, hints=[hint], key="train.sync_batchnorm")


def kind_of(chosen: Chosen) -> DeviceKind:
    """Returns the kind of devices that ranks compute on; raises PluginError if it cannot be loaded."""
    from ddpforge.ranks.devices import named_kind

    return named_kind(device_of(chosen))


def _check_kind(chosen: Chosen) -> Errors:
    """Yields errors for a precision, several ranks, or a process group that the kind of devices does not have."""
    train, given = chosen.recipe.train, chosen.device or chosen.recipe.train.device
    if given in ("cpu", "cuda") or (given == "auto" and all(one.is_own for one in chosen.registry.entries("device"))):
        return  # the device has all of this, and only loading a kind imports torch
    kind, name = kind_of(chosen), device_of(chosen)
    if train.precision not in kind.precisions:
        yield UsageError(
            f'train.precision = "{train.precision}" does not work on {kind.noun} (train.device = "{name}")',
            hints=[f"set train.precision to one of: {', '.join(kind.precisions)}"],
            key="train.precision",
        )
    if kind.backend is None and (chosen.ranks > 1 or chosen.strategy.needs_process_group):
        several = f"{chosen.ranks} ranks" if chosen.ranks > 1 else f'strategy.use = "{chosen.recipe.strategy.use}"'
        key = "train.device" if chosen.ranks > 1 else "strategy.use"
        yield UsageError(
            f'{several} cannot train on {kind.noun} (train.device = "{name}"): torch has no collectives for it',
            hints=[
                'start one process, with strategy.use = "single" or "ddp"',
                'or compute on the CPU: train.device = "cpu"',
            ],
            key=key,
        )


def check_compile(chosen: Chosen) -> Errors:
    """Yields errors for CUDA graphs if gradients accumulate over passes, or if updates train different parameters."""
    train = chosen.recipe.train
    if not train.uses_cuda_graphs or device_of(chosen) != "cuda":
        return
    together = max(1, train.per_pass(chosen.data_ranks)) * chosen.data_ranks
    if train.global_batch > together:
        yield UsageError(
            f'train.compile = "{train.compile}" replays CUDA graphs, which reuse their memory in every forward pass: '
            f"gradients of {train.global_batch // together} passes cannot accumulate there",
            hints=[
                'set train.compile = "default"',
                f"or let each rank make one pass per step, with {_one_pass(train)}",
            ],
            key="train.compile",
        )
    if chosen.trains and chosen.recipe.optimizer.updates:
        yield UsageError(
            f'train.compile = "{train.compile}" replays CUDA graphs, but each update trains other parameters',
            hints=['set train.compile = "default"'],
            key="train.compile",
        )


def _one_pass(train: TrainSection) -> str:
    """Returns the settings that make a step one forward pass of each rank."""
    if train.virtual_ranks:
        return f"virtual_ranks = ranks, and micro_batch = {train.global_batch} / ranks"
    return f"micro_batch = {train.global_batch} / ranks"


def check_float8(chosen: Chosen) -> Errors:
    """Yields errors for float8: a CPU or an older GPU, no torchao, a strategy that splits layers."""
    recipe = chosen.recipe
    if recipe.train.fp8 == "off":
        return
    import torch

    device = device_of(chosen)

    def error(message: str, *hints: str) -> UsageError:
        ways = [*hints, f"{'or ' * bool(hints)}remove train.fp8"]
        return UsageError(f'train.fp8 = "{recipe.train.fp8}" {message}', hints=ways, key="train.fp8")

    if device != "cuda":
        yield error(f"multiplies in float8, which needs a GPU, but this run is on {device}")
    elif torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < _FLOAT8:
        there, needed = [".".join(map(str, pair)) for pair in (found, _FLOAT8)]
        yield error(f"needs a GPU of compute capability {needed} (L4, RTX 40, H100), but this one has {there}")
    if find_spec("torchao") is None:
        yield error("needs torchao, which is not installed", pip_install("fp8"))
    if not contract_of(chosen.strategy).float8:
        yield error(
            f'needs whole layers, but strategy.use = "{recipe.strategy.use}" with its settings here splits them',
            'set strategy.use = "ddp", "fsdp" (without `tensor`) or "single"',
        )


# ---------------------------------------------------------------------------------------------- [optimizer]
def check_optimizer_options(chosen: Chosen) -> None:
    """Builds the optimizers over one small parameter; raises UsageError if one could not train.

    It skips ddpforge's own optimizers, if their signature excludes all invalid settings.
    """
    if not chosen.trains:
        return
    optimizer, registry = chosen.recipe.optimizer, chosen.registry
    for name, update in optimizer.updates.items():
        if not _is_sure(update, registry):
            _small(f"optimizer.updates.{name}", update, registry)
    is_sure = bool(optimizer.updates) or _is_sure(optimizer, registry)
    needs_model = registry.takes("optimizer", optimizer, "model")  # the check of the built model builds it
    built = None if needs_model or (is_sure and not optimizer.schedules) else _small("optimizer", optimizer, registry)
    if built and not optimizer.updates:
        from ddpforge.training.learning_rates import remember_initial

        remember_initial(built, optimizer.schedules)
    for name, group in optimizer.groups.items():
        key, settings = f"optimizer.groups.{name}", settings_of(group, optimizer)
        if group.use != optimizer.use and not _is_sure(group, registry):
            _small(key, group, registry)
        elif group.use == optimizer.use and not (is_sure and settings.keys() <= _OF_GROUPS):
            built = built or _small("optimizer", optimizer, registry)
            for option, value in settings.items():
                default = built.defaults.get(option, MISSING)
                if default is MISSING or isinstance(value, str) != isinstance(default, str):
                    raise UsageError(
                        f"`{option}` of {type(built).__name__} cannot differ between groups of parameters",
                        hints=[f"set optimizer.{option}, or give the group another `use`"],
                        key=f"{key}.{option}",
                    )


def _is_sure(component: Component, registry: Registry) -> bool:
    """True for an optimizer that takes the model, and for ddpforge's own.

    Except with nesterov and no momentum, which the signature of ddpforge's own allows.
    """
    if registry.takes("optimizer", component, "model"):
        return True
    entry, options = registry.find("optimizer", component.use), component.options
    is_own = entry is not None and entry.target.startswith("ddpforge.builtin.")
    return is_own and not (options.get("nesterov") and not options.get("momentum"))


def _small(key: str, component: Component, registry: Registry) -> Optimizer:
    """Builds an optimizer over one small parameter; raises UsageError if it could not train."""
    import torch

    group = {"params": [torch.nn.Parameter(torch.zeros(2, 2))]}
    try:
        optimizer = registry.build("optimizer", component, params=[group])
    except NotImported:
        raise
    except PluginError as error:
        raise UsageError(error.message, hints=error.hints, key=key) from error
    kind, use = type(optimizer).__name__, f'optimizer "{component.use}"'
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{use} returns a {kind}, not a torch.optim.Optimizer", key=f"{key}.use")
    if any(one is not group["params"][0] for settings in optimizer.param_groups for one in settings["params"]):
        raise UsageError(
            f"{use} updates other parameters than the model's, so the model would not change",
            hints=["use the argument of the function: lambda params: torch.optim.SGD(params, lr=0.1)"],
            key=f"{key}.use",
        )
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    if any(parameter.default is parameter.empty for parameter in parameters[:1]):
        raise UsageError(
            f"{use} computes the loss itself, several times a step, which ddpforge does not support",
            hints=['use = "lbfgs" is L-BFGS without a line search', "or use a first-order optimizer"],
            key=f"{key}.use",
        )
    settings: Any
    for settings in optimizer.param_groups:
        if "lr" in settings and not settings["lr"] > 0:
            raise UsageError(f"`{key}.lr` must be more than 0, not {float(settings['lr'])}", key=f"{key}.lr")
    return optimizer


def check_optimizers(chosen: Chosen) -> Errors:
    """Yields errors for several optimizers, or updates, under a strategy that supports one optimizer."""
    recipe = chosen.recipe
    if not chosen.trains or contract_of(chosen.strategy).optimizers != "one":
        return
    for name, group in recipe.optimizer.groups.items():
        if group.use != recipe.optimizer.use:
            yield UsageError(
                f'strategy.use = "{recipe.strategy.use}" takes one optimizer; [optimizer.groups.{name}] has another',
                hints=[*_SEVERAL, "or remove its `use`: groups of one optimizer may have different settings"],
                key=f"optimizer.groups.{name}.use",
            )
    if recipe.optimizer.updates:
        yield UsageError(
            f'strategy.use = "{recipe.strategy.use}" makes one update a step, but [optimizer.updates] needs several',
            hints=_SEVERAL,
            key="optimizer.updates",
        )


def check_updates(chosen: Chosen) -> Errors:
    """Yields errors for updates of the recipe that the task does not have, and updates of the task without a table."""
    updates, given = update_names(chosen.task), chosen.recipe.optimizer.updates
    if updates and not accepts_update(chosen.task):
        raise PluginError(
            f"{component_name(chosen.task)} has the updates {', '.join(updates)}, but its `loss` takes no update",
            hints=['def loss(self, model, batch, update: str = "")'],
        )
    there = [f"it has {', '.join(updates)}"] if updates else ["it makes one update a step: remove [optimizer.updates]"]
    for name in given.keys() - set(updates):
        yield UsageError(
            f"the task `{chosen.recipe.task.use}` has no update `{name}`",
            hints=[*did_you_mean(name, updates), *there],
            key=f"optimizer.updates.{name}",
        )
    for name in [update for update in updates if update not in given and chosen.trains]:
        yield UsageError(
            f"[optimizer.updates.{name}] is missing: the task makes an update of that name in every step",
            hints=[f"add it; if it is empty, it is like [optimizer] and trains `{name}.*`"],
            key="optimizer",
        )


# ---------------------------------------------------------------------------------------------- [task] and metrics
def check_metrics(chosen: Chosen) -> None:
    """Raises PluginError for a metric that is not a mean, and that the task does not report."""
    for component in _metrics(chosen.recipe.task):
        metric = build(chosen.registry, "metric", component)
        if type(metric).finish is not Metric.finish and metric.name not in chosen.task.reports:
            raise PluginError(
                f"task `{chosen.recipe.task.use}` does not report {metric.name}, which is not a mean",
                hints=["in its constructor: self.reports = {metric.name: metric for metric in metrics}"],
            )


def _metrics(task: Component) -> Iterator[Nested]:
    """Yields the metrics that a recipe names for its task."""
    for value in task.options.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Nested) and one.kind == "metric":
                yield one


def check_metric_direction(chosen: Chosen) -> Errors:
    """Yields an error for a metric to keep the best checkpoints by, if the better direction is not known."""
    _ = chosen.task.reports  # a task that could not be built may declare it
    if chosen.trains and (metric := missing_direction(chosen.loaded)):
        yield UsageError(
            f'it is not known whether less or more of "{metric}" is better',
            hints=['add mode = "min" or mode = "max" to `checkpoint.keep`'],
            key="checkpoint.keep.monitor",
        )


def check_evaluation_loss(chosen: Chosen) -> Errors:
    """Yields errors for decisions by the loss of an evaluation that has none, and for an evaluation without metrics."""
    task, recipe = chosen.task, chosen.recipe
    sets = [f"eval/{name}/" if name else "eval/" for name in recipe.data.evaluations]
    if task.evaluation_loss or not sets or not chosen.trains:
        return
    why = f"{component_name(task)} has a loss only in training: an evaluation has none"
    reported = sorted(f"{prefix}{name}" for prefix in sets for name in task.reports)
    hints = [f"there are {', '.join(reported)}"] if reported else ['name metrics of the task: metrics = ["…"]']
    wanted = {f"callbacks.{name}.metric": str(getattr(one, "metric", "")) for name, one in chosen.callbacks.items()}
    for key, metric in {**wanted, "checkpoint.keep.monitor": recipe.checkpoint.keep.monitor or ""}.items():
        if any(re.fullmatch(rf"{re.escape(prefix)}loss(/.+)?", metric) for prefix in sets):
            yield UsageError(f"{why}, so nothing reports {metric}", hints=hints, key=key)
    others = overriding(chosen.callbacks, "while_evaluating")  # report metrics of their own
    if not reported and not others and type(task).__module__.startswith("ddpforge."):
        yield UsageError(
            f"{why}, and the task has no metrics to report",
            hints=[*hints, "or remove the section [data.eval]"],
            key="task",
        )


def check_fused_loss(chosen: Chosen) -> Errors:
    """Yields an error for a loss within the model's forward pass, under a strategy that splits forward passes."""
    recipe = chosen.recipe
    if chosen.task.loss_in_model and not contract_of(chosen.strategy).loss_in_model:
        yield UsageError(
            f'task.use = "{recipe.task.use}" computes its loss within the model\'s forward pass, but strategy.use = '
            f'"{recipe.strategy.use}" with its settings here splits forward passes',
            hints=[
                "remove task.loss_chunk",
                'or set strategy.use = "ddp", "fsdp" (without `tensor`) or "deepspeed"',
            ],
            key="task.loss_chunk" if "loss_chunk" in recipe.task.options else "task.use",
        )


def check_whole_batch(chosen: Chosen) -> Errors:
    """Yields errors for settings that split a rank's step into several passes, if the loss compares all samples."""
    task, train, data_ranks = chosen.task, chosen.recipe.train, chosen.data_ranks
    if not task.whole_batch:
        return
    why = f"{component_name(task)} compares all samples of a step with each other"
    if train.virtual_ranks:
        message = f"{why}, but `train.virtual_ranks` would compute each virtual rank separately"
        yield UsageError(message, hints=["remove it"], key="train.virtual_ranks")
    elif train.micro_batch and train.micro_batch * data_ranks < train.global_batch:
        yield UsageError(
            f"{why}, but `train.micro_batch` = {train.micro_batch} would cut it into "
            f"{train.global_batch // (train.micro_batch * data_ranks)} forward passes of each rank",
            hints=[f"remove it: {train.global_batch // data_ranks} on each rank", "or train on more ranks"],
            key="train.micro_batch",
        )
    if train.eval_batch:
        yield UsageError(
            f"{why}, {train.global_batch} at a time, but `train.eval_batch` would compare others in evaluations",
            hints=["remove it: an evaluation then uses batches of at most train.global_batch samples"],
            key="train.eval_batch",
        )


def check_max_tokens(chosen: Chosen) -> Errors:
    """Yields errors for a limit of tokens with a loss, a strategy or a compiler mode that needs fixed micro-batches."""
    train, recipe = chosen.recipe.train, chosen.recipe
    if train.max_tokens is None or not chosen.trains:
        return
    if chosen.task.whole_batch:
        yield UsageError(
            f"{component_name(chosen.task)} compares all samples of a step with each other, but `train.max_tokens` "
            "would cut it into several forward passes",
            hints=["remove it"],
            key="train.max_tokens",
        )
    if "steps" in contract_of(chosen.strategy).splits_forward:
        yield UsageError(
            f'strategy.use = "{recipe.strategy.use}" sends micro-batches of one shape between ranks, but those of '
            "`train.max_tokens` differ in the number of samples and in length",
            hints=["set train.micro_batch instead", 'or set strategy.use = "fsdp"'],
            key="train.max_tokens",
        )
    if train.uses_cuda_graphs:
        yield UsageError(
            f'train.compile = "{train.compile}" replays CUDA graphs of one shape, but micro-batches of '
            "`train.max_tokens` differ in the number of samples and in length",
            hints=['set train.compile = "default"'],
            key="train.compile",
        )
    if recipe.data.evaluations and train.eval_batch is None and train.micro_batch is None:
        yield UsageError(
            "`train.max_tokens` limits only training, and without `train.eval_batch` or `train.micro_batch` a forward "
            f"pass of an evaluation has {max(1, train.per_pass(chosen.data_ranks))} samples",
            hints=["set train.eval_batch, the samples of a forward pass at evaluation"],
            key="train.max_tokens",
        )


# ---------------------------------------------------------------------------------------------- [callbacks]
# Methods of callbacks in Lightning, transformers and Keras.
_OF_OTHERS = re.compile(
    "on_(train|epoch|batch|validation|val|test|predict|fit|sanity|before|after|exception|save|load|evaluate|pre|post"
    "|optimizer|substep|init|setup|advance|run|prediction)(_|$)"
)


def _check_method(name: str, callback: Callback, method: str) -> None:
    """Raises UsageError for a method `on_…` that nothing calls, or that does not accept the arguments of its calls."""
    of = f"callback `{name}`: {type(callback).__name__}.{method}"
    known = [one for one in vars(Callback) if one.startswith("on_")]
    if not callable(getattr(type(callback), method)):
        return  # a value or a property that happens to be named so
    if method not in known:
        near = get_close_matches(method, known, n=1, cutoff=0.4)
        if not (_OF_OTHERS.match(method) or get_close_matches(method, known, n=1, cutoff=0.8)):
            return  # a method of the callback's own
        hints = [*(f"did you mean `{one}`?" for one in near), f"methods: {', '.join(known)}"]
        raise UsageError(f"{of} is never called", hints=hints)
    arguments = list(inspect.signature(getattr(Callback, method)).parameters)[1:]
    try:
        inspect.signature(getattr(callback, method)).bind(*arguments)
    except TypeError as error:
        written = ", ".join(["self", *arguments])
        raise UsageError(f"{of} is called with {', '.join(arguments)}", hints=[f"def {method}({written})"]) from error
    except ValueError:  # a method without a signature
        return


def check_callbacks(chosen: Chosen) -> Errors:
    """Yields errors for callbacks of an older contract or that the strategy cannot serve, and for missing metrics."""
    contract = None if chosen.strategy is MISSING else contract_of(chosen.strategy)
    for name, callback in chosen.callbacks.items():
        try:
            check_callback(name, callback, contract, _CALLABLE, trains=chosen.trains)
            for method in (one for one in dir(type(callback)) if one.startswith("on_")):
                _check_method(name, callback, method)
        except ForgeError as error:
            error.key = f"callbacks.{name}"
            yield error
        if chosen.trains and chosen.recipe.train.eval_by == "follower" and overriding({name: callback}, "on_eval"):
            yield UsageError(
                "it needs the evaluations of the run, but another process evaluates",
                hints=['set train.eval_by = "run", or remove the callback'],
                key=f"callbacks.{name}",
            )
        metric = getattr(callback, "metric", "")
        if chosen.trains and not chosen.recipe.data.evaluations and str(metric).startswith("eval/"):
            yield UsageError(
                f"the run has no evaluation, so nothing reports {metric}",
                hints=["add a [data.eval]"],
                key=f"callbacks.{name}.metric",
            )


# ---------------------------------------------------------------------------------------------- [strategy]
def check_strategy(chosen: Chosen) -> Errors:
    """Yields the strategy's `unsupported` settings of the recipe as errors."""

    def unsupported(device: str) -> list[Unsupported]:
        return list(chosen.strategy.unsupported(chosen.recipe.train, chosen.ranks, device))

    given = chosen.device or chosen.recipe.train.device
    found = unsupported("cpu" if given == "auto" else given)
    if given == "auto" and found != unsupported("cuda"):
        found = unsupported(device_of(chosen))  # the device matters, and only torch detects a GPU
    for refusal in found:
        yield UsageError(refusal.message, hints=refusal.hints, key=refusal.key)


# ---------------------------------------------------------------------------------------------- [data] and weights
def check_stream(chosen: Chosen) -> Errors:
    """Yields errors for a sampler, and for lengths in epochs, if the class of the training data is a stream."""
    train = chosen.recipe.data.train
    if not isinstance(train, Component):
        return  # several sources are checked when they are built
    kind = chosen.registry.load("data", train.use, train.base) if chosen.trains else None
    if not inspect.isclass(kind) or not _are_streams(kind):
        return
    if chosen.recipe.data.sampler:
        yield no_sampler_of_streams(kind)
    if not hasattr(kind, "__len__"):
        found: list[UsageError] = []

        @contextmanager
        def collecting(*path: str) -> Iterator[None]:
            try:
                yield
            except UsageError as error:
                error.key = ".".join(path)
                found.append(error)

        RunPlan.of(chosen.recipe, plan_batch(chosen.recipe.train, 1), None, noting=collecting)
        yield from found


def _are_streams(kind: type) -> bool:
    """True if objects of this class are streams, see `data.is_stream`."""
    if not hasattr(kind, "__iter__") or not hasattr(kind, "__getitem__"):
        return hasattr(kind, "__iter__")
    from torch.utils.data import IterableDataset

    return issubclass(kind, IterableDataset)


def check_initial_weights(chosen: Chosen) -> None:
    """Raises UsageError if the run begins with initial weights that do not exist."""
    source = chosen.recipe.checkpoint.init_from
    if chosen.trains and source and not chosen.resumes:
        from ddpforge.training.initial_weights import find_initial

        find_initial(source)


CHECKS = (
    ("optimizer", check_optimizer_options),
    ("optimizer", check_optimizers),
    ("task", check_updates),
    ("task", check_metrics),
    ("checkpoint.keep.monitor", check_metric_direction),
    ("task", check_evaluation_loss),
    ("task", check_whole_batch),
    ("task", check_fused_loss),
    ("train.max_tokens", check_max_tokens),
    ("callbacks", check_callbacks),
    ("callbacks", check_corruption),
    ("train", check_device),
    ("train.compile", check_compile),
    ("train.fp8", check_float8),
    ("strategy", check_strategy),
    ("data.train", check_stream),
    ("checkpoint.init_from", check_initial_weights),
)
"""The checks of `Chosen`, each with the recipe's key of its errors."""
