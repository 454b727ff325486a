"""`ddpforge ckpt`: lists, inspects, verifies, compares, exports and imports checkpoints."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpforge.cli.export import export
from ddpforge.cli.options import checkpoint_options, json_option, run_argument
from ddpforge.cli.tables import age, counted, number, print_table, printable, size
from ddpforge.errors import ExitCode

if TYPE_CHECKING:
    from ddpforge.api import CheckpointRow
    from ddpforge.interop.compare import Differences, TensorDifference, Value
    from ddpforge.interop.imports import Imported
    from ddpforge.runs.checkpoints import Tensor

_SHOWN = 20  # lines of a list without --json

source_argument = click.argument("source", metavar="RUN_OR_CHECKPOINT", type=click.Path())


@click.group()
def ckpt() -> None:
    """List, inspect, verify, compare, export and import checkpoints.

    RUN is a run's folder, its name in runs/, or a folder of checkpoints without a run.
    """


ckpt.add_command(export)


def _say(line: str) -> None:
    """Prints a line that may contain text from files, with control characters escaped."""
    click.echo(printable(line))


# ---------------------------------------------------------------------------------------------- ls
@ckpt.command("ls")
@run_argument
@json_option
def ls(run: str, as_json: bool) -> None:
    """List the checkpoints of RUN, newest first, then broken ones with the reason.

    This checks the sizes of all files, but does not read them: `ckpt verify` does. The metrics shown are those of the
    evaluation, and the one that decides which checkpoint is best.
    """
    from ddpforge.api import CheckpointFolder
    from ddpforge.runs.checkpoints import notable, rows

    place = CheckpointFolder.find(run)
    found = rows(place)
    if as_json:
        click.echo(
            json.dumps({"folder": str(place.folder), "checkpoints": [asdict(row) for row in found]}, default=str)
        )
        return
    whole, broken = ([row for row in found if (row.problem is None) == good] for good in (True, False))
    if not found:
        click.echo(f"{place.folder}: no checkpoints")
    if whole:
        names = notable(whole, place.keep())
        header = ("checkpoint", "step", "samples", "age", "strategy", "ranks", "layout", "size", *names, "")
        less = ("layout", "ranks", "strategy", "samples", "size")
        print_table(header, [_line(row, names) for row in whole], droppable=less, way="--json has all columns")
    for row in broken:
        _say(f"broken: {row.problem}")


def _line(row: "CheckpointRow", names: Sequence[str]) -> list[str]:
    marks = ", ".join(mark for mark, on in (("latest", row.latest), ("best", row.best)) if on)
    values = [row.metrics.get(name) for name in names]
    return [
        row.path.name,
        f"{row.step:,}",
        f"{row.samples:,}",
        _age(row.created or ""),
        row.strategy or "",
        str(row.world_size),
        row.layout or "",
        size(row.bytes),
        *map(number, values),
        marks,
    ]


def _age(created: str) -> str:
    """Returns the time since `created` in words; "?" if it is not a time."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    return age(seconds)


# ---------------------------------------------------------------------------------------------- inspect
@ckpt.command()
@source_argument
@checkpoint_options
@click.option("--all", "whole", is_flag=True, help="Print every metric, not only the six most important.")
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor, too.")
@json_option
def inspect(source: str, step: int | None, best: bool, whole: bool, with_tensors: bool, as_json: bool) -> None:
    """Show the manifest of RUN_OR_CHECKPOINT: the run's position, files, tensors, totals.

    RUN_OR_CHECKPOINT is a run (its newest checkpoint, unless --step or --best is given) or a checkpoint's folder.
    """
    from ddpforge.api import read_manifest
    from ddpforge.runs.checkpoints import describe, find, tensors

    path = find(source, step=step, best=best)
    manifest = read_manifest(path)
    facts = describe(path, manifest)
    listed = tensors(manifest) if with_tensors else []
    if as_json:
        click.echo(json.dumps(facts | ({"tensors": [asdict(tensor) for tensor in listed]} if with_tensors else {})))
        return
    for name, text in _page(facts, whole):
        _say(f"{name:<10} {text}")
    _print_tensors(listed)


def _page(facts: Mapping[str, Any], whole: bool) -> Iterable[tuple[str, str]]:
    """Yields name and text of each line to print."""
    from ddpforge.api import leading

    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield "checkpoint", facts["path"]
    yield "step", f"{facts['step']:,}, {facts['samples']:,} samples; saved {facts['created']}"
    yield "written by", f"{facts['strategy']}, {facts['world_size']} rank{'s' * (facts['world_size'] > 1)}; {versions}"
    yield "format", f"{facts['format']}, {facts['layout']}"
    metrics = facts["metrics"]
    shown = leading(metrics, None if whole else 6)
    if metrics:
        more = f"; {counted(hidden, 'more metric')}: --all" if (hidden := len(metrics) - len(shown)) else ""
        yield "metrics", f"{', '.join(f'{name} {_rounded(metrics[name])}' for name in shown)}{more}"
    for name in ("position", "loop", "aliases"):
        if facts[name]:
            yield name, ", ".join(f"{key} {_short(value)}" for key, value in facts[name].items())
    for place, entry in enumerate(facts["lineage"]):
        known = isinstance(entry, Mapping) and {"step", "recipe"} <= entry.keys()
        text = f"{str(entry['recipe'])[:12]} from step {entry['step']}" if known else json.dumps(entry)
        yield "recipe" if not place else "", text
    for name, entry in facts["sections"].items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in entry["dtypes"].items())
        if entry["tensors"]:
            yield name, f"{dtypes} tensors; {entry['elements']:,} elements, {size(entry['bytes'])}"
    for name, values in facts["callbacks"].items():
        if values:
            yield "callback", f"{name}: {', '.join(f'{key} {_short(value)}' for key, value in values.items())}"
    for place, (name, count) in enumerate(facts["files"].items()):
        yield "files" if not place else "", f"{name}  {size(count)}"


def _rounded(value: object) -> str:
    return number(value) if isinstance(value, float) else json.dumps(value)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _print_tensors(listed: Sequence["Tensor"]) -> None:
    if listed:
        click.echo()
        print_table(
            ("section", "name", "shape", "dtype", "parts", "size"),
            [(x.section, x.name, str(list(x.shape)), x.dtype, str(x.parts), size(x.bytes)) for x in listed],
        )


# ---------------------------------------------------------------------------------------------- verify
@ckpt.command()
@source_argument
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step; default: the newest.")
@click.option("--all", "every", is_flag=True, help="All checkpoints of the run.")
@json_option
def verify(source: str, step: int | None, every: bool, as_json: bool) -> None:
    """Read every byte of the newest checkpoint, of one, or of all; list each file that is missing or damaged.

    For a run, this also prints which checkpoint it would resume. Exit codes: 0 intact, 1 damaged, 2 no checkpoint.
    """
    from ddpforge.api import CheckpointFolder, damages, is_checkpoint
    from ddpforge.errors import UsageError
    from ddpforge.runs.checkpoints import find, newest_first

    if every and step is not None:
        raise UsageError("--all and --step exclude each other", hints=["use one of them"])
    known = {}
    resumes: Path | None = None
    if alone := is_checkpoint(Path(source)):
        if every:
            raise UsageError(f"{source} is one checkpoint; --all needs a run", hints=["omit --all, or name the run"])
        chosen = [find(source, step=step)]
    else:
        place = CheckpointFolder.find(source)
        order = newest_first(place)
        if not order:
            raise UsageError(f"{place.folder} has no checkpoint")
        chosen = order if every else order[:1] if step is None else _of_step(place.folder, order, step)
    for path in chosen:
        known[path] = damages(path)
        if not as_json:
            _print_damages(path, known[path])
    if not alone:
        resumes = next((path for path in order if not (known[path] if path in known else damages(path))), None)

    if as_json:
        listed = [
            {"path": str(path), "intact": not found, "damages": [damage._asdict() for damage in found]}
            for path, found in known.items()
        ]
        click.echo(json.dumps({"checkpoints": listed, **({} if alone else {"resumes": resumes and str(resumes)})}))
    elif not alone:
        click.echo(f"a run would resume from {resumes.name}" if resumes else "a run could not resume: none is intact")
    sys.exit(ExitCode.FAILED if any(known.values()) else ExitCode.DONE)


def _of_step(folder: Path, order: Sequence[Path], step: int) -> list[Path]:
    """Returns the checkpoints with this step in their names; raises UsageError if there is none."""
    from ddpforge.checkpoint.schema import FOLDER
    from ddpforge.errors import UsageError

    steps = {path: int(match[1]) for path in order if (match := FOLDER.fullmatch(path.name))}
    found = [path for path in order if steps.get(path) == step]
    if not found:
        there = ", ".join(str(each) for each in sorted(set(steps.values())))
        raise UsageError(f"{folder} has no checkpoint of step {step}", hints=[f"it has checkpoints of step {there}"])
    return found


def _print_damages(path: Path, found: Sequence[Any]) -> None:
    click.echo(f"{path}: {'damaged' if found else 'intact'}")
    for damage in found:
        _say(f"  {damage.file}: {damage.problem}")


# ---------------------------------------------------------------------------------------------- diff
@ckpt.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two checkpoints: recipe, position, and every tensor of model, optimizer and callbacks.

    A and B are checkpoints' folders, or RUN (the newest), RUN:STEP or RUN:best. Their layouts and numbers of ranks may
    differ. Provenance, metrics and recipe keys that cannot change the result are listed but do not count as
    differences. Exit codes: 0 equal, 1 different, 2 no such checkpoint, 3 a checkpoint is damaged.
    """
    from ddpforge.interop.compare import compare
    from ddpforge.runs.checkpoints import parse

    paths = [parse(a), parse(b)]
    found = compare(*paths)
    if as_json:
        facts = {"a": str(paths[0]), "b": str(paths[1]), "equal": found.equal, **asdict(found)}
        click.echo(json.dumps(_finite(facts), default=str))
    else:
        _print_differences(paths, found)
    sys.exit(ExitCode.DONE if found.equal else ExitCode.FAILED)


def _print_differences(paths: Sequence[Path], found: "Differences") -> None:
    click.echo(f"a: {paths[0]}\nb: {paths[1]}")
    for change in found.recipe:
        _say(f"recipe, {change.policy}: {change}")
    click.echo(f"not counted: {', '.join(_about(found)) or 'nothing'}")
    for line in _counted(found.facts):
        _say(line)
    for section, count in found.compared.items():
        mine = [each for each in found.tensors if each.section == section]
        for what, names in (("only in a", found.missing[section]), ("only in b", found.unexpected[section])):
            for name in names:
                _say(f"{section}: {name} is {what}")
        click.echo(f"{section}: {len(mine)} of {count} tensors differ")
        worst = sorted(mine, key=lambda each: (not each.note, -each.relative))[:_SHOWN]
        if worst:
            print_table(("", "differing", "max |a-b|", "relative", ""), [_difference(each) for each in worst])
        if len(mine) > len(worst):
            click.echo(f"  and {len(mine) - len(worst)} more with smaller differences; --json lists all")
    click.echo("equal" if found.equal else "different")


def _about(found: "Differences") -> Iterable[str]:
    """Yields the differences that do not count. Metrics nearly always differ: yields only their number."""
    metrics = [value for value in found.about if value.name.startswith("metrics.")]
    for value in found.about:
        if value not in metrics:
            yield f"{value.name} {json.dumps(value.a)} → {json.dumps(value.b)}"
    if metrics:
        yield f"{len(metrics)} metrics"


def _counted(facts: "Sequence[Value]") -> list[str]:
    """Lists differences of values that are not tensors. Equal differences of several parameters share a line."""
    lines: dict[str, list[str]] = {}
    for value in facts:
        section, colon, rest = value.name.partition(": ")
        owner, slash, key = rest.rpartition("/")
        name = f"{section}: {key}" if colon and slash else value.name
        lines.setdefault(f"{name}: {json.dumps(value.a)} → {json.dumps(value.b)}", []).append(owner)
    return [
        f"{line} (of {owners[0]} and {len(owners) - 1} more)" if len(owners) > 1 else line
        for line, owners in lines.items()
    ]


def _difference(each: "TensorDifference") -> list[str]:
    numbers = [f"{each.elements:,}", f"{each.absolute:.3g}", f"{each.relative:.3g}"] if each.elements else [""] * 3
    return [f"  {each.name}", *numbers, each.note]


def _finite(value: Any) -> Any:
    """Returns `value` with non-finite numbers replaced by text, because JSON has no NaN or infinity."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------- import
@ckpt.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(),
    metavar="RUN_OR_FOLDER",
    help="A run's folder, its name in runs/, or a folder of checkpoints, which is created if it does not exist.",
)
@click.option("--trust", is_flag=True, help="Load pickles without restrictions; a pickle can run any code.")
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="PATTERN=REPLACEMENT",
    help=r"Rename tensors, by a regular expression: --map '^module\.='; repeatable, applied in order.",
)
@click.option(
    "--step", type=click.IntRange(min=0), help="Step number for the checkpoint; default: that of SOURCE, or 0."
)
@click.option(
    "--samples", type=click.IntRange(min=0), help="Samples trained on so far; default: those of SOURCE, or 0."
)
@json_option
def import_(
    source: Path, out: str, trust: bool, maps: tuple[str, ...], step: int | None, samples: int | None, as_json: bool
) -> None:
    """Convert a checkpoint of another program, so that a run can resume from it or begin with its weights.

    SOURCE is a safetensors file, a state_dict (.pt, .bin), or a folder of transformers, torch.distributed.checkpoint or
    DeepSpeed (ZeRO 1 to 3: float32 weights). Optimizer state is converted if SOURCE has it by parameter. That is so for
    the last two formats, which are pickles and need --trust.
    """
    from ddpforge.interop.imports import import_checkpoint

    done = import_checkpoint(source, out, trust=trust, maps=maps, step=step, samples=samples)
    if as_json:
        click.echo(json.dumps(asdict(done), default=str))
    else:
        _print_imported(done)


def _print_imported(done: "Imported") -> None:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in done.dtypes.items())
    state = f"{', '.join(done.keys)} of {done.optimizer} parameters" if done.optimizer else "none"
    _say(f"{done.path}: from {done.kind}")
    _say(f"step       {done.step:,}, {done.samples:,} samples")
    _say(f"model      {dtypes} tensors, {size(done.bytes)}")
    _say(f"optimizer  {state}")
    if done.aliases:
        _say(f"tied       {', '.join(f'{name} to {other}' for name, other in done.aliases.items())}")
    for line in done.left_out[:_SHOWN]:
        _say(f"skipped    {line}")
    if len(done.left_out) > _SHOWN:
        _say(f"skipped    {len(done.left_out) - _SHOWN} more; --json lists all")
    for hint in done.hints:
        _say(f"note       {hint}")
