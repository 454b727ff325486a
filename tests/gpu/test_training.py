"""What training on a GPU must keep: no waiting, no bad step, the same bits, the same checkpoints. `pytest -m gpu`."""

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

from ddpforge.checkpoint.reader import Reader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SINGLE = 'use = "single"'
TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}  # of losses, against the CPU's in the same precision

HELP = """
import json
import warnings

import torch
from ddpforge.builtin.tasks.language_modelling import LanguageModelling
from ddpforge.interfaces import Callback


class Poisoned(LanguageModelling):
    "Its loss is not a number in the first and in the seventh of its training passes."

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
        if info.step == 110:
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            waits = [str(one.message) for one in self.found if "synchronizing" in str(one.message)]
            open("waits.json", "w").write(json.dumps(waits))


class Unchanged(Callback):
    "Ends the run if the weights of a step that was left out are not those before it, or not finite."

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
    "Notes the bytes that torch has given out, every hundredth step."

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
    """The same bench, whose runs log now and then only."""
    return Bench(bench.folder, bench.ddpforge, bench.recipe.replace('every = "1st"', 'every = "100st"'))


# ---------------------------------------------------------------------------------------------- no waiting
@pytest.mark.parametrize(
    ("strategy", "optimizer", "each"),
    [
        *((strategy, optimizer, 0) for strategy in (SINGLE, DDP, FSDP) for optimizer in ("adamw", "sgd")),
        (SINGLE, "torch.optim:RMSprop", 1),
        *((strategy, "adamw", 3) for strategy in ZERO.values()),
    ],
)
def test_no_step_waits_for_the_device_unless_ranks_agree(
    bench: Bench, strategy: str, optimizer: str, each: int
) -> None:
    """Optimizers that are not fused need the norm on the host, and DeepSpeed waits by itself."""
    bench = quiet(bench)
    bench.recipe = bench.recipe.replace('use = "adamw"', f'use = "{optimizer}"').replace("weight_decay = 0.1", "")
    more = '[callbacks.waits]\nuse = "./help.py:Waits"\n[checkpoint]\nevery = "1000st"'
    bench("run", strategy, nproc=1, length="120st", more=more)
    waits = json.loads((bench.folder / "waits.json").read_text())
    assert len(waits) <= 100 * each + 10  # two where ranks agree: for the row of step 100, and about once a second


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
def test_a_gradient_that_is_not_finite_does_what_it_does_on_the_cpu(
    bench: Bench, policy: str, precision: str, optimizer: str
) -> None:
    bench.recipe = bench.recipe.replace('use = "adamw"\nlr = 1e-2\nweight_decay = 0.1', OPTIMIZERS[optimizer])
    parts = GPT.replace('use = "language_modeling"', 'use = "./help.py:Poisoned"')
    codes = {}
    for device in ("cuda", "cpu"):
        train = f'device = "{device}"\nprecision = "{precision}"\non_nonfinite = "{policy}"'
        more = '[checkpoint]\nevery = "2st"'  # the second bad step, too, is one to save
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
    """All tensors in a checkpoint."""
    optimizer = Reader(checkpoint).state().optimizer
    moments = {f"{name} {key}": value for name, entry in optimizer.items() for key, value in entry.items()}
    whole = {key: value.read() if hasattr(value, "read") else value for key, value in moments.items()}
    return {**weights_in(checkpoint), **{key: value for key, value in whole.items() if isinstance(value, Tensor)}}


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("strategy", [SINGLE, FSDP], ids=["single", "fsdp"])
def test_a_run_that_was_stopped_half_way_ends_in_the_same_bits(
    bench: Bench, strategy: str, deterministic: bool, record_property: Callable[[str, object], None]
) -> None:
    """Where the algorithms are deterministic; else the difference is reported."""
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


def test_saves_in_the_background_are_those_that_training_waits_for(bench: Bench) -> None:
    for name, background in (("waits", "false"), ("trains_on", "true")):
        more = f'[checkpoint]\nevery = "2st"\nasync_save = {background}\n[checkpoint.keep]\nlast = 30'
        bench(name, SINGLE, nproc=1, train="deterministic = true", length="40st", more=more)
    saved = [sorted((bench.folder / f"runs/{name}/checkpoints").glob("step-*")) for name in ("waits", "trains_on")]
    assert len(saved[0]) == len(saved[1]) == 20
    for one, other in zip(*saved, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_on_on_another_device(bench: Bench, first: str, second: str) -> None:
    bench.recipe = bench.recipe.replace('use = "cosine"\nwarmup = "5st"', 'use = "constant"')  # of any length
    bench("whole", SINGLE, nproc=1, length="20st", train='device = "cpu"')
    bench("parts", SINGLE, nproc=1, length="10st", train=f'device = "{first}"')
    bench("parts", SINGLE, nproc=1, length="20st", train=f'device = "{second}"')
    assert bench.column("parts") == pytest.approx(bench.column("whole"), rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_is_saved_again_on_another_device_to_the_bit(bench: Bench, first: str, second: str) -> None:
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
def test_compiled_steps_stay_near_eager_ones(bench: Bench, compile: str, micro_batch: int, strategy: str) -> None:
    """CUDA graphs do not accumulate, nor do they go with FSDP: that is refused."""
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
def test_other_options_train_like_on_the_cpu(bench: Bench, text: dict[str, str]) -> None:
    for device in ("cuda", "cpu"):
        train = f'device = "{device}"\n{text.get("train", "")}'
        bench(device, SINGLE, nproc=1, **text | {"train": train})
    bench.alike("cuda", "cpu", rel=1e-4)


@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_convolutions_in_fp32_train_like_on_the_cpu(bench: Bench, channels_last: str) -> None:
    """TF32, which torch allows convolutions, is not fp32."""
    for device in ("cuda", "cpu"):
        train = f'device = "{device}"\nchannels_last = {channels_last}'
        bench(device, SINGLE, nproc=1, parts=CNN, train=train)
    bench.alike("cuda", "cpu", rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_that_looks_around_first_trains_like_on_the_cpu(bench: Bench, precision: str) -> None:
    copy(SUPPORT / "exploring.py", bench.folder)
    bench.recipe = bench.recipe.replace(OPTIMIZERS["adamw"], 'use = "./exploring.py:Uphill"\nlr = 0.1')
    bench.recipe = bench.recipe.replace("weight_decay = 0.1", "")
    for device in ("cuda", "cpu"):
        bench(device, SINGLE, nproc=1, train=f'device = "{device}"\nprecision = "{precision}"')
    bench.alike("cuda", "cpu", rel=TOLERANCES[precision])
