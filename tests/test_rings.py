"""The kernel and the rings around it, read from the source: the kernel imports no ring above it, not even lazily."""

import re

from test_layers import MODULES, graph

# Ring and the modules in it; the first pattern that matches decides. Modules that no pattern names are the kernel.
RINGS = {
    "tools": r"tools|testing|interop|pytest_options|app\.generation",
    "launch": r"launchers|watchdog",
    "guard": r"preflight|training\.(reference_check|task_checks|batch_checks|fingerprint|contract|oom|data_names)"
    r"|strategies\.(parameter_guard|optimizer_probe|optimizer_extra_state)"
    r"|app\.(node_consistency|memory_check|class_names)",
    "features": r"training\.(alternating_updates|auxiliary|batchnorm|float8|frozen_dtype|frozen_weights|media"
    r"|memory_format|memory_tracker|profiling|source_losses|task_state|activation_checkpointing|blocks)"
    r"|data\.(mixture|sources|streams|token_limit|shard_reader)|runs\.(mirror|media)",
    "product": r"cli|builtin|strategies\.(fsdp|tensor|pipeline|deepspeed)|app\.(api|evaluate|objects)"
    r"|__main__|fast_import",
    "recipe": r"recipe|components",  # below the kernel: text to typed values, names to classes
}
# Arrows out of the kernel, each with its reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("ddpforge", "ddpforge.app.api"): "public names of the package, imported when they are used",
    ("ddpforge", "ddpforge.app.evaluate"): "public names of the package, imported when they are used",
}
# Arrows that a hook must still turn round. Only shrinks.
LEFT = {
    ("app.attempt", "app.memory_check"),
    ("app.attempt", "runs.media"),
    ("app.attempt", "runs.mirror"),
    ("app.attempt", "training.contract"),
    ("app.attempt", "training.fingerprint"),
    ("app.attempt", "training.frozen_weights"),
    ("app.attempt", "training.oom"),
    ("app.attempt", "training.profiling"),
    ("app.build", "app.class_names"),
    ("app.build", "data.sources"),
    ("app.build", "data.streams"),
    ("app.build", "data.token_limit"),
    ("app.build", "preflight"),
    ("app.build", "preflight.samples"),
    ("app.build", "preflight.static"),
    ("app.build", "training.alternating_updates"),
    ("app.build", "training.auxiliary"),
    ("app.build", "training.blocks"),
    ("app.build", "training.contract"),
    ("app.build", "training.data_names"),
    ("app.build", "training.fingerprint"),
    ("app.build", "training.frozen_dtype"),
    ("app.build", "training.memory_format"),
    ("app.build", "training.task_checks"),
    ("app.choose", "preflight"),
    ("app.choose", "training.alternating_updates"),
    ("app.choose", "training.contract"),
    ("app.run", "app.memory_check"),
    ("app.run", "app.node_consistency"),
    ("app.run", "app.objects"),
    ("app.run", "preflight"),
    ("app.run", "runs.mirror"),
    ("data.batch_assignment", "data.token_limit"),
    ("data.fetching", "data.shard_reader"),
    ("data.fetching", "data.sources"),
    ("data.fetching", "data.streams"),
    ("data.fetching", "data.token_limit"),
    ("strategies", "strategies.optimizer_probe"),
    ("strategies.torch_replica", "strategies.optimizer_extra_state"),
    ("strategies.torch_replica", "strategies.optimizer_probe"),
    ("strategies.torch_replica", "strategies.parameter_guard"),
    ("training.assemble", "interop.initial"),
    ("training.assemble", "training.alternating_updates"),
    ("training.assemble", "training.auxiliary"),
    ("training.assemble", "training.batchnorm"),
    ("training.assemble", "training.blocks"),
    ("training.assemble", "training.contract"),
    ("training.assemble", "training.fingerprint"),
    ("training.assemble", "training.float8"),
    ("training.assemble", "training.frozen_weights"),
    ("training.assemble", "training.media"),
    ("training.assemble", "training.memory_format"),
    ("training.assemble", "training.reference_check"),
    ("training.assemble", "training.source_losses"),
    ("training.assemble", "training.task_checks"),
    ("training.assemble", "training.task_state"),
    ("training.checkpoint_saver", "training.frozen_weights"),
    ("training.evaluation", "training.alternating_updates"),
    ("training.evaluation", "training.batch_checks"),
    ("training.evaluation", "training.fingerprint"),
    ("training.evaluation", "training.task_checks"),
    ("training.loaders", "data.streams"),
    ("training.loop", "training.alternating_updates"),
    ("training.loop", "training.auxiliary"),
    ("training.loop", "training.batch_checks"),
    ("training.loop", "training.batchnorm"),
    ("training.loop", "training.fingerprint"),
    ("training.loop", "training.frozen_weights"),
    ("training.loop", "training.media"),
    ("training.loop", "training.reference_check"),
    ("training.loop", "training.source_losses"),
    ("training.loop", "training.task_state"),
    ("training.optimizers", "strategies.optimizer_probe"),
    ("training.optimizers", "training.blocks"),
    ("training.prediction", "training.alternating_updates"),
    ("training.restoring", "interop.export"),
    ("training.restoring", "interop.initial"),
    ("training.restoring", "training.auxiliary"),
    ("training.restoring", "training.frozen_weights"),
    ("training.restoring", "training.task_state"),
    ("training.rows", "training.alternating_updates"),
    ("training.stages", "data.token_limit"),
    ("training.stages", "training.contract"),
    ("training.stages", "training.data_names"),
    ("training.step", "training.alternating_updates"),
    ("training.step", "training.batch_checks"),
    ("training.step", "training.batchnorm"),
    ("training.step", "training.source_losses"),
    ("training.step", "training.task_checks"),
}
LINES = 19_000  # of the kernel: it is read in a day


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
