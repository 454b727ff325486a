"""Every name in a message exists: classes of the interfaces, keys of recipes, options and commands of ddpforge."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import ddpforge.interfaces
from ddpforge.recipe.schema import CheckpointSection, TrainSection

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("ddpforge/**/*.py"), *ROOT.glob("plugins/*/ddpforge_*/**/*.py")])

_CLASS = re.compile(r"(?<![\w.\[])([A-Z][A-Za-z]*[a-z][A-Za-z]*)\(")
_KEY = re.compile(r"(?<![\w./`{-])(train|checkpoint)\.([a-z_]+)(?![\w(/])")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_COMMAND = re.compile(r"`ddpforge ([a-z-]+)(?: ([a-z-]+))?")

OTHERS = {"Field", "UNet", "TensorDataset"}  # of pydantic; a built-in model; of torch
TRAIN_FILES = {"safetensors", "md", "py", "toml", "txt", "jsonl"}  # file names such as train.py


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and text of every string that is not a docstring, with "…" for the values of f-strings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


@cache
def messages() -> list[tuple[str, str]]:
    return [
        (f"{file.relative_to(ROOT)}:{line}", text)
        for file in FILES
        for line, text in literals(ast.parse(file.read_text()))
        if " " in text
    ]


def found(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for place, text in messages():
        for match in pattern.finditer(text):
            yield place, match


def test_classes_in_messages_are_public() -> None:
    """Regression: seven messages advised `Rows(…)`, which has had another name since Plugin API 3."""
    known = {*dir(ddpforge.interfaces), *dir(builtins), *OTHERS}
    unknown = {f"{place}: {match[1]}" for place, match in found(_CLASS) if match[1] not in known}
    assert unknown == set()


def test_keys_in_messages_are_keys_of_recipes() -> None:
    sections = {"train": TrainSection, "checkpoint": CheckpointSection}
    unknown = {
        f"{place}: {match[0]}"
        for place, match in found(_KEY)
        if match[2] not in sections[match[1]].model_fields and match[2] not in TRAIN_FILES
    }
    assert unknown == set()


REFERENCE = (ROOT / "docs/reference/cli.md").read_text()  # `tests/test_docs.py` compares it with the commands
OTHER_PROGRAMS = {
    *(
        "--block-signal",
        "--cpus-per-task",
        "--format",
        "--jobs",
        "--kill-on-bad-exit",
        "--noheader",
        "--signal",
    ),  # Slurm
    *(
        "--shm-size",
        "--ulimit",
        "--cpu",
        "--multi",
        "--num",
        "--wait",
        "--nproc-per-node",
        "--name",
        "--trust",
        "--mode",
    ),
}


def test_commands_in_messages_exist() -> None:
    commands = set(re.findall(r"ddpforge ([a-z-]+(?: [a-z-]+)?)", REFERENCE))
    firsts = {name.partition(" ")[0] for name in commands}
    groups = {"ckpt", "data", "plugins", "recipes", "runs"}
    unknown = set()
    for place, match in found(_COMMAND):
        first, second = match[1], match[2]
        if first not in firsts or (first in groups and second and f"{first} {second}" not in commands):
            unknown.add(f"{place}: {match[0]}")
    assert unknown == set()


def test_options_in_messages_are_options_of_a_command() -> None:
    known = {*_FLAG.findall(REFERENCE), *OTHER_PROGRAMS, "--ddpforge-dist", "--help"}
    unknown = {f"{place}: {match[0]}" for place, match in found(_FLAG) if match[0] not in known}
    assert unknown == set()
