"""Mistakes with components that are objects of Python: each is refused with what to give instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ddpforge.components.errors import UnknownComponent
from ddpforge.components.kinds import KINDS
from ddpforge.components.registry import Registry
from ddpforge.errors import UsageError

__all__ = [
    "check_list_of_callbacks",
    "check_named_data",
    "check_object",
    "is_function",
    "of_parameters",
]

_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def is_function(value: Any) -> bool:
    """True for a function, a class, or a `functools.partial`."""
    return isinstance(value, type | partial) or inspect.isroutine(value)


def _a(value: Any) -> str:
    return _with_article(type(value).__name__)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


# ---------------------------------------------------------------------------------------------- lists and dicts
def check_list_of_callbacks(callbacks: Any) -> None:
    """Raises UsageError for callbacks that are not in a list."""
    if isinstance(callbacks, list | tuple):
        return
    one = callbacks if isinstance(callbacks, type) else type(callbacks)
    hints = [f"callbacks=[{one.__name__}()]"]
    if isinstance(callbacks, str):
        hints = [_by_name("callbacks", "callback", callbacks, ("callbacks", callbacks))]
    elif isinstance(callbacks, dict):
        hints = ["callbacks=list(callbacks.values()): a callback is named by its class"]
    elif hasattr(callbacks, "__iter__") and not isinstance(callbacks, type):
        hints = ["callbacks=list(…)"]
    raise UsageError(f"callbacks is {_a(callbacks)}, not a list", hints=hints)


def check_named_data(argument: str, sources: dict[Any, Any]) -> None:
    """Raises UsageError for a dict that holds parts of samples, or the splits of one dataset, instead of datasets."""
    if all(map(_is_array, sources.values())):
        pairs = ", ".join(f"{argument}[{key!r}]" for key in sources)
        raise UsageError(
            f"{argument} is a dict of tensors; a dict has datasets by name",
            hints=[f"give one dataset: torch.utils.data.TensorDataset({pairs})"],
        )
    splits = [key for key in sources if key in _SPLITS] if argument == "train_data" else []
    if splits:  # as sources, samples for evaluation would be trained on
        raise UsageError(
            f"train_data is a dict with the split {splits[0]!r}; a dict has sources that are all trained on",
            hints=[f"give one split: train_data=datasets[{splits[0]!r}], eval_data=…", "or give sources other names"],
        )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "columns")


# ---------------------------------------------------------------------------------------------- objects
def check_object(argument: str, kind: str, value: Any, path: tuple[str, ...]) -> None:
    """Raises UsageError for an object of another kind, with what to give instead; `path` is its table in the recipe."""
    import torch

    if isinstance(value, str):
        raise UsageError(
            f"{argument} is the text {value!r}, not an object", hints=[_by_name(argument, kind, value, path)]
        )
    if isinstance(value, torch.utils.data.DataLoader):
        hints = [
            f"give its dataset: {argument}=loader.dataset",
            "the recipe sets the batch size (train.global_batch), the order ([data.sampler]) and data.workers",
            "a `collate_fn` is a method `collate(samples)` of the dataset",
        ]
        raise UsageError(f"{argument} is a DataLoader, which ddpforge makes itself", hints=hints)
    if isinstance(value, torch.optim.Optimizer):
        raise UsageError(
            f"{argument} is an optimizer that was built already; ddpforge builds it over the parameters of each rank",
            hints=["give a function: optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)", "or write [optimizer]"],
        )
    if kind in _OF_KIND:
        _OF_KIND[kind](argument, value)
    if KINDS[kind].mismatch(value) is None or (is_function(value) and kind != "schedule"):
        return
    if kind == "task" and isinstance(value, torch.nn.Module) and hasattr(value, "reduction"):
        return
    noun = _with_article(KINDS[kind].noun or kind)
    raise UsageError(f"{argument} is {_a(value)}, not {noun}", hints=list(_instead(argument, kind, value)))


def _by_name(argument: str, kind: str, name: str, path: tuple[str, ...]) -> str:
    """Returns how a recipe names a component; for data, a text that is not a name is probably a path."""
    at = ".".join(path)
    try:
        Registry.installed().find(kind, name)
    except UnknownComponent as error:
        if kind == "data":
            return f"a path is an option in the recipe: {{'{at}': {{'use': 'csv', 'path': {name!r}, …}}}}"
        near = next((hint for hint in error.hints if hint.startswith("did you mean")), "")
        meant = near.split("`")[1] if near else name
        return f"write the name in the recipe: {{'{at}.use': {meant!r}}}" + (f" ({near})" if near else "")
    return f"write the name in the recipe: {{'{at}.use': {name!r}}}"


_EXPECTED = {
    "model": "a torch.nn.Module",
    "task": "a ddpforge.interfaces.Task, a function of outputs and targets, or a loss of torch such as nn.MSELoss()",
    "data": "a dataset: an object with __len__ and __getitem__, or with __iter__",
    "optimizer": "a function of the parameters, e.g. functools.partial(torch.optim.AdamW, lr=1e-3)",
    "schedule": "a function of the step that returns the factor of the learning rate, e.g. lambda step: 0.99**step",
    "sampler": "a ddpforge.interfaces.BatchSampler",
    "callback": "an object of a class that derives from ddpforge.interfaces.Callback",
}
_FOREIGN = {
    "transformers": "Transformers",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "keras": "Keras",
}


def _instead(argument: str, kind: str, value: Any) -> Iterator[str]:
    """Yields what to give instead of an object of another kind."""
    origin = type(value).__module__.partition(".")[0]
    if isinstance(value, dict) and "use" in value:
        yield f"name it in the recipe: {{**recipe, {argument!r}: {{…}}}}"
    elif kind == "callback" and origin in _FOREIGN:
        yield f"it is a callback of {_FOREIGN[origin]}: the recipe has {{'callbacks.early_stopping': {{…}}}} and others"
    elif kind == "callback" and isinstance(value, list | tuple):
        yield "give one list: callbacks=[…, …]"
    elif kind == "sampler" and hasattr(value, "__iter__"):
        yield "name the order in the recipe: {'data.sampler.use': 'shuffled'}, or 'weighted', 'balanced', 'sequential'"
    elif kind == "model" and isinstance(value, dict):
        yield "for weights, give the module, and load them before: model.load_state_dict(…)"
    elif kind == "model" and hasattr(value, "__fspath__"):
        yield "build the model; its weights are checkpoint.init_from in the recipe"
    elif kind == "data" and hasattr(value, "__fspath__"):
        yield f"name the dataset in the recipe: {{'data.train': {{'use': 'csv', 'path': {str(value)!r}, …}}}}"
    elif isinstance(value, dict):
        yield f"options of a component are in the recipe: {{{argument!r}: {{'use': …}}}}"
    yield f"give {_EXPECTED.get(kind, _with_article(KINDS[kind].noun or kind))}, or a function that returns one"


# ---------------------------------------------------------------------------------------------- by kind
def _check_model(argument: str, model: Any) -> None:
    import torch

    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise UsageError(f"model is wrapped in {type(model).__name__}", hints=["give model.module: ddpforge wraps it"])
    if inspect.isbuiltin(model):
        raise UsageError(f"model is the function {model.__name__}, not a model", hints=["give a torch.nn.Module"])
    if not isinstance(model, torch.nn.Module):
        return
    away = next((one for one in model.parameters() if one.device.type != "cpu"), None)
    if away is not None and away.is_meta:
        raise UsageError(
            "model is on the meta device, so it has no weights",
            hints=["build it on the CPU", "or give its class or a function: the strategy builds it on each rank"],
        )
    if away is not None:
        raise UsageError(
            f"model is on {away.device}, but ddpforge moves a model from the CPU to the device of its rank",
            hints=["give the model before model.to(…); train.device sets the device"],
        )


def _check_data(argument: str, value: Any) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    if isinstance(value, dict):
        raise UsageError(
            f"{argument} is a dict, not a dataset" if value else f"{argument} is an empty dict",
            hints=["give a dataset, or a dict of datasets by name"],
        )
    if type(value).__module__.partition(".")[0] in ("pandas", "polars"):
        rows = "torch.tensor(frame[[…]].values, dtype=torch.float32), torch.tensor(frame['label'].values)"
        raise UsageError(
            f"{argument} is a {type(value).__name__} of {type(value).__module__.partition('.')[0]}, not a dataset",
            hints=[f"give torch.utils.data.TensorDataset({rows})", 'or write it as CSV, and name it: use = "csv"'],
        )
    if type(value).__module__ == "builtins" and hasattr(value, "__next__"):
        raise UsageError(
            f"{argument} is {_a(value)}, which gives its samples only once; each epoch and evaluation reads all",
            hints=["give a list of the samples, or an object whose `__iter__` begins again"],
        )
    if value is TensorDataset:
        raise UsageError(f"{argument} is the class TensorDataset", hints=["give an instance: TensorDataset(inputs, …)"])
    if not isinstance(value, list | tuple) or not value:
        return
    if isinstance(value, tuple) and all(_is_array(one) and one.ndim for one in value):
        hints = [f"give one dataset of them: torch.utils.data.TensorDataset(*map(torch.as_tensor, {argument}))"]
        raise UsageError(f"{argument} is a tuple of tensors, not a dataset", hints=hints)
    if all(hasattr(one, "__getitem__") and hasattr(one, "__len__") and not _is_sample(one) for one in value):
        hints = [f"give a dict by name: {argument}={{'one': …, 'two': …}}"]
        raise UsageError(f"{argument} is a {type(value).__name__} of datasets", hints=hints)
    if any(isinstance(one, DataLoader) for one in value):
        hints = [f"give their datasets by name: {argument}={{'one': loader.dataset, …}}"]
        raise UsageError(f"{argument} holds a DataLoader, which ddpforge makes itself", hints=hints)


def _is_sample(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | str | bytes) or _is_array(value)


def _check_schedule(argument: str, value: Any) -> None:
    from torch.optim.lr_scheduler import LRScheduler

    made = getattr(value, "func", value)
    if isinstance(value, LRScheduler) or (isinstance(made, type) and issubclass(made, LRScheduler)):
        name = made.__name__ if isinstance(made, type) else type(value).__name__
        raise UsageError(
            f"schedule is the scheduler {name} of torch, which needs an optimizer that ddpforge builds itself",
            hints=[
                "name a schedule in the recipe: {'schedule.use': 'cosine'}, or 'step', 'linear' and others",
                f"or give {_EXPECTED['schedule']}",
            ],
        )


def _check_optimizer(argument: str, value: Any) -> None:
    import torch

    named = getattr(value, "func", None)
    if isinstance(named, type) and issubclass(named, torch.optim.Optimizer) and value.args:
        raise UsageError(
            "optimizer is a partial function that has its parameters already; ddpforge gives it those of each rank",
            hints=[f"leave them out: functools.partial({named.__name__}, lr=…)"],
        )
    if is_function(value):
        of_parameters(value)


def of_parameters(value: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of an optimizer's function; raises UsageError if it cannot be called with the model's."""
    try:
        found = list(inspect.signature(value).parameters.values())
    except ValueError as error:
        found = []
        if "incorrect arguments" in str(error):
            options = ", ".join(value.keywords)  # type: ignore[attr-defined]  # only a partial function
            named = value.func.__name__  # type: ignore[attr-defined]
            raise UsageError(
                f"optimizer: {named} does not accept {options}", hints=[f"see the options of torch's {named}"]
            ) from error
    if not found:
        hints = ["give one of the model's parameters: lambda params: torch.optim.SGD(params, lr=0.1)"]
        raise UsageError("optimizer is a function without an argument", hints=hints)
    return found


def _check_task(argument: str, value: Any) -> None:
    if isinstance(value, type) and value.__module__ == "torch.nn.modules.loss":
        hints = [f"give an instance: task=nn.{value.__name__}()"]
        raise UsageError(f"task is the class {value.__name__}, not a loss", hints=hints)
    if inspect.isfunction(value):
        needed = _needed(value)
        if (needed and len(needed) != 2) or needed[:1] == ["model"]:
            raise UsageError(
                f"task is a function of {', '.join(needed)}; a loss has two arguments, the outputs and the targets",
                hints=["for a loss that calls the model, derive a class from ddpforge.interfaces.Task"],
            )


def _check_callback(argument: str, value: Any) -> None:
    if inspect.isfunction(value) and _needed(value):
        raise UsageError(
            f"callbacks has a function of {', '.join(_needed(value))}, not a callback",
            hints=["derive a class from ddpforge.interfaces.Callback, with a method such as `on_step(self, info)`"],
        )


def _check_sampler(argument: str, value: Any) -> None:
    from torch.utils.data import Sampler

    if isinstance(value, type) and issubclass(value, Sampler):
        raise UsageError(
            f"sampler is the class {value.__name__} of torch, which is not used",
            hints=list(_instead(argument, "sampler", [])),
        )


def _check_strategy(argument: str, value: Any) -> None:
    if isinstance(value, type) and value.__module__.startswith("torch."):
        name = "fsdp" if "FullySharded" in value.__name__ else "ddp"
        raise UsageError(
            f"strategy is the class {value.__name__} of torch, which ddpforge applies itself",
            hints=[f"name the strategy in the recipe: {{'strategy.use': '{name}'}}"],
        )


def _needed(function: Any) -> list[str]:
    """Returns the names of the parameters without a default."""
    found = inspect.signature(function).parameters.items()
    return [name for name, one in found if one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD]


_OF_KIND: dict[str, Callable[[str, Any], None]] = {
    "model": _check_model,
    "data": _check_data,
    "schedule": _check_schedule,
    "optimizer": _check_optimizer,
    "task": _check_task,
    "callback": _check_callback,
    "sampler": _check_sampler,
    "strategy": _check_strategy,
}
