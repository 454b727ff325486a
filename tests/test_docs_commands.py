"""Commands of the documentation: each is run, or a table has the reason and the test that covers it."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.launched import Ranks
from test_docs import DOCS, EXAMPLES, PAGES, ROOT, blocks, write_files
from test_tutorial import shell

SHORT = 'recipe = 2\nname = "tiny"\nextends = ["digits"]\n[train]\nlength = "2ep"\n'
GPT = """
recipe = 2
name = "gpt"
[model]
use = "gpt"
vocab_size = 256
block_size = 32
layers = 4
heads = 2
width = 32
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
length = "3st"
global_batch = 8
micro_batch = 2
"""
MLP = """
recipe = 2
name = "mlp"
extends = ["digits"]
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [32, 32, 32] }
optimizer = { use = "adamw", lr = 1e-3, fused = false }
"""
TRAINED = {
    "digits": [
        "digits",
        "callbacks.ema.decay=0.9",
        "checkpoint.keep.last=100",
        "checkpoint.every=69st",
        "train.length=9ep",
    ],
    "a": ["digits", "name=a", "train.length=2ep"],
    "b": ["digits", "name=b", "train.length=2ep", "optimizer.lr=1e-3"],
    "c": ["digits", "name=c", "train.length=2ep", "train.seed=3"],
    "gan": ["gan", "train.length=2st"],
    "diffusion": ["diffusion", "train.length=2ep"],
}


@dataclass(frozen=True)
class Page:
    """Files and runs that a page requires, and words to replace on a machine with two cores."""

    runs: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    swaps: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0,)


TWO = {"--nproc 8": "--nproc 2", "--nproc-per-node 8": "--nproc-per-node 2"}
FEW = {f"{option} 4": f"{option} 2" for option in ("--nproc", "--nproc-per-node", "--num_processes")}
HOUSES = "area,rooms,price\n" + "".join(f"{number},{number % 5},{2 * number}\n" for number in range(80))
PROSE = "Some words that a language model reads again and again. " * 40
MINE = "from ddpforge.strategies.ddp import DDP\n\n\nclass Mine(DDP):\n    pass\n"

RUN = {
    "guides/sanity-check": Page(),
    "guides/parity": Page(
        files={"recipe.toml": GPT, "mine.py": MINE, "my_package/__init__.py": "", "my_package/strategies.py": MINE},
        swaps={
            "--steps 30": "--steps 3",
            "ddpforge parity digits": "PYTHONPATH=.:${PYTHONPATH-} ddpforge parity digits --steps 3",
        },
    ),
    "guides/augmentation": Page(files={"cifar10.toml": SHORT}, swaps={"show cifar10": "show cifar10.toml"}),
    "guides/batch-size": Page(),
    "guides/callbacks": Page(("digits",)),
    "guides/checkpoints": Page(("digits",), codes=(0, 1)),  # `ckpt diff` finds differences
    "guides/data-loading": Page(),
    "guides/doctor": Page(files={"recipe.toml": SHORT}, swaps={**TWO, "/shared/runs": "shared"}, codes=(0, 1)),
    "guides/evaluate": Page(("digits",), swaps=FEW),
    "guides/export": Page(("digits",)),
    "guides/fine-tuning": Page(),
    "guides/launch": Page(files={"recipe.toml": SHORT}, swaps=FEW),
    "guides/pipeline-parallel": Page(
        files={"recipe.toml": GPT + '[strategy]\nuse = "pipeline"\nstages = 2\n'}, swaps=TWO
    ),
    "guides/profile": Page(),
    "guides/reproducibility": Page(),
    "guides/memory": Page(files={"recipe.toml": GPT}, swaps={"--ranks 8": "--ranks 2"}),
    "guides/scripts": Page(("digits",), files={"recipe.toml": SHORT}),
    "guides/report": Page(("digits",)),
    "guides/time": Page(("digits",)),
    "extend/research": Page(swaps={"--nproc 2": "--nproc 2 train.length=2st"}),
    "guides/resume": Page(
        ("digits",),
        files={"recipe.toml": SHORT},
        swaps={**TWO, "30ep": "3ep", "recipe.toml --allow": "recipe.toml train.length=3ep --allow"},
    ),
    "guides/runs": Page(("digits", "a", "b", "c")),
    "guides/teachers": Page(),
    "guides/sweeps": Page(
        swaps={"0..4 --jobs 2": "0..1 train.length=2ep --jobs 2", "--random 20": "--random 2 train.length=2ep"}
        | {"--optuna 20": "--optuna 2 train.length=2ep"}
    ),
    "extend/test-a-plugin": Page(files={"lines/a.txt": "".join(f"line {number:02}\n" for number in range(16))}),
    "guides/tensor-parallel": Page(
        files={
            "recipe.toml": GPT
            + '[strategy]\nuse = "fsdp"\ntensor = 2\nsequence_parallel = true\nloss_parallel = true\n'
        },
        swaps=TWO,
    ),
    "extend/upgrade": Page(
        files={"recipe.toml": "recipe = 1\ntrain.stall = '5m'\n", "base.toml": "train.timeout = '6m'\n"}
    ),
    "guides/mixtures": Page(files={f"{name}/{file}.txt": PROSE for name in ("code", "prose") for file in "ab"}),
    "guides/own-dataset": Page(files={"houses.csv": HOUSES}),
    "guides/predict": Page(("digits",)),
    "guides/parallelism": Page(
        swaps={
            "strategy.experts=2": "strategy.experts=2 train.length=2st schedule.warmup=1st",
            "digits --nproc 2": "digits --nproc 2 --fresh train.length=2ep",
        }
    ),
    "guides/hangs": Page(("digits",)),
    "guides/silent-corruption": Page(
        ("digits",), swaps={"digits --nproc 3": "digits --nproc 2 --fresh train.length=2ep", "every=200": "every=20"}
    ),
    "guides/debugger": Page(files={"recipe.toml": SHORT}),
    "extend/plugin": Page(),
    "extend/strategy": Page(files={"recipe.toml": MLP}, swaps={"parity recipe.toml": "parity recipe.toml --steps 3"}),
    "AGENTS": Page(swaps={"digits --nproc 2": "digits --nproc 2 --fresh train.length=2ep"}),
    "README": Page(
        files={"recipe.toml": SHORT},
        swaps={**TWO, "parity stdlib-lm": "parity stdlib-lm --steps 3"},
    ),
}
"""The pages whose commands are run here, by their names."""

NOT_HERE = {
    r"^(pip|python -m venv|make|uv|conda) |^\.venv/bin/(pip|ddpforge|python -m pytest)": "tests/test_tutorial.py",
    r"docs/generate": "for contributors: tests/test_docs.py",
    r"^docker ": "needs Docker: tests/test_docs.py reads the image's recipe",
    r"^hf auth|--push-to-hub": "needs the hub: tests/interop/test_export.py, against a stub",
    r"^tensorboard |^wandb ": "other programs: tests/builtin/trackers",
    r"--nnodes|ssh \$node": "several machines: tests/distributed/test_several_hosts.py, tests/launchers",
    r"^(sbatch|srun) |^ddpforge slurm": "needs Slurm: tests/launchers/test_slurm.py, …_training.py",
    r"--watch": "has no end: tests/tools/reports, tests/cli/test_runs.py",
    r"^py-spy|-m debugpy": "programs of others; tests/test_docs.py stops at a breakpoint",
    r"pretrained|theirs|meta-model|deepspeed-run": "other programs' files: tests/interop/test_import.py",
    r"runs/wide|runs/old|/scratch|RUN |--only test": "runs that do not exist here: tests/cli, tests/tools/reports",
    r"shakespeare-char|tiny-llama": "data and models to fetch: tests/test_recipes.py, ddpforge-transformers",
    r"generate grpo": "ddpforge-transformers: tests/test_nano.py",
    r"sft\.toml|dpo\.toml|(generate|export) sft": "a model to fetch: ddpforge-transformers, tests/test_smollm.py",
    r"ddpforge-embeddings|sentence_transformers|export search": "a package: plugins/ddpforge-embeddings/tests",
    r"ddpforge_diffusers|digits-flow": "a package to install: plugins/ddpforge-diffusers/tests/test_flow_training.py",
    r"nano$|^sh run\.sh|plan pretrain": "takes minutes: plugins/ddpforge-transformers/tests/test_nano.py",
    r"labeled=false": "runs that do not exist here: tests/app/test_class_names.py",
    r"\.onnx|\.pt2": "takes long: tests/interop/test_export.py",
    r"batch-size|lr-range": "takes long: tests/tools/trials",
    r"^ddpforge launch gpt-1-node": "eight GPUs: tests/test_recipes.py trains it in small",
    r"my-forge-parts|my-model|denoising|^pytest ": "a package to install: tests/testing, tests/test_docs.py",
}
"""Commands that are not run here: their pattern, and the reason, or the tests that run them."""

OTHER_PAGES = {
    "tutorial": "tests/test_tutorial.py",
    "custom-loss": "tests/testing/test_plugin_docs.py",
    "gallery": "docs/gallery.py trains each, also for examples' READMEs: tests/test_gallery.py",
    "install": "tests/test_tutorial.py, and the page on `doctor`",
    "migrate": "tests/test_migrate.py",
    "prove": "tests/tools/prove/test_prove.py",
    "certify": "tests/tools/certify/test_certify.py",
    "museum": "tests/test_museum.py",
    "certificates": "docs/certificate.py runs each: tests/test_certificates.py",
    "bisect": "tests/tools/bisection/test_bisect.py",
    "why-toml": "tests/cli/test_schema.py",
}
"""Pages whose commands other tests run."""


def commands(page: Path) -> Iterator[str]:
    """Yields the commands of a page's shell blocks (a loop is one command), and commands after a `$` in its output."""
    printed = "".join(blocks(page, "text", "console"))
    lines = [*"".join(blocks(page, "sh")).replace("\\\n", " ").splitlines(), *re.findall(r"^\$ (.*)", printed, re.M)]
    loop: list[str] = []
    for line in lines:
        if loop or re.match(r"(for|until|while) ", line):
            loop.append(line)
            if line != "done":
                continue
            line, loop = "\n".join(loop), []
        if line.strip() and not line.startswith(("#", "ddpforge --version")):
            yield line.strip()


def path_of(name: str) -> Path:
    return (ROOT if name in ("README", "AGENTS") else DOCS) / f"{name}.md"


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_HERE.items() if re.search(pattern, command, re.M)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_or_a_reason_is_given(page: Path) -> None:
    if page in map(path_of, RUN) or page.stem in OTHER_PAGES or page in EXAMPLES or page.parent.name == "recipes":
        return
    assert [command for command in commands(page) if command not in ("wait",) and reason(command) is None] == []


def test_every_reason_matches_a_command() -> None:
    everything = [command for page in PAGES for command in commands(page)]
    assert [one for one in NOT_HERE if not any(re.search(one, command, re.M) for command in everything)] == []
    assert {*map(path_of, RUN)} <= {*PAGES}
    assert OTHER_PAGES.keys() <= {page.stem for page in PAGES}


@pytest.mark.full
@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_run(ddpforge: Callable[..., Ranks], tmp_path: Path, name: str) -> None:
    path, page = path_of(name), RUN[name]
    for run in page.runs:
        ddpforge("run", *TRAINED[run])
    for file, text in page.files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    if name == "extend/research":
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
    if name in ("extend/strategy", "guides/own-dataset"):
        write_files(path, tmp_path)
    if name == "guides/mixtures":
        (tmp_path / "mixture.toml").write_text(blocks(path, "toml")[0])
    if name == "guides/own-dataset":
        (tmp_path / "houses.toml").write_text(blocks(path, "toml")[0])
    if name == "extend/test-a-plugin":
        write_files(path, tmp_path)
        settings = blocks(path, "ini")[-1]
        (tmp_path / "ddpforge_testing.toml").write_text(settings)
    some = [command for command in commands(path) if reason(command) is None]
    assert some
    for command in some:
        for words, others in page.swaps.items():
            command = command.replace(words, others)
        shell(command, tmp_path, codes=page.codes)
