"""`ddpforge data`: shows the first batches of a recipe's data without training."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ddpforge.cli.options import json_option, recipe_argument, sets_options

if TYPE_CHECKING:
    from ddpforge.tools.trials.samples import BatchSummary, Leaf, SplitBatches, TextParts

_CLASSES = 20  # that are shown
_LONGEST = 300  # characters; a longer text is truncated
_MOST = 3000  # of a text in parts
_STYLES: dict[str, dict[str, Any]] = {"learnt": {"fg": "green"}, "given": {}, "special": {"fg": "cyan", "dim": True}}
_MARKS = {"learnt": "«»", "given": ("", ""), "special": "[]"}  # without colours


@click.group()
def data() -> None:
    """Look at a recipe's data."""


@data.command()
@recipe_argument
@sets_options
@click.option("--split", default="train", show_default=True, metavar="SET", help="train, eval, or eval.NAME.")
@click.option(
    "--batches", type=click.IntRange(1, 10_000), default=2, show_default=True, help="Number of batches to show."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Draw the images of the first batch with their labels into one picture, e.g. sheet.png.",
)
@json_option
def show(recipe: str, sets: Sequence[str], split: str, batches: int, out: str | None, as_json: bool) -> None:
    """Print the first batches of RECIPE's data as one process trains on them: in order, transformed and collated.

    A batch is the input of one forward pass. For each tensor the output has its name, dtype, shape and range of values,
    the count of each label, and tokens as text if the dataset can decode them. In the text of a chat the
    learnt, given and special parts have colours; without a terminal, learnt parts are in «…» and special ones in […].
    Nothing is trained.
    """
    from ddpforge.cli.check import choose_and_check
    from ddpforge.tools.trials.samples import describe, first_batches

    chosen, problems = choose_and_check(recipe, [*sets, "data.workers=0"], 1, None)
    problems.raise_if_any()
    found = first_batches(chosen, problems, split, batches)
    shown = [describe(micro, found) for micro in found.micros]
    if as_json:
        names = {"class_names": list(found.class_names)} if found.class_names else {}
        click.echo(json.dumps({"split": split, **names, "batches": [asdict(one) for one in shown]}))
    elif found.class_names:
        click.echo(_classes(found.class_names))
    for number, one in enumerate([] if as_json else shown, start=1):
        click.echo("\n".join(_lines(split, number, one)))
    if out:
        _draw(out, found)


def _classes(names: Sequence[str]) -> str:
    """Returns a line with the number and the name of each class."""
    from ddpforge.cli.tables import printable

    shown = ", ".join(f"{number}: {printable(name)}" for number, name in enumerate(names[:_CLASSES]))
    return f"{len(names):,} classes: {shown}{', …' * (len(names) > _CLASSES)}"


def _lines(split: str, number: int, batch: "BatchSummary") -> Iterator[str]:
    from ddpforge.cli.tables import counted

    of = "" if batch.samples == batch.step_samples else f", of {batch.step_samples:,} in the step"
    sources = ", ".join(f"{count:,} {name}" for name, count in batch.sources.items())
    yield f"{split}, batch {number}: {counted(batch.samples, 'sample')}{of}{f' ({sources})' if sources else ''}"
    forms = [(leaf.name, f"{leaf.dtype} {list(leaf.shape)}") for leaf in batch.leaves]
    widths = [max(len(cell) for cell in column) for column in zip(*forms, strict=True)]
    for leaf, (name, form) in zip(batch.leaves, forms, strict=True):
        yield f"  {name:<{widths[0]}}  {form:<{widths[1]}}  {_values(leaf)}".rstrip()
        yield from _texts(leaf)
    if batch.texts:
        yield f"  text of {counted(len(batch.texts), 'sample')}: {' '.join(_part(kind, kind) for kind in _STYLES)}"
    for parts in batch.texts:
        yield f"    {''.join(_shortened(parts))}"


def _shortened(parts: "TextParts") -> Iterator[str]:
    """Yields the parts of a text with their colours or marks, up to `_MOST` characters of text."""
    left = _MOST
    for kind, text in parts:
        yield _part(kind, text[:left])
        left -= len(text)
        if left < 0:
            yield "…"
            return


def _part(kind: str, text: str) -> str:
    """Returns a part of a text in its colour, or between marks if the output has no colours."""
    import sys

    from ddpforge.cli.tables import printable

    if click.get_current_context().color is not False and sys.stdout.isatty():
        return click.style(printable(text), **_STYLES[kind])
    begin, end = _MARKS[kind]
    return f"{begin}{printable(text)}{end}"


def _values(leaf: "Leaf") -> str:
    if leaf.counts:
        said = [", ".join(f"{value}: {count}" for value, count in leaf.counts.items())]
    elif leaf.least is not None:
        said = [f"{leaf.least:.4g} … {leaf.most:.4g}, mean {leaf.mean:.4g}"]
    else:
        said = []
    return ", ".join([*said, *([f"{leaf.nonfinite:,} not finite"] if leaf.nonfinite else [])])


def _texts(leaf: "Leaf") -> Iterator[str]:
    from ddpforge.cli.tables import printable

    for text in leaf.texts:
        yield f"    {printable(text[:_LONGEST])}{'…' if len(text) > _LONGEST else ''}"


def _draw(out: str, found: "SplitBatches") -> None:
    from pathlib import Path

    from ddpforge.errors import UsageError
    from ddpforge.tools.trials.contact_sheet import draw, scaled
    from ddpforge.tools.trials.samples import pictures_of

    pictures = pictures_of(found.micros[0], found)
    if pictures is None:
        raise UsageError("the batch has no images: expected a tensor [N, 1 or 3, height, width]", hints=["omit -o"])
    draw(Path(out), pictures)
    moved = "; values were scaled to 0 … 1" if scaled(pictures.images)[1] else ""
    click.echo(f"{out}: {len(pictures.images)} pictures{moved}", err=True)
