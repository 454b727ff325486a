"""Documentation: its recipes load, its commands parse, its links exist, and its tables are up to date."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]
from support.docs_modules import docs_module
from support.launched import Ranks

import ddpforge as package
from ddpforge.cli import main
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, RecipeError
from ddpforge.recipe import load_recipe, render
from ddpforge.recipe.layers import framework_keys, kind_at, used_name
from ddpforge.recipe.renamed import keys
from ddpforge.recipe.vocabulary import Vocabulary

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = [*ROOT.glob("examples/*/README.md")]
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *EXAMPLES, ROOT / "recipes/README.md"])
SECTIONS = "model|data|task|optimizer|schedule|strategy|train|checkpoint|track|callbacks"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    fenced = r"^( *)```(\w+)\n(.*?)^\1```$"  # indented in lists
    found = re.findall(fenced, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [dedent(text) for _, language, text in found if language in languages]


def spans(page: Path) -> list[str]:
    """Returns inline code of the prose."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]


def recipes(page: Path) -> list[str]:
    return [text for text in blocks(page, "toml") if text.startswith("recipe = 2") and not is_of_plugin(text)]


def is_of_plugin(text: str) -> bool:
    """True if a plugin has the model of a recipe: its tests check the recipe."""
    return tomllib.loads(text).get("model", {}).get("use") in PLUGIN_MODELS


def write_files(page: Path, folder: Path) -> None:
    """Writes the Python files that a page shows; the first line of a block names its file.

    The pages about plugins share their files.
    """
    for each in sorted(page.parent.glob("*.md")) if page.parent.name == "extend" else [page]:
        for text in blocks(each, "python"):
            if name := re.match(r"# (\w+\.py)", text):
                file = folder / name[1]
                written = file.read_text() if file.exists() else ""
                file.write_text(written if text in written else written + text)


# ---------------------------------------------------------------------------------------------- reference
@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return docs_module("generate")


@pytest.mark.parametrize(
    "page", [*sorted((DOCS / "reference").glob("*.md")), DOCS / "install.md"], ids=lambda page: page.stem
)
def test_the_reference_is_up_to_date(page: Path, generate: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == generate.render(text), "run: python docs/generate.py"


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "reference/exit-codes.md").read_text(), re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == package.__version__


def test_the_changelog_has_the_version_that_dropped_an_option() -> None:
    rows = tomllib.loads((ROOT / "ddpforge/recipe/renamed.toml").read_text(encoding="utf-8"))["dropped"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    named = {*re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)}
    named |= {*re.findall(r"^This will be version (.+)\.$", changelog, re.MULTILINE)}
    assert {row["since"] for row in rows} <= named


# ---------------------------------------------------------------------------------------------- recipes, keys, code
@each_page
def test_recipes_load(page: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    for text in recipes(page):
        (tmp_path / "recipe.toml").write_text(text)
        load_recipe(tmp_path / "recipe.toml")


@each_page
def test_python_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


@each_page
def test_documented_keys_exist(page: Path, tmp_path: Path) -> None:
    """Checks keys of TOML fragments, and keys like `train.length` and `[train]` in the prose."""
    write_files(page, tmp_path)
    for text in blocks(page, "toml"):
        table = tomllib.loads(text)
        if "project" not in table and not is_of_plugin(text):
            for path in leaves(table):
                assert is_key(path, table, tmp_path), ".".join(path)

    for span in spans(page):
        key = re.fullmatch(rf"\[?((?:{SECTIONS})(?:\.\w+)*)\]?(?: = .*)?", span)
        if key and not key[1].endswith((".NAME", ".py", ".safetensors")) and (span.startswith("[") or "." in key[1]):
            path = tuple(key[1].split("."))
            known = kind_at(path, {}) or path in Vocabulary().models or is_key(path, {}, tmp_path)
            assert known or (page.name in OLD_NAMES and is_old_key(path)), span


PLUGIN_MODELS = (
    *("causal_lm", "image_text_to_text", "seq2seq_lm", "token_classification"),
    *("text_encoder", "diffusers"),
)
OLD_NAMES = ("CHANGELOG.md", "upgrade.md")  # pages with old names


def is_old_key(path: tuple[str, ...]) -> bool:
    """True if recipe version 1 had the key."""
    return any(len(row.old) == len(path) and all(map(fnmatchcase, path, row.old)) for row in keys())


def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def is_key(path: tuple[str, ...], table: dict[str, Any], folder: Path) -> bool:
    """True if a recipe can have the key: of a section, or of the component (any of its kind if `table` names none)."""
    vocabulary, registry = Vocabulary(), Registry.installed()
    if path[0] == "vars" or path[-1] in vocabulary.keys(path[:-1]):
        return True
    for end in range(1, len(path)):
        if kind := kind_at(path[:end], table):
            slot = table
            for part in path[:end]:
                slot = slot.get(part, {})
            use = used_name(path[:end], slot)
            options = (registry.options_model(kind, name, folder) for name in ([use] if use else registry.names(kind)))
            mine = ("use", *framework_keys(path[:end]))
            return path[end] in mine or any(path[end] in model.model_fields for model in options)
    return False


def test_error_message_in_the_readme_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(ROOT / "README.md", tmp_path)
    text = recipes(ROOT / "README.md")[0]
    for right, wrong in (('"adamw"', '"adam"'), ("length", "lenght"), ("clip_norm", "max_grad_norm")):
        text = text.replace(right, wrong)
    Path("recipe.toml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.toml")
    assert f"$ ddpforge check recipe.toml\n{render(caught.value)}\n" in blocks(ROOT / "README.md", "text")


# ---------------------------------------------------------------------------------------------- commands
@each_page
def test_commands_parse(page: Path, generate: ModuleType) -> None:
    commands = dict(generate.commands())
    for text in blocks(page, "sh"):
        for words in command_lines(text):
            parse(words, commands)
    for text in blocks(page, "text"):
        for line in re.findall(r"^\$ (.*)", text, re.MULTILINE):
            for words in command_lines(line):
                parse(words, commands)
    for span in spans(page):
        if "ddpforge " in span and "…" not in span:
            for words in command_lines(span):
                parse(words, commands, whole=False)


def test_the_yaml_of_clusters_is_read_and_its_commands_parse(generate: ModuleType) -> None:
    commands = dict(generate.commands())
    documents = [yaml.safe_load_all(text) for text in blocks(DOCS / "guides/clusters.md", "yaml")]
    found = [words for each in documents for words in commands_within(list(each))]
    assert [words[0] for words in found if words] == ["launch", "launch"]
    for words in filter(None, found):
        parse(words, commands)


def commands_within(value: Any) -> Iterator[list[str]]:
    """Yields ddpforge's arguments anywhere in a value of YAML: in a list of words, or in a shell script."""
    if isinstance(value, str):
        yield from command_lines(value)
    elif isinstance(value, list) and value[:1] == ["ddpforge"]:
        yield value[1:]
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from commands_within(each)


def command_lines(script: str) -> Iterator[list[str]]:
    """Yields the words after ddpforge of every command in a shell script."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for is_word, group in groupby(lexer, lambda word: bool(word.strip("();<>|&"))):
            words = list(group)
            names = [word.rpartition("/")[2] for word in words]
            if is_word and "ddpforge" in names:
                yield words[names.index("ddpforge") + 1 :]


def parse(words: Sequence[str], commands: dict[str, click.Command], *, whole: bool = True) -> None:
    """Fails unless ddpforge accepts these words; arguments may be missing unless `whole`."""
    try:
        if not words or words[0].startswith("-"):
            main.make_context("ddpforge", list(words))
            return
        size = 1 if f"ddpforge {words[0]}" in commands else 2
        name = " ".join(["ddpforge", *words[:size]])
        if not whole and any(known.startswith(f"{name} ") for known in commands):
            return  # a group
        commands[name].make_context(name, list(words[size:]))
    except click.exceptions.Exit:
        pass  # --help and --version
    except click.MissingParameter:
        if whole:
            raise


# ---------------------------------------------------------------------------------------------- links
@each_page
def test_links_have_existing_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings on GitHub, and of the keys in its tables."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {*re.findall(r'<a id="([\w.]+)"></a>', text)} | {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_docker_image_copies_only_files_in_the_build_context() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert sent == set(copied) >= {"pyproject.toml", "ddpforge", "recipes"}
    assert all((ROOT / name).exists() for name in copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"EXTRAS=([\w,]+)", text + (DOCS / "guides/docker.md").read_text())
    assert {extra for each in asked for extra in each.split(",")} <= {*extras}


# ---------------------------------------------------------------------------------------------- installation
def test_the_install_page_names_every_extra() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| [^|]+ \|$", (DOCS / "install.md").read_text(), re.MULTILINE)
    named = {extra for row in rows for extra in re.findall(r"\w+", row)}
    assert named == {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


def test_nothing_is_installed_from_pypi_under_this_name() -> None:
    """ddpforge is installed from a clone; PyPI has no package of this name."""
    folders = ("ddpforge", "docs", "recipes", "examples", "plugins", "benchmarks")
    files = [ROOT / "README.md", *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    wrong = re.compile(r"pip install (-\S+ )*['\"]?ddpforge\b|pypi\.org/project/ddpforge")
    texts = (".md", ".py", ".toml", ".txt", ".html", ".js", ".yaml")
    assert [file for file in files if file.suffix in texts and wrong.search(file.read_text())] == []


# ---------------------------------------------------------------------------------------------- runs
@pytest.mark.full
def test_the_examples_of_the_plugin_pages_train_together(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    page = DOCS / "extend/plugin.md"
    write_files(page, tmp_path)
    (tmp_path / "denoising.toml").write_text(recipes(page)[0])
    ddpforge("run", "denoising.toml", "--set", "train.length=2st", nproc=2)
    written = (tmp_path / "runs/denoising/evaluations.csv").read_text()
    assert {line.split(",")[1] for line in written.splitlines()} == {
        *("eval/loss", "eval/mae", "eval/psnr", "eval/brightness")
    }


@pytest.mark.full
def test_the_momentum_encoder_of_the_how_to_runs(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    write_files(DOCS / "guides/teachers.md", tmp_path)
    (tmp_path / "byol.toml").write_text(recipes(DOCS / "guides/teachers.md")[0])
    ddpforge("run", "byol.toml", "--set", "train.length=2st", "--set", 'strategy.use="fsdp"', nproc=2)


LOOKS = """
import os
import torch.nn.functional as F
from ddpforge.interfaces import Task


class Looks(Task):
    def loss(self, model, batch):
        logits = model(batch[0])
        if os.environ.get("RANK", "0") == "{rank}":
            breakpoint()
        return F.cross_entropy(logits, batch[1], reduction="sum"), logits
"""


@pytest.mark.full
@pytest.mark.parametrize(("words", "rank"), [("run", 0), ("launch", 1)])
def test_a_breakpoint_opens_pdb_in_one_process_and_on_one_rank(tmp_path: Path, words: str, rank: int) -> None:
    (tmp_path / "looks.py").write_text(LOOKS.replace("{rank}", str(rank)))
    text = 'recipe = 2\nname = "looks"\nextends = ["digits"]\nunset = ["checkpoint.keep", "schedule"]\n'
    text += 'task = { use = "./looks.py:Looks" }\ntrain = { length = "1st", hang_timeout = "off" }\n'
    (tmp_path / "recipe.toml").write_text(text)
    ranks = ["--nproc=2"] if words == "launch" else []
    done = subprocess.run(
        [sys.executable, "-m", "ddpforge", words, "recipe.toml", *ranks, "train.device=cpu"],
        cwd=tmp_path,
        env=os.environ | {"CI": "1", "OMP_NUM_THREADS": "1"},
        input="p 'shape', tuple(logits.shape)\n" + "c\n" * 30,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(Pdb) ('shape', (" in done.stdout


def test_run_folder_of_the_tutorial_matches_the_reference(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    write_files(DOCS / "tutorial.md", tmp_path)
    (tmp_path / "spirals.toml").write_text(recipes(DOCS / "tutorial.md")[0] + "[callbacks.throughput]\n")
    ddpforge("run", "spirals.toml", "--set", "train.length=2ep")

    run = tmp_path / "runs/spirals"
    described = (DOCS / "reference/run-folder.md").read_text()
    for path in run.iterdir():
        assert re.search(rf"^  (\S+  )?{re.escape(path.name)}[ /]", described, re.MULTILINE), path.name

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    named = {*spans(DOCS / "reference/run-folder.md"), *spans(DOCS / "reference/metrics.md")}
    assert {name for row in rows for name in row} <= named
    assert {*json.loads((run / "status.json").read_text()), *json.loads((run / "run.json").read_text())} <= named
