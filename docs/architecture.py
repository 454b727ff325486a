"""Writes the figures of `docs/concepts/architecture.md` and draws its picture, `docs/assets/architecture.svg`.

`python docs/architecture.py` counts the files and lines of kernel and rings (tests/rings.toml), reads the entry points
of pyproject.toml, and trains a few steps to record the path of one.
"""

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs/concepts/architecture.md", ROOT / "docs/assets/architecture.svg"
sys.path.insert(0, str(ROOT / "tests"))
# Installed plugins are not part of this documentation.
os.environ.setdefault("DDPFORGE_DISABLE_PLUGINS", ",".join(path.name for path in (ROOT / "plugins").glob("*")))

import svg  # noqa: E402
from support.architecture import HOLDS, path_of_a_step, ring, sizes  # noqa: E402

KERNEL = "the order of a run, the step, data, ranks, checkpoints, run folders; single-device and DDP strategies"
ORDER = ("kernel", "features", "guard", "launch", "product", "tools", "recipe")
# Place of each ring: x, y, width and height in pixels.
PLACES = {
    "tools": (10, 10, 740, 84),
    "product": (10, 110, 740, 84),
    "features": (10, 210, 220, 300),
    "kernel": (260, 210, 240, 170),
    "recipe": (260, 400, 240, 110),
    "guard": (530, 210, 220, 170),
    "launch": (530, 400, 220, 110),
}
LETTER = 7.3  # width of a letter, in pixels
STYLE = """.ring { fill: none; stroke: var(--line); } .kernel { stroke: var(--one); stroke-width: 2; }
text { font-size: 13px; } .name { font-weight: 700; font-size: 16px; } .hook { fill: var(--one); }"""


def hooks() -> dict[str, list[str]]:
    """Returns the entry-point groups of each ring; those of components are one."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    found: dict[str, list[str]] = {name: [] for name in ORDER}
    for group, points in groups.items():
        kind = group.removeprefix("ddpforge.")
        if kind not in ("check", "environment", "feature", "format", "observer"):
            continue
        for name in dict.fromkeys(ring(value.partition(":")[0]) for value in points.values()):
            found[name].append(group)
    found["product"] += ["ddpforge.command", "groups of components"]
    found["tools"].append("ddpforge.api")
    return found


def figures() -> dict[str, str]:
    """Returns the size of each ring, rounded: a commit changes few of them."""
    return {name: f"{files} files, {round(lines, -2):,} lines" for name, (files, lines) in sizes().items()}


def table() -> str:
    """Returns the rings with their sizes, hooks and contents, as Markdown."""
    given, holds = hooks(), {"kernel": KERNEL, **HOLDS}
    rows = [
        (name, figures()[name], ", ".join(f"`{group}`" if " " not in group else group for group in given[name]))
        for name in ORDER
    ]
    lines = [f"| {name} | {size} | {groups or 'no hook'} | {holds[name]} |" for name, size, groups in rows]
    return "\n".join(["| Ring | Size | Reached by | Contents |", "| --- | --- | --- | --- |", *lines])


def step(calls: Sequence[tuple[int, str]]) -> str:
    """Returns the path of a step as Markdown: each call below its caller."""
    files, frames = {name.partition(":")[0] for _, name in calls}, max(depth for depth, _ in calls)
    path = "\n".join(f"{'  ' * depth}{name}" for depth, name in calls)
    return f"{len(calls)} calls in {len(files)} files, at most {frames} deep:\n\n```text\n{path}\n```"


def written(text: str, blocks: dict[str, str]) -> str:
    """Returns the text of a page with these generated blocks."""
    block = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[3]}", text)


def drawn() -> str:
    """Returns kernel and rings as SVG, for light and dark pages."""
    given, holds, size = hooks(), {"kernel": KERNEL, **HOLDS}, figures()
    parts = []
    for name, (x, y, width, height) in PLACES.items():
        letters = int((width - 24) / LETTER)
        lines = [("name", name), ("", size[name])]
        lines += [("hook", line) for group in [", ".join(given[name])] for line in wrap(group, letters)]
        lines += [("", line) for line in wrap(holds[name], letters)]
        parts.append(svg.rect(x, y, width, height, "ring kernel" if name == "kernel" else "ring", rx=8))
        parts += [svg.text(x + 12, y + 24 + 18 * number, line, style) for number, (style, line) in enumerate(lines)]
    return svg.document(
        760,
        520,
        parts,
        title="Kernel and rings of ddpforge",
        description="Files and lines of each: " + "; ".join(f"{name}, {size[name]}" for name in ORDER),
        style=svg.common(STYLE),
    )


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        page = written(page, {"rings": table(), "step": step(path_of_a_step(Path(folder)))})
    PAGE.write_text(page, encoding="utf-8")
    PICTURE.write_text(drawn(), encoding="utf-8")
