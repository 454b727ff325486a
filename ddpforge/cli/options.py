"""Options and arguments of several commands."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem


class _Named(click.Path):
    """Path, or a name; the shell completes both: names first, then files."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        super().__init__()
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return [*found, *super().shell_complete(ctx, param, incomplete)]


def _recipes() -> Iterable[str]:
    from ddpforge.recipe.bundled import bundled

    return bundled()


def _runs() -> Iterable[str]:
    return sorted(path.parent.name for path in Path("runs").glob("*/run.json"))


class DeviceName(click.ParamType[str]):
    """Name of a kind of devices, of ddpforge or of a plugin."""

    name = "device"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[cpu|cuda|PLUGIN]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value) not in (known := self._known()):
            self.fail(f"'{value}' is not one of {', '.join(map(repr, known))}.", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]

    @staticmethod
    def _known() -> list[str]:
        from ddpforge.components.registry import Registry

        return Registry.installed().names("device")


def complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the keys that begin with the text before "=": those of the sections, and options of the recipe."""
    from ddpforge.cli.completion import keys

    return [CompletionItem(f"{key}=") for key in keys(str(ctx.params.get("recipe") or ""), incomplete)]


recipe_argument = click.argument("recipe", metavar="RECIPE", type=_Named(_recipes))
run_argument = click.argument("run", metavar="RUN", type=_Named(_runs))
set_option = click.option(
    *("-s", "--set", "sets"),
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_keys,
    help="Set a value of the recipe, e.g. train.seed=1, the same as KEY=VALUE without --set; repeatable.",
)
out_option = click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False),
    help="Folder for the run's folder, instead of the recipe's output_dir.",
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
    "--device", type=DeviceName(), help="Check for ranks on this device; default: this machine's."
)
imports_option = click.option(
    "--import/--no-import",
    "imports",
    default=True,
    help="Import code that the recipe names by file or module, which runs it. Without it, the options of such "
    "components are not checked.",
)

dry_run_option = click.option(
    "--dry-run",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Train this number of steps, evaluate as many batches, print their cost, and keep nothing.",
)


class SizeParam(click.ParamType[int]):
    """Number of bytes, with or without a unit: 5GB, 500 MiB, 4096."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            size = int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            size = 0
        if str(value).isdecimal() and 0 < size < 1024:
            self.fail(f"{value} is a size of {value} bytes; write a unit, e.g. {value}GB", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is not a size; expected e.g. 5GB or 500MiB", param, ctx)
        return size


def sets_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `KEY=VALUE…` after the other arguments, and `--set KEY=VALUE`. The command receives both as `sets`."""

    @wraps(command)
    def merged(*arguments: Any, sets: Sequence[str], words: Sequence[str], **others: Any) -> Any:
        return command(*arguments, sets=(*sets, *assignments(words)), **others)

    return click.argument("words", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_keys)(set_option(merged))


def assignments(words: Sequence[str]) -> tuple[str, ...]:
    """Returns `words` as a tuple. Raises click's UsageError for a word that is neither KEY=VALUE nor ~KEY."""
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise click.UsageError(f"Got unexpected extra argument ({word})", click.get_current_context())
    return tuple(words)


def before_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits `words` into the assignments at the beginning, and the flags for another program."""
    first = tuple(takewhile(lambda word: not word.startswith("-"), words))
    return assignments(first), tuple(words[len(first) :])


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a run: --fresh, --allow-change, --max-time and --profile."""
    fresh = click.option(
        "--fresh", is_flag=True, help="Start from scratch; the earlier run's folder is renamed, not deleted."
    )
    allow_change = click.option(
        "--allow-change",
        multiple=True,
        metavar="KEY",
        help="Resume although KEY has changed, which is normally fixed for a run; repeatable.",
    )
    max_time = click.option(
        "--max-time",
        metavar="DURATION",
        help="Stop after this time, e.g. 90m or 4h, with a checkpoint and exit code 75; the same command resumes.",
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
    best = click.option("--best", is_flag=True, help="The best checkpoint by the recipe's checkpoint.keep.monitor.")
    return step(best(command))
