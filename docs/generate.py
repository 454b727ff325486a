"""Writes the generated parts of the docs: recipe keys, built-in components, commands, renamed names, versions.

    python docs/generate.py

A page is prose with generated blocks. A line `<!-- generated: NAME -->` begins a block, and `<!-- end -->` ends it. The
script replaces the text between them by the result of `BLOCKS[NAME]`.
"""

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, create_model

import ddpforge.cli
from ddpforge.components.kinds import KINDS
from ddpforge.components.options_table import OptionRow, options_table
from ddpforge.components.registry import Registry
from ddpforge.recipe.layers import NAMED_SLOTS, SCHEDULES, SETS, SLOTS, VARIATIONS
from ddpforge.recipe.renamed import Renamed, components, earlier_defaults, keys, options
from ddpforge.recipe.report import KeyPath, dotted
from ddpforge.recipe.schema import Component, OptimizerComponent, Recipe, SourceComponent
from ddpforge.recipe.vocabulary import Vocabulary

DOCS = Path(__file__).parent
PAGES = DOCS / "reference"
# Installed plugins are not part of this documentation.
os.environ.setdefault("DDPFORGE_DISABLE_PLUGINS", ",".join(p.name for p in (PAGES.parents[1] / "plugins").glob("*")))
_SECTIONS = ("data", "train", "checkpoint", "checkpoint.keep", "track")
_BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str) -> str:
    """Returns the text of a page with updated generated blocks; raises KeyError for an unknown block."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", page)


# ---------------------------------------------------------------------------------------------- recipe
def _section(*path: str) -> str:
    """Returns the keys of one table of the recipe, without the tables and components in it."""
    vocabulary = Vocabulary()
    rows = [
        row
        for row in options_table(vocabulary.models[path])
        if not row.type.startswith("table") and (*path, row.name) not in SLOTS
    ]
    types = {row.name: "duration" for row in rows if vocabulary.takes_duration((*path, row.name))}
    return _options(rows, types, dotted(path))


def _optimizer(section: type[Component] = OptimizerComponent) -> str:
    """Returns the keys of [optimizer], or of a table in it, without `use` and the optimizer's own options."""
    own = {key: field for key, field in section.model_fields.items() if key not in Component.model_fields}
    fields: Any = {key: (field.annotation, field) for key, field in own.items()}
    table: type[BaseModel] = create_model("Optimizer", **fields)
    return _options(options_table(table), anchors="optimizer" if section is OptimizerComponent else None)


def _slots() -> str:
    """Returns the tables that name a component, with its kind and the default of an absent table."""
    absent = {
        name: "required" if field.is_required() else f'`use = "{field.default.use}"`'
        for name, field in Recipe.model_fields.items()
        if (name,) in SLOTS
    } | {"data.train": "required", "data.eval": "no evaluation", "data.sampler": '`use = "shuffled"`'}
    rows = [(f"`[{dotted(path)}]`", _link(kind), absent[dotted(path)]) for path, kind in SLOTS.items()]
    for path, noun in zip(SETS, ("source", "set"), strict=True):
        several = rows.index(next(row for row in rows if row[0] == f"`[{dotted(path)}]`")) + 1
        rows.insert(several, (f"`[{dotted(path)}.NAME]`", _link(SLOTS[path]), f"`[{dotted(path)}]` is one {noun}"))
    place = next(place for place, row in enumerate(rows) if row[0] == "`[schedule]`")
    rows[place:place] = [(f"`[{dotted(path)}.NAME]`", _link("optimizer"), "none") for path in VARIATIONS]
    rows.insert(place, (f"`[{dotted(SCHEDULES)}.NAME]`", _link("schedule"), "the option is constant"))
    rows += [(f"`[{table}.NAME]`", _link(kind), "none") for table, kind in NAMED_SLOTS.items()]
    kinds = {_link(kind): kind for kind in _OF_KIND}
    rows = [(table, kind, _interface(kinds[kind]), absent) for table, kind, absent in rows]
    return _table(("Table", "Kind", "In Python", "When absent"), rows)


_OF_KIND = {  # kind to its class, the section of interfaces.md with it, and the page on how to write one
    "model": ("torch.nn.Module", "model", "model"),
    "data": ("Data", "dataset", "dataset"),
    "sampler": ("BatchSampler", "sampler", "sampler"),
    "task": ("Task", "loss-task", "loss"),
    "optimizer": ("torch.optim.Optimizer", "optimizer-and-schedule", "optimizer"),
    "schedule": ("Schedule", "optimizer-and-schedule", "schedule"),
    "strategy": ("Strategy", "strategy", "strategy"),
    "tracker": ("Tracker", "tracker-and-media", "logger"),
    "callback": ("Callback", "callback", "callback"),
}


def _interface(kind: str) -> str:
    name, section, page = _OF_KIND[kind]
    return f"[`{name}`](interfaces.md#{section}); [write one](../extend/{page}.md)"


def _link(kind: str) -> str:
    return f"[{kind}](components.md#{kind})"


def _renamed_names() -> str:
    """Returns the names of recipe version 1 and 2."""
    rows = [(_key(row, row.old), f"`{dotted(row.new)}`") for row in (*keys(), *options()) if row.old != row.new]
    rows += [(f'{kind} `use = "{old}"`', f'`use = "{new}"`') for (kind, old), new in components().items()]
    rows += [
        (_key(row, row.old, f" = {_toml(old)}"), f"`{'.'.join(map(str, row.new))} = {_toml(new)}`")
        for row in (*keys(), *options())
        for old, new in row.values.items()
        if old != new
    ]
    rows += [
        (f"{use}: without `{option}`", f"`{option} = {_toml(before)}`, which is no longer the default")
        for use, options_of_it in earlier_defaults().items()
        for option, before in options_of_it.items()
    ]
    return _table(("Version 1", "Version 2"), rows)


def _key(row: Renamed, path: KeyPath, value: str = "") -> str:
    """Returns the name of a key, or of an option with its components."""
    name = ".".join(map(str, path))
    return f"{', '.join(row.of)}: `{name}{value}`" if row.of else f"`{name}{value}`"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


# ---------------------------------------------------------------------------------------------- components
def _components(kind: str) -> str:
    """Returns all components of a kind that ddpforge itself provides."""
    entries = Registry.installed().entries(kind)
    return "\n\n".join(_component(kind, entry.name) for entry in entries if entry.distribution == "ddpforge")


def _component(kind: str, name: str) -> str:
    registry = Registry.installed()
    use = f"ddpforge:{name}"  # ddpforge's own, even if another package provides the same name
    options = options_table(registry.options_model(kind, use))
    about = inspect.getdoc(registry.load(kind, use)) or ""
    entry = registry.find(kind, use)
    assert entry is not None
    table = _options(options) if options else "No options."
    return "\n\n".join([f"### {name}", about, f"In Python: `{entry.target}`", table])


def _options(rows: Sequence[OptionRow], types: Mapping[str, str] = {}, anchors: str | None = None) -> str:
    """Returns a table of options; with `anchors`, the name of a table of the recipe, each key has an anchor."""
    return _table(
        ("Key", "Type", "Default", "Limits", "Meaning"),
        [
            (
                f"{_anchor(anchors, row.name)}`{row.name}`",
                _code(types.get(row.name, row.type)),
                _code(row.default) if row.default else "required",
                # as code: Markdown would read a pattern as a link
                re.sub(r"matches (.+?)(?=, at |$)", r"matches `\1`", row.limits),
                row.description,
            )
            for row in rows
        ],
    )


def _anchor(section: str | None, key: str) -> str:
    """Returns the anchor `train.length` of a key, for links and search."""
    return "" if section is None else f'<a id="{".".join(filter(None, (section, key)))}"></a>'


# ---------------------------------------------------------------------------------------------- commands
def _commands() -> str:
    return "\n\n".join(_command(path, command) for path, command in commands())


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yields every command with its full name, e.g. ("ddpforge plugins list", …)."""
    for name in ddpforge.cli._COMMANDS:
        command = ddpforge.cli._load(name)
        if isinstance(command, click.Group):
            yield from ((f"ddpforge {name} {inner}", found) for inner, found in command.commands.items())
        else:
            yield f"ddpforge {name}", command


def _command(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    usage = f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```"
    options = [
        (_code(_flags(option, context)), option.help or "")
        for option in command.params
        if isinstance(option, click.Option)
    ]
    parts = [f"## {path}", usage, inspect.cleandoc(command.help or "")]
    return "\n\n".join([*parts, _table(("Option", "Meaning"), options)] if options else parts)


def _flags(option: click.Option, context: click.Context) -> str:
    value = option.make_metavar(context).replace("INTEGER RANGE", "N")
    return ", ".join([*option.opts, *option.secondary_opts]) + ("" if option.is_flag else f" {value}")


# ---------------------------------------------------------------------------------------------- versions
_PACKAGES = {"torch": "", "torchvision": "", "torchao": "", "accelerate": "", "deepspeed": "", "transformers": ""}


def _versions() -> str:
    """Returns the environments of tests/versions.toml, then the features that need a newer torch."""
    found = tomllib.loads((DOCS.parent / "tests/versions.toml").read_text(encoding="utf-8"))
    rows = []
    for row in found["row"]:
        pins = [re.split("(?=[<>=~!])", pin, maxsplit=1) for pin in row["pins"]]
        given = _PACKAGES | {package: _readable(limits) for package, limits in pins}
        rows.append((row["python"], *(given[package] or "newest" for package in _PACKAGES), row.get("note", "")))
    needs = [(row["feature"], f"torch {row['torch']} or newer") for row in found["needs"]]
    header = ("Python", "torch", "torchvision", "torchao", "accelerate", "DeepSpeed", "transformers", "Note")
    return f"{_table(header, rows)}\n\n{_table(('Feature', 'It needs'), needs)}"


def _readable(limits: str) -> str:
    """Returns the version of an exact pin, e.g. 2.11 of "==2.11.*"; other limits as code."""
    return limits.removeprefix("==").removesuffix(".*") if limits.startswith("==") else f"`{limits}`"


# ---------------------------------------------------------------------------------------------- Markdown
def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _code(text: str) -> str:
    return "*(none)*" if text == "unset" else f"`{text}`"


BLOCKS: Mapping[str, Callable[[], str]] = {
    "recipe": _section,
    "recipe data.train": partial(_optimizer, SourceComponent),
    "recipe optimizer": _optimizer,
    **{f"recipe {dotted(path)}": partial(_optimizer, section) for path, section in VARIATIONS.items()},
    **{f"recipe {name}": partial(_section, *name.split(".")) for name in _SECTIONS},
    "slots": _slots,
    **{kind: partial(_components, kind) for kind in KINDS},
    "commands": _commands,
    "renamed": _renamed_names,
    "versions": _versions,
}


if __name__ == "__main__":
    for file in sorted([*PAGES.glob("*.md"), DOCS / "extend/upgrade.md", DOCS / "install.md"]):
        file.write_text(render(file.read_text(encoding="utf-8")), encoding="utf-8")
