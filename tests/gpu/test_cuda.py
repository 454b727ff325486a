"""The same recipes on CUDA: NCCL, autocast, fused optimizers and torch.compile. Run with `pytest -m gpu`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.tasks.language_modeling import LanguageModeling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "gpt"
block_size = 32
layers = 2
heads = 2
width = 64
[data.train]
use = "text"
split = "train"
block_size = 32
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "30st"
global_batch = 16
micro_batch = {micro_batch}
clip_norm = 1.0
precision = "{precision}"
compile = "{compile}"
{train}
[checkpoint]
every = "10st"
[track]
every = "1st"
"""


@pytest.fixture
def losses(ddpforge: Callable[..., Ranks], tmp_path: Path) -> Callable[..., list[float]]:
    """Returns a function that runs a recipe and returns the training loss of every step."""

    def run(
        name: str, *, precision: str = "fp32", compile: str = "off", train: str = "", cpu: bool = False
    ) -> list[float]:
        micro_batch = 16 if compile == "reduce-overhead" else 8  # CUDA graphs do not accumulate
        text = RECIPE.format(name=name, precision=precision, compile=compile, micro_batch=micro_batch, train=train)
        (tmp_path / f"{name}.toml").write_text(text)
        ddpforge("run", f"{name}.toml", nproc=1, env={"ACCELERATE_USE_CPU": "true"} if cpu else None)
        rows = map(json.loads, (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines())
        return [row["train/loss"] for row in rows]

    return run


def test_fp32_on_cuda_matches_cpu(losses: Callable[..., list[float]]) -> None:
    assert losses("cuda") == pytest.approx(losses("cpu", cpu=True), rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("compile", ["off", "default", "reduce-overhead"])
def test_low_precision_and_compilation_stay_close_to_fp32(
    losses: Callable[..., list[float]], precision: str, compile: str
) -> None:
    found = losses("low", precision=precision, compile=compile)
    assert found == pytest.approx(losses("fp32"), rel=0.02)


@pytest.mark.real("float8 kernels")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compile", ["off", "default"])
def test_float8_stays_close_to_bf16(losses: Callable[..., list[float]], fp8: str, compile: str) -> None:
    found = losses("float8", precision="bf16", compile=compile, train=f'fp8 = "{fp8}"')
    bf16 = losses("bf16", precision="bf16", compile=compile)
    assert found == pytest.approx(bf16, rel=0.05)
    assert found != bf16


@pytest.mark.real("the speed of a GPU")
@pytest.mark.parametrize("compile", [False, True])
def test_chunked_loss_saves_memory_and_keeps_gradients(compile: bool) -> None:
    tokens = torch.randint(32_768, (2, 2048), device="cuda")

    def trained(task: LanguageModeling) -> tuple[float, torch.Tensor, int]:
        torch.manual_seed(0)
        model = GPT(vocab_size=32_768, block_size=2048, layers=1, heads=2, width=128).cuda()
        if compile:
            model.compile()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, _ = task.loss(model, (tokens, tokens))
        loss.backward()
        assert model.tokens.weight.grad is not None
        return loss.item(), model.tokens.weight.grad, torch.cuda.max_memory_allocated() - before

    loss, gradient, peak = trained(LanguageModeling())
    found, chunked, less = trained(LanguageModeling(loss_chunk=512))
    assert found == pytest.approx(loss, rel=1e-3)
    assert (chunked - gradient).norm() < 0.02 * gradient.norm()
    assert less < peak / 2  # whole: 0.5 GiB of logits, in fp32
