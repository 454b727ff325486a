"""Mistakes in calls of the Python API: wrong arguments, and errors that are raised to the caller's script."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ddpforge.components.errors import outside
from ddpforge.errors import ForgeError, UsageError
from ddpforge.recipe.vocabulary import Vocabulary, foreign_keys

__all__ = ["public", "unknown_argument"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


# ---------------------------------------------------------------------------------------------- calls
def public(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function one of the Python API: wrong arguments and errors are explained in terms of the caller's script.

    Wrong arguments raise UsageError with the call to write. The traceback of an error has no frames of ddpforge between
    the script and the code of a component; an error that began in ddpforge itself keeps all of them.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _wrong_call(function.__name__, signature, args, str(error)) from None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _shorten(error)
            raise

    return call


def _shorten(error: BaseException) -> None:
    """Removes ddpforge's frames from the traceback of an error and of its causes, down to the code of a component."""
    while True:
        found = outside(error)
        if isinstance(error, ForgeError) or found:
            error.__traceback__ = found if not isinstance(error, ForgeError) else None
        cause = error.__cause__
        if cause is None:
            return
        if outside(cause) is None:
            error.__cause__ = None  # an internal error that this one explains
            return
        error = cause


def _wrong_call(name: str, signature: inspect.Signature, args: Sequence[Any], problem: str) -> UsageError:
    """Returns the error for a call that does not fit the signature, with the call to write."""
    plain = [one for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    needed = [one.name for one in plain]
    written = ", ".join([*needed, *(_named(name, one) for one in args[len(needed) :])])
    if len(args) > len(needed):
        others = ", ".join(_described(one) for one in args[len(needed) :])
        alone = " and ".join(needed)
        message = f"{name}() takes only {alone} without a name, and was given {others}, too"
    else:
        message = f"{name}(): {problem}"
        written += ", model=…" if name in ("train", "launch") else ""
    first = ["the recipe comes first"] if any(isinstance(one, Mapping) for one in args[len(needed) :]) else []
    return UsageError(message, hints=[*first, f"write ddpforge.{name}({written})"])


def _described(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else f"an object of {type(value).__name__}"


def _named(function: str, value: Any) -> str:
    """Returns a value with the name of the argument that it probably is."""
    from torch import nn

    if isinstance(value, bool | int | str):
        known = function in ("evaluate", "predict", "load")
        return f"checkpoint={value!r}" if known else f"nproc={value!r}" if type(value) is int else f"NAME={value!r}"
    if isinstance(value, nn.Module):
        return "task=…" if hasattr(value, "reduction") else "model=…"
    if isinstance(value, Mapping):
        return "…"
    if isinstance(value, type):
        return "model=…" if issubclass(value, nn.Module) else f"NAME={value.__name__}"
    return "train_data=…" if hasattr(value, "__getitem__") or hasattr(value, "__iter__") else "NAME=…"


# ---------------------------------------------------------------------------------------------- names of arguments
_COLLATE = "give the dataset a method `collate(samples)`, which makes a batch"
_ARGUMENTS = {
    "model=…": "network net module model_init",
    "task=…": "loss loss_fn loss_function criterion objective",
    "train_data=…": "train_dataset dataset data train_ds trainset train_set training_data train_loader "
    "train_dataloader train_dataloaders dataloader x y",
    "eval_data=…": "eval_dataset val_dataset valid_dataset test_dataset validation_dataset val_data valid_data "
    "test_data validation_data val_loader val_dataloader val_dataloaders eval_dataloader eval_ds val_ds",
    "optimizer=…, a function of the parameters": "optim opt optimizers optimizer_cls",
    "schedule=…, a function of the step": "scheduler lr_scheduler lr_schedule",
    "a list: callbacks=[…]": "callback hooks",
    "strategy=…, or name it in the recipe: {'strategy.use': 'fsdp'}": "strategy_name distributed parallel",
    "out=…": "output_dir out_dir outdir save_dir log_dir logdir default_root_dir output",
    "sets=[…], such as 'optimizer.lr=1e-3'": "set overrides override opts",
    "fresh=True": "overwrite overwrite_output_dir restart",
    "profile='20..25'": "profiler profile_steps",
}
_HINTS = {
    "the first argument is the recipe: a file, or a dict": "args training_args config cfg hparams trainer settings",
    "name metrics in the recipe: {'task.metrics': ['accuracy']}": "metrics metric compute_metrics",
    "trackers are tables of the recipe: {'track.wandb.project': 'mine'}": "logger loggers tracker trackers log_with "
    "wandb report_to",
    _COLLATE: "collate_fn data_collator collator",
    "the dataset tokenizes: ddpforge-transformers has such datasets": "tokenizer processing_class processor",
    "ddpforge.launch(recipe, nproc=2, …) starts processes, and so does torchrun": "nproc nproc_per_node num_processes "
    "gpus devices num_gpus n_gpus world_size ranks num_nodes nodes",
    "the same call resumes a stopped run; fresh=True starts from scratch": "resume resume_from_checkpoint resume_from",
    "set checkpoint.init_from in the recipe to begin with the weights of a file": "checkpoint ckpt_path ckpt weights "
    "checkpoint_path init_from load_from",
    "set train.device in the recipe, or for a trained model ddpforge.load(…).model(device=…)": "device accelerator",
    'a LightningDataModule is named in the recipe: use = "lightning" in [data.train]': "datamodule data_module",
    "a part of a dataset is a dataset: {'data.eval': {'use': 'part', …}}": "validation_split val_split test_size",
    "the data is shuffled, unless the recipe has [data.sampler]": "shuffle",
    "ddpforge run RECIPE --dry-run 5 tries some steps": "dry_run fast_dev_run",
    "progress and metrics are logged; in a notebook, a callback has them live": "verbose progress enable_progress_bar",
    'checkpoint=STEP or checkpoint="best" chooses a checkpoint of `load`, `evaluate` and `predict`': "step best",
    "predict(…, data=['eval']) and evaluate(…, only=['NAME']) choose a dataset of the run": "split dataset_name subset",
    "TrainedRun.model(device=…) moves a loaded model": "map_location",
}


def unknown_argument(name: str, value: Any, objects: Sequence[str]) -> UsageError:
    """Returns the error for an argument that a run does not have, with what to write instead."""
    hints = [f"give {way}" for way, names in _ARGUMENTS.items() if name in names.split()]
    hints += [way for way, names in _HINTS.items() if name in names.split()]
    hints = hints or list(_of_recipe(name, value))
    return UsageError(f"a run has no argument `{name}`", hints=[*hints, f"objects: {', '.join(objects)}"])


def _of_recipe(name: str, value: Any) -> Iterator[str]:
    """Yields the key of the recipe that has the meaning of an argument."""
    plain = value if isinstance(value, bool | int | float | str) else None
    if name == "batch_size":
        yield f"set train.global_batch = {plain or 64} in the recipe: the samples of a step, over all ranks"
        yield "train.eval_batch is the size of a batch in evaluations"
    elif foreign := foreign_keys().get(name.lower()):
        written = foreign.of(name, plain)
        section = "".join(f"{part}." for part in foreign.path[:-1])
        yield f"set {section}{written.split('`')[1]} in the recipe" if foreign.text else written
    elif name in ("lr", "weight_decay", "momentum", "betas", "eps"):
        yield f"set optimizer.{name}{f' = {plain}' * bool(plain)} in the recipe"
    else:
        vocabulary = Vocabulary()
        for table in vocabulary.models:
            if name in vocabulary.keys(table):
                yield f"set {'.'.join(map(str, (*table, name)))} in the recipe"
