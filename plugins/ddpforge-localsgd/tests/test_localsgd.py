"""Local SGD compared with a simulation by hand and with DDP; checkpoints; gradients that are not finite."""

import json
import subprocess
from pathlib import Path
from shutil import copy, rmtree
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import SingleRank
from ddpforge.recipe.schema import TrainSection
from ddpforge.testing.ranks import run_ddpforge
from localsgd_parts import Net, Points
from safetensors.torch import load_file
from torch import Tensor

from ddpforge_localsgd import LocalSGD

ROOT = Path(__file__).parents[1]
RECIPE = """
recipe = 2
name = "run"
[model]
use = "./localsgd_parts.py:Net"
[data.train]
use = "./localsgd_parts.py:Points"
{data}
[task]
use = "./localsgd_parts.py:Weighted"
[optimizer]
{optimizer}
[strategy]
{strategy}
[train]
length = "{length}"
global_batch = 16
{train}
[track]
every = "1st"
[checkpoint]
at_start = true
keep = {{ last = 9 }}
every = "{every}"
{more}
"""
SGD = 'use = "sgd"\nlr = 0.2\nmomentum = 0.9'
PLAIN = 'use = "sgd"\nlr = 0.2'
ADAMW = 'use = "adamw"\nlr = 0.02'
DILOCO = 'use = "localsgd"\nperiod = 3\nouter_lr = 0.7\nouter_momentum = 0.9\nnesterov = true'


class Bench:
    """Runs one recipe in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy(Path(__file__).parent / "localsgd_parts.py", folder)

    def __call__(self, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        return run_ddpforge(*arguments, cwd=self.folder, ranks=ranks)

    def write(self, **text: str) -> None:
        blank = dict.fromkeys(("data", "train", "more"), "")
        options = blank | {"optimizer": SGD, "strategy": DILOCO, "length": "8st", "every": "99st"} | text
        (self.folder / "run.toml").write_text(RECIPE.format(**options))

    def train(self, *, ranks: int = 2, **text: str) -> None:
        self.write(**text)
        done = self("run", "run.toml", ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs/run/metrics.jsonl").read_text().splitlines()]

    def weights(self, *options: str) -> dict[str, Tensor]:
        done = self("export", "runs/run", "--out", "weights.safetensors", "--force", *options)
        assert done.returncode == 0, done.stderr
        return load_file(self.folder / "weights.safetensors")

    def samples(self, rank: int, steps: int) -> list[list[int]]:
        """Returns the indices of the samples of each step on a rank, without the samples of preflight."""
        ids = list(map(int, (self.folder / f"samples-{rank}.txt").read_text().split()))[-8 * steps :]
        return [ids[8 * step : 8 * step + 8] for step in range(steps)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- the algorithm
def test_two_ranks_match_the_simulation_by_hand(bench: Bench) -> None:
    """Eight steps: two full periods of three steps, and a third that the last checkpoint ends early."""
    bench.train(data="noted = true", train="clip_norm = 1.0")
    points = Points()
    models = [Net(), Net()]
    inner = [torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in models]
    common = Net()
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    batches = [bench.samples(rank, 8) for rank in (0, 1)]
    for step in range(8):
        items = sum(int(points.items[ids[step]].sum()) for ids in batches)
        squares = 0.0
        for model, optimizer, ids in zip(models, inner, batches, strict=True):
            x, y, weight = points.x[ids[step]], points.y[ids[step]], points.items[ids[step]]
            optimizer.zero_grad()
            loss = (F.mse_loss(model(x), y, reduction="none").squeeze(1) * weight).sum() * 2 / items
            loss.backward()  # type: ignore[no-untyped-call]
            squares += torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() ** 2
            optimizer.step()
        row = bench.rows()[step]
        assert row["train/grad_norm"] == pytest.approx((squares / 2) ** 0.5, rel=1e-5)
        if step in (2, 5, 7):
            for shared, one, other in zip(common.parameters(), *(m.parameters() for m in models), strict=True):
                shared.grad = shared.detach() - (one.detach() + other.detach()) / 2
            outer.step()
            for model in models:
                model.load_state_dict(common.state_dict())
    same(bench.weights(), dict(common.named_parameters()))


@pytest.mark.slow
def test_period_1_passes_parity_with_ddp(bench: Bench) -> None:
    """Ranks with different numbers of items, under a real launcher.

    The gradient norm is not compared: localsgd reports a mean over ranks, not the norm of the mean gradient.
    """
    bench.write(optimizer=PLAIN, strategy='use = "localsgd"', data="samples = 30")  # and a smaller last batch
    done = bench("parity", "run.toml", "--strategies", "ddp@2,localsgd:period=1@2", "--steps", "8", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(done.stdout)["runs"][1]
    largest = {name: quantity["largest"] for name, quantity in run["quantities"].items()}
    assert set(largest) == {"initial weights", "lr", "train/loss", "weights", "updates"}
    assert max(largest.values()) < 1e-5


def test_one_process_trains_like_single(bench: Bench) -> None:
    found = []
    for strategy in ('use = "single"', 'use = "localsgd"\nperiod = 3'):
        bench.train(optimizer=ADAMW, strategy=strategy, ranks=1, length="6st")
        found.append(([row["train/loss"] for row in bench.rows()], bench.weights()))
        rmtree(bench.folder / "runs")
    (losses, weights), (expected, alone) = found[::-1]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 6
    same(weights, alone)


def test_the_bundled_recipe_learns(bench: Bench) -> None:
    copy(ROOT / "recipes" / "digits-localsgd.toml", bench.folder / "digits-localsgd.toml")
    done = bench("run", "digits-localsgd.toml", ranks=2)
    assert done.returncode == 0, done.stderr
    status = json.loads((bench.folder / "runs/digits-localsgd/status.json").read_text())
    assert status["metrics"]["eval/accuracy"] >= 0.95


# ---------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("optimizer", [pytest.param(SGD, marks=pytest.mark.slow), ADAMW])
def test_resumed_run_equals_uninterrupted_run_exactly(bench: Bench, optimizer: str) -> None:
    """Also between two averagings: the checkpoint of step 4 averages, and contains outer and inner momentum."""
    bench.train(optimizer=optimizer, every="4st")
    whole = bench.weights()
    rows = bench.rows()
    rmtree(bench.folder / "runs")
    bench.train(optimizer=optimizer, every="4st", length="4st")
    bench.train(optimizer=optimizer, every="4st")
    assert [row["train/loss"] for row in bench.rows()] == [row["train/loss"] for row in rows]
    found = bench.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_run_continues_under_another_strategy_and_number_of_ranks(bench: Bench) -> None:
    bench.train(optimizer=ADAMW, length="4st")
    bench.train(optimizer=ADAMW, length="6st", strategy='use = "ddp"', ranks=1)
    bench.train(optimizer=ADAMW, length="8st")
    assert [row["samples"] for row in bench.rows()] == [16 * step for step in range(1, 9)]
    assert all(tensor.isfinite().all() for tensor in bench.weights().values())


def test_ema_averages_the_common_weights_and_evaluations_use_them(bench: Bench) -> None:
    """EMA's average changes only at an averaging; with decay 1/2 the first moves it half way."""
    more = '[callbacks.ema]\nuse = "ema"\ndecay = 0.5\n[data.eval]\nuse = "./localsgd_parts.py:Points"\nsamples = 9'
    bench.train(more=more, length="3st", train='eval_every = "3st"', strategy='use = "localsgd"\nperiod = 3')
    first, last, average = bench.weights("--step", "0"), bench.weights(), bench.weights("--weights", "ema")
    same(average, {name: (first[name] + last[name]) / 2 for name in last})

    model, points = Net(), Points(9)
    model.load_state_dict(average)
    loss = (F.mse_loss(model(points.x), points.y, reduction="none").squeeze(1) * points.items).sum()
    assert bench.rows()[-1]["eval/loss"] == pytest.approx((loss / points.items.sum()).item(), rel=1e-5)


# ---------------------------------------------------------------------------------------------- failures
def test_nonfinite_gradient_on_one_rank_skips_the_update_on_all_ranks(bench: Bench) -> None:
    """Every second step contains the sample: no rank updates in it, and no rank waits for another."""
    bench.train(data="nan = 3", train='on_nonfinite = "skip"', optimizer=PLAIN)
    assert bench.rows()[-1]["train/skipped_steps"] == 4
    assert all(tensor.isfinite().all() for tensor in bench.weights().values())

    rmtree(bench.folder / "runs")
    bench.write(data="nan = 3")
    done = bench("run", "run.toml", ranks=2)
    assert done.returncode != 0
    assert "is not finite; the weights were not updated with it" in done.stderr


def test_weights_do_not_change_if_all_steps_are_skipped(bench: Bench) -> None:
    bench.train(data="nan = 3\nsamples = 16", train='on_nonfinite = "skip"', optimizer=ADAMW)
    found = bench.weights()
    assert all(torch.equal(found[name], parameter) for name, parameter in Net().named_parameters())


def test_momentum_may_start_in_a_skipped_step() -> None:
    """On a GPU the fused kernel itself skips the step; here it runs on CPU tensors."""
    alone, model = SingleRank(), Net()
    strategy = LocalSGD()
    world = World(global_ranks=alone, dp_ranks=alone, device=torch.device("cuda", 0), local_rank=0)
    strategy.setup(TrainSection.model_validate({"length": "3st", "global_batch": 1}), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    replica = strategy.prepare(model, optimizer)
    begun = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for gradient in (torch.inf, 1.0, 1.0):
        _ = [torch.full_like(parameter, 7e3) for parameter in model.parameters()]  # fills reused memory
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        replica.step()
    same(dict(model.named_parameters()), {name: weight - 0.1 - 0.19 for name, weight in begun.items()})


@pytest.mark.parametrize(
    ("train", "message"),
    [('precision = "fp16"', "one loss scale for all ranks"), ("sync_batchnorm = true", "wait for each other")],
)
def test_unsupported_settings_are_refused(bench: Bench, train: str, message: str) -> None:
    bench.write(train=train)
    done = bench("run", "run.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="nesterov needs outer_momentum"):
        LocalSGD(nesterov=True)
