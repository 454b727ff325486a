"""Python API in addition to `run`: launch, evaluate, predict, load. One process may call them any number of times."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ddpforge.app import evaluate as evaluation
from ddpforge.app.attempt import Outcome
from ddpforge.app.build import WEIGHTS, build_dataset
from ddpforge.app.choose import TEACHERS
from ddpforge.app.generation import Sampling, answers, check_language, generate
from ddpforge.app.objects import GivenObjects, Objects
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.schema import omits_weights
from ddpforge.checkpoint.weights_file import chosen_weights
from ddpforge.components.attributes import missing_attribute
from ddpforge.components.options import Nested
from ddpforge.components.registry import Registry, build
from ddpforge.data import RankShare, mix
from ddpforge.data.collating import BatchKeys
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import CheckpointError, ExitCode, ForgeError, UsageError, says_memory_is_full
from ddpforge.features.frozen_dtype import cast_weights
from ddpforge.features.frozen_weights import verify_frozen
from ddpforge.interfaces import SavedTensor, Task
from ddpforge.launchers.local import LaunchSpec, prepare_launch
from ddpforge.ranks.collectives import SingleRank
from ddpforge.recipe import LoadedRecipe, Recipe, load_recipe
from ddpforge.recipe.call_mistakes import public
from ddpforge.recipe.load import as_toml, raise_no_recipe, reject_text
from ddpforge.runs.checkpoints import choose, is_checkpoint
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import read_metrics
from ddpforge.strategies.named_state import tensors
from ddpforge.training.initial_weights import load_initial
from ddpforge.training.loaders import open_data
from ddpforge.training.parameter_groups import freeze
from ddpforge.training.stages import key_of, source_components

__all__ = ["TrainedRun", "evaluate", "launch", "load", "predict"]

# The newest intact checkpoint, the best by `checkpoint.keep.monitor`, or the checkpoint of a step.
_Checkpoint = Literal["newest", "best"] | int


@public
def launch(
    recipe: str | Path | Mapping[str, Any] | LoadedRecipe,
    *,
    nproc: int | None = None,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
    max_time: str | None = None,
    max_restarts: int | None = None,
    profile: str | None = None,
    **objects: Unpack[Objects],
) -> Outcome:
    """Trains a recipe in `nproc` processes of this machine, as `ddpforge launch` does; returns its outcome.

    The default `nproc` is the number of GPUs, or 1. The processes are new, so `objects` (see `ddpforge.train`) must be
    classes or functions that they can import; the recipe sets their options. For the other arguments see
    `ddpforge.run`. A failed run also returns an outcome: its `exit_code` is not 0 and `status["error"]` is the cause.
    The processes import the modules of the objects from the same folders as this one.
    Raises ForgeError if the run ended before training; the ranks print the cause on stderr.
    """
    if nproc is not None and (not isinstance(nproc, int) or nproc < 1):
        raise UsageError(f"nproc={nproc!r}: expected 1 process or more", hints=["omit it for one process per GPU"])
    given = GivenObjects.of(objects)
    by_reference = given.references()
    with _recipe_file(recipe) as file:
        start = prepare_launch(
            file,
            LaunchSpec(nproc, max_restarts=max_restarts),
            sets=[*by_reference, *sets],
            out=None if out is None else str(out),
            fresh=fresh,
            allow_change=allow_change,
            max_time=max_time,
            profile=profile,
        )
        if folders := given.import_folders():
            paths = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
            start = replace(start, variables={**start.variables, "PYTHONPATH": paths})
        before = start.folder.status_version()
        started = start.run()
    if started.unreported and not started.folder.exists():
        raise started.unreported
    if started.ended.code and started.folder.status_version() == before:
        error = ForgeError(
            f"the ranks ended with exit code {started.ended.code} before training; see their messages on stderr"
        )
        known = {int(code): code for code in ExitCode}
        error.exit_code = known.get(started.ended.code, ExitCode.FAILED)
        raise error
    status = started.folder.status()
    assert status is not None  # a run that has trained has one
    return Outcome(started.folder.path, status, is_rank_zero=True)


@contextmanager
def _recipe_file(recipe: str | Path | Mapping[str, Any] | LoadedRecipe) -> Iterator[str]:
    """Yields the file or name of a recipe; a dict or a loaded recipe gets a file in this folder while the ranks run."""
    if isinstance(recipe, str | Path):
        yield str(recipe)
        return
    if isinstance(recipe, LoadedRecipe):
        text = recipe.dumps({file: os.path.relpath(file) for file in recipe.local_files()})
    elif isinstance(recipe, Mapping):
        text = as_toml(recipe)
    else:
        raise_no_recipe(recipe)
    with NamedTemporaryFile("w", dir=".", prefix=".recipe-", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield f"./{Path(file.name).name}"


@public
def evaluate(
    run: str | Path,
    *,
    checkpoint: _Checkpoint = "newest",
    sets: Sequence[str] = (),
    only: Sequence[str] = (),
    **objects: Unpack[Objects],
) -> evaluation.Evaluation:
    """Evaluates a checkpoint of a run, as `ddpforge eval` does. Call it on every rank.

    `run` is the run's folder, or its name in runs/. `checkpoint` is "newest", "best" or a step. A run of
    `ddpforge.train` needs the same objects again: `model`, `task`, `eval_data`, `callbacks`. For the other arguments
    see `ddpforge.app.evaluate.evaluate`. Raises ForgeError.
    """
    registry, folder = GivenObjects.of(objects).registry(), RunFolder.find(_place(run))
    return evaluation.evaluate(folder, **_chosen(checkpoint), sets=sets, only=only, registry=registry)


@public
def predict(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: _Checkpoint = "newest",
    weights: str | None = None,
    data: Sequence[str] = (),
    sets: Sequence[str] = (),
    limit: int | None = None,
    force: bool = False,
    **objects: Unpack[Objects],
) -> evaluation.Prediction:
    """Writes a run's predictions for a dataset to `out`, as `ddpforge predict` does. Call it on every rank.

    `run` is the run's folder, or its name in runs/. `out` is a .jsonl or .parquet file. A run of `ddpforge.train` needs
    the same objects again. For the other arguments see `ddpforge.app.evaluate.predict`. Raises ForgeError.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit}: expected 1 sample or more", hints=["omit it for all samples"])
    given: Any = out
    if not isinstance(given, str | Path):
        hints = ["to predict new inputs: ddpforge.load(run, …).model()(inputs)"]
        raise UsageError(f"out is a {type(out).__name__}, not the path of a file for the predictions", hints=hints)
    reject_text("data", data)
    return evaluation.predict(
        RunFolder.find(_place(run)),
        Path(out),
        **_chosen(checkpoint),
        weights=weights,
        data=data,
        sets=sets,
        limit=limit,
        force=force,
        registry=GivenObjects.of(objects).registry(),
    )


@public
def load(
    run: str | Path,
    *,
    checkpoint: _Checkpoint = "newest",
    weights: str | None = None,
    **objects: Unpack[Objects],
) -> TrainedRun:
    """Opens a trained run.

    Args:
        run: the run's folder, its name in runs/, or the folder of one of its checkpoints.
        checkpoint: "newest" (the newest intact checkpoint), "best", or a step. Only for a run.
        weights: "model", or the name of a callback that keeps its own weights. Default: the weights that evaluations
            use. These are the averages of `ema` if the recipe evaluates them.
        objects: the objects of a run of `ddpforge.train` that are used, e.g. `model=Net()`, which gets the weights.

    Raises UsageError if there is no such checkpoint, or no such weights.
    """
    registry, path = GivenObjects.of(objects).registry(), Path(_place(run))
    if not is_checkpoint(path):
        folder = RunFolder.find(str(run))
        return _opened(folder, choose(folder, **_chosen(checkpoint)), weights, registry)
    if checkpoint != "newest":
        raise UsageError(f"{run} is a checkpoint; checkpoint={checkpoint!r} is only for a run's folder")
    folder = RunFolder(path.resolve().parents[1])
    if not folder.exists():
        raise UsageError(f"{run} is not in a run's folder; the recipe in that folder is needed to build the model")
    return _opened(folder, path, weights, registry)


def _place(run: Any) -> str:
    """Returns the path or the name of a run; raises UsageError for another object."""
    if isinstance(run, str | Path):
        return str(run)
    hints = ["give outcome.folder"] if isinstance(run, Outcome) else ["give its folder, or its name in runs/"]
    raise UsageError(
        f"run is {'an' if isinstance(run, Outcome) else 'a'} {type(run).__name__}, not a path", hints=hints
    )


def _components(registry: Registry, kind: str, component: Any) -> Iterator[Any]:
    """Yields the class or function of a component, and of components of its kind in its options."""
    yield registry.load(kind, component.use, component.base)
    for option in component.options.values():
        if isinstance(option, Nested) and option.kind == kind:
            yield from _components(registry, kind, option)


def _opened(folder: RunFolder, checkpoint: Path, weights: str | None, registry: Registry) -> TrainedRun:
    found = TrainedRun(folder, checkpoint, weights, registry)
    chosen_weights(found._reader, found.weights)  # raises if there are no such weights
    return found


class _Choice(TypedDict):
    step: int | None
    best: bool


def _chosen(checkpoint: _Checkpoint) -> _Choice:
    if isinstance(checkpoint, int) and not isinstance(checkpoint, bool):
        return {"step": checkpoint, "best": False}
    if checkpoint not in ("newest", "best"):
        raise UsageError(f'checkpoint={checkpoint!r}: expected "newest", "best" or the number of a step')
    return {"step": None, "best": checkpoint == "best"}


@dataclass(frozen=True)
class TrainedRun:
    """Trained run: its folder, one of its checkpoints, and the name of the chosen weights in that checkpoint."""

    folder: RunFolder
    checkpoint: Path
    chosen: str | None = None
    registry: Registry = field(default_factory=Registry.installed, repr=False)  # the components of its recipe
    if not TYPE_CHECKING:
        __getattr__ = missing_attribute

    @cached_property
    def _reader(self) -> CheckpointReader:
        return CheckpointReader(self.checkpoint)

    @property
    def step(self) -> int:
        """Returns the step after which the checkpoint was saved."""
        return self._reader.metadata.step

    @cached_property
    def recipe(self) -> Recipe:
        """Returns the recipe of the run's last attempt, with every default."""
        self.folder.reject_odd()
        return load_recipe(self.folder.resolved, registry=self.registry).recipe

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of `metrics.jsonl`, one a step: training and evaluation."""
        return read_metrics(self.folder.path)

    def model(self, *, device: str | torch.device = "cpu") -> nn.Module:
        """Returns the bare model with the checkpoint's weights, in evaluation mode. It computes as in training.

        Does not change the global RNG state. Raises CheckpointError if the weights do not fit the model.
        """
        model = self.bare()
        model.load_state_dict(self._state(model), strict=True)
        try:
            return model.to(device).eval()
        except (RuntimeError, AssertionError) as error:
            if says_memory_is_full(error) or str(device) == "cpu":
                raise
            first = str(error).splitlines()[0][:200]
            raise UsageError(
                f"device={str(device)!r}: {first}", hints=['expected "cpu", "cuda" or "cuda:1"']
            ) from error

    def bare(self) -> nn.Module:
        """Returns the model with its initial weights, as at the start of the run."""
        with isolated_rng():
            # Weights that the checkpoint omits may come from this seed.
            torch.manual_seed(mix(self.recipe.train.seed, WEIGHTS))
            model: nn.Module = build(self.registry, "model", self.recipe.model)
            train = self.recipe.train
            if train.frozen_dtype is not None or getattr(model, "keeps_saved_dtype", False):
                freeze(model, train.freeze)
                cast_weights(model, train.frozen_dtype)
        return model

    def batch(self, samples: int, name: str | None = None) -> Any:
        """Returns the first `samples` samples of a dataset, collated; for `name` see `data`."""
        data = self.data(name)
        share = RankShare(0, 1, samples)
        fetching: dict[str, Any] = {"seed": self.recipe.train.seed, "workers": 0, "prefetch": 2, "pin": False}
        fetching["keys"] = BatchKeys.of(self.recipe.data)
        batches = open_data(data, global_batch=samples, share=share, drop_last=False, **fetching)
        with isolated_rng():
            return next(iter(batches.evaluation())).data

    def task(self) -> Task:
        """Builds the recipe's task, as evaluations do. Call its `start` if it uses the model or the ranks."""
        with isolated_rng():
            torch.manual_seed(mix(self.recipe.train.seed, TEACHERS))
            found: Task = build(self.registry, "task", self.recipe.task)
        return found

    def data(self, name: str | None = None) -> Any:
        """Builds a dataset of the recipe: "train", "train.NAME", "eval" or "eval.NAME".

        The default is the first evaluation set, or the training data if there is none. Raises UsageError for any other
        name.
        """
        evaluations = {key_of(name): component for name, component in self.recipe.data.evaluations.items()}
        components = source_components(self.recipe) | evaluations
        name = name or next(iter(evaluations or components))
        if name not in components:
            raise UsageError(f"{self.folder.path} has no data {name!r}", hints=[f"one of {', '.join(components)}"])
        return build_dataset(self.registry, components[name], self.recipe.train.seed)

    def data_with(self, attribute: str) -> Any:
        """Returns the first dataset of `data` that has the attribute, evaluation sets first; None if none has it."""
        names = [key_of(name) for name in self.recipe.data.evaluations]
        for name in (*names, *source_components(self.recipe)):
            if getattr(data := self.data(name), attribute, None) is not None:
                return data
        return None

    @property
    def export_format(self) -> str:
        """Returns the attribute `export_format` of the model's component, or of a model in its options.

        It is the format in which `ddpforge export` writes the model to a folder: "safetensors", the default, is only
        the weights; "transformers" includes configurations and tokenizer. Imports the components, and builds nothing.
        """
        found = {getattr(one, "export_format", None) for one in _components(self.registry, "model", self.recipe.model)}
        return "transformers" if "transformers" in found else "safetensors"

    def generate(
        self,
        *prompts: str,
        tokens: int = 200,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> list[str]:
        """Returns the text that a language model generates after each prompt, with the tokenizer of its data.

        For the sampling arguments see `generation.Sampling`. Raises UsageError if the run's task is not next-token
        prediction, or if the data cannot encode a prompt.
        """
        how = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed)
        return list(self.texts(prompts, how, device=device))

    def texts(
        self,
        prompts: Sequence[str],
        how: Sampling,
        *,
        device: str | torch.device = "cpu",
    ) -> Iterator[str]:
        """Yields the texts of `generate` one by one, each as soon as it is complete."""
        data = self.data()
        check_language(self.task(), data)
        yield from generate(self.model(device=device), data, prompts, how)

    def answers(
        self,
        turns: Iterable[str],
        how: Sampling,
        *,
        system: str | None = None,
        images: Sequence[str] = (),
        device: str | torch.device = "cpu",
    ) -> Iterator[str]:
        """Yields the answer to each of the user's turns of a chat, rendered with the chat template of the data.

        `images` are files of the first turn. Raises UsageError if the run's task is not next-token prediction, or if
        its data has no chat template, or no images.
        """
        data = self.data()
        check_language(self.task(), data)
        yield from answers(self.model(device=device), data, turns, how, system=system, images=images)

    def lm_eval(
        self,
        tasks: Sequence[str],
        *,
        include: Sequence[Path] = (),
        trust: bool = False,
        apply_chat_template: bool = False,
        device: str | torch.device = "cpu",
    ) -> dict[str, float]:
        """Returns the metrics of tasks of EleutherAI's lm-evaluation-harness, as {"TASK/METRIC": value}.

        A dataset of the run does this with its tokenizer, by `lm_eval(model, tasks, …)`: those of ddpforge-transformers
        do. `include` are folders with the files of own tasks; `trust` runs the Python code that they name. Raises
        UsageError if no dataset has the method, and for unknown tasks; SetupError if the harness is not installed.
        """
        data = self.data_with("lm_eval")
        if data is None:
            raise UsageError(
                "no dataset of the run can call the evaluation harness",
                hints=["--lm-eval is for language models of ddpforge-transformers"],
            )
        check_language(self.task(), data)
        batch = self.recipe.train.eval_batch or self.recipe.train.micro_batch or 8
        with isolated_rng():
            found: dict[str, float] = data.lm_eval(
                self.model(device=device),
                tasks,
                include=include,
                batch=batch,
                **({"trust": True} if trust else {}),
                apply_chat_template=apply_chat_template,
            )
        return found

    @property
    def weights(self) -> str:
        """Returns the name of the weights: "model", or a callback's name."""
        if self.chosen is not None:
            return self.chosen
        kept = self._reader.names("callbacks")
        for name, callback in self.recipe.callbacks.items():
            averages = callback.use == "ema" and callback.options.get("evaluate", True)
            if averages and any(each.startswith(f"{name}/") for each in kept):
                return name
        return "model"

    def _state(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns a state dict for `model`, from the checkpoint and from weights that it omits."""
        reader = self._reader
        held = chosen_weights(reader, self.weights)
        wanted = {name: reader.aliases.get(name, name) for name in model.state_dict()}
        own = self._left_out(model, held) if omits_weights(reader.metadata.loop) else {}
        if missing := sorted(name for name, kept in wanted.items() if kept not in held and name not in own):
            raise CheckpointError(f"{self.checkpoint} is of another model: it lacks {', '.join(missing[:5])}")
        if unused := sorted(set(held) - set(wanted.values())):
            raise CheckpointError(
                f"{self.checkpoint} is of another model: it has {', '.join(unused[:5])}, which the model lacks"
            )
        return {name: held[kept].fetch() if kept in held else own[name] for name, kept in wanted.items()}

    def _left_out(self, model: nn.Module, held: Collection[str]) -> dict[str, Tensor]:
        """Returns the tensors of the model that the checkpoint omits, verified to be the same as in training."""
        given, ranks = self.recipe.checkpoint, SingleRank(torch.device("cpu"))
        found, aliases = tensors(model)
        if given.init_from:

            def take(saved: Mapping[str, SavedTensor]) -> None:
                for name, tensor in saved.items():
                    found[name].detach().copy_(tensor.read())

            load_initial(given.init_from, found, aliases, take, ranks, skip=given.init_ignore)
        frozen = {name: parameter.detach() for name, parameter in model.named_parameters() if name not in held}
        verify_frozen(self._reader.metadata.loop, frozen, ranks)
        return {name: own for name, own in model.state_dict().items() if aliases.get(name, name) in frozen}
