"""Hints for commands and flags of other tools; `habits.toml` has the words."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import click


@cache
def _words() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("habits.toml").read_text(encoding="utf-8"))


def _meant(table: Mapping[str, Sequence[str]], word: str) -> str | None:
    """Returns the entry of a table for another tool's word; None if the word is not in it."""
    return next((meant for meant, words in table.items() if word in words), None)


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
    whole = error.ctx.command_path.partition(" ")[2] if error.ctx else ""
    if isinstance(error, click.MissingParameter) and error.param and error.param.name in ("run", "runs"):
        yield f"ddpforge {whole} NAME, or its folder; ddpforge runs ls lists the runs"
    if isinstance(error, click.MissingParameter) and (example := _words()["examples"].get(whole)):
        yield f"e.g. {example}"
    if isinstance(error, click.MissingParameter) and error.param and error.param.name == "recipe":
        yield from _recipes(whole)
    if "'loss' is not one of 'model'" in error.message:
        yield "a loss is a task, or a function that the recipe names: ddpforge plugins new task NAME"
    if isinstance(error, click.BadParameter) and error.param and isinstance(error.param.type, click.Choice):
        given, choices = re.match(r"'([^']*)'", error.message), error.param.type.choices
        near = get_close_matches(given[1].lower(), choices, n=1, cutoff=0.7) if given else []
        yield from (f"did you mean {one}?" for one in near)
    if "'gpu' is not one of 'cpu', 'cuda'" in error.message:
        yield "did you mean cuda?"
    if isinstance(error, click.NoSuchOption):
        own = [option for one in (error.ctx.command.params if error.ctx else ()) for option in one.opts]
        yield from _of_option(error.option_name.lstrip("-"), str(command), own)
        return
    if found := re.search(r"No such command '([^']*)'", error.message):
        groups = _words()["groups"]
        if meant := _meant(groups.get(str(command), {}), found[1]):
            yield f"ddpforge {command} {meant}"
        elif command not in groups and (meant := _meant(_words()["commands"], found[1])):
            yield meant
        elif found[1].endswith(".toml"):
            yield f"ddpforge {'data show' if command == 'data' else 'run'} {found[1]}"
        elif command not in groups and "Did you mean" not in error.format_message():
            near = get_close_matches(found[1], sum(_words()["commands"].values(), []), n=1, cutoff=0.75)
            yield from (meant for one in near if (meant := _meant(_words()["commands"], one)))
    if re.search(r"No such option '--?\w+=", error.message):
        yield "write KEY=VALUE without dashes"
    if "unexpected extra argument" in error.message and error.ctx:
        words = next((one for one in error.ctx.command.params if one.name == "words"), None)
        extra = re.search(r"extra arguments? \(([^ )]*)", error.message)
        if extra and extra[1].endswith(".toml"):
            yield "one recipe at a time: call the command once for each"
        elif command == "parity":
            yield "separate strategies with commas: --strategies ddp,fsdp,deepspeed:stage=3"
        elif words and command == "sweep":
            yield "separate the values of a key with commas: optimizer.lr=1e-3,1e-2"
        elif command == "predict" and extra and re.search(r"\.(jsonl|parquet|csv)$", extra[1]):
            yield f"write the file as an option: -o {extra[1]}"
        elif command == "generate":
            yield "write --prompt TEXT"
        elif words and extra and (pair := re.match(r"([\w.]+):(\S+)", extra[1])):
            yield f"write {pair[1]}={pair[2]}"
        elif words and extra and extra[1].isdigit():
            yield from _of_option("nproc", str(command)) if command != "launch" else [f"write --nproc {extra[1]}"]
        elif words and extra and command == "show":
            yield "without a key it shows the whole recipe: ddpforge show RECIPE"
        elif words and extra and re.fullmatch(r"[\w.]+", extra[1]):
            yield f"write KEY=VALUE without spaces: {extra[1]}=VALUE"
        elif words:
            yield f"expected {words.make_metavar(error.ctx)} after the recipe, e.g. optimizer.lr=1e-3"


def _of_option(name: str, command: str, own: Sequence[str] = ()) -> Iterator[str]:
    known = name.replace("_", "-").lower()
    words = _words()
    if f"--{known}" in own:
        yield f"write --{known}"
        return
    renamed = words["renamed"]["*"] | words["renamed"].get(command, {})
    if new := renamed.get(known):
        yield f"--{known} is now --{new}"
        return
    if known in words["flags"]["ranks"] and command == "slurm":
        yield "write --gpus-per-node N, or --nproc N for ranks on each node, and --nodes N"
    elif known in words["flags"]["ranks"]:
        yield "write --nproc N" if command == "launch" else "ddpforge launch RECIPE --nproc N starts several processes"
    elif known in ("checkpoint", "ckpt", "epoch") and command in ("eval", "predict", "export", "generate"):
        yield "write --best, or --step N; without, it is the newest checkpoint"
    elif known in words["flags"]["resume"]:
        yield "the same command resumes a stopped run; checkpoint.init_from begins with other weights"
    elif hint := _meant(words["hints"], known):
        yield hint
    elif key := _meant(words["keys"], known):
        yield f"set values of the recipe with KEY=VALUE, e.g. {key}"
    elif "." in name:
        yield f"write {name}=VALUE"


def _recipes(command: str) -> Iterator[str]:
    """Yields command lines: with a bundled recipe, and with one's own."""
    yield f"ddpforge {command} digits, or another bundled recipe: ddpforge recipes ls"
    yield f"ddpforge {command} recipe.toml for your own; ddpforge recipes cp digits makes one to edit"
