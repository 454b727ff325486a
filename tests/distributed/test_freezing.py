"""The recipe freezes a part of a model: same curve under every strategy, and checkpoints that may omit that part."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks
from support.sharding import DDP, FSDP, ZERO, Bench, weights_in

FROZEN = 'freeze = ["blocks.0.*", "positions*"]\neval_every = "4st"'
TRAINED = '[checkpoint]\nsave = "trainable"\nat_start = true\nkeep = { last = 9 }\n'
OPTIONS = {"length": "8st", "train": FROZEN}


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def test_frozen_weights_stay_and_may_be_omitted_from_checkpoints(bench: Bench) -> None:
    """Stops the second run, continues it under another strategy, and evaluates it afterwards."""
    bench("one", 'use = "single"', nproc=1, **OPTIONS)
    stop = f'{TRAINED}[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = 3\nrank = 0\n'
    assert set(bench("many", ZERO[3], more=stop, fails=True, **OPTIONS).codes) == {75}
    bench("many", FSDP, more=stop, **OPTIONS)
    bench.alike("many", "one")
    left = {"blocks.0", "positio"}
    assert {name for name in weights_in(bench.newest("one")) if name[:8] in left or name[:7] in left}
    assert not {name for name in weights_in(bench.newest("many")) if name[:8] in left or name[:7] in left}
    found = json.loads(bench.ddpforge("eval", "runs/many", "--json", nproc=2).stdout)
    assert found["eval/loss"] == pytest.approx(bench.column("one", "eval/loss")[-1], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [DDP, ZERO[1], ZERO[2], FSDP], ids=["ddp", "zero1", "zero2", "fsdp"])
def test_only_frozen_weights_stay_unchanged(bench: Bench, strategy: str) -> None:
    keep = "[checkpoint]\nat_start = true\nkeep = { last = 9 }\n"
    bench("one", 'use = "single"', nproc=1, **OPTIONS)
    bench("many", strategy, more=keep, **OPTIONS)
    bench.alike("many", "one")
    first, last = (weights_in(end(bench.folder.glob("runs/many/checkpoints/step-*"))) for end in (min, max))
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {name for name in first if name.startswith(("blocks.0.", "positions"))}


def test_freeze_pattern_without_a_match_is_refused(bench: Bench) -> None:
    failed = bench("none", 'use = "single"', nproc=1, fails=True, length="8st", train='freeze = ["block.0.*"]')
    assert failed.codes == [2]
    assert "train.freeze: `block.0.*` matches no parameter; similar names:" in failed.stderr
