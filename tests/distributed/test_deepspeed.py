"""DeepSpeed's ZeRO shards as its contract declares and keeps the curve. Tests of all strategies are in other files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, FSDP, GPT, RECIPE, ZERO, Bench

from ddpforge.checkpoint.reader import CheckpointReader

EMA = "[callbacks.ema]\ndecay = 0.9\n"
STOP = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = {step}\nrank = 0\n'
HOST = 'offload_optimizer = "cpu"'
PARAMETERS_TOO = f'{HOST}\noffload_parameters = "cpu"'


each_stage = pytest.mark.parametrize("stage", ZERO)
stages_1_and_3 = pytest.mark.parametrize(
    "stage", [1, pytest.param(2, marks=pytest.mark.full), 3]
)  # stages 1 and 2 share their code
PARTS = """
import torch
from torch import nn
from ddpforge.interfaces import Callback, Task

class Mode(Task):
    \"\"\"Returns a loss of 1 per sample in training and of 2 in evaluation.\"\"\"

    def loss(self, model, batch):
        outputs = model(batch[0])
        return 0.0 * outputs.sum() + len(outputs) * (1.0 if model.training else 2.0), outputs

class Everything(nn.Module):
    \"\"\"Frozen parameters of several dtypes, tied ones, a scalar, buffers, sizes that ranks do not divide.\"\"\"

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False)
        self.low = nn.Parameter(torch.full((3,), 0.1, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(5, 1)
        self.register_buffer("shift", torch.tensor([0.25]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        x = self.norm(self.frozen(self.b(self.a(x).tanh())))
        return self.scale * self.head(x) + self.shift + self.low.float().sum() + self.codes[3].float()

class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(x) + self.nothing.sum()

class Dwindling(nn.Module):
    \"\"\"Skips a layer from its third pass on.\"\"\"

    def __init__(self):
        super().__init__()
        self.head, self.late = nn.Linear(4, 1), nn.Linear(4, 1)
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        return self.head(x) + self.late(x) if self.passes < 3 else self.head(x)

class Loud(nn.Module):
    \"\"\"Has losses, and so gradients, in the thousands.\"\"\"

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return 30 * self.layers(x)

class Misplace(Callback):
    \"\"\"Replaces a shard of a weight by a copy that is not the strategy's.\"\"\"

    def on_start(self, run):
        name, part = next((name, part) for name, part in run.weights.shards().items() if part.tensor.numel())
        run.weights.shards()[name] = part.of(part.tensor + 1)
"""
POINTS = """
[model]
use = "./{model}"
[data.train]
use = "./parts.py:Points"
samples = 36
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    copy(SUPPORT / "odd_models.py", tmp_path)
    (tmp_path / "own.py").write_text(PARTS)
    return Bench(tmp_path, ddpforge)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, whole."""
    reader = CheckpointReader(checkpoint)
    state = reader.state()
    owners = {"model": state.model, **state.optimizer, **reader.callbacks()}
    return {
        f"{owner}: {key}": value.read() if hasattr(value, "read") else torch.as_tensor(value)
        for owner, values in owners.items()
        for key, value in values.items()
    }


# ---------------------------------------------------------------------------------------------- one curve
EXTRA = "\n[strategy.extra.zero_optimization]\n"


@pytest.mark.parametrize(
    "ways",
    [
        {
            "aligned": f"{ZERO[1]}{EXTRA}parameter_alignment = true\nreduce_bucket_size = 300\noverlap_comm = true",
            "scattered": f"{ZERO[1]}{EXTRA}reduce_scatter = true",
            "groups": f"{ZERO[3]}{EXTRA}sub_group_size = 500\nstage3_param_persistence_threshold = 0",
            "host-2": f"{ZERO[2]}\n{HOST}",
        },
        pytest.param(
            {
                "host": f"{ZERO[1]}\n{HOST}",
                "buckets-on-4": f"{ZERO[2]}{EXTRA}reduce_bucket_size = 300\nuse_multi_rank_bucket_allreduce = false",
                "all-host": f"{ZERO[3]}\n{PARAMETERS_TOO}",  # its resume is below
            },
            marks=pytest.mark.full,
        ),
    ],
    ids=", ".join,
)
def test_options_for_memory_and_speed_keep_the_curve(bench: Bench, ways: dict[str, str]) -> None:
    """Covers buckets that fill up within a backward pass, padding inside groups, weights that are never kept whole."""
    bench("one", 'use = "single"', nproc=1, length="8st", more=EMA)
    for name, strategy in ways.items():
        bench(name, strategy, nproc=4 if name.endswith("-4") else 2, length="8st", more=EMA)
        bench.alike(name, "one")


@pytest.mark.parametrize("stage", [1, 3])
def test_task_sees_the_training_flag_of_the_model(bench: Bench, stage: int) -> None:
    parts = POINTS.format(model="own.py:Loud").replace('use = "regression"', 'use = "./own.py:Mode"')
    bench("run", ZERO[stage], nproc=1, parts=parts, length="8st")
    assert set(bench.column("run", "train/loss")) == {1.0}
    assert set(bench.column("run", "eval/loss")) == {2.0}


@stages_1_and_3
@pytest.mark.full  # tests/distributed/test_activation_checkpointing.py has another model
def test_activation_checkpointing_keeps_the_losses(bench: Bench, stage: int) -> None:
    bench("plain", ZERO[stage], model="dropout = 0.2", length="6st")
    bench("recomputed", ZERO[stage], model="dropout = 0.2", length="6st", train="activation_checkpointing = true")
    assert bench.column("recomputed") == bench.column("plain")


@pytest.mark.full
@pytest.mark.parametrize(("stage", "blocks"), [(2, "false"), (3, "true")])
def test_compiled_model_has_the_curve_and_names_of_an_eager_model(bench: Bench, stage: int, blocks: str) -> None:
    bench("eager", ZERO[stage], nproc=1, length="6st")
    train = f'compile = "default"\ncompile_blocks = {blocks}'
    bench("compiled", ZERO[stage], nproc=1, length="6st", train=train)
    bench.alike("compiled", "eager", rel=1e-4)
    assert set(tensors(bench.newest("compiled"))) == set(tensors(bench.newest("eager")))


def test_fp16_skips_the_steps_that_ddp_skips_and_resumes_its_loss_scale(bench: Bench) -> None:
    """Covers trap 35b: the first scales overflow, which lowers the scale and skips the step, on all ranks."""
    options = {"parts": POINTS.format(model="own.py:Loud"), "train": 'precision = "fp16"', "length": "12st"}

    def scale(name: str) -> float:
        manifest = json.loads((bench.newest(name) / "manifest.json").read_text())
        return float(manifest["loop"]["loss_scale"])

    bench("ddp", DDP, **options)
    for stage in ZERO:
        bench(f"zero{stage}", ZERO[stage], **options)
        assert bench.column(f"zero{stage}") == pytest.approx(bench.column("ddp"), rel=2e-3)
        assert bench.column(f"zero{stage}", "train/skipped_steps") == bench.column("ddp", "train/skipped_steps")
        assert scale(f"zero{stage}") == scale("ddp") < 2**16
    assert bench.column("ddp", "train/skipped_steps")[-1] >= 2

    skipped = int(bench.column("ddp", "train/skipped_steps")[-1])  # all of them at the beginning: the next step fits
    assert bench.column("ddp", "train/skipped_steps").count(skipped) > 1
    stopped = bench("parts", ZERO[2], **options, more=STOP.format(step=skipped), fails=True)
    assert set(stopped.codes) == {75}
    bench("parts", ZERO[2], **options)
    assert bench.column("parts") == bench.column("zero2")


# ---------------------------------------------------------------------------------------------- to disk and back
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ZERO[1], id="1", marks=pytest.mark.full),
        pytest.param(ZERO[2], id="2", marks=pytest.mark.full),
        pytest.param(ZERO[3], id="3", marks=pytest.mark.full),
        pytest.param(f"{ZERO[3]}\n{PARAMETERS_TOO}", id="3-host"),
    ],
)
def test_resume_on_the_same_ranks_is_bitwise(bench: Bench, strategy: str) -> None:
    """Covers traps 08, 09, 36, with dropout and averaged weights; a checkpoint before the first step is harmless."""
    bench("whole", strategy, model="dropout = 0.2", length="12st", more=EMA)
    more = f"{EMA}{STOP.format(step=5)}\n[checkpoint]\nat_start = true"
    stopped = bench("parts", strategy, model="dropout = 0.2", length="12st", more=more, fails=True)
    assert stopped.codes == [75, 75]
    bench("parts", strategy, model="dropout = 0.2", length="12st", more=EMA)
    assert bench.column("parts") == bench.column("whole")
    assert bench.column("parts", "eval/loss") == bench.column("whole", "eval/loss")


@pytest.mark.full
def test_run_resumes_under_other_strategies_and_numbers_of_ranks(bench: Bench) -> None:
    """Covers trap 19: the curve is that of the uninterrupted run."""
    bench("whole", DDP, length="20st", more=EMA)
    for strategy, nproc, step in (
        (ZERO[1], 4, 4),
        (DDP, 1, 6),
        (ZERO[3], 2, 9),
        (FSDP, 2, 12),
        (f"{ZERO[2]}\n{HOST}", 4, 16),
    ):
        more = EMA + STOP.format(step=step)
        stopped = bench("parts", strategy, nproc=nproc, length="20st", more=more, fails=True)
        assert set(stopped.codes) == {75}, stopped.stderr
    bench("parts", f"{ZERO[3]}\n{PARAMETERS_TOO}", length="20st", more=EMA)
    bench.alike("parts", "whole")


@stages_1_and_3
def test_checkpoint_equals_that_of_ddp(bench: Bench, stage: int) -> None:
    """Covers traps 13, 25, 29, 35c: names, shapes and dtypes are those of DDP, wherever a tensor was."""
    points = POINTS.format(model="own.py:Everything")
    for name, strategy in (("ddp", DDP), ("zero", ZERO[stage])):
        said = bench(name, strategy, parts=points, length="8st", more=EMA)
        assert "DeepSpeed" not in said.stdout
        assert "INFO" not in said.stderr
    bench.alike("zero", "ddp")

    ours, theirs = tensors(bench.newest("zero")), tensors(bench.newest("ddp"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    aliases = [json.loads((bench.newest(name) / "manifest.json").read_text())["aliases"] for name in ("zero", "ddp")]
    assert aliases[0] == aliases[1] != {}


@pytest.mark.parametrize("optimizer", ["NAdam", pytest.param("SGD", marks=pytest.mark.full)])
def test_elementwise_optimizers_resume_under_other_strategies(bench: Bench, optimizer: str) -> None:
    """Covers NAdam, which keeps two numbers per parameter, and plain SGD, which keeps nothing."""
    text = RECIPE.replace('"adamw"\nlr = 1e-2', f'"torch.optim:{optimizer}"\nlr = 1e-2')
    blank: dict[str, Any] = {"train": "", "length": "9st", "parts": GPT.format(model="")}

    def run(name: str, strategy: str, more: str = "", *, fails: bool = False) -> Ranks:
        options = blank | {"name": name, "strategy": strategy, "more": more}
        (bench.folder / f"{name}.toml").write_text(text.format(**options))
        return bench.ddpforge("run", f"{name}.toml", nproc=2, fails=fails)

    run("whole", DDP)
    for strategy, step in ((ZERO[3], 4), (DDP, 6)):
        assert set(run("parts", strategy, STOP.format(step=step), fails=True).codes) == {75}
    run("parts", ZERO[2])
    bench.alike("parts", "whole")


def test_optimizer_state_that_differs_within_a_group_is_refused(bench: Bench) -> None:
    """Updates `b` under DDP for the first time in the second step; ZeRO keeps one count for both."""
    text = (
        'recipe = 2\nname = "run"\n[model]\nuse = "./parts.py:Scalars"\nweights = "ab"\n{uses}\n'
        '[data.train]\nuse = "./parts.py:Values"\nvalues = [1.0, 1.0]\n[task]\nuse = "./parts.py:SumOfLosses"\n'
        '[optimizer]\nuse = "adamw"\nlr = 1e-2\n[strategy]\n{strategy}\n'
        '[train]\nlength = "{length}"\nglobal_batch = 2\n'
    )
    allowing = f"{DDP}\nfind_unused_parameters = true"

    def run(length: str, strategy: str, uses: str = "", *, fails: bool = False) -> Ranks:
        (bench.folder / "run.toml").write_text(text.format(uses=uses, strategy=strategy, length=length))
        return bench.ddpforge("run", "run.toml", "--allow-change", "model.uses", nproc=2, fails=fails)

    run("1st", allowing, 'uses = "a"')
    refused = run("2st", ZERO[1], fails=True)
    assert set(refused.codes) == {3}
    assert "the checkpoint's optimizer has nothing for `b`" in refused.stderr
    run("2st", allowing)
    refused = run("3st", ZERO[3], fails=True)
    assert "has `step` 1 for `b` and 2 for `a`, but ZeRO has one value for both" in refused.stderr
    assert "Traceback" not in refused.stderr


# ---------------------------------------------------------------------------------------------- engaged or error
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])  # the same checks of the same model
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("odd_models.py:Half", "`head.weight` is bfloat16, but the optimizer updates float32 weights"),  # trap 26
        ("odd_models.py:BySample", "got no gradient on rank"),  # trap 30
        ("own.py:Dwindling", "`late.weight` and 1 more got no gradient on rank"),
        ("own.py:Empty", "parameter `nothing` has no elements"),
    ],
)
def test_unsupported_models_are_refused(bench: Bench, model: str, said: str, stage: int) -> None:
    failed = bench("run", ZERO[stage], parts=POINTS.format(model=model), fails=True)
    assert (2 if model.endswith("Half") else 3) in failed.codes
    assert said in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "ACCELERATE_DEEPSPEED_ZERO_STAGE=3"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "ACCELERATE_GRADIENT_CLIPPING=1.0"),
        ({"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu"),
        ({"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP=true"),
        ({"DS_ACCELERATOR": "cuda"}, "the environment has DS_ACCELERATOR=cuda, but this run is on cpu"),
    ],
)
def test_launcher_variables_that_contradict_the_recipe_are_refused(
    bench: Bench, env: dict[str, str], said: str
) -> None:
    """Covers traps 05 and 24; variables that agree with the recipe are accepted."""
    agreeing = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    }
    text = RECIPE.format(name="run", parts=GPT.format(model=""), strategy=ZERO[2], length="6st", train="", more="")
    (bench.folder / "run.toml").write_text(text)
    failed = bench.ddpforge("run", "run.toml", nproc=1, env=agreeing | env, fails=True)
    assert failed.codes == [3]
    assert said in failed.stderr
    if "DS_ACCELERATOR" in env:
        bench.ddpforge("run", "run.toml", nproc=2, env=agreeing)


@pytest.mark.full
def test_one_process_runs_without_a_launcher(bench: Bench) -> None:
    """Runs one process; `tests/launchers/test_launch.py` launches two that import DeepSpeed themselves."""
    bench("forked", ZERO[3], nproc=1, length="6st")
    text = (bench.folder / "forked.toml").read_text().replace('"forked"', '"alone"')
    (bench.folder / "alone.toml").write_text(text)
    environment = {key: value for key, value in os.environ.items() if "RANK" not in key and "ACCELERATOR" not in key}
    command = [sys.executable, "-m", "ddpforge", "run", "alone.toml"]
    ended = subprocess.run(command, cwd=bench.folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    bench.alike("alone", "forked")


@stages_1_and_3
def test_misplaced_shards_are_not_saved(bench: Bench, stage: int) -> None:
    failed = bench("run", ZERO[stage], nproc=1, more='[callbacks.misplace]\nuse = "./own.py:Misplace"', fails=True)
    assert failed.codes == [3]
    assert "are not where ddpforge expects them" in failed.stderr
    assert not list((bench.folder / "runs/run/checkpoints").glob("step-*"))
