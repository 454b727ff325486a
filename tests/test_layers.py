"""Architecture, read from the source: allowed imports between packages, and rules for every module."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import ddpforge

PACKAGE = Path(ddpforge.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# From the top down; a module imports only modules in lines below its own.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"tools.bisect", "tools.certify"},
    {"testing"},
    {"tools.prove"},
    {"tools.script_comparison", "tools.simulation"},
    {"tools.reports", "tools.sweeps", "tools.trials"},
    {"interop", "tools", "tools.doctor", "tools.parity"},
    {"api"},
    {"app.api"},
    {"app.follow"},
    {"app.evaluate", "app.generation", "app.objects"},
    {"app.run"},
    {"app.attempt"},
    {"app.build"},
    {"app"},
    {"watchdog"},
    {"launchers"},
    {"guard"},
    {"features"},
    {"training"},
    {"data", "runs", "strategies"},
    {"checkpoint"},
    {"ranks"},
    {"pytest_options", "recipe"},
    {"components"},
    {"builtin"},
    {"interfaces"},
    {"compat", "disk", "fast_import", "local_world", "secret_redaction"},
    {"errors", "machine"},
    {""},  # ddpforge itself: the version, and names that are imported on first use
]
# Modules without torch, so that commands that only read start quickly.
LIGHT = {
    "api",
    "cli",
    "compat",
    "components",
    "disk",
    "errors",
    "fast_import",
    "interfaces",
    "launchers",
    "local_world",
    "machine",
    "recipe",
    "runs",
    "secret_redaction",
    "tools.reports",
    "watchdog",
}
LIGHT |= {f"ranks.{name}" for name in ("environment", "failures", "heartbeat", "logs", "process_exit", "run_limits")}
LIGHT |= {"ranks.signal_policy", "ranks.signals"}
LIGHT |= {"app.choose", "guard", "features.corruption_check"}
LIGHT |= {f"training.{name}" for name in ("callbacks", "checks", "contract", "data_names", "metric_direction")}
LIGHT |= {"training.problems", "training.stages"}
LIGHT |= {f"strategies.{name}" for name in ("ddp", "fsdp.mesh", "single", "tensor.options")}
LIGHT |= {f"strategies.{name}.strategy" for name in ("deepspeed", "fsdp", "pipeline")}
LIGHT |= {f"strategies.deepspeed.{name}" for name in ("extra",)}
LIGHT.add("training.updates")
LIGHT |= {f"checkpoint.{name}" for name in ("manifest", "retention", "schema", "untrusted")}


def room_of(module: str) -> str:
    """Returns the module's entry in LAYERS: its folder, a top-level module, or the module itself."""
    words = module.removeprefix("ddpforge").removeprefix(".").split(".")
    named = set().union(*LAYERS)
    return next((room for n in (2, 1) if (room := ".".join(words[:n])) in named), words[0])


def layer(module: str) -> int:
    """Returns the number of a module's layer, counted from the top."""
    fits = [number for number, names in enumerate(LAYERS) if room_of(module) in names]
    assert fits, f"{module} has no place in LAYERS"
    return fits[0]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str, node: ast.AST | None = None, *, types: bool = False) -> Iterator[str]:
    """Yields a module's imports, also inside functions; with `types`, also imports for type checkers."""
    for child in ast.iter_child_nodes(node or tree(module)):
        if isinstance(child, ast.expr):
            continue  # expressions import nothing
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not types:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{module} imports relatively"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in MODULES else str(child.module) for name in names)
        else:
            yield from imports(module, child, types=types)


@cache
def graph() -> Mapping[str, set[str]]:
    """Returns the modules of ddpforge that each module imports, also in functions and for type checkers."""
    return {module: {one for one in imports(module, types=True) if one in MODULES} - {module} for module in MODULES}


# Allowed upward or circular imports, which run in no program, with their reasons.
TOLERATED = {
    ("ddpforge", "ddpforge.app.api"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.recipe"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.evaluate"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.objects"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.run"): "public names of the package, imported when they are used",
    (
        "ddpforge.interfaces.strategy",
        "ddpforge.recipe.schema",
    ): "the type of [train], which strategies are handed",
    (
        "ddpforge.strategies.deepspeed.replica",
        "ddpforge.strategies.deepspeed.strategy",
    ): "two halves of one thing; the half that is made second names the type of the first",
    (
        "ddpforge.strategies.fsdp.replica",
        "ddpforge.strategies.fsdp.strategy",
    ): "two halves of one thing; the half that is made second names the type of the first",
}


def package_of(module: str) -> str:
    return f"ddpforge.{room_of(module)}"


@cache
def edges() -> Sequence[tuple[str, str]]:
    """Returns imports between packages: importing and imported module."""
    return [
        (module, imported)
        for module in MODULES
        for imported in imports(module)
        if imported.partition(".")[0] == "ddpforge" and package_of(imported) != package_of(module)
    ]


# ---------------------------------------------------------------------------------------------- imports
def test_imports_point_down() -> None:
    upward = [edge for edge in edges() if layer(edge[0]) >= layer(edge[1])]
    assert not upward


def test_types_point_down_too() -> None:
    upward = [
        (a, b) for a, its in graph().items() for b in its if package_of(a) != package_of(b) and layer(a) >= layer(b)
    ]
    assert sorted(set(upward) - TOLERATED.keys()) == []


def circles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns groups of modules that import each other, directly or indirectly."""
    reached = {module: reachable(imported, module) for module in imported}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imported
        if module in reached[module]
    }
    return sorted(sorted(group) for group in groups)


def reachable(imported: Mapping[str, set[str]], module: str) -> set[str]:
    """Returns every module that `module` imports, directly or indirectly."""
    found: set[str] = set()
    waiting = list(imported[module])
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += imported[one]
    return found


def test_there_are_not_circular_imports() -> None:
    """Includes imports in functions and for type checkers: modules that need each other belong in one module."""
    straight = {module: {one for one in its if (module, one) not in TOLERATED} for module, its in graph().items()}
    assert circles(straight) == []


@pytest.mark.parametrize(("module", "imported"), TOLERATED)
def test_tolerated_imports_exist(module: str, imported: str) -> None:
    assert imported in graph()[module]


def test_circles_of_any_length_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]


# Imports of built-in components by other modules, with their reasons. All others reach them by entry points.
OF_BUILTIN = {
    ("app.objects", "builtin.tasks.loss_function"): "a loss object of torch becomes a task",
    ("interop.adapters", "builtin.models.quantized"): "the form of quantized weights in files",
    ("testing.fixtures", "builtin.tasks.classification"): "the task of the kit, if an author names none",
    ("features.frozen_dtype", "builtin.models.frozen_layers"): "forward passes of frozen layers in a low precision",
}


def test_built_in_components_are_a_leaf_that_the_package_reaches_by_entry_points() -> None:
    """Includes imports in functions and for type checkers."""
    found = {
        (module.removeprefix("ddpforge."), imported.removeprefix("ddpforge."))
        for module, its in graph().items()
        for imported in its
        if room_of(imported) == "builtin" and room_of(module) != "builtin"
    }
    assert found == OF_BUILTIN.keys()


def test_built_in_components_import_only_the_interfaces() -> None:
    """Built-in components follow the rules of plugins: they need only the interfaces, and `disk` for cache files."""
    ours = {imported for module, imported in edges() if package_of(module) == "ddpforge.builtin"}
    allowed = {"ddpforge.interfaces", "ddpforge.errors", "ddpforge.machine", "ddpforge.disk"}
    assert {package_of(imported) for imported in ours} <= allowed


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("accelerate", "ddpforge.ranks.join"),
        ("deepspeed", "ddpforge.strategies.deepspeed"),
        ("wandb", "ddpforge.builtin.trackers.wandb"),
        ("click", "ddpforge.cli"),
    ],
)
def test_a_library_is_imported_in_one_place(library: str, home: str) -> None:
    users = {module for module in MODULES if library in {name.partition(".")[0] for name in imports(module)}}
    assert all(user == home or user.startswith(f"{home}.") for user in users), users


def test_light_modules_do_not_import_torch() -> None:
    """Allows imports in functions, and `launchers.torchrun`, which is a separate program."""
    names = {module: module.removeprefix("ddpforge.") for module in MODULES}
    light = {module for module, name in names.items() if name in LIGHT or room_of(module) in LIGHT}
    light = {one for one in light if not one.startswith("ddpforge.guard.")} | {"ddpforge.guard.static"}
    light -= {f"ddpforge.interfaces.{name}" for name in ("columns", "permutation")}  # samplers import them
    heavy = [
        (module, imported)
        for module in light - {"ddpforge.launchers.torchrun"}
        for statement in tree(module).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for imported in imports(module, ast.Module([statement], []))
        if imported.partition(".")[0] in ("torch", "numpy", "accelerate", "safetensors")
        or (imported.startswith("ddpforge.") and imported not in light and not imported.endswith("__main__"))
    ]
    assert not heavy


# ---------------------------------------------------------------------------------------------- the map
def shown() -> list[str]:
    """Returns the paths on the map of the tree in CONTRIBUTING.md."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.partition("## Layout")[2].partition("```text\n")[2].partition("```")[0]
    found: list[str] = []
    folders: list[str] = []  # the last folder at each depth
    for line in drawn.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r" *((?:[\w.]+(?:/|\.py) ?)+)", line)
        assert names, line
        found.extend("".join([*folders[:depth], name]) for name in names[1].split())
        folders[depth:] = [names[1].split()[-1]]
    return found


def test_the_map_shows_every_package_and_every_module_at_the_top() -> None:
    """Does not require modules inside packages."""
    packages = {f"{path.parent.relative_to(PACKAGE.parent)}/" for path in PACKAGE.rglob("__init__.py")}
    at_the_top = {f"ddpforge/{path.name}" for path in PACKAGE.glob("*.py")}
    around = {f"{folder}/" for folder in ("recipes", "docs", "benchmarks", "plugins", "tests")}
    paths = shown()
    assert len(paths) == len(set(paths))
    silent = {"ddpforge/__init__.py", "ddpforge/__main__.py"}
    assert not (packages | at_the_top | around) - silent - set(paths)


def test_paths_on_the_map_exist() -> None:
    lost = [path for path in shown() if not (PACKAGE.parent / path).exists()]
    assert not lost


def test_packages_on_the_map_are_in_the_order_of_the_layers() -> None:
    rooms = [path.removesuffix("/").removesuffix(".py") for path in shown() if path.removesuffix("/").count("/") == 1]
    layers = [layer(room.replace("/", ".")) for room in rooms if room.startswith("ddpforge/")]
    assert layers == sorted(layers)


def test_the_files_that_contributing_points_to_exist() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:ddpforge|tests|docs)/[\w/.]+)`", text)
    assert len(named) > 10
    assert not [path for path in named if not (PACKAGE.parent / path).exists()]


# ---------------------------------------------------------------------------------------------- every module
def test_every_module_has_a_docstring() -> None:
    opened = {module: (ast.get_docstring(tree(module)) or "").partition("\n\n")[0].rstrip() for module in MODULES}
    assert [module for module, text in opened.items() if not text.endswith((".", ":"))] == []


QUESTIONS = re.compile(r"(what|which|who(se|m)?|whether|how|where|when|why)(ever)?\b", re.I)


def test_docstrings_do_not_begin_with_a_question_word() -> None:
    """ "Finds the rank that failed first", not "Which rank failed first"."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for module in MODULES:
        opened = [ast.get_docstring(node) for node in ast.walk(tree(module)) if isinstance(node, documented)]
        assert [text.partition("\n")[0] for text in opened if text and QUESTIONS.match(text)] == [], module


def test_names_in_all_exist() -> None:
    for module in MODULES:
        if not module.endswith("__main__"):
            found = import_module(module)
            assert [name for name in getattr(found, "__all__", ()) if not hasattr(found, name)] == [], module


# ---------------------------------------------------------------------------------------------- the version
def test_the_changelog_begins_with_this_version() -> None:
    text = (PACKAGE.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[?v?(\d+\.\d+\.\d+\S*?)\]?(?=[\s,(:]|$)", text, re.MULTILINE)
    assert versions[0] == ddpforge.__version__
