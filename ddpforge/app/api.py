"""The functions of `import ddpforge` beside `run`: evaluate, load and launch, as often as one likes in one process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from ddpforge.app import evaluate as evaluation
from ddpforge.app.attempt import Outcome
from ddpforge.app.build import WEIGHTS
from ddpforge.app.choose import TEACHERS
from ddpforge.app.generation import Sampling, check_language, generate
from ddpforge.app.starting import Ranks, prepare
from ddpforge.checkpoint.reader import Reader
from ddpforge.components.registry import Registry, build
from ddpforge.data import RankShare, mix, open_data
from ddpforge.data.randomness import own_random_numbers
from ddpforge.errors import CheckpointError, ExitCode, ForgeError, UsageError
from ddpforge.interfaces import SavedTensor, Task
from ddpforge.interop.export import chosen_weights
from ddpforge.interop.initial import load_initial
from ddpforge.ranks.collectives import Alone
from ddpforge.recipe import Recipe, load_recipe
from ddpforge.runs.checkpoints import choose, is_checkpoint
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import read_metrics
from ddpforge.strategies.named_state import tensors
from ddpforge.training.left_out import has_left_out, refuse_others
from ddpforge.training.stages import key_of

__all__ = ["TrainedRun", "evaluate", "launch", "load", "predict"]

_Checkpoint = Literal["newest", "best"] | int  # the newest, the best by `checkpoint.keep.monitor`, or a step's


def launch(
    recipe: str | Path,
    *,
    nproc: int | None = None,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
    max_time: str | None = None,
    max_restarts: int | None = None,
    profile: str | None = None,
) -> Outcome:
    """Trains a recipe in `nproc` processes of this machine, as `ddpforge launch` does; returns how that ended.

    By default there is one process per GPU, or one. For everything else see `ddpforge.run`. A run that failed is an
    outcome as well, whose `exit_code` is not 0 and whose `status["error"]` says why. Raises ForgeError where it was
    refused before it could train; the ranks have said why on stderr.
    """
    if nproc is not None and nproc < 1:
        raise UsageError(f"nproc={nproc}: there must be 1 process or more", hints=["leave it out for one per GPU"])
    start = prepare(
        str(recipe),
        Ranks(nproc, max_restarts=max_restarts),
        sets=sets,
        out=None if out is None else str(out),
        fresh=fresh,
        allow_change=allow_change,
        max_time=max_time,
        profile=profile,
    )
    before = start.folder.status_version()
    started = start.run()
    if started.untold and not started.folder.exists():
        raise started.untold
    if started.ended.code and started.folder.status_version() == before:
        error = ForgeError(f"the ranks ended with exit code {started.ended.code} before training; they have said why")
        known = {int(code): code for code in ExitCode}
        error.exit_code = known.get(started.ended.code, ExitCode.FAILED)
        raise error
    status = started.folder.status()
    assert status is not None  # a run that has trained has one
    return Outcome(started.folder.path, status, is_main=True)


def evaluate(
    run: str | Path,
    *,
    checkpoint: _Checkpoint = "newest",
    sets: Sequence[str] = (),
    only: Sequence[str] = (),
) -> evaluation.Evaluation:
    """Evaluates a run's checkpoint, the "newest", the "best" or that of a step, as `ddpforge eval` does; on every rank.

    `run` is a run's folder, or its name in runs/. For the rest see `runner.evaluate`. Raises ForgeError.
    """
    folder = RunFolder.find(str(run))
    return evaluation.evaluate(folder, **_chosen(checkpoint), sets=sets, only=only)


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
) -> evaluation.Prediction:
    """Writes what a run's model predicts of a dataset to `out`, a .jsonl or .parquet file, as `ddpforge predict` does.

    `run` is a run's folder, or its name in runs/. For the rest see `runner.predict`. Raises ForgeError.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit}: there must be 1 sample or more", hints=["leave it out for all"])
    return evaluation.predict(
        RunFolder.find(str(run)),
        Path(out),
        **_chosen(checkpoint),
        weights=weights,
        data=data,
        sets=sets,
        limit=limit,
        force=force,
    )


def load(run: str | Path, *, checkpoint: _Checkpoint = "newest", weights: str | None = None) -> TrainedRun:
    """Opens what was trained: `run` is a run's folder, its name in runs/, or the folder of one of its checkpoints.

    Of a run it is the "newest" `checkpoint` that is intact, the "best" one, or that of a step. `weights` is "model", or
    the name of a callback that keeps weights of its own; absent: those that evaluations used, which are the averages of
    `ema` where the recipe evaluates them. Raises UsageError where there is no such checkpoint, or no such weights.
    """
    path = Path(run)
    if not is_checkpoint(path):
        folder = RunFolder.find(str(run))
        return _opened(folder, choose(folder, **_chosen(checkpoint)), weights)
    if checkpoint != "newest":
        raise UsageError(f"{run} is a checkpoint, and checkpoint={checkpoint!r} chooses one of a run")
    folder = RunFolder(path.resolve().parents[1])
    if not folder.exists():
        raise UsageError(f"{run} lies in no run's folder, whose recipe says what the model is")
    return _opened(folder, path, weights)


def _opened(folder: RunFolder, checkpoint: Path, weights: str | None) -> TrainedRun:
    found = TrainedRun(folder, checkpoint, weights)
    chosen_weights(found._reader, found.weights)  # which raises where there are none
    return found


class _Choice(TypedDict):
    step: int | None
    best: bool


def _chosen(checkpoint: _Checkpoint) -> _Choice:
    if isinstance(checkpoint, int) and not isinstance(checkpoint, bool):
        return {"step": checkpoint, "best": False}
    if checkpoint not in ("newest", "best"):
        raise UsageError(f'checkpoint={checkpoint!r}: there are "newest", "best" and the number of a step')
    return {"step": None, "best": checkpoint == "best"}


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder, one of its checkpoints, and the name of the weights in it that are meant."""

    folder: RunFolder
    checkpoint: Path
    chosen: str | None = None

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.checkpoint)

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved."""
        return self._reader.facts.step

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that the run's last attempt followed, with every default."""
        self.folder.refuse_odd()
        return load_recipe(self.folder.resolved).recipe

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one a step: training and evaluation."""
        return read_metrics(self.folder.path)

    def model(self, *, device: str | torch.device = "cpu") -> nn.Module:
        """The bare model with the checkpoint's weights, in evaluation mode.

        The generators of random numbers are left as they were. Raises CheckpointError where weights do not fit.
        """
        model = self.bare()
        model.load_state_dict(self._state(model), strict=True)
        return model.to(device).eval()

    def bare(self) -> nn.Module:
        """The model as its constructor makes it for a run that begins."""
        with own_random_numbers():
            torch.manual_seed(mix(self.recipe.train.seed, WEIGHTS))  # what a checkpoint has left out may be drawn
            model: nn.Module = build(Registry.installed(), "model", self.recipe.model)
        return model

    def batch(self, samples: int, name: str | None = None) -> Any:
        """The first samples of a dataset, as `data` names it, collated."""
        data = self.data(name)
        share = RankShare(0, 1, samples)
        fetching: dict[str, Any] = {"seed": self.recipe.train.seed, "workers": 0, "prefetch": 2, "pin": False}
        batches = open_data(data, global_batch=samples, share=share, drop_last=False, **fetching)
        with own_random_numbers():
            return next(iter(batches.evaluation())).data

    def task(self) -> Task:
        """The recipe's task, as evaluations build it; one that looks at the model or at ranks needs its `start`."""
        with own_random_numbers():
            torch.manual_seed(mix(self.recipe.train.seed, TEACHERS))
            found: Task = build(Registry.installed(), "task", self.recipe.task)
        return found

    def data(self, name: str | None = None) -> Any:
        """A dataset of the recipe: "train", "eval", or "eval.NAME" of several; raises UsageError for another.

        By default it is the first to evaluate on, or the training data where there is none.
        """
        name = name or next((key_of(each) for each in self.recipe.data.evaluations), "train")
        components = {"train": self.recipe.data.train}
        components |= {key_of(name): component for name, component in self.recipe.data.evaluations.items()}
        if name not in components:
            raise UsageError(f"{self.folder.path} has no data {name!r}", hints=[f"one of {', '.join(components)}"])
        return build(Registry.installed(), "data", components[name], seed=self.recipe.train.seed)

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
        """The text that a language model writes after each of `prompts`, in the tokens of its data.

        For how tokens are drawn see `generation.Sampling`. Raises UsageError for a run of another kind, and where a
        prompt has what the model has never seen.
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
        """Yields what `generate` returns, as it comes."""
        data = self.data()
        check_language(self.task(), data)
        yield from generate(self.model(device=device), data, prompts, how)

    @property
    def weights(self) -> str:
        """The name of the weights: "model", or that of a callback."""
        if self.chosen is not None:
            return self.chosen
        kept = self._reader.names("callbacks")
        for name, callback in self.recipe.callbacks.items():
            averages = callback.use == "ema" and callback.options.get("evaluate", True)
            if averages and any(each.startswith(f"{name}/") for each in kept):
                return name
        return "model"

    def _state(self, model: nn.Module) -> dict[str, Tensor]:
        """The state dict that the model asks for."""
        reader = self._reader
        held = chosen_weights(reader, self.weights)
        wanted = {name: reader.aliases.get(name, name) for name in model.state_dict()}
        own = self._left_out(model, held) if has_left_out(reader.facts.loop) else {}
        if missing := sorted(name for name, kept in wanted.items() if kept not in held and name not in own):
            raise CheckpointError(f"{self.checkpoint} is of another model: it lacks {', '.join(missing[:5])}")
        return {name: held[kept].fetch() if kept in held else own[name] for name, kept in wanted.items()}

    def _left_out(self, model: nn.Module, held: Collection[str]) -> dict[str, Tensor]:
        """The model's tensors, of which those that the checkpoint has left out are what they were in training."""
        given, ranks = self.recipe.checkpoint, Alone(torch.device("cpu"))
        found, aliases = tensors(model)
        if given.init_from:

            def take(saved: Mapping[str, SavedTensor]) -> None:
                for name, tensor in saved.items():
                    found[name].detach().copy_(tensor.read())

            load_initial(given.init_from, found, aliases, take, ranks, skip=given.init_ignore)
        frozen = {name: parameter.detach() for name, parameter in model.named_parameters() if name not in held}
        refuse_others(self._reader.facts.loop, frozen, ranks)
        return {name: own for name, own in model.state_dict().items() if aliases.get(name, name) in frozen}
