"""Command line. `--help` imports no command: a command's module is imported when it runs, also that of a plugin."""

import os
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ddpforge import __version__
from ddpforge.errors import ExitCode, ForgeError, PeerFailed

if TYPE_CHECKING:
    from ddpforge.components.hooks import Hook

_GROUPS = {
    "Train": {
        "run": ("run", "Train a recipe; resume the run if it was interrupted."),
        "launch": ("launch", "Start several processes on this machine and train a recipe in them."),
        "sweep": ("sweep", "Train a recipe with many values: a grid, random values, or a search."),
        "slurm": ("slurm", "Write a Slurm job's script that trains a recipe, or submit it."),
    },
    "Check before training": {
        "check": ("check", "Validate a recipe without starting anything."),
        "show": ("show", "Print the resolved recipe and where each value came from."),
        "data": ("data", "Show the first batches of a recipe's data: shapes, ranges, labels, pictures, text."),
        "plan": ("plan", "Predict a run's memory, communication and time without using a device."),
        "doctor": ("doctor", "Find problems for a run on this machine, or on all machines of a launcher."),
        "lr-range": ("trials:lr_range", "Test a range of learning rates in one short training, and suggest one."),
        "batch-size": ("trials:batch_size", "Find the largest micro-batch that fits into memory."),
        "parity": ("parity", "Train a recipe under several strategies and report where they diverge."),
        "compare-script": (
            "compare_script",
            "Train your own script and a recipe, and report the first step at which they differ.",
        ),
        "prove": ("prove", "Find wrong training in a script of any trainer, by relations whose result is known."),
        "bisect": ("bisect", "Find the first step, module and operation at which two runs part."),
        "certify": ("certify", "Train a recipe under every layout of its ranks, and compare each with one process."),
    },
    "After training": {
        "eval": ("evaluate", "Evaluate a run's checkpoint."),
        "predict": ("predict", "Write the predictions of a run's model for every sample of a dataset."),
        "generate": ("generate", "Generate text with a trained language model."),
        "export": ("export", "Write a run's weights as plain safetensors."),
        "ckpt": ("ckpt", "List, inspect, verify, compare, export and import checkpoints."),
    },
    "Runs": {
        "runs": ("runs", "List, compare, resume and delete runs."),
        "status": ("status", "Print the state and progress of a run, also while it trains."),
        "report": ("report", "Make one HTML page about runs, to read offline or while they train."),
    },
    "Recipes and plugins": {
        "recipes": ("recipes", "List or copy the recipes that come with ddpforge; upgrade your own."),
        "schema": ("recipes:schema", "Print the recipe's JSON Schema, for editors."),
        "plugins": ("plugins", "List and show components; write and test plugins."),
        "completion": ("completion", "Print a shell completion script."),
    },
}
"""ddpforge's own commands by the title of their group: name, "module" or "module:attribute", and one line of help."""

_COMMANDS = {name: row for rows in _GROUPS.values() for name, row in rows.items()}


class _Commands(click.Group):
    """Command group that loads a command's module when it is called; until then a command is a name and one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands; those of plugins come last."""
        return [*super().list_commands(ctx), *(name for name in _of_plugins() if name not in _COMMANDS)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Returns a command without its options; None if there is none. Looks for plugins only if it is not own."""
        if own := super().get_command(ctx, name):
            return own
        return click.Command(name, short_help=_line(hooks[0])) if (hooks := _of_plugins().get(name)) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name and stub else stub, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands in groups."""
        groups = {title: [(name, line) for name, (_, line) in rows.items()] for title, rows in _GROUPS.items()}
        if plugins := [(name, _line(hook)) for name, hooks in _of_plugins().items() for hook in hooks]:
            groups["Plugins"] = plugins
        width = max(len(name) for rows in groups.values() for name, _ in rows)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", line) for name, line in rows])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Turns colours off if NO_COLOR is set, or if the terminal has none."""
        context = super().make_context(*args, **kwargs)
        context.color = _colour()
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. Adds suggestions to the error for a wrong command line."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            from ddpforge.cli.habits import explained

            raise explained(error) from error

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Prints ddpforge's own errors as messages. Any other exception is a bug and keeps its traceback."""
        try:
            return super().main(*args, **kwargs)
        except ForgeError as error:
            complain(error)
            sys.exit(error.exit_code)


def _load(name: str) -> click.Command:
    """Imports a command. Raises PluginError for one of plugins that cannot be used, or that two plugins have."""
    if name not in _COMMANDS:
        first, *others = _of_plugins()[name]
        if others:
            raise first.error(f"is a command of {others[0].distribution}, too")
        found = first.load()
        if not isinstance(found, click.Command):
            raise first.error(f"is a {type(found).__name__}, not a command of click")
        return found
    module, _, attribute = _COMMANDS[name][0].partition(":")
    command: click.Command = getattr(import_module(f"ddpforge.cli.{module}"), attribute or module)
    return command


def _of_plugins() -> "dict[str, list[Hook]]":
    """Returns the commands of plugins by name, not imported; the entry points of a name are its providers."""
    from ddpforge.components.hooks import found

    commands: dict[str, list[Hook]] = {}
    for hook in found("command"):
        commands.setdefault(hook.name, []).append(hook)
    return dict(sorted(commands.items()))


def _line(hook: "Hook") -> str:
    """Returns the line of help of a plugin's command: the first of its docstring, which is read from its file."""
    from ddpforge.components.installed import summary

    if hook.name in _COMMANDS:
        return f"Not used: ddpforge has this command. ({hook.distribution})"
    return f"{summary(hook.point.value)} ({hook.distribution})".lstrip()


def complain(error: ForgeError) -> None:
    """Prints an error to stderr. If all ranks raise the same error, only one rank on each node prints it."""
    from ddpforge.recipe.report import render
    from ddpforge.secret_redaction import redact

    said = redact(render(error))
    number = os.environ.get("RANK", "0")
    rank = int(number) if number.isdecimal() else 0
    if isinstance(error, PeerFailed) and error.launcher_prints:
        return
    alike = error.exit_code == ExitCode.USAGE or isinstance(error, PeerFailed)
    elsewhere = os.environ.get("GROUP_RANK", "0") != "0" and os.environ.get("LOCAL_RANK") == "0"
    if rank == 0 or (alike and elsewhere):
        click.echo(_in_colour(said), err=True, color=_colour())
    elif not alike:
        click.echo(f"[rank {rank}] {_in_colour(said)}", err=True, color=_colour())


def _colour() -> bool | None:
    """Returns False if the user or the terminal wants no colours, else None: colours only on a terminal."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def _in_colour(text: str) -> str:
    """Returns the text of errors with their first words and carets in colour; click removes it outside a terminal."""
    found = re.sub(r"(?m)^error:", click.style("error:", fg="red", bold=True), text)
    found = re.sub(r"(?m)^( *\| +)(\^+)$", lambda part: part[1] + click.style(part[2], fg="red"), found)
    return re.sub(r"(?m)^( *= )help:", lambda part: part[1] + click.style("help:", fg="cyan"), found)


@click.group(
    cls=_Commands,
    commands={name: click.Command(name, short_help=line) for name, (_, line) in _COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ddpforge")
def main() -> None:
    """One TOML recipe becomes a correct, fast, distributed PyTorch training run.

    \b
    ddpforge run digits                       the bundled digits recipe, in this process
    ddpforge launch recipe.toml --nproc 8     one process per GPU
    accelerate launch -m ddpforge run recipe.toml
    """
