"""Starts the ranks for some checks, with few launches: each runs the jobs of many components."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

from ddpforge.api import TOLERANCES, Record, compare, drift_text, first_drift
from ddpforge.components.kinds import KINDS
from ddpforge.components.local_code import neighbours
from ddpforge.errors import ExitCode, PluginError
from ddpforge.ranks.signal_policy import received_signal
from ddpforge.testing.cases import Case
from ddpforge.testing.ranks import run_ranks
from ddpforge.testing.registered_checks import checks_of
from ddpforge.testing.report import Breach, KitInterrupted
from ddpforge.testing.trial import settle

__all__ = ["MultiRankRuns", "drift_text", "run_to_the_end", "same_training", "write_recipe"]

_LINES = 15  # of the output of a failed world, in messages
_STOPPED = "stopped; not all checks were made"
_LOCAL = re.compile(r"\./([^:]*\.py):")


@dataclass
class _Order:
    """Job for the ranks of one world; `outcome` is its result, or the failure."""

    case: Case
    job: str
    nproc: int
    folder: Path
    tables: dict[str, Any]
    outcome: dict[str, Any] | Breach | None = None

    def write(self) -> dict[str, Any]:
        """Writes the job's recipe; returns the order in the form that the ranks read."""
        recipe = write_recipe(self.case, self.tables, self.folder)
        return {"job": self.job, "recipe": str(recipe), "folder": str(self.folder), "kind": self.case.kind}


@dataclass
class MultiRankRuns:
    """Worlds for `cases`; ranks start when a check requests the first outcome."""

    cases: Sequence[Case]
    say: Callable[[str], None] = lambda _: None
    memory: dict[Any, Any] = field(
        default_factory=dict
    )  # results that the checks of strategies share, see `checks.strategy`

    def __post_init__(self) -> None:
        self._temporary = TemporaryDirectory(prefix="ddpforge-testing-")
        self.folder = Path(self._temporary.name)
        self._orders: dict[int, list[_Order]] = {}

    def close(self) -> None:
        """Removes the files of the runs."""
        self._temporary.cleanup()

    def outcome(self, case: Case, job: str, nproc: int) -> dict[str, Any]:
        """Returns the ranks' result of a job; raises Breach if they failed."""
        if nproc not in self._orders:
            self._orders[nproc] = self._plan(nproc)
            self._carry_out(self._orders[nproc], nproc)
        (order,) = (one for one in self._orders[nproc] if one.case is case and one.job == job)
        if isinstance(order.outcome, dict):
            return order.outcome
        assert order.outcome is not None
        raise order.outcome

    # -- planning
    def _plan(self, nproc: int) -> list[_Order]:
        orders = []
        for number, case in enumerate(self.cases):
            job = KINDS[case.kind].jobs.get(nproc)
            asked = [one for one in checks_of(case.kind) if one.starts_ranks and not case.skipped(one.name)]
            if job and asked:
                folder = self.folder / f"{nproc}-{number}"
                folder.mkdir()
                order = _Order(case, job, nproc, folder, {})
                try:
                    settle(case)
                    order.tables = _tables(case, job)
                except Breach as breach:
                    order.outcome = breach
                except PluginError as error:
                    order.outcome = Breach("a component that can be built", error.message, hints=error.hints)
                orders.append(order)
        return orders

    def _carry_out(self, orders: Iterable[_Order], nproc: int) -> None:
        groups: dict[str, list[_Order]] = defaultdict(list)
        for order in orders:
            if order.outcome is None:  # jobs share a world only if these sections are equal
                groups[json.dumps([order.tables["strategy"], order.tables["train"]])].append(order)
        for group in groups.values():
            while waiting := [order for order in group if order.outcome is None]:
                self._launch(waiting, nproc)

    def _launch(self, orders: list[_Order], nproc: int) -> None:
        """Starts ranks that run the jobs until one fails."""
        names = ", ".join(f"{order.case.kind} {order.case.label}" for order in orders)
        self.say(f"starting {nproc} rank{'s' * (nproc > 1)} for {names}")
        written = self.folder / "orders.json"
        written.write_text(json.dumps([order.write() for order in orders]))
        said = run_to_the_end("ddpforge.testing.job", str(written), nproc=nproc).stderr

        for order in orders:
            order.outcome = _outcome(order, nproc)
            if order.outcome is None or isinstance(order.outcome, Breach):
                order.outcome = order.outcome or _silent(said)
                return


def run_to_the_end(module: str, *arguments: str, nproc: int) -> CompletedProcess[str]:
    """Runs `module` on `nproc` ranks; raises Interrupted if a signal stopped them or this process."""
    with received_signal(
        signal.default_int_handler
    ):  # any request to stop acts as Ctrl-C: ranks and temporary files are removed
        try:
            done = run_ranks(module, *arguments, cwd=Path.cwd(), ranks=nproc)
        except KeyboardInterrupt:
            raise KitInterrupted(_STOPPED) from None
    if done.returncode in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, signal.SIGTERM):
        raise KitInterrupted(_STOPPED)
    return done


def _tables(case: Case, job: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"train": {"virtual_ranks": 2}} if job == "train" else {}
    if job == "callback":
        changes["checkpoint"] = {"every": "3st", "at_start": True, "keep": {"last": 9}}
        changes["train"] = {"eval_every": "2st", "eval_batch": 8}
    tables = case.recipe(**changes)
    if job == "train":
        tables["train"]["length"] = "4st"
        del tables["data"]["eval"]
    if case.settings.get("unused"):
        tables["strategy"] = {**tables["strategy"], "find_unused_parameters": True}
    return tables


def write_recipe(case: Case, tables: dict[str, Any], folder: Path) -> Path:
    """Writes a recipe into `folder`, with copies of the local files that it names; returns its path."""
    import tomlkit

    text = tomlkit.dumps(tables)
    for name in set(_LOCAL.findall(text)):
        source = next((base / name for base in (case.base, case.folder) if (base / name).is_file()), None)
        if source is None:
            continue
        base = source.parents[len(Path(name).parts) - 1]
        for place, file in {source.name: source, **neighbours(source, base)}.items():
            target = (folder / name).parent / place
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(file, target)
    path = folder / "case.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _outcome(order: _Order, nproc: int) -> dict[str, Any] | Breach | None:
    """Reads the result or the failure of the ranks; None if they ended without writing either."""
    done = [order.folder / f"done-{rank}.json" for rank in range(nproc)]
    if all(path.exists() for path in done):
        return dict(json.loads(done[0].read_text()))
    failed = [json.loads(path.read_text()) for path in order.folder.glob("failed-*.json")]
    if not failed:
        return None
    first = min(failed, key=lambda one: (one["symptom"], one["time"]))
    text = first["where"].replace(str(order.folder), str(order.case.base.resolve()))
    return Breach(
        f"a run of the {order.case.kind} on {nproc} rank{'s' * (nproc > 1)} to succeed",
        f"rank {first['rank']}: {first['error']}",
        where=text or None,
        hints=first["hints"],
    )


def _silent(said: str) -> Breach:
    lines = said.rstrip().splitlines()[-_LINES:]
    return Breach("ranks that report a result", "\n".join(["they ended without one; the last output:", *lines]))


# ---------------------------------------------------------------------------------------------- comparing
def same_training(run: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """Describes the first difference between two trainings; None if there is none."""
    import torch

    records = []
    for found in (run, reference):
        kept = torch.load(found["weights"])
        records.append(Record(found["rows"], kept["initial"], kept["final"]))
    drift = first_drift(compare(records[0], records[1], TOLERANCES["fp32"]))
    return drift_text(*drift) if drift else None
