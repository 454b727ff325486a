"""The kernel and the rings around it, read from the source: the kernel imports no ring above it, not even lazily."""

import re

from test_layers import MODULES, graph

# Ring and the modules in it; the first pattern that matches decides. Modules that no pattern names are the kernel.
RINGS = {
    "tools": r"tools|testing|interop|pytest_options|app\.generation",
    "launch": r"launchers|watchdog",
    "guard": r"guard|strategies\.(parameter_guard|optimizer_probe)",
    "features": r"features|data\.(mixture|sources|streams|token_limit|shard_reader)",
    "product": r"api|cli|builtin|strategies\.(fsdp|tensor|pipeline|deepspeed)"
    r"|app\.(api|evaluate|objects|prediction_tables)|__main__|fast_import",
    "recipe": r"recipe|components",  # below the kernel: text to typed values, names to classes
}
# Arrows out of the kernel, each with its reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("ddpforge", "ddpforge.app.api"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.objects"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.evaluate"): "public names of the package, imported when they are used",
}
# Arrows that a hook must still turn round. Only shrinks.
LEFT = {
    ("app.build", "data.sources"),
    ("app.build", "data.streams"),
    ("app.build", "data.token_limit"),
    ("data.fetching", "data.shard_reader"),
    ("data.fetching", "data.sources"),
    ("data.fetching", "data.streams"),
    ("strategies", "strategies.optimizer_probe"),
    ("strategies.torch_replica", "strategies.optimizer_probe"),
    ("strategies.torch_replica", "strategies.parameter_guard"),
    ("training.loaders", "data.streams"),
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
        r"app\.(build|evaluate|generation)|builtin|guard|runs|checkpoint\.schema|training\.(checks|frozen_weights)",
        "a command is the product's: it prints what one function of it returns",
    ),
    r"interop": (r"checkpoint|runs\.checkpoints|builtin", "converts checkpoints, byte by byte"),
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
LINES = 20_600  # of the kernel: it is read in a day


def ring(module: str) -> str:
    name = module.removeprefix("ddpforge").removeprefix(".")
    return next((ring for ring, pattern in RINGS.items() if re.match(rf"({pattern})(\.|$)", name)), "kernel")


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
    left = [arrow for arrow in arrows() if arrow not in ALLOWED]
    named = {(module.removeprefix("ddpforge."), imported.removeprefix("ddpforge.")) for module, imported in left}
    assert named == LEFT


def test_allowed_arrows_exist() -> None:
    assert not ALLOWED.keys() - set(arrows())


def test_the_kernel_can_be_read_in_a_day() -> None:
    """Bounds the lines of the kernel: a feature belongs into a ring."""
    count = {module: path.read_text(encoding="utf-8").count("\n") for module, path in MODULES.items()}
    assert sum(lines for module, lines in count.items() if ring(module) == "kernel") <= LINES


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
    assert sum(len(beside(module)) for module in tools) <= 111
