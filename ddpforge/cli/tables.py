"""Tables for the terminal: boxes where people look, plain columns where programs do."""

import sys
from collections.abc import Sequence

import click


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under a header to stdout."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)  # brackets in a cell are TOML, not styles
        return

    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """Text out of a file, without control characters: names in it must not steer the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def size(count: int) -> str:
    """Bytes for people: 1,234 B, 56.7 MB."""
    if count < 10_000:
        return f"{count:,} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 1000 or unit == "TB":
            break
    return f"{value:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """1 tensor, 1,234 tensors."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def span(seconds: float) -> str:
    """A time for people, in its two largest units: 5s, 3m05s, 2h10m, 4d03h."""
    rest = max(0, round(seconds))
    for length, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if rest >= length:
            return f"{rest // length}{unit}{rest % length // smaller:02}{name}"
    return f"{rest}s"


def age(seconds: float) -> str:
    """The time since something happened, in its largest unit: 90 s, 5 min, 3 h, 4 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def number(value: float | None) -> str:
    """A metric; nothing where it is missing or not finite."""
    return "" if value is None else f"{value:.4g}"
