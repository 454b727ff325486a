"""Features come by entry points: ddpforge's own, and those of plugins, which errors name."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_distributions import forgetting_modules_below, install
from support.forked import in_ranks, refused
from torch.utils.data import IterableDataset

from ddpforge import api
from ddpforge.app.run import run
from ddpforge.data import MicroBatch, RankShare
from ddpforge.data.batch_assignment import AssignmentTerms
from ddpforge.errors import PluginError
from ddpforge.features.installed import FEATURES
from ddpforge.training import features, loaders
from ddpforge.training.loaders import open_data

PAGE = Path(__file__).parents[2] / "docs/extend/feature.md"
LOGIT_PENALTY = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
SETS = ["train.length=2st", "track.every=1st", 'schedule={use="constant"}', "~checkpoint.keep", "train.device=cpu"]


def plugin(site: Path, code: str, target: str) -> None:
    points = {"ddpforge.feature": {"mine": f"logit_penalty:{target}"}}
    install(site, "logit-penalty", points, modules={"logit_penalty.py": code})


def rows(folder: Path, ranks: int, *site: Path) -> list[dict[str, Any]]:
    """Returns the rows of two steps of `digits`, with the features in `site`."""

    def rank(_: int) -> None:
        sys.path[:0] = map(str, site)
        run("digits", sets=SETS, out=folder)

    in_ranks(ranks, rank)
    return [dict(row) for row in api.read_metrics(folder / "digits") if "train/loss" in row]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_feature_of_a_plugin_adds_to_the_loss_and_logs_totals_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    plugin(tmp_path / "site", LOGIT_PENALTY, "LogitPenalty")
    plain = rows(tmp_path / "plain", ranks)
    penalised = rows(tmp_path / "penalised", ranks, tmp_path / "site")
    assert "train/squared_logits" not in plain[0]
    classes, strength = 10, 1e-3
    added = strength * classes * penalised[0]["train/squared_logits"]
    assert added > 1e-5
    assert penalised[0]["train/loss"] == pytest.approx(plain[0]["train/loss"] + added, abs=1e-6)
    assert abs(penalised[0]["train/grad_norm"] - plain[0]["train/grad_norm"]) > 1e-6


def test_ddpforges_own_features_come_before_those_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, LOGIT_PENALTY, "LogitPenalty")
    monkeypatch.syspath_prepend(tmp_path)
    with forgetting_modules_below(tmp_path):
        found = [one.__name__ for one in features.feature_classes()]
    assert found[: len(FEATURES)] == [one.__name__ for one in FEATURES]
    assert "LogitPenalty" in found[len(FEATURES) :]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("Mine = 3", "is not a subclass of `Feature`, nor a list of them"),
        ("Mine = [int]", "is not a subclass of `Feature`, nor a list of them"),
    ],
    ids=["import", "no class", "no features"],
)
def test_a_broken_feature_is_an_error_of_the_environment_that_names_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    plugin(tmp_path, code, "Mine")
    monkeypatch.syspath_prepend(tmp_path)
    with forgetting_modules_below(tmp_path):
        message = refused(PluginError, lambda: list(features.feature_classes()))
    assert f"`mine` of logit-penalty (ddpforge.feature) {said}" in message
    assert "DDPFORGE_DISABLE_PLUGINS=logit-penalty" in message


def test_only_overridden_methods_of_features_are_called() -> None:
    class After(features.Feature):
        def after_step(self) -> bool:
            return True

    one = After()
    assert features.methods_of([features.Feature(), one], "after_step") == (one.after_step,)
    assert features.methods_of([features.Feature(), one], "before_pass") == ()


def test_two_features_that_replace_the_same_part_are_refused() -> None:
    class Takes(features.Feature):
        def around_update(self, optimizer: Any) -> Any:
            return len

    with pytest.raises(PluginError, match=r"two features replace the same part of a step \(`around_update`\)"):
        features.only_one([Takes(), Takes()], "around_update", None)
    assert features.only_one([Takes(), features.Feature()], "around_update", None) is len
    assert features.only_one([features.Feature()], "around_update", None) is None


class Tape:
    """Data that is neither map-style nor iterable."""


class Reading(IterableDataset[MicroBatch]):
    """One sample a step, which is the number of the step."""

    def __init__(self, data: Any, terms: AssignmentTerms, order: Any, start: int, one_epoch: bool) -> None:
        self.steps = range(start, 3 if one_epoch else 1000)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (MicroBatch(torch.tensor([step]), 1, 1, True, 0, 0) for step in self.steps)


class Tapes(features.Feature):
    """Reads tapes."""

    @staticmethod
    def reader(data: Any) -> Any:
        """Returns the reader of a tape."""
        return Reading if isinstance(data, Tape) else None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_feature_reads_another_kind_of_data(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    given: dict[str, Any] = {"global_batch": 1, "share": RankShare(0, 1, 1), "seed": 0, "drop_last": False}
    given |= {"workers": workers, "prefetch": 2, "pin": False}
    with pytest.raises(PluginError, match="Tape is not a dataset"):
        open_data(Tape(), **given)
    monkeypatch.setattr(loaders, "feature_classes", lambda: [Tapes])
    batches = open_data(Tape(), **given)
    assert [micro.data.item() for micro in islice(batches.training(5), 2)] == [5, 6]
    assert [micro.data.item() for micro in batches.evaluation()] == [0, 1, 2]
    monkeypatch.setattr(loaders, "feature_classes", lambda: [Tapes, Tapes])
    with pytest.raises(PluginError, match=r"\(`reader`\): Reading and Reading"):
        open_data(Tape(), **given)


def test_two_features_with_a_callback_of_one_name_are_refused() -> None:
    with pytest.raises(PluginError, match="two features have a callback with the name `b`"):
        features.merged([{"a": 1, "b": 2}, {"b": 3}], "callback")
    assert features.merged([{"a": 1}, {"b": 3}], "callback") == {"a": 1, "b": 3}
