"""Checks of strategies: training equal to DDP, and a resume on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any

from ddpforge.api import (
    TOLERANCES,
    CheckpointReader,
    Record,
    RunFolder,
    committed,
    compare,
    contract_of,
    drift_text,
    first_drift,
    read_metrics,
    snapshot,
)
from ddpforge.interfaces import Contract, Replica, Strategy
from ddpforge.recipe import load_recipe
from ddpforge.recipe.schema import VERSION
from ddpforge.testing import fixtures
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns, run_to_the_end, write_recipe
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable, source_of
from ddpforge.testing.settings import SETTINGS

_STEPS, _MIDDLE = 12, 6
_PROBE = "ddpforge_parity"
_LINES = 20
_PLAIN: dict[str, Any] = {"global_batch": 16, "length": f"{_STEPS}st"}
_ACCUMULATES = _PLAIN | {"micro_batch": 4}
_CLIPS = _ACCUMULATES | {"clip_norm": 0.3}
_RELATIONS = {"step": "ranks", "forward": "split"}  # of `ddpforge prove`, by the method that is wrong
_CURVES = ("lr", "train/loss", "train/grad_norm")


@check("contract", "strategy")
def contract(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the component is a Strategy with a Contract."""
    strategy = case.build()
    if not isinstance(strategy, Strategy):
        raise Breach("a ddpforge.interfaces.Strategy", f"a {type(strategy).__name__}")
    if not isinstance(getattr(strategy, "contract", None), Contract):
        raise Breach(
            "a `contract` with its sharding, clipping and accumulation", "none", hints=["contract = Contract(…)"]
        )


@check("trains-like-ddp", "strategy", ranks=True)
def trains_like_ddp(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that training equals DDP, with accumulation, clipping and a smaller last batch, and tests the contract."""
    run = _TrialRun.of(case, worlds)
    drift = run.drift(worlds)
    if drift is None:
        return
    simpler = [
        (_PLAIN, "even without accumulation and clipping", "step"),  # relation `ranks`
        (_ACCUMULATES, "with accumulation, and not without", "forward"),  # relation `split`
    ]
    faults = {
        "step": f"{run.averages} are not averaged over ranks, or the initial weights differ between ranks",
        "forward": "the gradients of micro-batches are not summed, or are averaged over ranks too early or too often",
    }
    hints = [f"options that average after every step belong below [strategy.{case.name}] in {case.said or SETTINGS}"]
    for train, when, method in simpler:
        variant = run if train == run.train else replace(run, name=f"{run.name}-{method}", train=train)
        if found := variant.drift(worlds):
            raise Breach(
                f"the training of DDP (relation `{_RELATIONS[method]}`)",
                f"{found}, {when}: {faults[method]}",
                where=_method(case, method),
                hints=hints if (run.averages, method) == ("weights", "step") else (),
            )
    raise Breach(
        "the training of DDP (relation `clipping`)",
        f"{drift}, only with train.clip_norm: gradients are clipped by another norm than that of all",
        where=_method(case, "step"),
    )


@check("resumes-on-any-ranks", "strategy", ranks=True)
def resumes_on_any_ranks(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a resume equals an uninterrupted training, on the same and on other numbers of ranks."""
    run = _TrialRun.of(case, worlds)
    if run.broken(worlds):
        raise NotApplicable("not possible: trains-like-ddp failed")
    straight = run.record(worlds)
    for ranks in dict.fromkeys([run.ranks, *case.settings.get("ranks", (2, 1))]):
        resumed = replace(run, name=f"{run.name}-resumed-{ranks}", ranks=ranks, start=run.checkpoint(worlds))
        later = replace(straight, rows=straight.rows[_MIDDLE:])
        drift = first_drift(compare(resumed.record(worlds), later, TOLERANCES["fp32"]))
        if drift:
            what = "the same number of" if ranks == run.ranks else f"{ranks} instead of {run.ranks}"
            raise Breach(
                f"a resumed training equal to an uninterrupted one, on {what} ranks (relation `resume`)",
                f"after a resume at step {_MIDDLE}, {drift_text(*drift)} (steps counted from there)",
                where=_method(case, "load_state"),
                hints=[
                    "`state` must return weights and optimizer state exactly, by name; `load_state` must restore both"
                ],
            )


def _method(case: Case, name: str) -> str:
    """Returns "file:line" of the method `name` of a Replica in the strategy's module; else that of the strategy."""
    home = case.component.__module__
    beside = vars(import_module(home)).values() if isinstance(case.component, type) else ()
    replicas = [found for found in beside if isinstance(found, type) and issubclass(found, Replica)]
    own = [vars(found)[name] for found in replicas if found.__module__ == home and name in vars(found)]
    return source_of(own[0] if own else case.component)


@dataclass(frozen=True)
class _TrialRun:
    """Run that keeps its results in `MultiRankRuns.memory` for other checks."""

    case: Case
    name: str
    strategy: dict[str, Any]
    ranks: int
    train: dict[str, Any]
    averages: str
    start: Path | None = None

    @classmethod
    def of(cls, case: Case, worlds: MultiRankRuns) -> _TrialRun:
        """Returns the strategy's main run, with accumulation, and with clipping if it averages gradients."""
        number = worlds.cases.index(case)
        ranks = case.settings.get("ranks", (2, 1))[0]
        averages = contract_of(case.build()).averages
        # If weights are averaged, each rank clips by its own norm, so the result cannot equal that of DDP.
        train = _CLIPS if averages == "gradients" else _ACCUMULATES
        return cls(case, f"strategy-{number}", {"use": case.use, **case.options()}, ranks, train, averages)

    def drift(self, worlds: MultiRankRuns) -> str | None:
        """Describes the first difference between the run and DDP; None if there is none."""
        key = "-".join(map(str, self.train.values()))
        ddp = replace(self, name=f"ddp-{key}", strategy={"use": "ddp"}, ranks=2, averages="gradients", start=None)
        mine, theirs = self.record(worlds), ddp.record(worlds)
        found = first_drift(compare(mine, theirs, TOLERANCES["fp32"]))
        if found is None:
            return None
        each = compare(mine, theirs, TOLERANCES["fp32"], [theirs])
        worst = [one for quantity in each if quantity.name == "updates" for one in quantity.worst]
        factors = ", ".join(f"`{one.name}` × {one.multiple:.4g}" for one in worst if one.multiple is not None)
        return drift_text(*found) + (f"; changes of weights: {factors}" if factors else "")

    def broken(self, worlds: MultiRankRuns) -> bool:
        """True if the run failed, or differs from DDP."""
        try:
            return self.drift(worlds) is not None
        except Breach:
            return True

    def record(self, worlds: MultiRankRuns) -> Record:
        """Returns the record of the run; runs it on the first call."""
        found: Record = self._once(worlds, "record", lambda: self._record(worlds))
        return found

    def checkpoint(self, worlds: MultiRankRuns) -> Path:
        """Returns the checkpoint in the middle of the run."""
        self.record(worlds)
        found, _ = committed(self._folder(worlds).checkpoints)
        return next(path for path, manifest in found if manifest.step == _MIDDLE)

    def _once(self, worlds: MultiRankRuns, what: str, action: Callable[[], Any]) -> Any:
        key = (what, self.name)
        if key not in worlds.memory:
            try:
                worlds.memory[key] = action()
            except Breach as breach:
                worlds.memory[key] = breach
        if isinstance(worlds.memory[key], Breach):
            raise worlds.memory[key]
        return worlds.memory[key]

    def _folder(self, worlds: MultiRankRuns) -> RunFolder:
        return RunFolder(worlds.folder / "runs" / self.name)

    def _record(self, worlds: MultiRankRuns) -> Record:
        worlds.say(f"training {self._title()}")
        folder = worlds.folder / self.name
        folder.mkdir()
        recipe = write_recipe(self.case, self._tables(), folder)
        if self.start:
            kept = self._folder(worlds)
            kept.create(**snapshot(load_recipe(recipe, registry=self.case.registry)))
            copytree(self.start, kept.checkpoints / self.start.name)
        arguments = [str(recipe), f"--out={worlds.folder / 'runs'}"]
        arguments += ["--allow-change=run"] if self.start else []  # the checkpoint is of another run
        done = run_to_the_end("ddpforge", "run", *arguments, nproc=self.ranks)
        if done.returncode:
            said = (done.stdout + done.stderr).replace(str(folder), str(self.case.base.resolve()))
            lines = said.rstrip().splitlines()[-_LINES:]
            raise Breach(
                f"{self._title()} to reach its end",
                "\n".join([f"exit code {done.returncode}; its last output:", *lines]),
                where=self.case.where,
            )
        return self._read(worlds)

    def _read(self, worlds: MultiRankRuns) -> Record:
        folder = self._folder(worlds)
        path, manifest = committed(folder.checkpoints)[0][0]
        if manifest.world_size != self.ranks:
            raise Breach(f"a world of {self.ranks} ranks", f"one of {manifest.world_size}", where=self.case.where)
        checkpoint = CheckpointReader(path)
        final = {name: checkpoint.read("model", name) for name in checkpoint.names("model")}
        probed = [name for name in checkpoint.names("callbacks") if name.startswith(f"{_PROBE}/")]
        initial = {name.removeprefix(f"{_PROBE}/"): checkpoint.read("callbacks", name) for name in probed}
        rows = [{key: row.get(key) for key in _CURVES} for row in read_metrics(folder.path)]
        return Record(rows, initial, final, self.averages)

    def _title(self) -> str:
        verb = "resumed " if self.start else ""
        return (
            f"{self.strategy['use']} on {self.ranks} rank{'s' * (self.ranks > 1)} {verb}for {self.case.label}".strip()
        )

    def _tables(self) -> dict[str, Any]:
        model = {"use": "mlp", "inputs": 64, "outputs": 10, "hidden": [8, 8]}
        sections = fixtures.DEFAULTS | {"model": model, "task": fixtures.COUNTED}
        return {
            "recipe": VERSION,
            "name": self.name,
            **{key: sections[key] for key in ("model", "task", "optimizer", "schedule")},
            "data": {"train": sections["data"]},
            "strategy": self.strategy,
            "train": {"collective_timeout": "60s", **self.train},
            "checkpoint": {"every": f"{_MIDDLE}st", "keep": {"last": 9}},
            "track": {"every": "1st"},
            "callbacks": {_PROBE: {"use": "ddpforge.tools.parity.probe:probe", "steps": _STEPS, "inherit": False}},
        }
