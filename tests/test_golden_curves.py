"""Each of these recipes keeps its curve and its weights: what `golden/curves.json` has, from an earlier version.

The other tests compare two computations of one version; this one finds a change that both share. On the kind of
machine that wrote the file the numbers are equal to the last bit, elsewhere to `ELSEWHERE`. After a change that is
meant to change them, or on a new machine:

    .venv/bin/python tests/test_golden_curves.py    writes the file anew; its differences belong to the commit
"""

import hashlib
import json
import logging
import os
import platform
from contextlib import ExitStack
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from support import SUPPORT
from support.forked import in_ranks
from support.torch_versions import needs_pipelines

import ddpforge
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.testing.ranks import reserved_port

KEPT = Path(__file__).parent / "golden/curves.json"
ELSEWHERE = 1e-6  # relative difference on a machine with other instructions, or with another torch
TIMES = (
    "time",
    "train/time/",
    "train/samples_per_second",
    "train/items_per_second",
    "train/tokens_per_second",
    "perf/",
)

DIGITS = """
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
task = { use = "classification", metrics = ["accuracy"] }
[data]
train = { use = "digits", split = "train" }
eval = { use = "digits", split = "test" }
"""
GPT = """
model = { use = "gpt", vocab_size = 16, block_size = 8, layers = 2, heads = 2, width = 16 }
task = { use = "language_modeling" }
[data]
train = { use = "./parts.py:RaggedTokens" }
eval = { use = "./parts.py:RaggedTokens", samples = 11 }
"""
MEASURED = GPT.replace('RaggedTokens" }\neval', 'MeasuredTokens" }\neval')
POINTS = """
task = { use = "regression" }
[data]
train = { use = "./parts.py:Points", samples = 36 }
eval = { use = "./parts.py:Points", samples = 11 }
"""
NORMED = 'model = { use = "./parts.py:Net", normed = true }' + POINTS
ADAMW = """
[optimizer]
use = "adamw"
lr = 1e-2
weight_decay = 0.1
no_decay = ["bias", "norm"]
[schedule]
use = "cosine"
warmup = "2st"
"""
SGD = """
[optimizer]
use = "sgd"
lr = 0.05
momentum = 0.9
"""
ADVERSARIAL = """
model = { use = "gan", shape = [1, 8, 8], latent = 8, width = 16 }
task = { use = "gan", latent = 8 }
[data]
train = { use = "digits", split = "train" }
eval = { use = "digits", split = "test" }
[optimizer]
use = "adamw"
lr = 5e-4
betas = [0.5, 0.999]
[optimizer.updates.discriminator]
lr = 1e-3
n_updates = 2
new_batch = true
[optimizer.updates.generator]
"""
TAUGHT = """
model = { use = "./parts.py:Net" }
task = { use = "./parts.py:Accompanied", teacher = { use = "./parts.py:Net" } }
[data]
train = { use = "./parts.py:Points" }
eval = { use = "./parts.py:Points", samples = 11 }
"""
UPHILL = """
[optimizer]
use = "./exploring.py:Uphill"
lr = 0.05
rho = 0.05
passes = 3
"""
SOURCES = """
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
task = { use = "classification" }
[data.train.plain]
use = "digits"
split = "train"
weight = { 0st = 0.5, 3st = 0.3 }
[data.train.few]
use = "part"
of = { use = "digits", split = "test" }
share = "5%"
weight = 0.5
"""
STREAM = """
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
task = { use = "classification" }
[data]
train = { use = "./parts.py:DigitsInShards" }
"""
SINGLE = 'use = "single"'
EMA = '[callbacks.ema]\nuse = "ema"\ndecay = 0.5\n'
RECIPES: dict[str, tuple[int, str, str, str]] = {  # ranks, parts, [strategy], [train]
    "mlp": (1, DIGITS + SGD, SINGLE, "global_batch = 16"),
    "accumulation": (1, GPT + ADAMW, SINGLE, "global_batch = 12\nmicro_batch = 3"),
    "clipping": (1, DIGITS + ADAMW + EMA, SINGLE, "global_batch = 16\nclip_norm = 0.5\nprecision = 'bf16'"),
    "gan": (1, ADVERSARIAL, SINGLE, "global_batch = 16\nvirtual_ranks = 4"),
    "ddp": (2, GPT + ADAMW, 'use = "ddp"', "global_batch = 12\nmicro_batch = 3\nclip_norm = 0.5"),
    "fsdp": (2, GPT + ADAMW, 'use = "fsdp"', "global_batch = 12\nmicro_batch = 3\nclip_norm = 0.5"),
    "zero3": (2, GPT + ADAMW, 'use = "deepspeed"\nstage = 3', "global_batch = 12\nmicro_batch = 3\nclip_norm = 0.5"),
    "tensor": (2, GPT + ADAMW, 'use = "fsdp"\ntensor = 2\nsequence_parallel = true', "global_batch = 8"),
    "pipeline": (2, GPT + ADAMW, 'use = "pipeline"\nstages = 2', "global_batch = 12\nmicro_batch = 3\nclip_norm = 0.5"),
    "statistics": (
        2,
        NORMED + SGD.replace("0.05", "0.005"),
        'use = "ddp"',
        "global_batch = 32\nvirtual_ranks = 4\ndrop_last = true",
    ),
    "gan-fsdp": (2, ADVERSARIAL, 'use = "fsdp"', "global_batch = 16\nvirtual_ranks = 4"),
    "teachers": (2, TAUGHT + SGD, 'use = "ddp"', "global_batch = 12"),
    "passes": (2, 'model = { use = "./parts.py:Net" }' + POINTS + UPHILL, 'use = "fsdp"', "global_batch = 12"),
    "sources": (2, SOURCES + SGD, 'use = "ddp"', "global_batch = 20"),
    "frozen": (2, GPT + ADAMW, 'use = "fsdp"', 'global_batch = 12\nfreeze = ["tokens*", "blocks.0*"]'),
    "tokens": (2, MEASURED + ADAMW, 'use = "ddp"', "global_batch = 12\nmax_tokens = 24\neval_batch = 6"),
    "stream": (2, STREAM + SGD, 'use = "ddp"', "global_batch = 16"),
    "recomputed": (
        2,
        GPT + ADAMW,
        'use = "fsdp"',
        "global_batch = 12\nmicro_batch = 3\nactivation_checkpointing = true",
    ),
}
COMMON = """
[strategy]
{strategy}
[train]
length = "6st"
seed = 3
device = "cpu"
{train}
[track]
every = "1st"
"""


def machine() -> dict[str, str]:
    """Returns what decides the last bits of a computation on a CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"cpu": model or platform.machine(), "instructions": instructions, "torch": torch.__version__}


def train(ports: dict[str, int], folder: Path) -> None:
    """Trains recipes one after the other, on this rank of a world that meets at another port for each."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    os.chdir(folder)
    for name, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        AcceleratorState._reset_state(reset_partial_state=True)
        ddpforge.run(f"{name}.toml")


def computed(names: list[str], folder: Path) -> dict[str, Any]:
    """Returns the rows and weights of recipes with the same number of ranks."""
    for file in (SUPPORT / "parts.py", SUPPORT / "exploring.py"):
        copy(file, folder)
    for name in names:
        _, parts, strategy, options = RECIPES[name]
        text = f'recipe = 2\nname = "{name}"\n{parts}{COMMON.format(strategy=strategy, train=options)}'
        (folder / f"{name}.toml").write_text(text)
    with ExitStack() as held:
        ports = {name: held.enter_context(reserved_port()) for name in names}
        in_ranks(RECIPES[names[0]][0], lambda _: train(ports, folder), timeout=120)
    return {name: result(folder / "runs" / name) for name in names}


def result(run: Path) -> dict[str, Any]:
    """Returns the rows of a run without times, the norm of each of its last weights, and a hash of the whole state."""
    rows = [
        {key: value for key, value in json.loads(line).items() if not key.startswith(TIMES)}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    reader = CheckpointReader(max((run / "checkpoints").glob("step-*")))
    state = reader.state()
    tensors = {f"model.{name}": saved.read() for name, saved in state.model.items()}
    for group in (state.optimizer, reader.callbacks()):
        for name, entry in group.items():
            tensors |= {f"{name}.{key}": saved.read() for key, saved in entry.items() if hasattr(saved, "read")}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    norms = {name: float(tensor.double().norm()) for name, tensor in tensors.items() if name.startswith("model.")}
    return {"rows": rows, "norms": norms, "sha256": digest.hexdigest()}


def groups() -> list[list[str]]:
    """Returns the names of all recipes by their ranks; those of one group share their processes."""
    return [[name for name in RECIPES if RECIPES[name][0] == ranks] for ranks in (1, 2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, deepspeed: None) -> dict[str, Any]:
    return {
        name: result
        for names in groups()
        for name, result in computed(names, tmp_path_factory.mktemp("golden")).items()
    }


@needs_pipelines
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_keeps_its_curve_and_its_weights(found: dict[str, Any], name: str) -> None:
    kept = json.loads(KEPT.read_text())
    expected, got = kept["recipes"][name], found[name]
    if kept["machine"] == machine():
        assert got["rows"] == expected["rows"]
        assert got["sha256"] == expected["sha256"]
    for row, wanted in zip(got["rows"], expected["rows"], strict=True):
        assert row == pytest.approx(wanted, rel=ELSEWHERE)
    assert got["norms"] == pytest.approx(expected["norms"], rel=ELSEWHERE)


if __name__ == "__main__":
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    recipes: dict[str, Any] = {}
    for names in groups():
        with TemporaryDirectory() as folder:
            recipes |= computed(names, Path(folder))
    KEPT.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(recipes[name])}" for name in RECIPES)
    KEPT.write_text(f'{{"machine": {json.dumps(machine())}, "recipes": {{\n{lines}\n}}}}\n')
