"""Ranks with different models or data are refused, and so is a resume with different data."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import ForgeError, UsageError
from ddpforge.guard.data_print import DataPrint, check_unchanged_data, difference
from ddpforge.guard.same_on_ranks import check_same_data, check_same_groups, check_same_models, check_same_schedules
from ddpforge.interfaces import Ranks
from ddpforge.ranks.collectives import SingleRank
from ddpforge.testing.doubles import in_threads


class Numbers:
    """Samples are pairs of a row of numbers and a class, in the order of `ids`. `noise`: relative error of the
    numbers."""

    random = False

    def __init__(self, ids: list[int], *, noise: float = 0.0) -> None:
        self.ids, self.noise = ids, noise

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(self.ids[place])) * (1 + self.noise), self.ids[place] % 3


def printed(data: Any, workers: int = 0) -> DataPrint:
    return DataPrint(data, seed=0, workers=workers)


def errors_of_two_ranks(action: Callable[[Ranks, int], None]) -> list[str]:
    """Returns the error messages of two ranks; "" if a rank raised none."""

    def run(ranks: Ranks) -> str:
        try:
            action(ranks, ranks.rank)
        except ForgeError as error:
            return error.message or type(error).__name__
        return ""

    return in_threads(2, run)


# ---------------------------------------------------------------------------------------------- across ranks
def layers(*names: str, width: int = 2, frozen: str = "") -> nn.Module:
    model = nn.ModuleDict(OrderedDict((name, nn.Linear(width, 1, bias=False)) for name in names))
    if frozen:
        model[frozen].requires_grad_(False)
    return model


def tied(name: str) -> nn.Module:
    """Returns a model with one layer under two names: "a" and `name`."""
    model = layers("a")
    model.add_module(name, model.get_submodule("a"))
    return model


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (layers("a", "b"), layers("b", "a"), "number 0 on rank 0 is parameter `a.weight`.* rank 1 it is .*`b.weight`"),
        (layers("a"), layers("a", "b"), "number 1 on rank 0 is nothing, and on rank 1 it is parameter `b.weight`"),
        (
            layers("a"),
            layers("a", width=3),
            r"float32 \[1, 2\]\), and on rank 1 it is parameter `a.weight` \(float32 \[1, 3",
        ),
        (layers("a"), layers("a").double(), "float64"),
        (layers("a", "b"), layers("a", "b", frozen="b"), "on rank 1 it is parameter `b.weight` .*frozen"),
        (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), "on rank 0 is buffer `running_mean`"),
        (tied("b"), tied("c"), "number 1 on rank 0 is parameter `b.weight`.* rank 1 it is parameter `c.weight`"),
    ],
)
def test_ranks_with_different_models_are_refused(one: nn.Module, other: nn.Module, told: str) -> None:
    said = errors_of_two_ranks(lambda ranks, rank: check_same_models(ranks, other if rank else one))
    assert re.search(told, said[0])
    assert said[1], "every rank ends"


def test_ranks_with_different_schedules_are_refused() -> None:
    def other(ranks: Ranks, rank: int) -> None:
        check_same_schedules(ranks, {"": lambda step: 1.0, "beta1": lambda step: 1.0 - 0.01 * rank * step}, 20)

    def same(ranks: Ranks, rank: int) -> None:
        check_same_schedules(ranks, {"": lambda step: 0.5**step}, None)

    said = errors_of_two_ranks(other)
    assert "ranks have built the schedule differently" in said[0]
    assert "`beta1` at step 1" in said[0]
    assert said[1]
    assert errors_of_two_ranks(same) == ["", ""]


def test_ranks_with_different_parameter_groups_are_refused_except_pipeline_stages() -> None:
    model = layers("a", "b")
    parameters = list(model.parameters())

    def groups(ranks: Ranks, rank: int) -> None:
        rates = (0.1, 0.2) if rank == 0 else (0.2, 0.1)
        optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)])
        check_same_groups(ranks, model, optimizer)

    def stages(ranks: Ranks, rank: int) -> None:
        stage = layers("a", "b")
        stage.get_submodule("ba"[rank]).to("meta")  # as every stage has the parameters of the others
        check_same_groups(ranks, stage, torch.optim.SGD(stage.parameters(), lr=0.1 * (1 + rank)))

    assert (
        "ranks have built the optimizer differently: number 0 on rank 0 is parameter group 0"
        in errors_of_two_ranks(groups)[0]
    )
    assert errors_of_two_ranks(stages) == ["", ""]


class Dice(Numbers):
    """Samples that differ at each read."""

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        import secrets

        return torch.tensor(float(secrets.randbelow(1 << 30))), 0


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (Numbers([*range(16)]), Numbers([*range(15, -1, -1)]), "sample 0 is different"),
        (Numbers([*range(16)]), Numbers([*range(15)]), "16 samples → 15 samples"),
        (Numbers([*range(16)]), Numbers([*range(16)], noise=1e-7), ""),
        (Numbers([*range(16)]), Numbers([*range(16)], noise=1e-3), "sample"),
        (Dice([*range(16)]), Dice([*range(16)]), ""),
        (Dice([*range(16)]), Dice([*range(15)]), "16 samples → 15 samples"),
    ],
)
def test_ranks_with_different_data_are_refused(one: Any, other: Any, told: str) -> None:
    prints = [{"train": printed(one)}, {"train": printed(other)}]
    said = errors_of_two_ranks(lambda ranks, rank: check_same_data(ranks, prints[rank]))
    if told:
        assert said[0].startswith("ranks have different data: [data.train] on rank 0 and on rank 1: ")
        assert told in said[0]
    assert [bool(each) for each in said] == [bool(told)] * 2


def test_a_single_rank_is_compared_with_no_other() -> None:
    check_same_models(SingleRank(), layers("a"))
    check_same_data(SingleRank(), {"train": printed(Numbers([1]))})


# ---------------------------------------------------------------------------------------------- across a resume
@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_fingerprint_in_a_checkpoint_detects_different_data(workers: int) -> None:
    saved = printed(Numbers([*range(32)]), workers).as_json()
    for ids, told in (
        ([*range(32)], ""),
        ([*range(64)], "32 samples → 64 samples"),
        ([*range(31), 99], "sample 31 is different"),
        ([*range(16), 99, *range(17, 32)], "sample 16 is different"),
    ):
        assert difference(saved, printed(Numbers(ids)).as_json()) == told


class Files(Numbers):
    """Dataset that opens its file at the first sample, as datasets for loader processes do."""

    opened_by: ClassVar[list[int]] = []

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        import os

        self.opened_by.append(os.getpid())
        return super().__getitem__(place)


def test_a_dataset_for_loader_processes_is_not_read_in_the_parent_process() -> None:
    data = Files([*range(8)])
    assert len(printed(data, workers=2).samples) == 8
    assert data.opened_by == []


class Nested:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return {"text": f"line {place}", "ids": torch.arange(place), "parts": [1.5 * place, {"nan": float("nan")}]}


def test_samples_of_any_structure_are_recognized() -> None:
    saved = printed(Nested()).as_json()
    assert len(saved["samples"]) == 3
    assert difference(saved, printed(Nested()).as_json()) == ""
    assert saved["samples"]["0"] != saved["samples"]["1"]


class Rows:
    """Two samples; the first is a row of numbers."""

    random = False

    def __init__(self, *row: float) -> None:
        self.row = row

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor(self.row if place == 0 else [0.0])


@pytest.mark.parametrize("row", [(1.0, 3.0, 2.0), (-1.0, 2.0, 5.0), (1.0, 2.0, float("nan"))], ids=str)
def test_a_sample_with_reordered_changed_or_missing_numbers_is_different(row: tuple[float]) -> None:
    """Comparing means alone is not enough, and NaN never equals a number."""
    saved, now = printed(Rows(1.0, 2.0, 3.0)).as_json(), printed(Rows(*row)).as_json()
    assert difference(saved, now) == difference(now, saved) == "sample 0 is different"
    assert difference(now, json.loads(json.dumps(now, allow_nan=False))) == ""


class Words(list[str]):
    """Samples without numbers."""


def test_different_text_samples_are_detected() -> None:
    saved = printed(Words(["one", "two"])).as_json()
    assert difference(saved, printed(Words(["one", "two"])).as_json()) == ""
    assert difference(saved, printed(Words(["one", "too"])).as_json()) == "sample 1 is different"


class Throws(Numbers):
    """Dataset that draws random numbers for every sample."""

    random = True

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.rand(3), place


def test_a_fingerprint_does_not_change_the_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    assert len(printed(Throws([*range(4)])).samples) == 4
    assert torch.rand(()) == expected


def test_a_resume_with_random_samples_compares_only_their_number() -> None:
    saved = {"train": printed(Dice([*range(4)])).as_json()}
    check_unchanged_data({"train": printed(Dice([*range(4)]))}, saved, [])
    with pytest.raises(UsageError, match=r"data\.train: 4 samples → 5 samples"):
        check_unchanged_data({"train": printed(Dice([*range(5)]))}, saved, [])


class Broken(Numbers):
    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        raise OSError("no such file")


def test_unreadable_data_has_an_empty_fingerprint_and_raises_no_error() -> None:
    assert printed(Broken([1, 2])).as_json() == {
        "length": 2,
        "class_names": [],
        "input_names": [],
        "samples": {},
    }


def test_a_resume_with_different_data_is_refused_unless_allowed() -> None:
    saved = {"train": printed(Numbers([*range(4)])).as_json(), "eval": printed(Numbers([1])).as_json()}
    now = {"train": printed(Numbers([*range(5)])), "eval": printed(Numbers([1]))}
    with pytest.raises(UsageError, match=r"data\.train: 4 samples → 5 samples") as refused:
        check_unchanged_data(now, saved, ["model"])
    assert "--allow-change data.train" in refused.value.hints[1]
    for allowed in ("data.train", "data", "data.train.path"):
        check_unchanged_data(now, saved, [allowed])
    check_unchanged_data(now, {}, [])  # a checkpoint of an earlier version


RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 1
outputs = 1
hidden = []
[data.train]
use = "./parts.py:Lines"
[task]
use = "regression"
[optimizer]
use = "sgd"
lr = 1e-4
[train]
length = "3st"
global_batch = 8
[checkpoint]
every = "1st"
[track]
every = "1st"
"""
CODE = """
import torch
from pathlib import Path

class Lines:
    random = False
    def __init__(self): self.values = [float(line) for line in Path("data.txt").read_text().split()]
    def __len__(self): return len(self.values)
    def __getitem__(self, i): return torch.tensor([self.values[i]]), torch.tensor([self.values[i]])
"""


def test_changed_data_lost_rows_and_foreign_checkpoints_are_detected_on_resume(
    ddpforge: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "parts.py").write_text(CODE)
    lines = "\n".join(map(str, range(32)))
    (tmp_path / "data.txt").write_text(lines)
    ddpforge("run", "run.toml")
    ddpforge("run", "run.toml", "name=other")

    (tmp_path / "data.txt").write_text(lines + "\n40\n41\n")
    refused = ddpforge("run", "run.toml", "train.length=5st", fails=True)
    assert refused.codes == [2]
    assert "data.train: 32 samples → 34 samples" in refused.stderr
    assert ddpforge("run", "run.toml", "train.length=6st", "--allow-change", "data.train").stderr
    (tmp_path / "data.txt").write_text(lines)

    run, other = tmp_path / "runs" / "run", tmp_path / "runs" / "other"
    rows = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(rows[1:]))
    resumed = ddpforge("run", "run.toml", "name=other", "train.length=4st")
    assert "metrics.jsonl has 2 rows up to step 3; it had 3" in resumed.stderr

    (stranger,) = (run / "checkpoints").glob("step-000000006-*")
    stranger.rename(other / "checkpoints" / stranger.name)
    refused = ddpforge("run", "run.toml", "name=other", "train.length=20st", fails=True)
    assert f"{stranger.name} is a checkpoint of the run " in refused.stderr
