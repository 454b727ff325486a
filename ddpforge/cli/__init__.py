"""Command line. `--help` imports only click; a command's module is imported when the command runs."""

import os
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


class _Commands(click.Group):
    """Command group that loads a command's module when it is called; until then a command is a name and one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name and stub else stub, rest

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
        click.echo(said, err=True)
    elif not alike:
        click.echo(f"[rank {rank}] {said}", err=True)


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
