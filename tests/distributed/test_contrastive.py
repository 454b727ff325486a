"""Small contrastive recipe: one curve on any ranks, sharded and in pipelines, with a ragged end and evaluation."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks
from support.torch_versions import needs_pipelines

SMALL = (
    *("data.train.of.split=test", "train.drop_last=false", "train.length=7st", "train.eval_every=7st"),
    *("track.every=1st", "checkpoint.every=99st", "schedule.use=constant"),
)
CURVE = ("train/loss", "train/accuracy", "train/grad_norm", "eval/loss", "eval/accuracy")


def rows(name: str, key: str) -> list[Any]:
    lines = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


@needs_pipelines
@pytest.mark.full  # tests/training/test_whole_batch.py has its loss and gradients over ranks
def test_contrastive_loss_has_the_same_curve_on_any_ranks_and_strategy(
    ddpforge: Callable[..., Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains step 6 on the last 40 of 360 samples."""
    monkeypatch.chdir(tmp_path)
    pipelines = ("strategy.use=pipeline", "strategy.stages=2")
    runs: dict[str, tuple[int, Sequence[str]]] = {
        "one": (1, ()),
        "two": (2, ()),
        "four": (4, ()),
        "sharded": (2, ("strategy.use=fsdp",)),
        "staged": (4, pipelines),
    }
    for name, (nproc, strategy) in runs.items():
        sets = (*SMALL, f"name={name}", *strategy)
        ddpforge("run", "contrastive-digits", *(f"--set={one}" for one in sets), nproc=nproc)
    assert rows("one", "samples")[4:6] == [320, 360]
    for name in runs:
        for key in CURVE:
            assert rows(name, key) == pytest.approx(rows("one", key), rel=1e-5), (name, key)


def test_accumulation_is_refused_before_training(ddpforge: Callable[..., Ranks]) -> None:
    failed = ddpforge("run", "contrastive-digits", "--set", "train.micro_batch=16", nproc=2, fails=True)
    assert failed.codes == [2, 2]
    assert "would cut it into 2 forward passes of each rank" in failed.stderr
    assert "Traceback" not in failed.stderr
