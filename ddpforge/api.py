"""Reads recipes, runs and checkpoints, and builds the stages of a run: the API of tools, ddpforge's own and others'.

Authors of features and observers import their base classes from here, too.

    loaded = load_recipe("digits")
    problems = Problems(loaded)
    chosen = choose(loaded, Registry.installed(), problems, ranks=1)  # components without data and model
    check_chosen(chosen, problems)
    built = build(chosen, problems)  # data and model
    run = open_run("digits")
    rows, weights = read_metrics(run.path), open_checkpoint("digits").state().model

The import is cheap: names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.app.api import load as load
    from ddpforge.app.build import build as build
    from ddpforge.app.build import build_alike as build_alike
    from ddpforge.app.build import build_checked as build_checked
    from ddpforge.app.build import build_dataset as build_dataset
    from ddpforge.app.build import build_without_ranks as build_without_ranks
    from ddpforge.app.build import check_chosen as check_chosen
    from ddpforge.app.build import check_cut as check_cut
    from ddpforge.app.build import deal as deal
    from ddpforge.app.build import describe_shares as describe_shares
    from ddpforge.app.build import short_steps as short_steps
    from ddpforge.app.choose import choose as choose
    from ddpforge.app.run import join as join
    from ddpforge.app.run import peers_of as peers_of
    from ddpforge.checkpoint.formats import format_of as format_of
    from ddpforge.checkpoint.formats import named_format as named_format
    from ddpforge.checkpoint.manager import Checkpoints as Checkpoints
    from ddpforge.checkpoint.manifest import damages as damages
    from ddpforge.checkpoint.manifest import read_manifest as read_manifest
    from ddpforge.checkpoint.reader import CheckpointReader as CheckpointReader
    from ddpforge.checkpoint.retention import committed as committed
    from ddpforge.checkpoint.weights_file import chosen_weights as chosen_weights
    from ddpforge.checkpoint.weights_file import write_weights as write_weights
    from ddpforge.components.registry import Registry as Registry
    from ddpforge.data import Batches as Batches
    from ddpforge.data import MicroBatch as MicroBatch
    from ddpforge.data import RankShare as RankShare
    from ddpforge.data import mix as mix
    from ddpforge.data import seed_all as seed_all
    from ddpforge.data.pytree import digest as digest
    from ddpforge.data.pytree import leaves as leaves
    from ddpforge.data.pytree import select as select
    from ddpforge.data.pytree import take as take
    from ddpforge.data.pytree import to_device as to_device
    from ddpforge.guard.comparison import TOLERANCES as TOLERANCES
    from ddpforge.guard.comparison import VISIBLE as VISIBLE
    from ddpforge.guard.comparison import Point as Point
    from ddpforge.guard.comparison import Quantity as Quantity
    from ddpforge.guard.comparison import Record as Record
    from ddpforge.guard.comparison import Tolerances as Tolerances
    from ddpforge.guard.comparison import compare as compare
    from ddpforge.guard.comparison import drift_text as drift_text
    from ddpforge.guard.comparison import first_drift as first_drift
    from ddpforge.guard.rounding import PERTURBED as PERTURBED
    from ddpforge.guard.rounding import UPDATES as UPDATES
    from ddpforge.guard.rounding import Excess as Excess
    from ddpforge.guard.rounding import Rounding as Rounding
    from ddpforge.guard.rounding import Values as Values
    from ddpforge.guard.rounding import apart as apart
    from ddpforge.guard.rounding import excesses as excesses
    from ddpforge.guard.rounding import multiple_of as multiple_of
    from ddpforge.guard.rounding import norm_of as norm_of
    from ddpforge.guard.rounding import perturb as perturb
    from ddpforge.guard.rounding import ratio as ratio
    from ddpforge.guard.rounding import relative as relative
    from ddpforge.guard.rounding import resolution_of as resolution_of
    from ddpforge.guard.rounding import worst as worst
    from ddpforge.ranks.backend_flags import explain_determinism_error as explain_determinism_error
    from ddpforge.ranks.backend_flags import restored_backend_flags as restored_backend_flags
    from ddpforge.ranks.collectives import SingleRank as SingleRank
    from ddpforge.ranks.devices import accelerators as accelerators
    from ddpforge.ranks.devices import choose_device as choose_device
    from ddpforge.ranks.devices import chosen_kind as chosen_kind
    from ddpforge.ranks.devices import named_kind as named_kind
    from ddpforge.ranks.join import leave as leave
    from ddpforge.ranks.signals import StopRequests as StopRequests
    from ddpforge.ranks.signals import training_begins as training_begins
    from ddpforge.ranks.writers import WriterGroup as WriterGroup
    from ddpforge.recipe import LoadedRecipe as LoadedRecipe
    from ddpforge.recipe import Recipe as Recipe
    from ddpforge.recipe import load_recipe as load_recipe
    from ddpforge.runs.changes import Change as Change
    from ddpforge.runs.changes import flattened as flattened
    from ddpforge.runs.changes import recipe_changes as recipe_changes
    from ddpforge.runs.checkpoints import CheckpointFolder as CheckpointFolder
    from ddpforge.runs.checkpoints import CheckpointRow as CheckpointRow
    from ddpforge.runs.checkpoints import is_checkpoint as is_checkpoint
    from ddpforge.runs.environment import world_size as world_size
    from ddpforge.runs.folder import RunFolder as RunFolder
    from ddpforge.runs.folder import snapshot as snapshot
    from ddpforge.runs.metrics import Row as Row
    from ddpforge.runs.metrics import read_metrics as read_metrics
    from ddpforge.runs.observers import ObservedRun as ObservedRun
    from ddpforge.runs.observers import RunObserver as RunObserver
    from ddpforge.runs.summary import Comparison as Comparison
    from ddpforge.runs.summary import RunSummary as RunSummary
    from ddpforge.runs.summary import differences as differences
    from ddpforge.runs.summary import find_runs as find_runs
    from ddpforge.runs.summary import leading as leading
    from ddpforge.runs.summary import named_runs as named_runs
    from ddpforge.runs.summary import sorted_by as sorted_by
    from ddpforge.runs.summary import summarize as summarize
    from ddpforge.runs.summary import thinned as thinned
    from ddpforge.training.assemble import assemble as assemble
    from ddpforge.training.blocks import find_blocks as find_blocks
    from ddpforge.training.checks import check as check
    from ddpforge.training.checks import check_built as check_built
    from ddpforge.training.contract import contract_of as contract_of
    from ddpforge.training.features import Assembled as Assembled
    from ddpforge.training.features import Feature as Feature
    from ddpforge.training.loaders import open_data as open_data
    from ddpforge.training.loop import Trainer as Trainer
    from ddpforge.training.oom import explain_oom as explain_oom
    from ddpforge.training.optimizers import build_optimizer as build_optimizer
    from ddpforge.training.problems import Problems as Problems
    from ddpforge.training.stages import MISSING as MISSING
    from ddpforge.training.stages import Built as Built
    from ddpforge.training.stages import Chosen as Chosen
    from ddpforge.training.stages import Dealt as Dealt
    from ddpforge.training.updates import batches_per_step as batches_per_step
    from ddpforge.training.updates import tasks_by_update as tasks_by_update

_MODULES = {
    "ddpforge.app.api": "load",
    "ddpforge.app.build": "build build_alike build_checked build_dataset build_without_ranks "
    "check_chosen check_cut deal describe_shares short_steps",
    "ddpforge.app.choose": "choose",
    "ddpforge.app.run": "join peers_of",
    "ddpforge.checkpoint.formats": "format_of named_format",
    "ddpforge.checkpoint.manager": "Checkpoints",
    "ddpforge.checkpoint.manifest": "damages read_manifest",
    "ddpforge.checkpoint.reader": "CheckpointReader",
    "ddpforge.checkpoint.retention": "committed",
    "ddpforge.checkpoint.weights_file": "chosen_weights write_weights",
    "ddpforge.components.registry": "Registry",
    "ddpforge.data": "Batches MicroBatch RankShare mix seed_all",
    "ddpforge.data.pytree": "digest leaves select take to_device",
    "ddpforge.guard.comparison": "TOLERANCES VISIBLE Point Quantity Record Tolerances compare drift_text first_drift",
    "ddpforge.guard.rounding": "PERTURBED UPDATES Excess Rounding Values apart excesses multiple_of norm_of perturb "
    "ratio relative resolution_of worst",
    "ddpforge.ranks.backend_flags": "explain_determinism_error restored_backend_flags",
    "ddpforge.ranks.collectives": "SingleRank",
    "ddpforge.ranks.devices": "accelerators choose_device chosen_kind named_kind",
    "ddpforge.ranks.join": "leave",
    "ddpforge.ranks.signals": "StopRequests training_begins",
    "ddpforge.ranks.writers": "WriterGroup",
    "ddpforge.recipe": "LoadedRecipe Recipe load_recipe",
    "ddpforge.runs.changes": "Change flattened recipe_changes",
    "ddpforge.runs.checkpoints": "CheckpointFolder CheckpointRow is_checkpoint",
    "ddpforge.runs.environment": "world_size",
    "ddpforge.runs.folder": "RunFolder snapshot",
    "ddpforge.runs.metrics": "Row read_metrics",
    "ddpforge.runs.observers": "ObservedRun RunObserver",
    "ddpforge.runs.summary": "Comparison RunSummary differences find_runs "
    "leading named_runs sorted_by summarize thinned",
    "ddpforge.training.updates": "batches_per_step tasks_by_update",
    "ddpforge.training.assemble": "assemble",
    "ddpforge.training.blocks": "find_blocks",
    "ddpforge.training.checks": "check check_built",
    "ddpforge.training.contract": "contract_of",
    "ddpforge.training.features": "Assembled Feature",
    "ddpforge.training.loaders": "open_data",
    "ddpforge.training.loop": "Trainer",
    "ddpforge.training.oom": "explain_oom",
    "ddpforge.training.optimizers": "build_optimizer",
    "ddpforge.training.problems": "Problems",
    "ddpforge.training.stages": "MISSING Built Chosen Dealt",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted([*_LAZY, "open_checkpoint", "open_run"])


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ddpforge.api' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def open_run(run: str | Path) -> RunFolder:
    """Returns the folder of a run, by its path or its name in runs/; raises UsageError if there is none."""
    from ddpforge.runs.folder import RunFolder

    return RunFolder.find(str(run))


def open_checkpoint(run: str | Path, *, step: int | None = None, best: bool = False) -> CheckpointReader:
    """Opens the newest complete checkpoint of a run, that of a step, or the best one; or a checkpoint's folder.

    Its tensors are read when they are needed. Raises UsageError if there is none, CheckpointError if it is damaged.
    """
    from ddpforge.checkpoint.reader import CheckpointReader
    from ddpforge.runs.checkpoints import find

    return CheckpointReader(find(str(run), step=step, best=best, intact=True))
