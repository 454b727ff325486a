"""The command line as a whole: imports, help, suggestions for mistyped commands, and entry points."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ddpforge
from ddpforge.cli import main

HEAVY = {"accelerate", "numpy", "pydantic", "rich", "torch", "wandb"}


def heavy_imports(code: str) -> set[str]:
    """Returns the heavy packages that a new interpreter has imported after `code`."""
    script = f"import sys\n{code}\nprint(*{HEAVY} & set(sys.modules), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(ended.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["plugins", "list"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    called = f"""
from contextlib import suppress
from ddpforge.cli import main
with suppress(SystemExit):
    main({arguments}, prog_name="ddpforge")
"""
    assert heavy_imports(called) == set()


@pytest.mark.parametrize(
    "module", ["ddpforge", "ddpforge.errors", "ddpforge.interfaces", "ddpforge.components.registry"]
)
def test_modules_for_plugins_import_nothing_heavy(module: str) -> None:
    assert heavy_imports(f"import {module}") == set()


def test_submodules_do_not_shadow_the_functions_of_the_package() -> None:
    """Checks that importing ddpforge.app.run does not replace the function ddpforge.run."""
    code = """
import ddpforge
before = ddpforge.run
import ddpforge.cli.run, ddpforge.app.run
assert ddpforge.run is before, ddpforge.run
assert callable(ddpforge.run) and callable(ddpforge.load_recipe)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("ddpforge.recipe", {"pydantic"}),
        ("ddpforge.recipe.json_schema", {"pydantic"}),
        ("ddpforge.runs.folder", set()),
        ("ddpforge.launchers.process", set()),
        ("ddpforge.ranks.logs", set()),
    ],
)
def test_recipes_and_run_folders_are_read_without_torch(module: str, allowed: set[str]) -> None:
    assert heavy_imports(f"import {module}") <= allowed


# ---------------------------------------------------------------------------------------------- help
def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """Yields the words that call each command, including groups."""
    yield path
    for name in group.commands:
        context = click.Context(group)
        _, command, _ = group.resolve_command(context, [name])
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


def options_of(path: tuple[str, ...]) -> list[click.Option]:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        _, found, _ = command.resolve_command(click.Context(command), [name])
        assert found
        command = found
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("path", [*commands(main)], ids=" ".join)
def test_every_command_and_option_has_a_help_text(path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        shown = CliRunner().invoke(main, [*path, flag], prog_name="ddpforge")
        assert shown.exit_code == 0, shown.output
        assert shown.stdout.startswith(f"Usage: {' '.join(['ddpforge', *path])}")
        assert len(shown.stdout.split("\n\n")[1].strip()) > 20  # the description
    assert all(option.help for option in options_of(path))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rum"], "Did you mean 'run'?"),
        (["evaluate"], "Did you mean 'eval'?"),
        (["run", "--frehs"], "Did you mean '--fresh'?"),
        (["recipes", "copy"], "Did you mean 'cp'?"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(arguments: list[str], hint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "r.toml"], "ddpforge run RECIPE"),
        (["help", "run"], "ddpforge --help, or ddpforge run --help for one command"),
        (["upgrade", "r.toml"], "ddpforge recipes upgrade FILE"),
        (["ckpt", "list"], "ddpforge ckpt ls"),
        (["runs", "list"], "ddpforge runs ls"),
        (["plugins", "new", "loss", "mine"], "a loss is a task, or a function that the recipe names"),
        (["check", "digits", "b.toml"], "one recipe at a time"),
        (["parity", "digits", "--strategies", "ddp", "fsdp"], "separate strategies with commas: --strategies ddp,fsdp"),
        (["slurm", "digits", "--gpus", "8"], "write --gpus-per-node N"),
        (["validate"], "ddpforge check RECIPE"),
        (["hlep"], "ddpforge --help, or ddpforge run --help for one command"),
        (["doctor", "--fix"], "it reports and changes nothing: each message names what to change"),
        (["plugins", "install", "ddpforge-timm"], "pip installs, e.g. pip install ./plugins/ddpforge-timm"),
        (["plugins", "new", "Task", "mine"], "did you mean task?"),
        (["plugins", "new", "task"], "e.g. ddpforge plugins new task my_loss"),
        (["plugins", "test"], "e.g. ddpforge plugins test ddpforge-timm"),
        (["launch", "digits", "--node_rank", "1"], "write --node-rank"),
        (["launch", "digits", "--node-rank", "1"], "set --nnodes N and --rdzv-endpoint HOST:PORT, too"),
        (["launch", "digits", "2"], "write --nproc 2"),
        (["run", "digits", "2"], "ddpforge launch RECIPE --nproc N starts several processes"),
        (["show", "digits", "optimizer.lr"], "without a key it shows the whole recipe"),
        (["sweep", "digits"], "e.g. ddpforge sweep recipe.toml optimizer.lr=1e-4,1e-3"),
        (["sweep", "digits", "optimizer.lr=1,2", "--parallel", "2"], "write --jobs N for several runs at a time"),
        (["ckpt", "ls"], "ddpforge ckpt ls NAME, or its folder"),
        (["report"], "ddpforge report NAME, or its folder"),
        (["prove"], "e.g. ddpforge prove train.py"),
        (["launch", "train.py"], "a script is started by Python or torchrun"),
        (["run", "."], "it is a folder; its recipe is a file, e.g. ./recipe.toml"),
        (["lr-find", "digits"], "ddpforge lr-range RECIPE"),
        (["find-batch-size"], "ddpforge batch-size RECIPE"),
        (["run", "digits", "--fast-dev-run"], "--dry-run 5 trains five steps and keeps nothing"),
        (["run", "digits", "--overfit-batches", "1"], "--overfit 1 trains on one batch again and again"),
        (["resume"], "the same command resumes a stopped run"),
        (["r.toml"], "ddpforge run r.toml"),
        (["run", "digits", "--resume"], "the same command resumes a stopped run"),
        (["run", "digits", "--nproc", "2"], "ddpforge launch RECIPE --nproc N"),
        (["launch", "digits", "--gpus", "2"], "write --nproc N"),
        (["run", "digits", "--lr", "1e-3"], "set values of the recipe with KEY=VALUE, e.g. optimizer.lr=1e-3"),
        (["run", "digits", "--optimizer.lr=1e-3"], "write optimizer.lr=VALUE"),
        (["run"], "ddpforge run digits, or another bundled recipe: ddpforge recipes ls"),
        (["check"], "ddpforge recipes cp digits makes one to edit"),
        (["run", "--config", "r.toml"], "write the recipe without an option"),
        (["launch", "digits", "--endpoint", "node01"], "--endpoint is now --rdzv-endpoint"),
        (["launch", "digits", "--run-id=a"], "--run-id is now --rdzv-id"),
        (["plan", "digits", "--budget", "1GB"], "--budget is now --memory"),
        (["batch-size", "digits", "--budget=1GB"], "--budget is now --memory"),
        (["eval", "digits", "--only", "test"], "--only is now --dataset"),
        (["export", "digits", "--only", "head.*"], "--only is now --include"),
        (["ckpt", "export", "digits", "--only", "head.*"], "--only is now --include"),
        (["check", "digits", "optimizer.lr", "1e-3"], "write KEY=VALUE without spaces: optimizer.lr=VALUE"),
        (["check", "digits", "optimizer.lr:1e-3"], "write optimizer.lr=1e-3"),
        (["check", "digits", "1e-3,"], "expected [KEY=VALUE]... after the recipe, e.g. optimizer.lr=1e-3"),
        (["eval"], "ddpforge eval NAME, or its folder; ddpforge runs ls lists the runs"),
        (["eval", "digits", "--checkpoint", "best"], "write --best, or --step N"),
        (["predict", "digits", "out.jsonl"], "write the file as an option: -o out.jsonl"),
        (["generate", "digits", "hello"], "write --prompt TEXT"),
        (["data", "r.toml"], "ddpforge data show r.toml"),
        (["data", "show"], "ddpforge data show digits"),
        (["tensorboard", "a"], "tensorboard --logdir runs"),
        (["compare", "a", "b"], "ddpforge runs compare RUN RUN"),
        (["logs", "a"], "metrics.jsonl in a run's folder"),
        (["version"], "ddpforge --version"),
        (["ckpt", "show", "a"], "ddpforge ckpt inspect"),
        (["run", "digits", "--cpu"], "e.g. train.device=cpu"),
        (["run", "digits", "--multirun"], "`ddpforge sweep RECIPE KEY=VALUE,VALUE`"),
        (["launch", "digits", "--master_port", "1"], "write --rdzv-endpoint HOST:PORT"),
    ],
)
def test_commands_of_other_tools_get_a_hint(arguments: list[str], hint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert f"= help: {hint}" in result.stderr or hint in result.stderr.partition("= help: ")[2]
    assert "Did you mean" not in result.stderr


def test_commands_are_listed_in_groups_without_gaps() -> None:
    shown = CliRunner().invoke(main, ["--help"]).stdout
    assert shown.index("Train:") < shown.index("  run ") < shown.index("Check before training:")


def test_a_wrong_number_is_an_error_in_plain_words() -> None:
    stderr = CliRunner().invoke(main, ["launch", "digits", "--nproc", "two"]).stderr
    assert "Invalid value for '-n' / '--nproc': expected a whole number, not 'two'" in stderr


def test_a_number_out_of_range_and_a_size_without_a_unit_are_errors_in_plain_words() -> None:
    stderr = CliRunner().invoke(main, ["launch", "digits", "--nproc", "0"]).stderr
    assert "expected 1 to 1024, not 0" in stderr
    stderr = CliRunner().invoke(main, ["plan", "digits", "--memory", "80"]).stderr
    assert "80 is a size of 80 bytes; write a unit, e.g. 80GB" in stderr


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_errors_are_red_unless_colours_are_off(variables: dict[str, str], coloured: bool) -> None:
    for arguments in (["check", "nowhere.toml"], ["check", "--nothing"]):
        shown = CliRunner(env={"NO_COLOR": "", "TERM": "xterm"} | variables).invoke(main, arguments, color=True)
        assert ("\x1b[31m" in shown.stderr) == coloured


def test_version_prints_the_version_of_the_package() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"ddpforge, version {ddpforge.__version__}\n"


# ---------------------------------------------------------------------------------------------- entry points
def test_the_package_can_be_run_as_a_module_and_as_a_folder(tmp_path: Path) -> None:
    """Runs the folder as `accelerate launch ddpforge` does; its modules must not shadow the standard library."""
    folder = str(Path(ddpforge.__file__).parent)
    for door in (["-m", "ddpforge"], [folder]):
        command = [sys.executable, *door, "--version"]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert said == f"ddpforge, version {ddpforge.__version__}\n"
