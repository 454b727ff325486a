"""Documentation site: every page is in its menu, it makes no requests, and its search works from the disk."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

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
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built: Path = module.build()  # strict: a link or a name without a target is an error
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
    "axolotl": "guides/language-models migrate",
    "pretrained weights": "guides/fine-tuning",
    "distillation": "guides/teachers",
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
    "exit codes": "reference/exit-codes",
    "glossary": "reference/glossary",
}
"""What people search for, and the pages in docs/ that answer it: one of them is to be among the first three hits."""

FIRST = """
box => [...box.getRootNode().querySelectorAll("[role=option]")].slice(0, 3).map(link => new URL(link.href).pathname)
"""
SHOWN = """
([box, query]) => {
    const first = box.getRootNode().querySelector("[role=option]");
    return first && new URL(first.href).searchParams.get("h") === query;
}
"""


def test_search_finds_the_page_by_the_words_of_the_field(site: Path, browser: "Browser") -> None:
    from playwright.sync_api import TimeoutError as NothingFound

    page = browser.new_page()
    page.goto((site / "docs/guides/launch.html").as_uri(), wait_until="domcontentloaded")
    page.get_by_role("button", name="Search").first.click()
    box = page.get_by_role("combobox", name="Search")
    wrong = {}
    for query, expected in QUERIES.items():
        box.fill(query)
        try:
            page.wait_for_function(SHOWN, arg=[box.element_handle(), query], timeout=5000)
            hits = [relpath(hit, site / "docs").removesuffix(".html") for hit in box.evaluate(FIRST)]
        except NothingFound:
            hits = []
        if not set(hits) & set(expected.split()):
            wrong[query] = hits
    assert wrong == {}
