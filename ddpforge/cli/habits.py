"""Commands and flags of other tools, with their equivalents in ddpforge."""

import re
from collections.abc import Iterator
from typing import Any

import click

_COMMANDS = {
    **dict.fromkeys(("train", "fit", "start", "finetune", "pretrain"), "ddpforge run RECIPE"),
    **dict.fromkeys(("validate", "lint", "verify"), "ddpforge check RECIPE"),
    **dict.fromkeys(("dry-run", "dryrun", "fast-dev-run"), "ddpforge run RECIPE --dry-run 5"),
    **dict.fromkeys(("lr-find", "lr-finder", "find-lr", "tune"), "ddpforge lr-range RECIPE"),
    **dict.fromkeys(("find-batch-size", "scale-batch-size", "batch-finder"), "ddpforge batch-size RECIPE"),
    "overfit": "ddpforge run RECIPE --overfit 1",
    **dict.fromkeys(("samples", "inspect", "preview"), "ddpforge data show RECIPE"),
    "profile": "ddpforge run RECIPE --profile 20..25",
    "help": "ddpforge --help, or ddpforge run --help for one command",
    **dict.fromkeys(("upgrade", "migrate", "update"), "ddpforge recipes upgrade FILE…"),
    **dict.fromkeys(("config", "cfg", "print", "resolve"), "ddpforge show RECIPE"),
    **dict.fromkeys(("val", "test"), "ddpforge eval RUN"),
    **dict.fromkeys(
        ("resume", "continue", "restart"), "ddpforge runs resume RUN; the same command resumes a stopped run, too"
    ),
    **dict.fromkeys(("torchrun", "distributed", "multi"), "ddpforge launch RECIPE --nproc N"),
    **dict.fromkeys(("checkpoint", "checkpoints"), "ddpforge ckpt ls RUN"),
    **dict.fromkeys(("plugin", "components"), "ddpforge plugins list"),
    **dict.fromkeys(("list", "ls", "ps", "history"), "ddpforge runs ls"),
    **dict.fromkeys(("rm", "delete", "remove"), "ddpforge runs rm RUN"),
    **dict.fromkeys(("watch", "info", "state", "progress"), "ddpforge status RUN"),
    **dict.fromkeys(("recipe", "init", "new"), "ddpforge recipes ls, and ddpforge recipes cp NAME"),
}
_RANKS = ("nproc", "nproc-per-node", "gpus", "num-gpus", "devices", "num-processes", "ranks", "world-size", "n", "np")
_RESUME = ("resume", "resume-from", "resume-from-checkpoint", "continue", "auto-resume", "load", "ckpt", "checkpoint")
_KEYS = {
    **dict.fromkeys(("lr", "learning-rate"), "optimizer.lr=1e-3"),
    **dict.fromkeys(("epochs", "max-epochs", "num-epochs", "num-train-epochs"), "train.length=5ep"),
    **dict.fromkeys(("steps", "max-steps", "num-steps", "iterations"), "train.length=1000st"),
    **dict.fromkeys(("batch-size", "global-batch", "batch", "bs"), "train.global_batch=256"),
    **dict.fromkeys(("micro-batch", "per-device-train-batch-size"), "train.micro_batch=32"),
    **dict.fromkeys(("precision", "mixed-precision", "amp", "bf16"), "train.precision=bf16"),
    "fp16": "train.precision=fp16",
    "seed": "train.seed=1",
    **dict.fromkeys(("name", "run-name", "exp-name", "experiment"), "name=my-run"),
    **dict.fromkeys(("strategy", "backend"), "strategy.use=fsdp"),
    **dict.fromkeys(("compile", "torch-compile"), "train.compile=default"),
    **dict.fromkeys(("workers", "num-workers"), "data.workers=4"),
    **dict.fromkeys(("wandb", "project"), "track.wandb.project=my-project"),
}
_OTHERS = {
    **dict.fromkeys(("config", "cfg", "recipe", "config-file", "c", "f"), "write the recipe without an option"),
    **dict.fromkeys(("output", "output-dir", "out-dir", "logdir", "log-dir", "save-dir", "dir"), "write --out DIR"),
    **dict.fromkeys(("dryrun", "fast-dev-run"), "--dry-run 5 trains five steps and keeps nothing"),
    **dict.fromkeys(("overfit-batches", "overfit-one-batch"), "--overfit 1 trains on one batch again and again"),
    **dict.fromkeys(("auto-lr-find", "lr-find"), "`ddpforge lr-range RECIPE` tests a range of learning rates"),
    **dict.fromkeys(
        ("auto-scale-batch-size", "auto-find-batch-size"), "`ddpforge batch-size RECIPE` finds the largest"
    ),
    "profiler": "--profile 20..25 profiles these steps",
    **dict.fromkeys(("override", "overrides", "opts", "options"), "write KEY=VALUE, once for each key"),
    **dict.fromkeys(("force", "overwrite", "restart"), "write --fresh to start from scratch"),
}


_RENAMED = {  # options of ours by their names before version 1.0, as (command, option), or of any command
    ("launch", "endpoint"): "rdzv-endpoint",
    ("launch", "run-id"): "rdzv-id",
    ("", "budget"): "memory",
    ("eval", "only"): "dataset",
    ("", "only"): "include",
}


_NOT_A_NUMBER = re.compile(r"('[^']*') is not a valid (integer|float)(?: range)?")
_RANGE = re.compile(r"(\S+) is not in the range (\S+?)<=x<=(\S+?)\.?$")
_NUMBERS = {"integer": "a whole number", "float": "a number"}


def explained(error: click.UsageError) -> click.UsageError:
    """Returns the error for a wrong command line, with suggestions for flags and commands of other tools."""
    hints = list(_hints(error))
    own = hints and not isinstance(error, click.BadParameter)
    message = (error.message if own else "") or error.format_message()
    message = _NOT_A_NUMBER.sub(lambda found: f"expected {_NUMBERS[found[2]]}, not {found[1]}", message)
    message = _RANGE.sub(r"expected \2 to \3, not \1", message.rstrip())
    return _Shown("\n  = help: ".join([message.rstrip(), *hints]), ctx=error.ctx)


class _Shown(click.UsageError):
    def show(self, file: Any = None) -> None:
        """Prints the usage and the error on stderr, with its first word in red on a terminal."""
        context = self.ctx
        if context is not None:
            click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)
        colour = context.color if context else None
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {self.format_message()}", err=True, color=colour)


def _hints(error: click.UsageError) -> Iterator[str]:
    command = error.ctx.info_name if error.ctx else ""
    if isinstance(error, click.MissingParameter) and error.param and error.param.name == "recipe":
        yield from _recipes(str(command))
    if "'loss' is not one of 'model'" in error.message:
        yield "a loss is a task, or a function that the recipe names: ddpforge plugins new task NAME"
    if "'gpu' is not one of 'cpu', 'cuda'" in error.message:
        yield "did you mean cuda?"
    if isinstance(error, click.NoSuchOption):
        yield from _of_option(error.option_name.lstrip("-"), str(command))
        return
    if found := re.search(r"No such command '([^']*)'", error.message):
        if meant := _GROUPS.get(str(command), {}).get(found[1]):
            yield f"ddpforge {command} {meant}"
        elif command not in _GROUPS and found[1] in _COMMANDS:
            yield _COMMANDS[found[1]]
        elif found[1].endswith(".toml"):
            yield f"ddpforge run {found[1]}"
    if "unexpected extra argument" in error.message and error.ctx:
        words = next((one for one in error.ctx.command.params if one.name == "words"), None)
        extra = re.search(r"extra arguments? \(([^ )]*)", error.message)
        if extra and extra[1].endswith(".toml"):
            yield "one recipe at a time: call the command once for each"
        elif command == "parity":
            yield "separate strategies with commas: --strategies ddp,fsdp,deepspeed:stage=3"
        elif words and command == "sweep":
            yield "separate the values of a key with commas: optimizer.lr=1e-3,1e-2"
        elif words:
            yield f"expected {words.make_metavar(error.ctx)} after the recipe, e.g. optimizer.lr=1e-3"


_GROUPS: dict[str, dict[str, str]] = {
    "ckpt": {"list": "ls", "delete": "rm", "remove": "rm", "convert": "import", "compare": "diff"},
    "runs": {"list": "ls", "delete": "rm", "remove": "rm", "diff": "compare", "continue": "resume"},
    "plugins": {"ls": "list", "create": "new", "info": "show", "check": "test"},
    "recipes": {"list": "ls", "new": "cp", "init": "cp", "update": "upgrade", "migrate": "upgrade"},
    "data": {"ls": "show", "inspect": "show", "preview": "show"},
}
"""Groups of commands: other words for their commands."""


def _of_option(name: str, command: str) -> Iterator[str]:
    known = name.replace("_", "-").lower()
    if new := _RENAMED.get((command, known), _RENAMED.get(("", known))):
        yield f"--{known} is now --{new}"
        return
    if known in _RANKS and command == "slurm":
        yield "write --gpus-per-node N, or --nproc N for ranks on each node, and --nodes N"
    elif known in _RANKS:
        yield "write --nproc N" if command == "launch" else "ddpforge launch RECIPE --nproc N starts several processes"
    elif known in _RESUME:
        yield "the same command resumes a stopped run; checkpoint.init_from begins with other weights"
    elif known in _OTHERS:
        yield _OTHERS[known]
    elif known in _KEYS:
        yield f"set values of the recipe with KEY=VALUE, e.g. {_KEYS[known]}"
    elif "." in name:
        yield f"write {name}=VALUE"


def _recipes(command: str) -> Iterator[str]:
    """Yields command lines: with a bundled recipe, and with one's own."""
    yield f"ddpforge {command} digits, or another bundled recipe: ddpforge recipes ls"
    yield f"ddpforge {command} recipe.toml for your own; ddpforge recipes cp digits makes one to edit"
