"""Options of a recipe have their effect, on two ranks as on one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import SUPPORT
from support.launched import Ranks
from support.sharding import weights_in

RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "mlp"
inputs = 4
hidden = [8]
outputs = 1
{model}
[data]
{data}
[data.train]
use = "./parts.py:Points"
samples = {samples}
noisy = true
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
metrics = ["mae"]
[optimizer]
use = "sgd"
lr = 0.1
momentum = 0.9
[strategy]
use = "ddp"
{strategy}
[train]
length = "{length}"
global_batch = 8
eval_every = "4st"
{train}
[track]
every = "1st"
{more}
"""


class Bench:
    """Writes a recipe, runs it, reads its results."""

    def __init__(self, folder: Path, ddpforge: Callable[..., Ranks]) -> None:
        self.folder, self.ddpforge = folder, ddpforge
        copy(SUPPORT / "parts.py", folder)

    def __call__(self, name: str, *, nproc: int = 2, fails: bool = False, env: Any = None, **text: Any) -> Ranks:
        blank = dict.fromkeys(("model", "data", "strategy", "train", "more"), "")
        options = blank | {"name": name, "samples": 43, "length": "12st"} | text
        (self.folder / f"{name}.toml").write_text(RECIPE.format(**options))
        return self.ddpforge("run", f"{name}.toml", nproc=nproc, fails=fails, env=env)

    def column(self, name: str, key: str = "train/loss") -> list[float]:
        rows = map(json.loads, (self.folder / f"runs/{name}/metrics.jsonl").read_text().splitlines())
        return [row[key] for row in rows if key in row]

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"runs/{name}/status.json").read_text())
        return found

    def checkpoints(self, name: str) -> list[Path]:
        return sorted((self.folder / f"runs/{name}/checkpoints").glob("step-*"))


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


# ---------------------------------------------------------------------------------------------- DDP's options
def test_ddp_options_for_memory_and_speed_keep_the_curve(bench: Bench) -> None:
    bench("plain")
    bench("static", strategy="static_graph = true")
    bench("copies", strategy="gradient_as_bucket_view = false\nbucket_cap_mb = 1")
    bench("unused", strategy="find_unused_parameters = true")
    for other in ("static", "copies", "unused"):
        assert bench.column(other) == pytest.approx(bench.column("plain"), rel=1e-6)


@pytest.mark.parametrize(
    ("compression", "tolerance", "alike"),
    [
        ("fp16", 0.05, 1),
        pytest.param("bf16", 0.05, 1, marks=pytest.mark.full),
        ("powersgd", 0.1, 3),
    ],
)
def test_compressed_gradients_stay_close_to_the_curve(
    bench: Bench, compression: str, tolerance: float, alike: int
) -> None:
    """Compares the first losses exactly: PowerSGD begins after two steps of plain all-reduce."""
    bench("plain")
    bench("compressed", strategy=f'compression = "{compression}"\npowersgd_start = 2')
    plain, compressed = bench.column("plain"), bench.column("compressed")
    assert compressed[:alike] == pytest.approx(plain[:alike], rel=1e-6)
    assert all(one != other for one, other in zip(compressed[alike:], plain[alike:], strict=True))
    assert compressed == pytest.approx(plain, rel=tolerance)


# ---------------------------------------------------------------------------------------------- precision, compile
def test_bf16_stays_close_to_fp32_on_one_and_two_ranks(bench: Bench) -> None:
    bench("fp32", nproc=1)
    bench("one", nproc=1, train='precision = "bf16"')
    bench("two", nproc=2, train='precision = "bf16"')
    assert bench.column("one") != bench.column("fp32")
    assert bench.column("one") == pytest.approx(bench.column("fp32"), rel=0.05)
    assert bench.column("two") == pytest.approx(bench.column("one"), rel=0.05)


def test_fp16_scales_the_loss_and_resumes_with_its_scale(bench: Bench) -> None:
    """Halves the scale at an overflow and skips the step; scale and number of good steps are part of a checkpoint."""
    bench("whole", train='precision = "fp16"')
    bench("parts", length="5st", train='precision = "fp16"')
    bench("parts", length="12st", train='precision = "fp16"')
    assert bench.column("parts") == bench.column("whole")
    skipped = bench.column("whole", "train/skipped_steps")
    assert skipped[-1] >= 1
    for name in ("whole", "parts"):
        manifest = json.loads((bench.checkpoints(name)[-1] / "manifest.json").read_text())
        assert manifest["loop"] == {
            "loss_scale": 2.0 ** (16 - skipped[-1]),
            "loss_scale_growth_tracker": skipped.count(skipped[-1]) - 1,
        }


@pytest.mark.full  # tests/strategies/test_ddp.py shows it without the code generator
def test_compiled_model_has_the_curve_and_names_of_an_eager_model(bench: Bench) -> None:
    """Covers trap 25."""
    bench("eager", length="4st")
    bench("compiled", length="4st", train='compile = "default"')
    assert bench.column("compiled") == pytest.approx(bench.column("eager"), rel=1e-4)
    names = [set(weights_in(bench.checkpoints(name)[-1])) for name in ("eager", "compiled")]
    assert names[0] == names[1]
    assert not any("module." in name or "_orig_mod" in name for name in names[1])


# ---------------------------------------------------------------------------------------------- data
def test_loader_processes_keep_the_curve(bench: Bench) -> None:
    bench("none")
    bench("two", data="workers = 2")
    assert bench.column("two") == bench.column("none")


def test_epoch_may_end_with_fewer_samples_than_ranks(bench: Bench) -> None:
    """Covers trap 12: 17 samples in steps of 8 leave one sample for four ranks."""
    bench("one", nproc=1, samples=17)
    bench("four", nproc=4, samples=17)
    assert bench.column("four") == pytest.approx(bench.column("one"), rel=1e-5)
    assert bench.column("four", "samples")[:4] == [8, 16, 17, 25]


def test_iterable_dataset_has_the_same_curve_on_one_and_two_ranks(bench: Bench, tmp_path: Path) -> None:
    """Covers trap 37."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 30)
    recipe = """
recipe = 2
name = "{name}"
model = {{ use = "gpt", block_size = 16, layers = 1, heads = 2, width = 16 }}
data = {{ workers = {workers}, train = {{ use = "text_stream", path = "text.txt", block_size = 16 }} }}
task = {{ use = "language_modeling" }}
optimizer = {{ use = "adamw", lr = 1e-2 }}
train = {{ length = "20st", global_batch = 6 }}
checkpoint = {{ every = "20st" }}
track = {{ every = "1st" }}
"""
    for name, nproc, workers in (("one", 1, 0), ("two", 2, 0), ("loaders", 2, 2)):
        (tmp_path / f"{name}.toml").write_text(recipe.format(name=name, workers=workers))
        bench.ddpforge("run", f"{name}.toml", nproc=nproc)
    assert bench.column("two") == pytest.approx(bench.column("one"), rel=1e-5)
    assert bench.column("loaders") == bench.column("two")


# ---------------------------------------------------------------------------------------------- callbacks
def test_averaged_weights_are_the_same_on_one_and_two_ranks_and_can_be_exported(bench: Bench) -> None:
    """Covers trap 43."""
    ema = "[callbacks.ema]\ndecay = 0.8"
    for name, nproc in (("one", 1), ("two", 2)):
        bench(name, nproc=nproc, more=ema)
        bench.ddpforge("export", name, "--weights", "ema")
    assert bench.column("two", "eval/loss") == pytest.approx(bench.column("one", "eval/loss"), rel=1e-5)

    averages = [load_file(bench.folder / f"{name}-ema.safetensors") for name in ("one", "two")]
    live = weights_in(bench.checkpoints("two")[-1])
    torch.testing.assert_close(averages[0], averages[1], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(live[name], averages[1][name]) for name in live)


def test_early_stopping_ends_both_ranks_at_the_same_step(bench: Bench) -> None:
    """Covers trap 45: the third evaluation without an improvement of 10, which is impossible, ends the run."""
    stop = '[callbacks.early_stopping]\nmetric = "eval/loss"\npatience = 2\nmin_delta = 10.0'
    bench("stopped", length="40st", more=stop)
    assert (bench.status("stopped")["state"], bench.status("stopped")["step"]) == ("done", 12)
    bench("stopped", length="40st", more=stop)  # it is done, and stays done
    assert bench.status("stopped")["step"] == 12


def test_throughput_callback_adds_columns(bench: Bench) -> None:
    bench("perf", more="[callbacks.throughput]")
    assert len(bench.column("perf", "perf/step_seconds")) == 12


# ---------------------------------------------------------------------------------------------- checkpoints
def test_best_checkpoint_is_saved_at_its_evaluation_and_kept(bench: Bench) -> None:
    """Covers trap 46."""
    keep = '[checkpoint]\nevery = "100st"\nkeep = { last = 1, best = 1, monitor = "eval/loss" }'
    bench("best", length="40st", more=keep)
    losses = dict(zip(range(4, 41, 4), bench.column("best", "eval/loss"), strict=True))
    best = min(losses, key=lambda step: losses[step])
    assert [int(path.name.split("-")[1]) for path in bench.checkpoints("best")] == sorted({best, 40})

    chosen = bench.ddpforge("eval", "best", "--best", "--json", nproc=2)
    assert json.loads(chosen.stdout)["eval/loss"] == pytest.approx(losses[best], rel=1e-6)


def test_length_may_be_a_wall_time(bench: Bench) -> None:
    bench("timed", length="1s", more='[checkpoint]\nevery = "100st"')
    assert bench.status("timed")["state"] == "done"
    assert bench.status("timed")["step"] >= 1
    step = bench.status("timed")["step"]
    bench("timed", length="1s", more='[checkpoint]\nevery = "100st"')
    assert bench.status("timed")["step"] == step  # the time is used up


def test_resume_refuses_a_changed_model(bench: Bench) -> None:
    bench("fixed", length="4st")
    failed = bench("fixed", length="12st", model="dropout = 0.5", fails=True)
    assert set(failed.codes) == {2}
    assert "model.dropout: 0.0 → 0.5" in failed.stderr
    assert failed.stderr.count("error:") == 1  # only rank 0 prints it
    assert bench.status("fixed")["step"] == 4


# ---------------------------------------------------------------------------------------------- logs
def test_one_wandb_run_for_all_ranks_with_every_step(bench: Bench) -> None:
    """Covers trap 32a."""
    wandb = '[track.wandb]\nproject = "test"\nmode = "offline"'
    bench("tracked", more=wandb, env={"WANDB_ERROR_REPORTING": "false", "HOME": str(bench.folder)})
    runs = list((bench.folder / "runs/tracked").glob("wandb/offline-run-*"))
    assert len(runs) == 1


def test_console_output_of_a_run(bench: Bench) -> None:
    """Checks that rank 0 alone prints; a file gets neither cursor movement nor colour; stdout has the result."""
    said = bench("quiet")
    assert re.fullmatch(r"runs/quiet: done at step 12, eval/loss [\d.]+, eval/mae [\d.]+\n", said.stdout)
    assert not set(said.stderr) & {"\r", "\x1b"}
    assert said.stderr.count("8 per step = 4 per forward pass × 1 accumulation × 2 ranks") == 1
    assert said.stderr.count("12/12") == 1


def test_static_graph_accumulates_and_resumes_bitwise(bench: Bench) -> None:
    """Covers the first step of every process, in which DDP records the graph and cannot skip the all-reduce."""
    accumulates, static = "micro_batch = 2", 'compression = "bf16"\nstatic_graph = true'
    bench("plain", strategy='compression = "bf16"', train=accumulates)
    bench("static", strategy=static, train=accumulates)
    bench("parts", length="5st", strategy=static, train=accumulates)
    bench("parts", strategy=static, train=accumulates)
    assert bench.column("static") == bench.column("plain")
    assert bench.column("parts") == bench.column("static")


def test_console_shows_the_forward_passes_of_virtual_ranks(bench: Bench) -> None:
    """Runs four virtual ranks of two samples each on two ranks."""
    ranks = bench("run", train="virtual_ranks = 4", length="1st")
    assert "8 per step = 2 per forward pass × 2 accumulation × 2 ranks" in ranks.stderr


def test_out_of_memory_error_suggests_a_smaller_micro_batch(bench: Bench, tmp_path: Path) -> None:
    copy(SUPPORT / "odd_models.py", tmp_path)
    (tmp_path / "run.toml").write_text(
        RECIPE.format(name="run", model="", data="", samples=43, strategy="", length="9st", train="", more="").replace(
            'use = "mlp"\ninputs = 4\nhidden = [8]\noutputs = 1', 'use = "./odd_models.py:Hungry"'
        )
    )
    ranks = bench.ddpforge("run", "run.toml", nproc=1, fails=True)
    assert ranks.codes == [1]
    assert "memory is full: " in ranks.stderr
    assert "by the plan" not in ranks.stderr  # a simulation would need memory that is not free
    assert re.search(r"help: for the memory of a step .*: ddpforge plan runs/run/recipe.resolved.toml", ranks.stderr)
    assert "help: set train.micro_batch = 4: the global batch, and so the result, stays" in ranks.stderr
    assert "Traceback" not in ranks.stderr
    assert "OutOfMemory: memory is full" in bench.status("run")["error"]
