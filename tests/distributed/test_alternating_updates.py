"""Alternating updates: a small GAN has one curve on 1, 2 and 4 ranks and under FSDP, and resumes exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import Ranks
from support.sharding import weights_in

SMALL = (
    *("train.eval_every=6st", "checkpoint.every=99st", "track.every=1st", "model.width=32"),
    *(
        "train.global_batch=16",
        "optimizer.updates.discriminator.n_updates=2",
        "optimizer.updates.discriminator.new_batch=true",
    ),
)
CURVE = ("train/loss", "train/grad_norm", "train/loss/discriminator", "train/grad_norm/generator", "lr/generator")


@pytest.fixture
def gan(ddpforge: Callable[..., Ranks]) -> Callable[..., Ranks]:
    def run(name: str, *sets: str, nproc: int = 1, steps: int = 4, **more: Any) -> Ranks:
        every = (*SMALL, f"name={name}", f"train.length={steps}st", *sets)
        return ddpforge("run", "gan", *(f"--set={one}" for one in every), nproc=nproc, **more)

    return run


def rows(name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def assert_same_run(one: str, other: str) -> None:
    for key in CURVE:
        assert [row[key] for row in rows(one)] == pytest.approx([row[key] for row in rows(other)], rel=1e-5), key
    first, second = (weights_in(max(Path(f"runs/{name}/checkpoints").glob("step-*"))) for name in (one, other))
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=1e-4, atol=1e-6)


def test_gan_has_the_same_curve_on_any_number_of_ranks_and_after_a_resume(
    gan: Callable[..., Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flat = ("schedule.use=constant", "optimizer.updates.generator.schedule={use='constant', warmup='2st'}")
    gan("one", *flat)
    assert [row["samples"] for row in rows("one")] == [32, 64, 96, 128]  # two batches per step
    assert [row["lr/generator"] / rows("one")[2]["lr/generator"] for row in rows("one")] == [1 / 2, 1, 1, 1]
    gan("four", *flat, nproc=4)
    assert_same_run("one", "four")
    gan("resumed", *flat, "strategy.use=fsdp", nproc=2, steps=3)
    gan("resumed", *flat, "strategy.use=fsdp", nproc=2, steps=4)
    assert_same_run("one", "resumed")


def test_strategies_without_alternating_updates_are_refused_before_training(gan: Callable[..., Ranks]) -> None:
    failed = gan("no", "strategy.use=deepspeed", fails=True)
    assert failed.codes == [2]
    assert "makes one update a step, but [optimizer.updates] needs several" in failed.stderr
    assert "Traceback" not in failed.stderr
