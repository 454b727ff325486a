"""Every strategy on one CUDA device, over NCCL: bf16, torch.compile, shards on the host. Run with `pytest -m gpu`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks
from support.sharding import DDP, FSDP, ZERO, Bench, each_strategy

from ddpforge import compat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = 'precision = "bf16"'
TOLERANCE = 0.02  # of losses in bf16, as in `ddpforge parity`
COMPILED = 'compile = "default"'
BLOCKS = "compile_blocks = true\nactivation_checkpointing = true"
share_one_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.nccl.version() < (2, 30), reason="NCCL 2.30 lets ranks share a GPU"
)


def skip_refused(strategy: str) -> None:
    """Skips a compiled ZeRO-3 run if it is refused, because this torch compiles it to wrong gradients."""
    if strategy == ZERO[3] and not compat.torch_has(compat.COMPILED_STAGE_3):
        pytest.skip("this torch compiles ZeRO-3 to wrong gradients, so it is refused")


SHARED = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}

LOOK = """
import os

import torch.distributed as dist
from ddpforge.interfaces import Callback

class Look(Callback):
    def __init__(self, *, weights_on: str = "cuda") -> None:
        self.weights_on = weights_on

    def on_start(self, run):
        assert run.world.device.type == "cuda"
        backend = "gloo" if "PRETEND_CUDA_DEVICES" in os.environ else "nccl"
        assert not dist.is_initialized() or backend in dist.get_backend()
        assert {shard.tensor.device.type for shard in run.weights.shards().values()} == {self.weights_on}
"""
LOOKS = '[callbacks.look]\nuse = "./look.py:Look"\n'


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    (tmp_path / "look.py").write_text(LOOK)
    return Bench(tmp_path, ddpforge)


@pytest.mark.real("Triton")
@each_strategy
def test_compiled_bf16_gives_the_curve_of_one_process(bench: Bench, strategy: str) -> None:
    skip_refused(strategy)
    bench("one", 'use = "single"', nproc=1, train=f"{BF16}\n{COMPILED}", more=LOOKS)
    bench("other", strategy, nproc=1, train=f"{BF16}\n{COMPILED}", more=LOOKS)
    bench.alike("other", "one", rel=TOLERANCE)


@each_strategy
def test_fp32_trains_like_one_process_on_the_cpu(bench: Bench, strategy: str) -> None:
    bench("cpu", 'use = "single"', nproc=1, env={"ACCELERATE_USE_CPU": "true"})
    bench("cuda", strategy, nproc=1, more=LOOKS)
    bench.alike("cuda", "cpu", rel=1e-4)


@pytest.mark.real("NCCL")
@share_one_gpu
@each_strategy
def test_ranks_that_share_one_gpu_train_like_one_process(bench: Bench, strategy: str) -> None:
    """Runs two ranks on one GPU, which NCCL allows by an option: so their collectives are tested on one GPU, too."""
    bench("one", 'use = "single"', nproc=1, more=LOOKS)
    bench("two", strategy, nproc=2, more=LOOKS, env=SHARED)
    bench.alike("two", "one", rel=1e-4)


@pytest.mark.real("NCCL")
@share_one_gpu
def test_checkpoint_of_two_ranks_on_one_gpu_resumes_in_one_process(bench: Bench) -> None:
    bench.recipe = bench.recipe.replace(
        'use = "cosine"\nwarmup = "5st"', 'use = "constant"'
    )  # independent of the length
    bench("whole", FSDP, nproc=1, length="20st")
    bench("parts", FSDP, nproc=2, env=SHARED)
    bench("parts", DDP, nproc=1, length="20st")
    assert bench.column("parts") == pytest.approx(bench.column("whole"), rel=1e-4)


@pytest.mark.real("Triton")
@pytest.mark.parametrize("strategy", [DDP, FSDP, ZERO[3]], ids=["ddp", "fsdp", "zero3"])
def test_blocks_compiled_one_by_one_train_like_eager_ones(bench: Bench, strategy: str) -> None:
    skip_refused(strategy)
    bench("eager", 'use = "single"', nproc=1, train=BF16, more=LOOKS)
    bench("compiled", strategy, nproc=1, train=f"{BF16}\n{COMPILED}\n{BLOCKS}", more=LOOKS)
    bench.alike("compiled", "eager", rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cpu_offload_matches_shards_on_the_device(bench: Bench, precision: str) -> None:
    train = f'precision = "{precision}"'
    bench("device", FSDP, nproc=1, train=train, more=LOOKS)
    bench("host", f"{FSDP}\ncpu_offload = true", nproc=1, train=train, more=f'{LOOKS}weights_on = "cpu"\n')
    bench.alike("host", "device", rel=1e-4 if precision == "fp32" else TOLERANCE)


def test_bf16_all_gather_stays_close_to_autocast(bench: Bench) -> None:
    bench("autocast", FSDP, nproc=1, train=BF16, more=LOOKS)
    bench("gathered", f'{FSDP}\nall_gather_dtype = "compute"', nproc=1, train=BF16, more=LOOKS)
    bench.alike("gathered", "autocast", rel=TOLERANCE)


@pytest.mark.parametrize("name", ["NaiveSplit", "DataParallel"])
def test_several_gpus_in_one_process_give_the_curve_of_one(bench: Bench, name: str) -> None:
    """Uses strategies of ddpforge-teaching; on a machine with one GPU, they use only that one."""
    bench("one", 'use = "single"', nproc=1, more=LOOKS)
    bench("several", f'use = "ddpforge_teaching:{name}"', nproc=1, more=LOOKS)
    bench.alike("several", "one", rel=1e-4)
