"""SAM compared with a loop written by hand, under every strategy; its options; a resumed run."""

import json
import math
import subprocess
from importlib.util import find_spec
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ddpforge.testing.ranks import run_ddpforge
from safetensors.torch import load_file
from sam_parts import Net, Points
from torch import Tensor, nn

from ddpforge_sam import sam

ROOT = Path(__file__).parents[1]
RECIPE = """
recipe = 2
name = "run"
[model]
use = "./sam_parts.py:Net"
[data.train]
use = "./sam_parts.py:Points"
[data.eval]
use = "./sam_parts.py:Points"
samples = 7
draw = 2
[task]
use = "regression"
[optimizer]
use = "sam"
rho = 0.3
{base}
[strategy]
{strategy}
[train]
length = "{length}"
global_batch = 16
micro_batch = 4
eval_every = "1st"
{train}
[track]
every = "1st"
[checkpoint]
at_start = true
"""
SGD = 'base = "sgd"\nlr = 0.2\nmomentum = 0.9'
ADAMW = 'base = "adamw"\nlr = 0.05\nweight_decay = 0.1\nbetas = [0.9, 0.99]'
STRATEGIES = {"ddp": 'use = "ddp"', "fsdp": 'use = "fsdp"', "hsdp": 'use = "fsdp"\nreplicas = 2'}
if find_spec("deepspeed"):
    STRATEGIES |= {f"zero{stage}": f'use = "deepspeed"\nstage = {stage}' for stage in (1, 2, 3)}


class Bench:
    """Runs one recipe in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy(Path(__file__).parent / "sam_parts.py", folder)

    def __call__(self, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        return run_ddpforge(*arguments, cwd=self.folder, ranks=ranks)

    def write(self, *, base: str = SGD, strategy: str = "ddp", length: str = "6st", train: str = "") -> None:
        text = RECIPE.format(base=base, strategy=STRATEGIES[strategy], length=length, train=train)
        (self.folder / "run.toml").write_text(text)

    def train(self, *, ranks: int, **text: str) -> None:
        self.write(**text)
        done = self("run", "run.toml", ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr

    def column(self, key: str) -> list[float]:
        rows: list[dict[str, Any]] = [
            json.loads(line) for line in (self.folder / "runs/run/metrics.jsonl").read_text().splitlines()
        ]
        return [row[key] for row in rows if key in row]

    def weights(self) -> dict[str, Tensor]:
        done = self("export", "runs/run", "--out", "weights.safetensors", "--force")
        assert done.returncode == 0, done.stderr
        return load_file(self.folder / "weights.safetensors")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class ByHand:
    """Algorithm of the paper, in one process and one batch."""

    def __init__(self, base: str = "sgd", *, clip: float = math.inf, rho: float = 0.3, steps: int = 6) -> None:
        self.model = Net()
        parameters = list(self.model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
        if base == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, betas=(0.9, 0.99))
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluated: list[float] = []
        for _ in range(steps):
            before = [p.detach().clone() for p in parameters]
            self.losses.append(self.differentiate(Points()).item())
            norm = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()
            with torch.no_grad():
                for p in parameters:
                    p += rho * p.grad / norm
            self.differentiate(Points())
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
            self.norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip).item())
            optimizer.step()
            self.evaluated.append(self.loss(Points(7, 2)).item())

    def loss(self, points: Points) -> Tensor:
        return F.mse_loss(self.model(points.x), points.y)

    def differentiate(self, points: Points) -> Tensor:
        self.model.zero_grad()
        loss = self.loss(points)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def check(bench: Bench, expected: ByHand) -> None:
    assert bench.column("train/loss") == pytest.approx(expected.losses, rel=1e-5)
    assert bench.column("train/grad_norm") == pytest.approx(expected.norms, rel=1e-5)
    assert bench.column("eval/loss") == pytest.approx(expected.evaluated, rel=1e-5)  # with unperturbed weights
    weights = bench.weights()
    for name, parameter in expected.model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- the loss curve
# One strategy keeps gradients whole, the other splits all; in the resumed run below FSDP2 splits them.
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("ddp", "zero3"))) for name in STRATEGIES]
)
def test_two_ranks_match_the_loop_by_hand(bench: Bench, strategy: str) -> None:
    bench.train(ranks=2, strategy=strategy, train="clip_norm = 0.1")
    assert min(ByHand().norms) > 0.1  # so every step clips
    check(bench, ByHand(clip=0.1))


def test_one_process_with_adamw_matches_the_loop_by_hand(bench: Bench) -> None:
    bench.train(ranks=1, base=ADAMW)
    check(bench, ByHand("adamw"))


def test_sam_differs_from_its_base(bench: Bench) -> None:
    """Otherwise the other tests could not detect an ignored `rho`."""
    assert ByHand(rho=1e-12).losses != pytest.approx(ByHand().losses, rel=1e-2)


def test_resumed_run_equals_uninterrupted_run(bench: Bench) -> None:
    bench.train(ranks=2, base=ADAMW, strategy="fsdp", length="3st")
    bench.train(ranks=2, base=ADAMW, strategy="fsdp", length="6st")
    check(bench, ByHand("adamw"))


def test_bf16_approximates_fp32(bench: Bench) -> None:
    bench.train(ranks=1, train='precision = "bf16"')
    assert bench.column("train/loss") == pytest.approx(ByHand().losses, rel=0.1)


@pytest.mark.slow
def test_bundled_recipe_passes_parity(bench: Bench) -> None:
    """Under every strategy, the CNN's BatchNorm computes each batch twice but counts it once; with a real launcher."""
    copy(ROOT / "recipes" / "digits-sam.toml", bench.folder)
    done = bench("parity", "digits-sam.toml", "--strategies", "ddp@2,fsdp@2", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------- the optimizer
def test_perturb_moves_by_rho_and_restore_is_exact() -> None:
    weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2))]
    optimizer: Any = sam([{"params": weights}], rho=0.7, lr=0.1)
    before = [weight.detach().clone() for weight in weights]
    for weight in weights[:2]:
        weight.grad = torch.randn_like(weight)
    norm = torch.cat([weight.grad.flatten() for weight in weights[:2] if weight.grad is not None]).norm().item()

    optimizer.perturb(norm)
    moved = torch.cat([(w.detach() - b).flatten() for w, b in zip(weights, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.7, rel=1e-5)
    optimizer.restore()
    assert all(torch.equal(w.detach(), b) for w, b in zip(weights, before, strict=True))


def test_zero_gradient_does_not_move_the_weights() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    optimizer: Any = sam([{"params": [weight]}], lr=0.1)
    optimizer.perturb(0.0)
    assert torch.equal(weight.detach(), torch.ones(2))


@pytest.mark.parametrize("base", ["sgd", "adamw", "torch.optim:RAdam"])
def test_base_keeps_its_class_groups_and_options(base: str) -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = sam(groups, base=base, lr=0.3, weight_decay=0.2)
    assert isinstance(optimizer, {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}.get(base, torch.optim.RAdam))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.3, 0.2), (0.3, 0.0)]


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("sdg", "there is no optimizer `sdg`; known: adamw"),
        ("sam", "there is no optimizer `sam`"),
        ("torch.optim:Nothing", "cannot be imported"),
        ("no_such_module:Nothing", "cannot be imported"),
        ("math:pi", "is not an optimizer"),
        ("ddpforge_sam:sam", "is itself a multi-pass optimizer"),
    ],
)
def test_unusable_base_is_refused(base: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sam([{"params": [nn.Parameter(torch.ones(2))]}], base=base, **({"lr": 0.1} if "sam:" in base else {}))


def test_error_about_an_option_of_the_base_names_sam() -> None:
    with pytest.raises(ValueError, match=r"sam passes its other options to the base `sgd`.*missing .*'lr'"):
        sam([{"params": [nn.Parameter(torch.ones(2))]}], base="sgd")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('base = "sdg"\nlr = 0.1', "there is no optimizer `sdg`"),
        ('base = "sgd"\nlr = 0.1\nmomentun = 0.9', "momentun"),
        ('base = "torch.optim:LBFGS"\nlr = 0.1', "computes the loss itself"),
        ("lr = 0.1\nsharpness = 0.05", "sharpness"),
    ],
)
def test_mistake_in_a_recipe_is_an_error_with_its_line(bench: Bench, base: str, message: str) -> None:
    bench.write(base=base)
    done = bench("run", "run.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "run.toml:" in done.stderr
    assert "Traceback" not in done.stderr
