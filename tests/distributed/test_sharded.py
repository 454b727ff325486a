"""Guarantees under every strategy that shards: checkpoints, unusual models, contracts."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
from safetensors.torch import load_file
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, EACH, FSDP, HSDP, ZERO, Bench, weights_in

from ddpforge.builtin.models.gpt import GPT

EMA = "[callbacks.ema]\ndecay = 0.9\n"
STOP = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = {step}\nrank = 0\n'
POINTS = """
[model]
use = "./odd_models.py:{name}"
{{model}}
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
"""

each_sharded = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            table, id=name, marks=pytest.mark.full if name in ("zero1", "zero2") else ()
        )  # as zero3, in fewer parts
        for name, table in EACH.items()
        if name != "ddp"
    ],
)


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    copy(SUPPORT / "odd_models.py", tmp_path)
    return Bench(tmp_path, ddpforge)


# ---------------------------------------------------------------------------------------------- to disk and back
def test_resume_under_fsdp_is_bitwise(bench: Bench) -> None:
    """Covers traps 08, 09, 36, with dropout and averaged weights."""
    options = {"model": "dropout = 0.2"}
    bench("whole", FSDP, more=EMA, **options)
    stopped = bench("parts", FSDP, more=EMA + STOP.format(step=5), fails=True, **options)
    assert stopped.codes == [75, 75]
    bench("parts", FSDP, more=EMA, **options)
    assert bench.column("parts") == bench.column("whole")
    assert bench.column("parts", "eval/loss") == bench.column("whole", "eval/loss")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(FSDP, id="fsdp", marks=pytest.mark.full),  # hsdp is fsdp with replicas
        pytest.param(HSDP, id="hsdp"),
        pytest.param(ZERO[2], id="zero2", marks=pytest.mark.full),  # its checkpoints: test_deepspeed.py
        pytest.param(ZERO[3], id="zero3", marks=pytest.mark.full),
    ],
)
def test_checkpoint_and_export_equal_those_of_ddp(bench: Bench, strategy: str) -> None:
    """Covers trap 25; tied embeddings are one tensor; averaged weights are those of DDP."""
    nproc = 4 if strategy == HSDP else 2
    bench("run", strategy, nproc=nproc, more=EMA)
    bench("ddp", DDP, more=EMA)
    model = GPT(vocab_size=16, block_size=8, layers=2, heads=2, width=16)
    for weights in ("model", "ema"):
        bench.ddpforge("export", "run", "--weights", weights, "--out", "out.safetensors", "--force")
        model.load_state_dict(load_file(bench.folder / "out.safetensors"))
    assert bench.column("run", "eval/loss") == pytest.approx(bench.column("ddp", "eval/loss"), rel=1e-5)

    evaluated = bench.ddpforge("eval", "run", "--json", nproc=nproc)
    assert json.loads(evaluated.stdout)["eval/loss"] == bench.column("run", "eval/loss")[-1]

    manifests = [json.loads((bench.newest(name) / "manifest.json").read_text()) for name in ("run", "ddp")]
    for section in ("model", "optimizer", "callbacks"):
        shapes = [{name: (t["shape"], t["dtype"]) for name, t in m["tensors"][section].items()} for m in manifests]
        assert shapes[0] == shapes[1]
    assert manifests[0]["optimizer"] == manifests[1]["optimizer"]


# ---------------------------------------------------------------------------------------------- odd models
@each_sharded
def test_parameter_with_two_names_stays_one_tensor(bench: Bench, strategy: str) -> None:
    """Covers trap 35c."""
    bench("ddp", DDP, parts=POINTS.format(name="TiedNames"))
    bench("run", strategy, parts=POINTS.format(name="TiedNames"))
    bench.alike("run", "ddp")
    assert "b.weight" not in weights_in(bench.newest("run"))


@each_sharded
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Half", "parameter `head.weight` is bfloat16"),  # trap 26
        ("BySample", "got no gradient on rank"),  # trap 30: other parameters in other micro-batches
    ],
)
def test_unsupported_models_are_refused(bench: Bench, strategy: str, model: str, said: str) -> None:
    failed = bench("run", strategy, parts=POINTS.format(name=model), fails=True)
    assert 0 not in failed.codes
    assert (2 if model == "Half" else 3) in failed.codes
    assert said in failed.stderr


# ---------------------------------------------------------------------------------------------- contracts
def test_strategy_that_breaks_its_contract_is_refused(bench: Bench) -> None:
    """Covers trap 05: the strategy declares that it shards, but every rank holds everything."""
    (bench.folder / "lying.py").write_text(
        "from dataclasses import replace\n"
        "from ddpforge.strategies.ddp import DDP\n\n"
        "class Lying(DDP):\n"
        '    contract = replace(DDP.contract, shards=("optimizer state",))\n'
    )
    failed = bench("run", 'use = "./lying.py:Lying"', fails=True)
    assert set(failed.codes) == {3}
    assert "Lying promises that 2 ranks hold each trainable weight once, but they hold 6,976 of 6,976" in failed.stderr
    assert "each part 2 times" in failed.stderr


# ---------------------------------------------------------------------------------------------- how long ranks wait
@pytest.mark.parametrize("strategy", [DDP, HSDP, ZERO[2]], ids=["ddp", "hsdp", "zero2"])
def test_collective_timeout_applies_to_every_process_group(bench: Bench, strategy: str) -> None:
    """Covers groups that FSDP creates for replicas and DeepSpeed for itself, for which torch would use 30 minutes."""
    timeouts = '[callbacks.timeouts]\nuse = "./parts.py:ShowTimeouts"'
    bench("run", strategy, length="6st", train='collective_timeout = "7m"', more=timeouts)
    waits = json.loads((bench.folder / "timeouts.json").read_text())
    assert set(waits) == {420.0}
