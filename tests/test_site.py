"""Documentation site: every page is in its menu, it makes no requests, and its search works from the disk."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from support.docs_modules import docs_module

import ddpforge
import ddpforge.api
import ddpforge.interfaces
import ddpforge.testing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}


def leaves(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for part in menu.values() if isinstance(menu, dict) else menu:
            yield from leaves(part)


def test_every_page_is_in_the_menu_and_in_the_index() -> None:
    menu = {*leaves(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])}
    assert {page for page in menu if page.startswith("docs/")} == PAGES
    index = ROOT / "docs/index.md"
    linked = {f"docs/{link}" for link in re.findall(r"\]\(([\w/-]+\.md)\)", index.read_text())}
    assert linked | {"docs/index.md"} == PAGES


def package_strings() -> str:
    """Returns all strings in ddpforge's code."""
    constants = (
        node.value
        for path in sorted((ROOT / "ddpforge").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return "\n".join(constants)


def test_messages_on_the_troubleshooting_page_are_in_the_code() -> None:
    rows = re.findall(r"^\| (`.+?) \| ", (ROOT / "docs/guides/troubleshooting.md").read_text(), re.MULTILINE)
    others = {"SIGBUS", "unable to write to file </torch_", "Connection reset by peer", "Connection closed by peer"}
    messages = {message for row in rows for message in re.findall(r"`([^`]+)`", row)} - others
    code = package_strings()
    assert len(messages) > 20
    assert [message for message in sorted(messages) if message not in code] == []


@pytest.fixture(scope="module")
def site() -> Path:
    built: Path = docs_module("site").build()  # strict: a link or a name without a target is an error
    return built


def test_every_page_is_built_with_the_docstrings_it_names(site: Path) -> None:
    assert {str(path.relative_to(site).with_suffix(".md")) for path in (site / "docs").rglob("*.html")} >= PAGES


REFERENCES = [("python", ddpforge), ("api", ddpforge.api), ("interfaces", ddpforge.interfaces)]


@pytest.mark.parametrize(
    ("page", "module"),
    [*REFERENCES, ("interfaces", ddpforge.testing)],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_every_public_name_is_in_the_reference_with_its_types(site: Path, page: str, module: ModuleType) -> None:
    text = (site / f"docs/reference/{page}.html").read_text()
    names = {name for name in module.__all__ if not name.startswith("__")}
    assert {name for name in names if f'id="{module.__name__}.{name}"' not in text} == set()


def test_signatures_in_the_reference_have_types(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "docs/reference/python.html").read_text())
    assert "fresh: bool = False" in text


def test_every_page_is_there_as_markdown_and_in_llms_txt(site: Path) -> None:
    listed = set(re.findall(r"^- \[.+?\]\((.+?)\)", (site / "llms.txt").read_text(), re.MULTILINE))
    assert listed >= PAGES | {"README.md", "AGENTS.md", "recipes/README.md"}
    for place in listed:
        assert (site / place).read_text() == (ROOT / place).read_text()


def test_every_page_but_the_index_has_its_synonyms_below_the_title() -> None:
    without = {page for page in PAGES if not re.match(r"# .+\n\n\*Also called: ", (ROOT / page).read_text())}
    assert without == {"docs/index.md"}


def test_on_a_phone_the_meaning_of_a_key_is_visible(site: Path, browser: "Browser") -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((site / "docs/reference/recipe.html").as_uri(), wait_until="domcontentloaded")
    box = page.locator("tr", has=page.locator("[id='train.length']")).locator("td").last.bounding_box()
    assert box is not None
    assert 0 <= box["x"] < box["x"] + box["width"] <= 390


def test_search_works_from_the_disk_without_requests(site: Path, browser: "Browser") -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto((site / "docs/guides/launch.html").as_uri(), wait_until="domcontentloaded")
    page.get_by_role("button", name="Search").first.click()
    page.get_by_role("combobox", name="Search").press_sequentially("pipeline schedules")
    found = page.locator("a[href*='docs/guides/pipeline-parallel.html']:visible", has_text="1F1B").first
    found.wait_for()
    assert complaints == []


QUERIES = {
    # get started
    "install": "install",
    "requirements": "install",
    "cuda wheel": "install",
    "quickstart": "tutorial",
    "lightning trainer": "migrate",
    "hugging face trainer": "migrate",
    "compare script": "migrate",
    "wrong gradient accumulation": "guides/prove",
    "custom loss": "custom-loss extend/loss",
    # data
    "custom dataset": "guides/own-dataset extend/dataset",
    "image folder": "guides/own-dataset",
    "csv file": "guides/own-dataset",
    "data augmentation": "guides/augmentation",
    "object detection": "guides/detection",
    "class weights": "guides/sampling",
    "class imbalance": "guides/sampling",
    "mixture of datasets": "guides/mixtures",
    "temperature sampling": "guides/mixtures",
    "chat template": "guides/chat-data",
    "sample packing": "guides/chat-data",
    "sharegpt": "guides/chat-data",
    "streaming parquet": "guides/streaming",
    "webdataset tar": "guides/streaming",
    "num_workers": "guides/data-loading",
    # training
    "gradient accumulation": "guides/batch-size",
    "batch size": "guides/batch-size",
    "max tokens per batch": "guides/batch-size",
    "learning rate scheduler": "guides/schedules extend/schedule",
    "learning rate warmup": "guides/schedules extend/schedule",
    "early stopping": "guides/callbacks",
    "mixed precision": "guides/mixed-precision",
    "bf16": "guides/mixed-precision",
    "lora": "guides/fine-tuning",
    "qlora 4-bit": "guides/fine-tuning",
    "freeze layers": "guides/fine-tuning",
    "sfttrainer": "guides/language-models",
    "dpo": "guides/language-models",
    "grpo": "guides/rewards",
    "axolotl": "guides/language-models migrate",
    "pretrained weights": "guides/fine-tuning",
    "distillation": "guides/teachers",
    "gallery of examples": "gallery",
    "model zoo": "gallery",
    "lora or full fine-tuning": "guides/choose-method",
    "supported models": "guides/choose-method",
    "which learning rate for dpo": "guides/choose-method",
    "gpu memory for 8b": "guides/choose-method guides/language-models",
    "validation": "guides/evaluate",
    # distributed
    "multi gpu": "guides/launch",
    "torchrun": "guides/launch guides/multi-node",
    "accelerate launch": "guides/launch",
    "multi-node": "guides/multi-node",
    "slurm": "guides/slurm",
    "sbatch": "guides/slurm",
    "docker": "guides/docker",
    "kubernetes": "guides/clusters",
    "fsdp": "guides/parallelism concepts/strategies",
    "zero3": "guides/parallelism concepts/strategies",
    "deepspeed": "guides/parallelism concepts/strategies",
    "tensor parallel": "guides/tensor-parallel",
    "pipeline parallelism": "guides/pipeline-parallel",
    "how much memory": "guides/memory guides/out-of-memory",
    # checkpoints
    "resume training": "guides/resume",
    "checkpoint frequency": "guides/checkpoints",
    "preemption": "guides/resume guides/slurm",
    # experiments
    "hyperparameter sweep": "guides/sweeps",
    "wandb": "guides/wandb",
    "tensorboard": "guides/loggers",
    "compare runs": "guides/runs",
    "export onnx": "guides/export",
    "inference": "guides/predict",
    "jupyter": "guides/python",
    # debug
    "OOM": "guides/out-of-memory",
    "CUDA out of memory": "guides/out-of-memory",
    "NCCL timeout": "guides/hangs",
    "training hangs": "guides/hangs",
    "loss is nan": "guides/nan",
    "learning rate finder": "guides/sanity-check",
    "overfit one batch": "guides/sanity-check",
    "pdb": "guides/debugger",
    "breakpoint": "guides/debugger",
    "profile": "guides/profile",
    "gpu idle": "guides/profile guides/data-loading",
    "seed reproducibility": "guides/reproducibility",
    "deterministic": "guides/reproducibility",
    "unused parameters": "guides/troubleshooting",
    # extend, concepts, reference
    "custom callback": "extend/callback",
    "custom metric": "extend/metric",
    "custom accelerator": "extend/device",
    "house rules": "extend/check",
    "subcommand": "extend/command",
    "read a checkpoint in python": "reference/api",
    "npz": "extend/format",
    "mpirun": "extend/environment",
    "regularizer": "extend/feature",
    "step timer": "extend/observer",
    "apple gpu": "install",
    "custom optimizer": "extend/optimizer",
    "entry points": "extend/plugin",
    "GAN": "extend/research extend/loss",
    "architecture": "concepts/architecture",
    "code structure": "concepts/architecture",
    "benchmark": "concepts/performance",
    "silent errors of trainers": "museum",
    "exit codes": "reference/exit-codes",
    "glossary": "reference/glossary",
    # the words of newcomers, and whole questions
    "fsdp vs deepspeed": "guides/parallelism concepts/strategies",
    "ddp vs dataparallel": "guides/parallelism concepts/strategies",
    "lightning vs ddpforge": "migrate",
    "how to finetune llama": "guides/language-models guides/fine-tuning",
    "finetune": "guides/fine-tuning guides/language-models",
    "llama": "guides/language-models guides/fine-tuning",
    "imagenet weights": "guides/fine-tuning",
    "resnet pretrained": "guides/fine-tuning",
    "stochastic weight averaging": "guides/callbacks",
    "save best model": "guides/callbacks guides/checkpoints",
    "ModelCheckpoint": "guides/callbacks guides/checkpoints",
    "delete old checkpoints": "guides/checkpoints",
    "tabular data": "guides/own-dataset",
    "pandas dataframe": "guides/own-dataset",
    "imagenet": "guides/own-dataset guides/fine-tuning",
    "huggingface datasets": "guides/own-dataset",
    "audio": "guides/own-dataset",
    "config inheritance": "reference/recipe",
    "override from the command line": "reference/recipe tutorial",
    "override config command line": "reference/recipe tutorial",
    "environment variables": "reference/recipe",
    "api key": "reference/recipe guides/wandb",
    "batchnorm": "reference/recipe guides/reproducibility",
    "torch.compile": "reference/recipe guides/mixed-precision concepts/performance",
    "log every n steps": "reference/recipe guides/loggers",
    "torchscript": "guides/export",
    "self-supervised": "guides/teachers extend/research",
    "multi-task": "custom-loss extend/loss extend/research",
    "multiple optimizers": "extend/loss extend/optimizer extend/research",
    "graceful shutdown": "guides/resume",
    "passwordless ssh": "guides/multi-node",
    "address already in use": "guides/multi-node guides/troubleshooting",
    "device-side assert": "guides/troubleshooting",
    "disk full": "guides/troubleshooting",
    "model summary": "guides/sanity-check",
    "number of parameters": "guides/sanity-check",
    "number of gpus": "guides/launch",
    "progress bar": "guides/launch",
    "dropout differs": "guides/reproducibility",
    "sync batchnorm": "guides/reproducibility guides/parallelism",
    "comet": "guides/loggers",
    "neptune": "guides/loggers",
    "windows": "install",
    "how do I resume my training": "guides/resume",
    "how to use multiple gpus": "guides/launch",
    "train on two nodes": "guides/multi-node",
    "my loss is nan": "guides/nan",
    "why is my gpu idle": "guides/profile guides/data-loading",
    "use my own dataset": "guides/own-dataset",
    "use my own model": "extend/model",
    "own loss function": "custom-loss extend/loss",
    "learning rate": "guides/schedules guides/sanity-check",
    "cosine schedule with warmup": "guides/schedules",
    "reduce on plateau": "guides/schedules extend/schedule",
    "gradient clipping": "reference/recipe guides/nan",
    "clip grad norm": "reference/recipe guides/nan concepts/step guides/mixed-precision",
    "gradient checkpointing": "guides/memory guides/out-of-memory",
    "activation checkpointing": "guides/memory guides/out-of-memory",
    "cpu offload": "guides/memory guides/out-of-memory guides/parallelism",
    "fp16": "guides/mixed-precision",
    "amp": "guides/mixed-precision",
    "autocast": "guides/mixed-precision",
    "fp8": "guides/mixed-precision",
    "exponential moving average": "guides/callbacks",
    "ema": "guides/callbacks",
    "test set": "guides/evaluate",
    "confusion matrix": "guides/evaluate extend/metric",
    "f1 score": "guides/evaluate",
    "train test split": "guides/own-dataset",
    "random crop": "guides/augmentation",
    "mixup": "guides/augmentation",
    "weighted sampler": "guides/sampling",
    "bounding boxes": "guides/detection",
    "coco": "guides/detection",
    "segmentation": "guides/own-dataset guides/detection extend/research",
    "shard files": "guides/streaming",
    "iterable dataset": "guides/streaming extend/dataset",
    "s3": "guides/checkpoints guides/streaming",
    "dataloader workers": "guides/data-loading",
    "shared memory": "guides/data-loading guides/docker guides/troubleshooting",
    "effective batch size": "guides/batch-size",
    "largest batch size": "guides/batch-size",
    "teacher student": "guides/teachers",
    "knowledge distillation": "guides/teachers",
    "byol": "guides/teachers extend/research",
    "adapters": "guides/fine-tuning",
    "quantization": "guides/fine-tuning",
    "instruction tuning": "guides/language-models guides/chat-data",
    "sft": "guides/language-models guides/chat-data",
    "rlhf": "guides/language-models",
    "reward model": "guides/language-models",
    "tokenizer": "guides/language-models guides/chat-data",
    "generate text": "guides/language-models guides/predict",
    "system prompt": "guides/chat-data",
    "mask the prompt": "guides/chat-data guides/language-models",
    "flash attention": "guides/language-models concepts/performance",
    "mixture of experts": "guides/parallelism",
    "context parallel": "guides/tensor-parallel guides/parallelism",
    "hsdp": "guides/parallelism",
    "zero stage": "guides/parallelism concepts/strategies",
    "model too big for one gpu": "guides/parallelism guides/memory guides/out-of-memory",
    "infiniband": "guides/multi-node guides/hangs",
    "ssh": "guides/multi-node",
    "spot instances": "guides/resume guides/clusters",
    "job array": "guides/slurm",
    "time limit": "guides/slurm guides/resume",
    "kubeflow": "guides/clusters",
    "ray": "guides/clusters",
    "container": "guides/docker",
    "elastic training": "guides/multi-node guides/launch",
    "load state dict": "guides/checkpoints guides/fine-tuning",
    "convert checkpoint": "guides/checkpoints guides/export",
    "safetensors": "guides/export guides/checkpoints",
    "hugging face hub": "guides/export guides/fine-tuning",
    "tensorrt": "guides/export",
    "optuna": "guides/sweeps",
    "grid search": "guides/sweeps",
    "random search": "guides/sweeps",
    "mlflow": "guides/loggers",
    "csv logger": "guides/loggers",
    "offline wandb": "guides/wandb",
    "plot loss curve": "guides/runs guides/report",
    "dashboard": "guides/report",
    "notebook": "guides/python",
    "python api": "guides/python reference/python",
    "train without a recipe": "guides/python",
    "debugger": "guides/debugger",
    "vscode": "guides/debugger",
    "flame graph": "guides/profile",
    "goodput": "guides/time",
    "straggler": "guides/time",
    "slow training": "guides/profile guides/data-loading",
    "memory leak": "guides/memory guides/profile",
    "vram": "guides/memory guides/out-of-memory",
    "deadlock": "guides/hangs",
    "watchdog": "guides/hangs",
    "set seed": "guides/reproducibility",
    "same results on different gpus": "guides/reproducibility guides/parity",
    "sanity check": "guides/sanity-check",
    "dry run": "guides/sanity-check",
    "verify installation": "guides/doctor install",
    "nccl test": "guides/doctor guides/hangs",
    "write a plugin": "extend/plugin",
    "custom dataset class": "guides/own-dataset extend/dataset",
    "custom sampler": "extend/sampler",
    "custom scheduler": "extend/schedule extend/environment",
    "custom strategy": "extend/strategy",
    "custom logger": "extend/logger",
    "unit test my plugin": "extend/test-a-plugin",
    "breaking changes": "extend/upgrade",
    "accumulate gradients": "guides/batch-size",
    "toml vs yaml": "concepts/why-toml",
    "yaml": "concepts/why-toml",
    "inline table": "reference/recipe tutorial",
    "folder layout of a run": "reference/run-folder",
    "metrics.jsonl": "reference/run-folder reference/metrics guides/scripts",
    "exit code 75": "reference/exit-codes",
    "what is a micro batch": "reference/glossary guides/batch-size",
    "speed compared to plain pytorch": "concepts/performance",
    "throughput": "concepts/performance guides/profile",
    "ctrl-c": "guides/resume",
    "bash script": "guides/scripts",
    "json output": "guides/scripts reference/cli",
    "shell completion": "reference/cli install",
}
"""What people search for, and the pages in docs/ that answer it: one of them is to be among the first three hits."""

ANSWERS = """
async ([script, data, queries]) => {
    const worker = new Worker(URL.createObjectURL(new Blob([script], {type: "text/javascript"})));
    const ask = message => new Promise(answer => {
        worker.onmessage = event => answer(event.data);
        worker.postMessage(message);
    });
    await ask({type: 0, data});
    const found = {};
    for (const input of queries) {
        const hits = (await ask({type: 2, data: {input}})).data.items.slice(0, 3);
        found[input] = hits.map(hit => data.items[hit.id].location);
    }
    return found;
}
"""


def test_search_finds_the_page_by_the_words_of_the_field(site: Path, browser: "Browser") -> None:
    (script,) = site.glob("assets/javascripts/workers/search.*.js")
    page = browser.new_page()
    page.goto("about:blank")
    index = json.loads((site / "search.json").read_text())
    answers = page.evaluate(ANSWERS, [script.read_text(), index, list(QUERIES)])
    pages = {
        query: [re.sub(r"\.html.*", "", hit).removeprefix("docs/") for hit in hits] for query, hits in answers.items()
    }
    wrong = {query: hits for query, hits in pages.items() if not {*hits} & {*QUERIES[query].split()}}
    assert wrong == {}


def test_a_hit_need_not_have_every_word_and_its_words_are_marked(site: Path, browser: "Browser") -> None:
    page = browser.new_page()
    page.goto((site / "docs/guides/launch.html").as_uri(), wait_until="domcontentloaded")
    page.get_by_role("button", name="Search").first.click()
    page.get_by_role("combobox", name="Search").fill("how to compare fsdp vs xyzzy")
    hit = page.locator("[role=option][href*='parallelism.html']").first
    hit.wait_for()
    assert "fsdp" in {word.lower() for word in hit.locator("mark").all_inner_texts()}
