"""Runs the kit's jobs on every rank of a shared world, one after another, until one fails.

Started as `python -m ddpforge.testing.job ORDERS.json`. Each rank writes `done-RANK.json` or `failed-RANK.json` into a
job's folder. After a failure the rank ends, because the ranks are no longer synchronized.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpforge.api import (
    CheckpointReader,
    Checkpoints,
    Problems,
    Trainer,
    WriterGroup,
    assemble,
    build_checked,
    build_dataset,
    check,
    choose,
    committed,
    digest,
    leave,
)
from ddpforge.components.registry import Registry
from ddpforge.data.pytree import close
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, GoBack, RunContext, StepInfo, Strategy, TensorShard, Tracker, Weights, World
from ddpforge.ranks.failures import is_symptom
from ddpforge.ranks.join import join
from ddpforge.recipe import LoadedRecipe, load_recipe
from ddpforge.testing.checks.data import batches
from ddpforge.testing.report import place_of

_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Site:
    """Context of a job: its recipe and folder, and the world of its ranks."""

    recipe: str
    folder: Path
    registry: Registry
    strategy: Strategy
    world: World
    peers: WriterGroup

    @cached_property
    def loaded(self) -> LoadedRecipe:
        """Loads the job's recipe."""
        return load_recipe(self.recipe, registry=self.registry)

    def trainer(self, tracker: Tracker, folder: str = "checkpoints") -> Trainer:
        """Builds a trainer for the job's recipe."""
        recipe = self.loaded.recipe
        problems = Problems(self.loaded)
        chosen = choose(self.loaded, self.registry, problems, ranks=self.world.global_ranks.size)
        chosen = replace(chosen, strategy=self.strategy)
        check("chosen", chosen, problems)
        parts = build_checked(chosen, self.world, problems, samples=False)
        checkpoints = Checkpoints(
            self.folder / folder,
            recipe.checkpoint,
            peers=self.peers,
            ranks=self.world.global_ranks,
            keep_every=parts.plan.every.get("checkpoint.keep.every"),
        )
        (self.folder / folder).mkdir(exist_ok=True)
        trainer = assemble(parts, self.world, checkpoints, tracker, folder=self.folder, life=ExitStack())
        trainer.saving.begin({"strategy": recipe.strategy.use, "world_size": self.world.global_ranks.size})
        return trainer

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on every rank."""
        return self.world.global_ranks.all_gather_object(value)


class _Rows(Tracker):
    """Tracker that keeps some columns of each row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = ("lr", "train/loss", "train/grad_norm")
        self.rows.append({name: value for name, value in metrics.items() if name in kept})


# ---------------------------------------------------------------------------------------------- the jobs
def train(site: Site) -> dict[str, Any]:
    """Trains; returns the rows of all steps, and the path of a file with the initial and final weights."""
    tracker = _Rows()
    trainer = site.trainer(tracker)
    bare = trainer.replica.unwrapped
    initial = {name: p.detach().clone() for name, p in bare.named_parameters() if p.requires_grad}
    trainer.fit()
    path = site.folder / "weights.pt"
    if site.world.is_rank_zero:
        torch.save({"initial": initial, "final": bare.state_dict()}, path)
    return {"rows": tracker.rows, "weights": str(path)}


def data(site: Site) -> dict[str, Any]:
    """Returns the digests of the first samples, as each rank reads them."""
    recipe = site.loaded.recipe
    (train,) = recipe.data.sources.values()
    built = build_dataset(site.registry, train, recipe.train.seed)
    mine = list(map(digest, batches(built, micro=1)))
    return {"digests": site.gather(mine)}


def callback(site: Site) -> dict[str, Any]:
    """Trains with a callback, then resumes from the middle; returns a difference between ranks or after the resume."""
    try:
        straight, trainer = _watched(site, "first", None)
    except _Disagreement as problem:
        return {"disagreement": str(problem)}
    last = trainer.progress.step
    found, _ = committed(site.folder / "first")
    middle = max((manifest.step, path) for path, manifest in found if manifest.step < last)[1]
    try:
        resumed, again = _watched(site, "second", CheckpointReader(middle))
    except _Disagreement as problem:
        return {"state": f"after a resume, {problem}"}
    if again.progress.step != last:
        return {"state": f"a resumed run ended at step {again.progress.step}, not at step {last}"}
    if straight.keys() != resumed.keys():
        return {"state": f"other names: {', '.join(sorted(straight.keys() ^ resumed.keys()))}"}
    apart = [name for name, value in straight.items() if not close(value, resumed[name])]
    return {"state": f"`{apart[0]}` is {_shown(resumed[apart[0]])}, not {_shown(straight[apart[0]])}"} if apart else {}


def _watched(site: Site, folder: str, start: CheckpointReader | None) -> tuple[dict[str, Any], Trainer]:
    trainer = site.trainer(Tracker(), folder)
    ((name, inner),) = trainer.callbacks.items()
    trainer.calls.callbacks = trainer.evaluator.callbacks = {name: _Agreeing(inner, site, trainer.replica.weights)}
    if start:
        trainer.restore(start)
    try:
        trainer.fit()
    except _Disagreement:
        if trainer.saving.checkpoints.pending:  # the next job uses the same peers
            with suppress(CheckpointError):
                trainer.saving.checkpoints.wait()
        raise
    inner.on_end(None)
    kept = {key: x.tensor if isinstance(x, TensorShard) else x for key, x in trainer.callbacks[name].state().items()}
    return {key: x.detach().clone() if isinstance(x, Tensor) else x for key, x in kept.items()}, trainer


def _shown(value: Any) -> str:
    return f"a tensor of norm {float(value.double().norm()):.6g}" if isinstance(value, Tensor) else repr(value)


class _Disagreement(Exception):
    """Raised on all ranks at the same time."""


def _compare(site: Site, what: str, value: Any) -> None:
    values = site.gather(value)
    if any(one != values[0] for one in values):
        raise _Disagreement(f"{what} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1")


class _Agreeing(Callback):
    """Wrapper of a callback that compares its results over ranks."""

    def __init__(self, inner: Callback, site: Site, weights: Weights) -> None:
        self.inner, self.site, self.weights = inner, site, weights
        self.goes_back, self.calls_model = inner.goes_back, inner.calls_model

    def _ask(self, what: str, call: Callable[[], Any], shown: Callable[[Any], Any] = lambda value: value) -> Any:
        failure: Exception | None = None
        answer = None
        try:
            answer = call()
        except Exception as error:
            failure = error
        _compare(self.site, what, repr(failure) if failure else shown(answer))
        if failure:
            raise failure
        return answer

    def on_start(self, run: RunContext) -> None:
        raise AssertionError("assemble has already called on_start of the callback")

    def lr_factor(self) -> float:
        return float(self._ask("lr_factor", self.inner.lr_factor, float))

    def on_gradient(self, step: int, norm: Tensor) -> None:
        self.inner.on_gradient(step, norm)

    def on_step(self, info: StepInfo) -> bool | GoBack | None:
        def shown(wish: object) -> object:
            return repr(wish) if isinstance(wish, GoBack) else bool(wish)

        wish: bool | GoBack | None = self._ask(f"on_step at step {info.step}", lambda: self.inner.on_step(info), shown)
        return wish

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        found = self._ask(f"the columns of on_log at step {info.step}", lambda: self.inner.on_log(info), sorted)
        return dict(found)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        return bool(self._ask(f"on_eval at step {step}", lambda: self.inner.on_eval(step, metrics), bool))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        before = [digest(part.tensor) for part in self.weights.shards().values()]
        with self.inner.evaluating():
            yield
        if [digest(part.tensor) for part in self.weights.shards().values()] != before:
            raise AssertionError("the weights after `evaluating` differ from those before it")

    def while_evaluating(self, step: int) -> Mapping[str, float]:
        return dict(self._ask(f"while_evaluating at step {step}", lambda: self.inner.while_evaluating(step), dict))

    def on_rollback(self, step: int) -> None:
        self.inner.on_rollback(step)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self.inner.on_checkpoint(step, folder)

    def state(self) -> Mapping[str, Any]:
        found = self.inner.state()
        plain = {key: value for key, value in found.items() if not isinstance(value, TensorShard)}
        shown = {key: digest(value) if isinstance(value, Tensor) else value for key, value in plain.items()}
        _compare(self.site, "its state", shown)
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state(state)


# ---------------------------------------------------------------------------------------------- the rank
_JOBS: dict[str, Callable[[Site], dict[str, Any]]] = {"train": train, "data": data, "callback": callback}


def main(path: str) -> int:
    """Runs the jobs in the file; returns the exit code."""
    logging.getLogger("ddpforge").setLevel(logging.ERROR)
    orders = json.loads(Path(path).read_text())
    registry = Registry.installed()
    first = load_recipe(orders[0]["recipe"], registry=registry).recipe
    strategy: Strategy = registry.build("strategy", first.strategy)
    world = strategy.setup(first.train, join(first.train, strategy))
    peers = WriterGroup.of(world.global_ranks, _PATIENCE)
    for order in orders:
        folder = Path(order["folder"])
        site = Site(order["recipe"], folder, registry, strategy, world, peers)
        try:
            found = _JOBS[order["job"]](site)
            site.gather(None)  # no rank begins the next job while another one may fail in this one
        except BaseException as error:
            _write(folder / f"failed-{world.global_ranks.rank}.json", _failure(error, world, site, order["kind"]))
            return 1
        _write(folder / f"done-{world.global_ranks.rank}.json", found)
    leave(world)
    return 0


def _failure(error: BaseException, world: World, site: Site, kind: str) -> dict[str, Any]:
    where = ""
    try:
        recipe = site.loaded.recipe
        components = {
            "model": recipe.model,
            "data": next(iter(recipe.data.sources.values())),
            "callback": next(iter(recipe.callbacks.values()), None),
        }
        if component := components.get(kind):
            where = place_of(error, site.registry.load(kind, component.use, component.base))
    except Exception:
        where = ""  # the original failure is more important
    return {
        "time": time.time(),
        "symptom": is_symptom(error),
        "rank": world.global_ranks.rank,
        "error": f"{type(error).__name__}: {error}",
        "where": where,
        "hints": list(getattr(error, "hints", ())),
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for ranks that may have ended
