"""Guarantees of training on a GPU: no host waits, no bad step, bitwise resume, equal checkpoints. `pytest -m gpu`."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import CNN, DDP, FSDP, GPT, ZERO, Bench, weights_in
from torch import Tensor

from ddpforge.checkpoint.reader import CheckpointReader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SINGLE = 'use = "single"'
TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}  # of losses, against the CPU's in the same precision

HELP = """
import json
import time
import warnings

import torch
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.interfaces import Callback


class Poisoned(LanguageModeling):
    "Returns NaN as the loss of the first and the seventh training pass."

    def __init__(self, **options):
        super().__init__(**options)
        self.passes = 0

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        self.passes += model.training
        return (loss * float("nan") if model.training and self.passes in (1, 7) else loss), outputs


class Waits(Callback):
    "Counts, from step 10 to step 110, how often the host waits for the device."

    def on_step(self, info):
        if info.step == 10:
            self.caught = warnings.catch_warnings(record=True)
            self.found = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self.began = time.monotonic()
        if info.step == 110:
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            waits = [str(one.message) for one in self.found if "synchronizing" in str(one.message)]
            open("waits.json", "w").write(json.dumps([len(waits), time.monotonic() - self.began]))


class Unchanged(Callback):
    "Ends the run if the weights after a skipped step are not those before it, or not finite."

    def on_start(self, run):
        self.model, self.skipped = run.model, 0
        self.keep()

    def keep(self):
        self.kept = [parameter.detach().clone() for parameter in self.model.parameters()]

    def on_step(self, info):
        skipped = info.metrics.get("train/skipped_steps", 0)
        if skipped > self.skipped:
            for before, now in zip(self.kept, self.model.parameters(), strict=True):
                assert torch.equal(before, now)
        assert all(parameter.isfinite().all() for parameter in self.model.parameters())
        self.skipped = skipped
        self.keep()


class Allocated(Callback):
    "Records the bytes that torch has allocated, every hundredth step."

    def on_step(self, info):
        if info.step % 100 == 0:
            torch.cuda.synchronize()
            print(torch.cuda.memory_allocated(), file=open("allocated.txt", "a"))
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    (tmp_path / "help.py").write_text(HELP)
    return Bench(tmp_path, ddpforge)


def quiet(bench: Bench) -> Bench:
    """Returns the same bench with a row every 100 steps."""
    return Bench(bench.folder, bench.ddpforge, bench.recipe.replace('every = "1st"', 'every = "100st"'))


# ---------------------------------------------------------------------------------------------- no waiting
@pytest.mark.parametrize(
    ("strategy", "optimizer", "each"),
    [
        *((strategy, "adamw", 0) for strategy in (SINGLE, DDP, FSDP)),
        *((strategy, "sgd", 0) for strategy in (SINGLE, DDP)),
        (FSDP, "sgd", 1),  # torch has no fused SGD for sharded weights
        (SINGLE, "torch.optim:RMSprop", 1),
        *((strategy, "adamw", 9) for strategy in ZERO.values()),  # 7 to 8 of DeepSpeed 0.19.8 itself, on an H200
    ],
)
def test_steps_do_not_wait_for_the_device_unless_ranks_agree(
    bench: Bench, strategy: str, optimizer: str, each: int
) -> None:
    """Optimizers that are not fused need the norm on the host, and DeepSpeed waits by itself."""
    bench = quiet(bench)
    bench.recipe = bench.recipe.replace('use = "adamw"', f'use = "{optimizer}"').replace("weight_decay = 0.1", "")
    more = '[callbacks.waits]\nuse = "./help.py:Waits"\n[checkpoint]\nevery = "1000st"'
    bench("run", strategy, nproc=1, length="120st", train='eval_every = "1000st"', more=more)
    waits, seconds = json.loads((bench.folder / "waits.json").read_text())
    # Ranks agree for the row of step 100, and about once a second: with four waits.
    assert waits <= 100 * each + 10 + 4 * seconds


def test_memory_does_not_grow_with_steps_evaluations_and_saves(bench: Bench) -> None:
    more = '[callbacks.allocated]\nuse = "./help.py:Allocated"\n[checkpoint]\nevery = "100st"'
    quiet(bench)("run", SINGLE, nproc=1, length="500st", train='eval_every = "100st"', more=more)
    first, *_, last = map(int, (bench.folder / "allocated.txt").read_text().split())
    assert last <= first * 1.01


# ---------------------------------------------------------------------------------------------- no bad step
OPTIMIZERS = {
    "adamw": 'use = "adamw"\nlr = 1e-2',
    "sgd": 'use = "sgd"\nmomentum = 0.9\nlr = 1e-2',
    "rmsprop": 'use = "torch.optim:RMSprop"\nlr = 1e-3',
}


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_nonfinite_gradient_has_the_same_effect_as_on_cpu(
    bench: Bench, policy: str, precision: str, optimizer: str
) -> None:
    bench.recipe = bench.recipe.replace('use = "adamw"\nlr = 1e-2\nweight_decay = 0.1', OPTIMIZERS[optimizer])
    parts = GPT.replace('use = "language_modeling"', 'use = "./help.py:Poisoned"')
    codes = {}
    for device in ("cuda", "cpu"):
        train = f'device = "{device}"\nprecision = "{precision}"\non_nonfinite = "{policy}"'
        more = '[checkpoint]\nevery = "2st"'  # the second bad step is a step with a save
        if policy == "skip":
            more += '\n[callbacks.unchanged]\nuse = "./help.py:Unchanged"'
        codes[device] = bench(device, SINGLE, nproc=1, parts=parts, train=train, more=more, fails=True).codes
    assert codes["cuda"] == codes["cpu"]
    assert bench.column("cuda", "step") == bench.column("cpu", "step")
    curves = [[-1.0 if loss is None else loss for loss in bench.column(device)] for device in ("cuda", "cpu")]
    assert curves[0] == pytest.approx(curves[1], rel=TOLERANCES[precision])
    if policy == "skip":
        assert codes["cuda"] == [0]


# ---------------------------------------------------------------------------------------------- the same bits
def bits(checkpoint: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint."""
    optimizer = CheckpointReader(checkpoint).state().optimizer
    moments = {f"{name} {key}": value for name, entry in optimizer.items() for key, value in entry.items()}
    whole = {key: value.read() if hasattr(value, "read") else value for key, value in moments.items()}
    return {**weights_in(checkpoint), **{key: value for key, value in whole.items() if isinstance(value, Tensor)}}


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("strategy", [SINGLE, FSDP], ids=["single", "fsdp"])
def test_stopped_and_resumed_run_equals_uninterrupted_run_bitwise(
    bench: Bench, strategy: str, deterministic: bool, record_property: Callable[[str, object], None]
) -> None:
    """Compares bitwise if the algorithms are deterministic; otherwise reports the largest difference."""
    train = "deterministic = true" if deterministic else ""
    text = {"model": "dropout = 0.1", "train": train, "length": "40st"}
    bench("whole", strategy, nproc=1, **text)
    stop = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = 20\nrank = 0'
    assert bench("halves", strategy, nproc=1, fails=True, more=stop, **text).codes == [75]
    bench("halves", strategy, nproc=1, more=stop, **text)
    if deterministic:
        assert bench.column("halves") == bench.column("whole")
        assert_same_bits(bench.newest("halves"), bench.newest("whole"))
    else:
        pairs = zip(
            weights_in(bench.newest("halves")).values(), weights_in(bench.newest("whole")).values(), strict=True
        )
        record_property("largest difference of a weight", max(float((a - b).abs().max()) for a, b in pairs))


def test_async_saves_equal_blocking_saves(bench: Bench) -> None:
    for name, background in (("waits", "false"), ("trains_on", "true")):
        more = f'[checkpoint]\nevery = "2st"\nasync_save = {background}\n[checkpoint.keep]\nlast = 30'
        bench(name, SINGLE, nproc=1, train="deterministic = true", length="40st", more=more)
    saved = [sorted((bench.folder / f"runs/{name}/checkpoints").glob("step-*")) for name in ("waits", "trains_on")]
    assert len(saved[0]) == len(saved[1]) == 20
    for one, other in zip(*saved, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoint_resumes_on_another_device(bench: Bench, first: str, second: str) -> None:
    bench.recipe = bench.recipe.replace(
        'use = "cosine"\nwarmup = "5st"', 'use = "constant"'
    )  # independent of the length
    bench("whole", SINGLE, nproc=1, length="20st", train='device = "cpu"')
    bench("parts", SINGLE, nproc=1, length="10st", train=f'device = "{first}"')
    bench("parts", SINGLE, nproc=1, length="20st", train=f'device = "{second}"')
    assert bench.column("parts") == pytest.approx(bench.column("whole"), rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoint_saved_again_on_another_device_is_bitwise_equal(bench: Bench, first: str, second: str) -> None:
    stop, again = (
        '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = 7\nrank = 0',
        '[callbacks.again]\nuse = "./parts.py:SaveAgain"',
    )
    for device, more in ((first, stop), (second, again)):
        assert bench("run", SINGLE, nproc=1, train=f'device = "{device}"', more=more, fails=True).codes == [75]
    assert_same_bits(*(bench.folder / "runs/run/checkpoints").glob("step-*"))


# ---------------------------------------------------------------------------------------------- compiled, and the rest
@pytest.mark.parametrize(
    ("compile", "micro_batch", "strategy"),
    [
        *(("default", batch, strategy) for batch in (12, 6, 3) for strategy in (SINGLE, DDP, FSDP)),
        *((mode, 12, strategy) for mode in ("reduce-overhead", "max-autotune") for strategy in (SINGLE, DDP)),
    ],
)
def test_compiled_steps_stay_close_to_eager_steps(bench: Bench, compile: str, micro_batch: int, strategy: str) -> None:
    """CUDA graphs support neither accumulation nor FSDP: both are refused."""
    bench.recipe = bench.recipe.replace("micro_batch = 3", f"micro_batch = {micro_batch}")
    bench("eager", SINGLE, nproc=1, train='precision = "bf16"')
    bench("compiled", strategy, nproc=1, train=f'precision = "bf16"\ncompile = "{compile}"')
    assert bench.column("compiled") == pytest.approx(bench.column("eager"), rel=0.02)
    norms = [bench.column(name, "train/grad_norm")[0] for name in ("compiled", "eager")]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param({"more": '[callbacks.ema]\nuse = "ema"\ndecay = 0.9'}, id="ema"),
        pytest.param({"train": "virtual_ranks = 4"}, id="elastic"),
        pytest.param({"more": "[data]\nworkers = 4"}, id="workers"),
        pytest.param({"train": "activation_checkpointing = true"}, id="recomputed"),
    ],
)
def test_other_options_match_cpu(bench: Bench, text: dict[str, str]) -> None:
    for device in ("cuda", "cpu"):
        train = f'device = "{device}"\n{text.get("train", "")}'
        bench(device, SINGLE, nproc=1, **text | {"train": train})
    bench.alike("cuda", "cpu", rel=1e-4)


@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_fp32_convolutions_match_cpu(bench: Bench, channels_last: str) -> None:
    """Torch allows convolutions to use TF32, which is not fp32."""
    for device in ("cuda", "cpu"):
        train = f'device = "{device}"\nchannels_last = {channels_last}'
        bench(device, SINGLE, nproc=1, parts=CNN, train=train)
    bench.alike("cuda", "cpu", rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_multi_pass_optimizer_matches_cpu(bench: Bench, precision: str) -> None:
    copy(SUPPORT / "exploring.py", bench.folder)
    bench.recipe = bench.recipe.replace(OPTIMIZERS["adamw"], 'use = "./exploring.py:Uphill"\nlr = 0.1')
    bench.recipe = bench.recipe.replace("weight_decay = 0.1", "")
    for device in ("cuda", "cpu"):
        bench(device, SINGLE, nproc=1, train=f'device = "{device}"\nprecision = "{precision}"')
    bench.alike("cuda", "cpu", rel=TOLERANCES[precision])
