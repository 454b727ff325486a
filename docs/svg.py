"""Pieces of SVG for the pictures of the documentation, which have the colors of light and of dark pages."""

from collections.abc import Iterable, Mapping
from html import escape

# Colors by name: on light pages, on dark pages. `one` to `five` distinguish ranks and strategies.
PALETTE = {
    "paper": ("#f6f8fa", "#161b22"),
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "line": ("#8b949e", "#6e7681"),
    "faint": ("#d0d7de", "#3d444d"),
    "one": ("#0a67c2", "#58a6ff"),
    "two": ("#bc4c00", "#ff9d4d"),
    "three": ("#1a7f37", "#56d364"),
    "four": ("#a626a4", "#e08ad6"),
    "five": ("#a07d00", "#ecd444"),
}
STYLE = """text { font: 15px system-ui, sans-serif; fill: var(--ink); }
.small { font-size: 13px; } .tiny { font-size: 11px; }
.bold { font-weight: 700; } .soft { fill: var(--soft); } .middle { text-anchor: middle; } .end { text-anchor: end; }
.paper { fill: var(--paper); stroke: var(--faint); } .box { fill: none; stroke: var(--line); }
path { fill: none; stroke: var(--line); } .dots { stroke-linecap: round; }"""


def themed(palette: Mapping[str, tuple[str, str]]) -> str:
    """Returns colors as variables of CSS, for light and for dark pages."""
    light, dark = (" ".join(f"--{name}: {both[mode]};" for name, both in palette.items()) for mode in (0, 1))
    return f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"


def document(
    width: float, height: float, parts: Iterable[str], *, title: str, description: str, style: str = ""
) -> str:
    """Returns a picture on a sheet of paper; `title` and `description` are read aloud by screen readers.

    Without a `style` it has the colors of PALETTE and the classes of STYLE; otherwise `style` has all of them.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-labelledby="title desc">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="desc">{escape(description)}</desc>\n<style>{style or common()}</style>\n'
        + "\n".join([rect(0.5, 0.5, width - 1, height - 1, "paper", rx=6), *parts])
        + "\n</svg>\n"
    )


def common(more: str = "") -> str:
    """Returns the colors of PALETTE and the classes of STYLE, and `more` of the picture's own."""
    return "\n".join(filter(None, (themed(PALETTE), STYLE, more)))


def element(name: str, style: str, attributes: Mapping[str, object], content: str | None = None) -> str:
    """Returns an element; `style` are its classes."""
    given = {"class": style or None, **{key.replace("_", "-"): value for key, value in attributes.items()}}
    written = "".join(f' {key}="{_short(value)}"' for key, value in given.items() if value is not None)
    return f"<{name}{written}/>" if content is None else f"<{name}{written}>{escape(content)}</{name}>"


def text(x: float, y: float, words: str, style: str = "", **attributes: object) -> str:
    """Returns a line of text that begins at x, with its letters on y."""
    return element("text", style, {"x": x, "y": y, **attributes}, words)


def rect(x: float, y: float, width: float, height: float, style: str = "", **attributes: object) -> str:
    """Returns a rectangle."""
    return element("rect", style, {"x": x, "y": y, "width": width, "height": height, **attributes})


def path(points: Iterable[tuple[float, float]], style: str = "", **attributes: object) -> str:
    """Returns straight lines from each point to the next."""
    return element("path", style, {"d": "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points), **attributes})


def dots(points: Iterable[tuple[float, float]], style: str = "") -> str:
    """Returns a point at each place; the width of the stroke is its size."""
    return element("path", f"dots {style}", {"d": "".join(f"M{_short(x)} {_short(y)}h0" for x, y in points)})


def arrow(start: tuple[float, float], end: tuple[float, float], style: str = "") -> str:
    """Returns a line with a head at its end."""
    (x, y), (to_x, to_y) = start, end
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    along, across = ((to_x - x) / length * 6, (to_y - y) / length * 6), 0.6
    left, right = (
        (to_x - along[0] - side * across * along[1], to_y - along[1] + side * across * along[0]) for side in (1, -1)
    )
    return path([start, end], style) + path([left, end, right], style)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))
