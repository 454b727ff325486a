"""Mixtures on real ranks: the same curve, losses and epochs of sources on any number of ranks, also after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.trained import trained

RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "mlp"
inputs = 64
outputs = 10
hidden = [8]
[data.train.plain]
use = "digits"
split = "train"
weight = {{ 0st = 0.5, 6st = 0.3 }}
[data.train.noisy]
use = "two"
weight = 0.3
[data.train.few]
use = "part"
of = {{ use = "digits", split = "test" }}
share = "5%"
weight = 0.2
[task]
use = "classification"
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "12st"
global_batch = 20
micro_batch = {micro}
[checkpoint]
every = "7st"
[track]
every = "1st"
"""
NOISY = '''
import torch
from ddpforge.builtin.datasets.digits import Digits

class Noisy:
    """Digits with random noise for each sample."""
    def __init__(self) -> None:
        self.digits = Digits(split="test")
    def __len__(self):
        return len(self.digits)
    def __getitem__(self, index):
        image, label = self.digits[index]
        return image + torch.rand(image.shape), label
'''
COLUMNS = [f"train/{name}/{column}" for name in ("few", "noisy", "plain") for column in ("loss", "epochs")]


def recipe(folder: Path, name: str, micro: int) -> str:
    (folder / "noisy.py").write_text(NOISY)
    return RECIPE.format(name=name, micro=micro).replace('"two"', '"./noisy.py:Noisy"')


def test_losses_and_epochs_of_sources_do_not_depend_on_ranks(tmp_path: Path) -> None:
    alone = trained(tmp_path, recipe(tmp_path, "one", 20), 1)[0]
    for ranks, micro in ((1, 4), (2, 5), (4, 5)):
        for one in trained(tmp_path, recipe(tmp_path, f"on{ranks}-{micro}", micro), ranks):
            for column in ("train/loss", *COLUMNS):
                assert one.column(column) == pytest.approx(alone.column(column), rel=1e-5)
    # Samples of a step, before and after step 6.
    counts: dict[str, tuple[float, float]] = {
        "few": (4, 5),
        "noisy": (6, 7.5),
        "plain": (10, 7.5),
    }
    for name, (before, after) in counts.items():
        size = {"few": 18, "noisy": 360, "plain": 1437}[name]
        epochs = [(before * min(step, 6) + after * max(0, step - 6)) / size for step in range(1, 13)]
        assert alone.column(f"train/{name}/epochs") == pytest.approx(epochs, abs=1 / size)
    for step, row in enumerate(alone.rows[:12], start=1):
        shares = {"few": 0.2, "noisy": 0.3, "plain": 0.5} if step <= 6 else None
        if shares:  # each of these steps has exactly these shares
            whole = sum(share * row[f"train/{name}/loss"] for name, share in shares.items())
            assert row["train/loss"] == pytest.approx(whole, rel=1e-6)


PARTS = """
import torch
from ddpforge.builtin.datasets.digits import Digits
from ddpforge.interfaces import ShardedDataset

class Parts(ShardedDataset):
    shuffle, shuffle_buffer, interleave = True, 3, (4, 2)
    def __init__(self, split: str) -> None:
        self.digits, self.shard_sizes = Digits(split=split), [100, 60, 70]
    def iter_shard(self, part, *, epoch, skip):
        yield from range(part * 100 + skip, part * 100 + self.shard_sizes[part])
    def prepare(self, number):
        image, label = self.digits[number]
        return image + torch.rand(image.shape), label
"""


def test_sources_in_parts_have_one_curve_on_any_ranks(tmp_path: Path) -> None:
    (tmp_path / "parts_of.py").write_text(PARTS)
    curves = []
    for ranks in (1, 2, 4):
        text = RECIPE.format(name=f"on{ranks}", micro=5).partition("[data.train.plain]")
        sources = "".join(
            f'[data.train.{name}]\nuse = "./parts_of.py:Parts"\nsplit = "{name}"\nweight = {weight}\n'
            for name, weight in (("train", 3), ("test", 1))
        )
        recipe = text[0] + sources + "[task]" + text[2].partition("[task]")[2]
        curves.append(trained(tmp_path, recipe, ranks)[0])
    for column in ("train/loss", "train/train/loss", "train/test/loss", "train/test/epochs"):
        assert len(curves[0].column(column)) == 12
        for curve in curves[1:]:
            assert curve.column(column) == pytest.approx(curves[0].column(column), rel=1e-5)
    assert curves[0].column("train/test/epochs")[-1] == 12 * 5 / 230


def test_a_source_that_has_changed_since_the_run_began_is_named(ddpforge: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(recipe(tmp_path, "changed", 5))
    ddpforge("run", "run.toml", "--set", "train.length=3st")
    (tmp_path / "noisy.py").write_text(NOISY.replace("return len(self.digits)", "return 9"))
    refused = ddpforge("run", "run.toml", fails=True)
    assert "data.train.noisy: 360 samples → 9 samples" in refused.stderr
    assert "--allow-change data.train.noisy" in refused.stderr


def test_a_launched_mixture_resumes_within_an_epoch_on_other_ranks(
    ddpforge: Callable[..., Any], tmp_path: Path
) -> None:
    curves = []
    for name, attempts in (("alone", [("12st", 1)]), ("together", [("7st", 4), ("12st", 2)])):
        (tmp_path / "run.toml").write_text(recipe(tmp_path, name, 5))
        for length, ranks in attempts:
            ddpforge("run", "run.toml", "--set", f"train.length={length}", nproc=ranks)
        lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        curves.append([[line[key] for key in ("step", "train/loss", *COLUMNS)] for line in lines if "epoch" in line])
    alone, together = curves
    assert len(alone) == len(together) == 12
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
