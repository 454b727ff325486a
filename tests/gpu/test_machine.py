"""One GPU: device assignment, memory errors, env.json and data transfer. Run with `pytest -m gpu`."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, FSDP, ZERO, Bench
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from ddpforge.builtin.datasets.vision import torchvision_dataset
from ddpforge.builtin.optim.optimizers import sgd
from ddpforge.data import RankShare, to_device
from ddpforge.features.block_forwards import rework_blocks
from ddpforge.machine import usable_cores
from ddpforge.recipe.schema import TrainSection
from ddpforge.strategies.precision import precision_for
from ddpforge.training.loaders import open_data, served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    for name in ("weight_copies.py", "odd_models.py"):
        copy(SUPPORT / name, tmp_path)
    return Bench(tmp_path, ddpforge)


@pytest.mark.parametrize("strategy", [DDP, FSDP, ZERO[2]], ids=["ddp", "fsdp", "zero2"])
def test_more_processes_than_gpus_are_refused(bench: Bench, strategy: str) -> None:
    ranks = bench("two", strategy, nproc=torch.cuda.device_count() + 1, fails=True)
    assert set(ranks.codes) == {3}
    needs = "each process" if torch.cuda.device_count() > 1 else "each rank"  # one visible GPU may differ by process
    assert f"but {needs} needs its own GPU" in ranks.stderr
    assert "Traceback" not in ranks.stderr


def test_rank_with_one_visible_gpu_uses_it_under_any_local_rank(bench: Bench) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for name, strategy in (("ddp", DDP), ("zero", ZERO[3])):
        bench(name, strategy, nproc=1, env=env)
        assert json.loads((bench.folder / f"runs/{name}/status.json").read_text())["state"] == "done"


def test_recipe_can_select_cpu(bench: Bench) -> None:
    bench("cpu", nproc=2, train='device = "cpu"')
    assert json.loads((bench.folder / "runs/cpu/env.json").read_text())["cuda"] is None


@pytest.mark.real("a driver")
def test_env_json_names_the_gpu(bench: Bench) -> None:
    bench("run", nproc=1)
    found = json.loads((bench.folder / "runs/run/env.json").read_text())["cuda"]
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["driver"]
    assert found["nccl"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_skipped_first_step_leaves_momentum_intact(precision: str, nesterov: bool) -> None:
    weight = nn.Parameter(torch.ones(4096, device="cuda"))
    _ = [torch.full((4096,), 7e3, device="cuda") for _ in range(40)]  # leaves large numbers in freed memory
    optimizer = sgd([{"params": [weight]}], lr=0.1, momentum=0.9, nesterov=nesterov)
    kind = precision_for(precision, weight.device)  # type: ignore[arg-type]
    for gradient in (torch.inf, 1.0, 1.0):
        kind.backward((weight * gradient).sum())
        kind.unscale(optimizer)
        kind.update(optimizer, torch.nn.utils.get_total_norm([weight.grad]))  # type: ignore[list-item]
        weight.grad = None
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - (0.461 if nesterov else 0.29)))


def test_recomputed_block_with_keyword_arguments_repeats_dropout(bench: Bench) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.drop = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5)

        def forward(self, *, x: Tensor) -> Tensor:
            return self.drop(self.norm(self.layer(x)).relu())

    def trained(**options: bool) -> list[Tensor]:
        torch.manual_seed(0)
        block = Block().cuda()
        rework_blocks([block], TrainSection.model_validate({"length": "1st", "global_batch": 1} | options))
        torch.manual_seed(1)
        block(x=torch.randn(32, 64, device="cuda")).square().sum().backward()
        return [*(parameter.grad for parameter in block.parameters()), *block.buffers()]  # type: ignore[list-item]

    for kept, recomputed in zip(trained(), trained(activation_checkpointing=True), strict=True):
        torch.testing.assert_close(recomputed, kept)


@pytest.mark.real("the speed of a GPU")
def test_batches_copied_during_long_kernels_arrive_intact() -> None:
    """Starts each copy while the device is busy, into memory of an earlier batch."""
    device = torch.device("cuda", torch.cuda.current_device())
    large = torch.randn(4096, 4096, device=device)
    sums = []
    for number in range(50):
        batch = torch.full((1 << 20,), float(number)).pin_memory()
        for _ in range(4):
            large = torch.nn.functional.normalize(large @ large)
        sums.append(to_device([batch], device)[0].double().sum())
    assert [one.item() for one in sums] == [number * 2.0**20 for number in range(50)]


def test_packed_sequences_move_by_their_own_method() -> None:
    packed = pack_sequence([torch.ones(2, 3), torch.zeros(1, 3)])
    sequences, targets = to_device((packed, torch.ones(2)), torch.device("cuda"))
    assert [x.device.type for x in (sequences.data, sequences.batch_sizes, targets)] == ["cuda", "cpu", "cuda"]
    assert sequences.data.tolist() == packed.data.tolist()


def test_out_of_memory_error_suggests_a_smaller_micro_batch(bench: Bench) -> None:
    parts = """
[model]
use = "./odd_models.py:Hungry"
[data.train]
use = "./parts.py:Points"
[task]
use = "regression"
"""
    ranks = bench("run", nproc=1, parts=parts, fails=True)
    assert ranks.codes == [1]
    assert "memory is full: " in ranks.stderr
    assert "train.micro_batch = 1" in ranks.stderr


def test_images_use_loader_processes_by_default() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    images = torchvision_dataset(name="FakeData", split="train")
    options: dict[str, Any] = {"seed": 0, "drop_last": False, "workers": 0, "prefetch": 2, "pin": True}
    alone = open_data(images, global_batch=64, share=RankShare(0, 1, 64), **options)
    served_by = served("train", images, alone, device, trains=True)
    assert served_by.workers == min(8, usable_cores() - 1)
    for one, other in zip(alone.evaluation(), served_by.evaluation(), strict=True):
        assert torch.equal(one.data[0], other.data[0])
