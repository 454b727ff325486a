"""Options and arguments that several commands share."""

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import takewhile
from typing import Any

import click

# Names do as well as paths; the type lets shells complete the latter.
recipe_argument = click.argument("recipe", metavar="RECIPE", type=click.Path())
run_argument = click.argument("run", metavar="RUN", type=click.Path())
set_option = click.option(
    *("-s", "--set", "sets"),
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value, e.g. train.seed=1, as KEY=VALUE does without this option; repeatable.",
)
out_option = click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False),
    help="Put the run's folder in DIR, not in the recipe's output_dir.",
    metavar="DIR",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
ranks_option = click.option(
    "--ranks",
    type=click.IntRange(1, 2**20),
    envvar="WORLD_SIZE",
    default=1,
    show_default="WORLD_SIZE, else 1",
    help="Check the batch split for this many ranks.",
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Check for ranks on this device; default: what is here."
)
imports_option = click.option(
    "--import/--no-import",
    "imports",
    default=True,
    help="Import the code that the recipe locates by a file or a module, which runs it; without it, its options are "
    "not checked.",
)

dry_run_option = click.option(
    "--dry-run",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Train this many steps, evaluate on as many batches, say what they cost, and keep nothing: there is no run.",
)


class Size(click.ParamType[int]):
    """A number of bytes, with or without a unit: 5GB, 500 MiB, 4096."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            size = int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            size = 0
        if size < 1:
            self.fail(f"{value!r} is not a size; expected e.g. 5GB or 500MiB", param, ctx)
        return size


def sets_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `KEY=VALUE…` after the other arguments and `--set KEY=VALUE`; the command is given both as `sets`."""

    @wraps(command)
    def merged(*arguments: Any, sets: Sequence[str], words: Sequence[str], **others: Any) -> Any:
        return command(*arguments, sets=(*sets, *assignments(words)), **others)

    return click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")(set_option(merged))


def assignments(words: Sequence[str]) -> tuple[str, ...]:
    """`words`, each of which must be KEY=VALUE, or ~KEY; raises click's UsageError for the first that is not."""
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise click.UsageError(f"Got unexpected extra argument ({word})", click.get_current_context())
    return tuple(words)


def before_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The assignments among `words`, and the flags for another program after them."""
    first = tuple(takewhile(lambda word: not word.startswith("-"), words))
    return assignments(first), tuple(words[len(first) :])


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options about an earlier run of the same name."""
    fresh = click.option(
        "--fresh", is_flag=True, help="Start from scratch; the earlier run's folder is renamed, not deleted."
    )
    allow_change = click.option(
        "--allow-change",
        multiple=True,
        metavar="KEY",
        help="Resume even though KEY, normally fixed for the life of a run, has changed; repeatable.",
    )
    max_time = click.option(
        "--max-time",
        metavar="DURATION",
        help="Stop after this long, e.g. 90m or 4h, with a checkpoint and exit code 75: the same command resumes.",
    )
    profile = click.option(
        "--profile",
        metavar="FROM..TO",
        help="Profile these steps, e.g. 20..25, or 20..25,all on all ranks: a trace and a table in the run's folder.",
    )
    return fresh(allow_change(max_time(profile(command))))


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that choose one of a run's checkpoints; see `runs.checkpoints`."""
    step = click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step; default: the newest.")
    best = click.option(
        "--best", is_flag=True, help="The checkpoint that is best by the recipe's checkpoint.keep.monitor."
    )
    return step(best(command))
