"""FSDP2 and HSDP shard everything and keep the curve."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, FSDP, HSDP, Bench, weights_in
from torch.distributed.fsdp import FSDPModule

EMA = "[callbacks.ema]\ndecay = 0.9\n"


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


# ---------------------------------------------------------------------------------------------- one curve
OF_TEST_MATRIX = {"one-shard": (1, FSDP), "two-shards": (2, FSDP), "hybrid": (4, HSDP)}
LAYOUTS = {
    "whole-gradients": (2, f"{FSDP}\nno_sync = true"),
    "kept": (2, f"{FSDP}\nreshard_after_forward = false"),
    "meta": (2, f"{FSDP}\nmeta = true"),
}


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(OF_TEST_MATRIX, marks=pytest.mark.full)], ids=", ".join)
def test_every_fsdp_layout_has_the_curve_of_one_process(bench: Bench, layouts: dict[str, tuple[int, str]]) -> None:
    """Covers traps 01, 02, 04, 06, 24, 27; evaluates averaged weights."""
    bench("one", 'use = "single"', nproc=1, more=EMA)
    for name, (nproc, strategy) in layouts.items():
        bench(name, strategy, nproc=nproc, more=EMA)
        bench.alike(name, "one")


@pytest.mark.full  # tests/distributed/test_activation_checkpointing.py has another model
def test_activation_checkpointing_keeps_the_losses(bench: Bench) -> None:
    dropout = "dropout = 0.2"
    bench("plain", FSDP, model=dropout)
    bench("recomputed", FSDP, model=dropout, train="activation_checkpointing = true")
    bench("recomputed-ddp", DDP, model=dropout, train="activation_checkpointing = true")
    assert bench.column("recomputed") == bench.column("plain")
    bench.alike("recomputed-ddp", "plain")


@pytest.mark.full
def test_compiled_blocks_have_the_curve_of_eager_blocks(bench: Bench) -> None:
    bench("eager", FSDP)
    bench("compiled", FSDP, train='compile = "default"\ncompile_blocks = true\nactivation_checkpointing = true')
    bench("compiled-ddp", DDP, train='compile = "default"\ncompile_blocks = true')
    bench.alike("compiled", "eager", rel=1e-4)
    bench.alike("compiled-ddp", "eager", rel=1e-4)
    assert set(weights_in(bench.newest("compiled"))) == set(weights_in(bench.newest("eager")))


def test_bf16_all_gather_stays_close_to_autocast(bench: Bench) -> None:
    """Halves the traffic. The model is an MLP, because LayerNorm takes no mixed dtypes on CPU."""
    mlp = """
[model]
use = "mlp"
inputs = 4
hidden = [16, 16]
outputs = 1
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
"""
    bf16 = 'precision = "bf16"\nblocks = ["Linear"]'
    bench("autocast", FSDP, parts=mlp, train=bf16)
    bench("gathered", f'{FSDP}\nall_gather_dtype = "compute"', parts=mlp, train=bf16)
    bench.alike("gathered", "autocast", rel=2e-2)


# ---------------------------------------------------------------------------------------------- engaged or error
@pytest.mark.parametrize(
    ("strategy", "nproc", "train", "said"),
    [
        (f"{FSDP}\nreplicas = 3", 2, "", "strategy.replicas = 3 does not divide the 2 ranks"),
        (f"{FSDP}\ncpu_offload = true", 1, "", "strategy.cpu_offload moves shards from a GPU to the host"),
        (f'{FSDP}\nall_gather_dtype = "compute"', 1, "", 'has no effect while train.precision is "fp32"'),
        (FSDP, 2, "sync_batchnorm = true", "train.sync_batchnorm needs CUDA"),
    ],
)
def test_unsupported_options_are_refused(bench: Bench, strategy: str, nproc: int, train: str, said: str) -> None:
    failed = bench("run", strategy, nproc=nproc, train=train, fails=True)
    assert set(failed.codes) == {2}
    assert said in failed.stderr
    assert "Traceback" not in failed.stderr


POINTS = """
[model]
use = "./odd_models.py:{name}"
{{model}}
[data.train]
use = "./parts.py:Points"
[task]
use = "regression"
"""


@pytest.fixture
def train_model(bench: Bench) -> Callable[..., Ranks]:
    copy(SUPPORT / "odd_models.py", bench.folder)

    def run(name: str, strategy: str, **options: str) -> Ranks:
        parts = POINTS.format(name=name)
        failed = bench("run", strategy, parts=parts, fails=True, **options)
        assert 0 not in failed.codes
        assert "Traceback" not in failed.stderr
        return failed

    return run


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("TiedBlocks", "", "`blocks.0.inner.weight` and `blocks.1.inner.weight` are one parameter"),  # trap 35c
        ("Uninitialised", "meta = true", "(Uninitialised) has parameters or buffers but no reset_parameters"),
        ("Scalar", "", "parameter `scale` is a scalar"),
        pytest.param(
            *("Uneven", "", "parameter `b.0.weight` and 3 more got no gradient on rank 0"),
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
                reason="an older torch has rank 0 and rank 1 reduce different sizes, which ends both",
            ),
        ),
    ],
)
def test_unsupported_models_are_refused(train_model: Callable[..., Ranks], model: str, options: str, said: str) -> None:
    failed = train_model(model, f"{FSDP}\n{options}")
    assert 3 in failed.codes
    assert said in failed.stderr


def test_optimizer_with_factored_state_is_refused(bench: Bench) -> None:
    """Trains with Adafactor, which keeps a vector per row and column of a weight: it needs whole weights."""
    adafactor = bench.recipe.replace('use = "adamw"', 'use = "torch.optim:Adafactor"')
    factored = Bench(bench.folder, bench.ddpforge, adafactor)
    factored("moved", DDP, length="6st")
    refused = factored("moved", FSDP, length="8st", fails=True)
    assert set(refused.codes) == {3}
    assert "Adafactor cannot be used under FSDP" in refused.stderr
    factored("moved", DDP, length="8st", nproc=1)
