"""Command line. `--help` imports only click; a command's module is imported when the command runs."""

import os
import re
import sys
from importlib import import_module
from typing import Any

import click

from ddpforge import __version__
from ddpforge.errors import ExitCode, ForgeError, PeerFailed

_COMMANDS = {
    "run": ("run", "Train a recipe; resume the run if it was interrupted."),
    "launch": ("launch", "Start several processes on this machine and train a recipe in them."),
    "slurm": ("slurm", "Write a Slurm job's script that trains a recipe, or submit it."),
    "parity": ("parity", "Train a recipe under several strategies and report where they diverge."),
    "compare-script": ("compare_script", "Train your own script and a recipe, and report where they part."),
    "doctor": ("doctor", "Find problems for a run on this machine, or on all machines of a launcher."),
    "check": ("check", "Validate a recipe without starting anything."),
    "data": ("data", "Show the first batches of a recipe's data: shapes, ranges, labels, pictures, text."),
    "lr-range": ("trials:lr_range", "Test a range of learning rates in one short training, and suggest one."),
    "plan": ("plan", "Predict a run's memory, communication and time without using a device."),
    "batch-size": ("trials:batch_size", "Find the largest micro-batch that fits into memory."),
    "show": ("show", "Print the resolved recipe and where each value came from."),
    "sweep": ("sweep", "Train a recipe with many values: a grid, random values, or a search."),
    "runs": ("runs", "List, compare, resume and delete runs."),
    "report": ("report", "Make one HTML page about runs, to read offline or while they train."),
    "status": ("status", "Print the state and progress of a run, also while it trains."),
    "eval": ("evaluate", "Evaluate a run's checkpoint."),
    "predict": ("predict", "Write the predictions of a run's model for every sample of a dataset."),
    "generate": ("generate", "Generate text with a trained language model."),
    "export": ("export", "Write a run's weights as plain safetensors."),
    "ckpt": ("ckpt", "List, inspect, verify, compare, export and import checkpoints."),
    "recipes": ("recipes", "List or copy the recipes that come with ddpforge; upgrade your own."),
    "plugins": ("plugins", "List and show components; write and test plugins."),
    "schema": ("recipes:schema", "Print the recipe's JSON Schema, for editors."),
    "completion": ("completion", "Print a shell completion script."),
}


_GROUPS = {
    "Train": ("run", "launch", "sweep", "slurm"),
    "Check before training": (
        *("check", "show", "data", "plan", "doctor", "lr-range", "batch-size", "parity"),
        "compare-script",
    ),
    "After training": ("eval", "predict", "generate", "export", "ckpt"),
    "Runs": ("runs", "status", "report"),
    "Recipes and plugins": ("recipes", "schema", "plugins", "completion"),
}


class _Commands(click.Group):
    """Command group that loads a command's module when it is called; until then a command is a name and one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name and stub else stub, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands in groups."""
        width = max(map(len, self.commands))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", _COMMANDS[name][1]) for name in names])

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
    place, _ = _COMMANDS[name]
    module, _, attribute = place.partition(":")
    command: click.Command = getattr(import_module(f"ddpforge.cli.{module}"), attribute or module)
    return command


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
