"""The kernel and the rings around it, read from the source: the kernel imports no ring above it, not even lazily."""

import re
from xml.etree import ElementTree

from support.architecture import PACKAGE, ring, sizes
from test_layers import MODULES, graph

from ddpforge.features.installed import FEATURES, OBSERVERS

# Arrows out of the kernel, each with its reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("ddpforge", "ddpforge.app.api"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.objects"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.evaluate"): "public names of the package, imported when they are used",
    (
        "ddpforge.strategies",
        "ddpforge.strategies.optimizer_probe",
    ): "a public name of the building blocks for strategies, imported when it is used",
    (
        "ddpforge.strategies.torch_replica",
        "ddpforge.strategies.optimizer_probe",
    ): "every replica refuses an optimizer that cannot use its gradients, also in plans and in evaluations",
    (
        "ddpforge.strategies.torch_replica",
        "ddpforge.strategies.parameter_guard",
    ): "the guard of the first passes is a part of the replica's own `forward`, also without a trainer",
}
# Modules that tools and commands import besides `ddpforge.api`, public contracts and each other, each with the reason.
TOOLS = r"tools|testing|interop|cli|pytest_options"
PUBLIC = r"api|interfaces|errors|recipe|components"
LEAVES = r"compat|disk|fast_import|local_world|machine|secret_redaction"  # they know nothing of runs
BESIDE = {
    r"cli|tools\.(sweeps|doctor|trials|parity|script_comparison)|testing": (
        r"launchers|watchdog|ranks|guard\.comparison|app\.(local_launch|run)|guard\.node_consistency|runs\.resume",
        "they start runs and ranks, and end with their exit codes",
    ),
    r"cli": (
        r"app\.(build|evaluate|follow|generation)|builtin|guard|runs|checkpoint\.schema|training\.(checks|frozen_weights)",
        "a command is the product's: it prints what one function of it returns",
    ),
    r"interop": (r"checkpoint|runs\.checkpoints|builtin", "converts checkpoints, byte by byte"),
    r"tools\.certify": (r"strategies\.tensor", "checks the types of the shares of layers as they are attached"),
    r"tools\.reports": (r"runs", "shows all that a run's folder holds"),
    r"tools\.(simulation|trials)": (
        r"training|features|strategies|data|ranks",
        "takes the steps of a run with other devices, batches or rates",
    ),
    r"testing": (
        r"training|features|data|checkpoint|ranks|builtin|strategies\.pipeline",
        "tests a component as each part of a run uses it",
    ),
    r"tools": (r"checkpoint\.retention|runs\.summary|data\.(pytree|workers)|builtin", "one function of it"),
}
LINES = 20_930  # of the kernel: it is read in a day


def arrows() -> list[tuple[str, str]]:
    """Returns the imports of the kernel's modules from rings above the kernel."""
    return sorted(
        (module, imported)
        for module, its in graph().items()
        for imported in its
        if ring(module) == "kernel" and ring(imported) not in ("kernel", "recipe")
    )


def test_the_kernel_imports_no_ring_above_it() -> None:
    """Includes imports in functions and for type checkers."""
    assert [arrow for arrow in arrows() if arrow not in ALLOWED] == []


def test_the_kernel_names_no_feature() -> None:
    """Includes comments and docstrings: a word of a feature is a hook that is missing."""
    names = {one.__name__ for one in [*FEATURES, *OBSERVERS]} - {"BatchNorm"}  # a layer, too
    words = re.compile(rf"\b({'|'.join(names)})\b")
    kernel = [path for module, path in MODULES.items() if ring(module) == "kernel"]
    assert [(path.name, found[0]) for path in kernel if (found := words.search(path.read_text(encoding="utf-8")))] == []


def test_allowed_arrows_exist() -> None:
    assert not ALLOWED.keys() - set(arrows())


def test_the_kernel_can_be_read_in_a_day() -> None:
    """Bounds the lines of the kernel: a feature belongs into a ring."""
    assert sizes()["kernel"][1] <= LINES


DOCS = PACKAGE.parent / "docs"


def test_figures_of_the_page_about_the_architecture_are_those_of_the_code() -> None:
    """With room, so that the page need not change with each commit; picture and page have the same figures."""
    page = (DOCS / "concepts/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) files, ([\d,]+) lines \|", page, re.MULTILINE)
    assert {name for name, *_ in rows} == sizes().keys()
    for name, *figures in rows:
        for shown, counted in zip((int(one.replace(",", "")) for one in figures), sizes()[name], strict=True):
            assert abs(shown - counted) <= max(3, 0.1 * counted), "run: python docs/architecture.py"


def test_picture_of_the_architecture_is_valid_and_has_the_figures_of_its_page() -> None:
    page = (DOCS / "concepts/architecture.md").read_text(encoding="utf-8")
    root = ElementTree.parse(DOCS / "assets/architecture.svg").getroot()
    drawn = "\n".join(root.itertext())
    for name, size in re.findall(r"^\| (\w+) \| (\d+ files, [\d,]+ lines) \|", page, re.MULTILINE):
        assert f"{name}\n" in drawn
        assert size in drawn
        assert f"{name}, {size}" in drawn
    assert "prefers-color-scheme: dark" in drawn


def beside(module: str) -> list[str]:
    """Returns the modules that a tool imports besides the API, public contracts, leaves, and other tools."""
    known = rf"({TOOLS}|{PUBLIC}|{LEAVES})(\.|$)"
    names = (one.removeprefix("ddpforge").removeprefix(".") for one in graph()[module])
    return [name for name in names if name and not re.match(known, name)]


def test_tools_and_commands_use_the_api() -> None:
    """Other modules of ddpforge need a row in BESIDE, with its reason."""
    for module in MODULES:
        name = module.removeprefix("ddpforge.")
        if re.match(rf"({TOOLS})(\.|$)", name):
            allowed = "|".join(others for tools, (others, _) in BESIDE.items() if re.match(rf"({tools})(\.|$)", name))
            assert [one for one in beside(module) if not re.match(rf"({allowed})(\.|$)", one)] == [], name


def test_imports_of_tools_besides_the_api_become_fewer() -> None:
    tools = [module for module in MODULES if re.match(rf"({TOOLS})(\.|$)", module.removeprefix("ddpforge."))]
    assert sum(len(beside(module)) for module in tools) <= 112
