"""Writes `docs/gallery.md`, `examples/*/README.md` and their pictures: each recipe and example, with its curve.

`python docs/gallery.py` makes them from `docs/gallery.toml` (words) and `docs/gallery.json` (measured).
`python docs/gallery.py --train [NAME ...]` trains first, and measures: the named ones (`recipes.digits`), or those
whose files have changed. All take about ten minutes of a core.
"""

import base64
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from os.path import relpath
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).parents[1]
WORDS, MEASURED = ROOT / "docs/gallery.toml", ROOT / "docs/gallery.json"
PAGE, PICTURES = ROOT / "docs/gallery.md", ROOT / "docs/assets/gallery"
POINTS = 60  # of a curve
WIDTH, HEIGHT, LEFT, TOP = 180, 140, 10, 30  # of a panel, in pixels, and the begin of its curve
STYLE = """svg { --paper: #f6f8fa; --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --curve: #0550ae; }
@media (prefers-color-scheme: dark) {
svg { --paper: #161b22; --ink: #e6edf3; --dim: #9198a1; --line: #3d444d; --curve: #79b8ff; } }
rect { fill: var(--paper); stroke: var(--line); } text { font: 12px system-ui, sans-serif; fill: var(--dim); }
.name { font-weight: 600; fill: var(--ink); } .large { font-size: 30px; fill: var(--curve); }
.end { text-anchor: end; } image { image-rendering: pixelated; }
path { fill: none; stroke: var(--curve); stroke-width: 1.6; stroke-linejoin: round; } circle { fill: var(--curve); }"""


# ---------------------------------------------------------------------------------------------- sources
def words() -> dict[str, Any]:
    """Returns the words of the gallery: `groups`, `recipes`, `examples`, and `others`, which are not trained here."""
    return tomllib.loads(WORDS.read_text(encoding="utf-8"))


def entries() -> dict[str, dict[str, Any]]:
    """Returns the words of each entry by its name, e.g. `recipes.digits`, and the words of its recipe's header."""
    found = {}
    for kind in ("recipes", "examples"):
        for name, entry in words()[kind].items():
            path = f"recipes/{name}.toml" if kind == "recipes" else f"examples/{name}/recipe.toml"
            found[f"{kind}.{name}"] = (header(path) if (ROOT / path).exists() else {}) | {"name": name} | entry
    return found


def header(path: str) -> dict[str, Any]:
    """Returns the description, the commands up to the one that trains, and the expectation of a recipe's header."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: next(n for n, one in enumerate(lines) if not one)]]
    parts = [part.split("\n") for part in "\n".join(comment).split("\n\n")]
    about = " ".join(parts[0])
    expect = next(" ".join(part[place:]) for part in parts for place in [_place(part)] if place is not None)
    names = (path, Path(path).stem)
    commands = []
    for line in comment:
        if found := re.match(r"(ddpforge (?:run|launch) \S+(?: --\S+ \d+)?)", line):
            commands.append(found[1])
            if found[1].split()[2] in names:
                break
    return {"about": about, "expect": re.sub(r".*?Expect: ", "", expect), "commands": commands, "recipe": path}


def _place(part: Sequence[str]) -> int | None:
    return next((number for number, line in enumerate(part) if "Expect: " in line), None)


def digest(name: str, entry: Mapping[str, Any]) -> str:
    """Returns a hash of everything that an entry trains: its commands, recipes without comments, and Python files."""
    folder = ROOT / "examples" / entry["name"] if name.startswith("examples.") else None
    files = set(folder.glob("*.py")) if folder else set()
    for command in entry["commands"]:
        word = command.split()[2]
        files.add(ROOT / (word if word.endswith(".toml") else f"recipes/{word}.toml"))
    parts: list[Any] = [entry["commands"], entry["curves"], entry.get("image")]
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        parts.append([str(file.relative_to(ROOT)), tomllib.loads(text) if file.suffix == ".toml" else text])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def stale() -> list[str]:
    """Returns the names of entries whose files have changed since they were trained, or that were never trained."""
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    return [name for name, entry in entries().items() if known.get(name, {}).get("hash") != digest(name, entry)]


# ---------------------------------------------------------------------------------------------- training
def train(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Trains an entry by its commands in a temporary folder; returns its curves, time and size."""
    import torch

    import ddpforge

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        before, seconds, output = set[Path](), 0.0, ""
        for command in entry["commands"]:
            before = {*Path(folder).rglob("metrics.jsonl")}
            start = _cpu()
            line = [sys.executable, "-m", *shlex.split(command)]
            done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
            seconds, output = _cpu() - start, done.stdout + done.stderr
            if done.returncode:
                sys.exit(f"{command}\n{output}")
        runs = [file.parent for file in sorted({*Path(folder).rglob("metrics.jsonl")} - before)]
        sizes = re.search(r"([\d,]+) parameters", (runs[0] / "logs/rank-0.log").read_text() + output)
        pictures = sorted((runs[0] / "shown" / entry["image"]).glob("*.png")) if "image" in entry else []
        processes = re.search(r"--nproc (\d+)", entry["commands"][-1])
        return {
            "hash": digest(name, entry),
            "version": ddpforge.__version__,
            "torch": torch.__version__.partition("+")[0],
            "cpu_seconds": round(seconds, 1),
            "processes": int(processes[1]) if processes else 1,
            "parameters": int(sizes[1].replace(",", "")) if sizes else None,
            "curves": {key: [_curve(run, key) for run in runs] for key in entry["curves"]},
        } | ({"image": base64.b64encode(pictures[-1].read_bytes()).decode()} if pictures else {})


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _curve(run: Path, key: str) -> list[tuple[int, float]]:
    """Returns at most `POINTS` points of a metric, with the first and the last."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    points = [(row["step"], float(f"{row[key]:.4g}")) for row in rows if key in row]
    if not points:
        sys.exit(f"{run.name} has no metric {key}")
    if len(points) <= POINTS:
        return points
    return [points[round(number * (len(points) - 1) / (POINTS - 1))] for number in range(POINTS)]


# ---------------------------------------------------------------------------------------------- pictures
def drawn(entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns the curves of an entry, and its image, as SVG for light and dark pages."""
    panels = [_image(found["image"], entry["image"])] if "image" in found else []
    panels += [_panel(key, lines) for key, lines in found["curves"].items()]
    width, title = WIDTH * len(panels), escape(described(entry, found))
    parts = [f'<g transform="translate({WIDTH * place} 0)">{panel}</g>' for place, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'role="img" aria-label="{title}">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{HEIGHT - 1}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def described(entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns a picture's contents in words."""
    parts = ["generated samples"] if "image" in found else []
    for key, lines in found["curves"].items():
        ends = ", ".join(
            f"{number(line[0][1])} to {number(line[-1][1])}" if len(line) > 1 else number(line[0][1]) for line in lines
        )
        parts.append(f"{key} {'from ' * (len(lines[0]) > 1)}{ends} in {lines[0][-1][0]} steps")
    return f"{entry['title']}: {'; '.join(parts)}"


def _image(data: str, name: str) -> str:
    side = HEIGHT - TOP - 10
    return (
        f'<text class="name" x="{LEFT}" y="18">{escape(name)}</text>'
        f'<image x="{LEFT}" y="{TOP - 4}" width="{side + 4}" height="{side + 4}" href="data:image/png;base64,{data}"/>'
    )


def _panel(key: str, lines: Sequence[Sequence[Sequence[float]]]) -> str:
    """Returns a metric's curves with its name, range, first and last value."""
    values = [value for line in lines for _, value in line]
    least, most, last = min(values), max(values), max(line[-1][0] for line in lines)
    width, height = WIDTH - 2 * LEFT, HEIGHT - TOP - 26

    def at(step: float, value: float) -> str:
        share = (value - least) / (most - least) if most > least else 0.5
        return f"{LEFT + width * step / last:.1f} {TOP + height * (1 - share):.1f}"

    parts = [f'<text class="name" x="{LEFT}" y="18">{escape(key)}</text>']
    if [len(line) for line in lines] == [1]:  # evaluated once
        parts.append(f'<text class="large" x="{LEFT}" y="{TOP + height / 2 + 12:g}">{number(least)}</text>')
        return parts[0] + parts[1] + f'<text x="{LEFT}" y="{HEIGHT - 8}">after {last:,} steps</text>'
    for line in lines:
        places = [at(*point) for point in line]
        parts.append(f'<path d="M{" L".join(places)}"/>')
        x, y = places[-1].split()
        parts.append(f'<circle cx="{x}" cy="{y}" r="3"/>')
    foot = f"{number(lines[0][0][1])} → {number(lines[0][-1][1])}" if len(lines) == 1 else f"{len(lines)} runs"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{foot}</text>')
    parts.append(f'<text class="end" x="{WIDTH - LEFT}" y="{HEIGHT - 8}">{last:,} steps</text>')
    return "".join(parts)


def number(value: float) -> str:
    """Returns a number with three digits."""
    return f"{value:.3g}"


# ---------------------------------------------------------------------------------------------- pages
def page(measured: Mapping[str, Any]) -> str:
    """Returns the gallery as Markdown."""
    found, known = entries(), words()
    parts = [INTRODUCTION]
    for group, title in known["groups"].items():
        parts.append(f"## {title}")
        for name, entry in found.items():
            if entry["group"] == group:
                parts.append(section(name, entry, measured[name], PAGE, "###"))
    rows = [f"| {link(PAGE, f'recipes/{name}.toml', name)} | {why} |" for name, why in known["others"].items()]
    parts.append("## Recipes without a curve here\n\n| Recipe | Reason |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Gallery

*Also called: examples, model zoo, showcase, samples, demos, sample projects, starter templates, what can it train.*

```sh
ddpforge recipes ls
ddpforge run digits
```

Every recipe and example that trains on a laptop without a download, with its curve. Times are seconds of one core,
with the start of Python. In Python instead of a recipe: [a notebook](../examples/notebook.ipynb), and [a script for
each kind of user](../examples/scripts/README.md). <!-- made by: python docs/gallery.py -->"""


def section(name: str, entry: Mapping[str, Any], found: Mapping[str, Any], place: Path, head: str) -> str:
    """Returns an entry of the gallery: picture, words, figures, command, and values to change."""
    kind, _, short = name.partition(".")
    source = f"examples/{short}/README.md" if kind == "examples" else entry["recipe"]
    parts = [
        f"{head} {entry['title']}",
        picture(name, entry, found, place),
        wrapped(entry["about"]),
        f"{facts(found)} · {link(place, source, f'examples/{short}' if kind == 'examples' else short)}",
        f"```sh\n{chr(10).join(entry['commands'])}\n```",
        changes(entry, "Change first:"),
    ]
    return "\n\n".join(parts)


def readme(name: str, entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns the README of an example."""
    place = ROOT / "examples" / entry["name"] / "README.md"
    rows = [("recipe.toml", "the recipe")] if (place.parent / "recipe.toml").exists() else []
    rows += entry["files"].items()
    guides = " · ".join(link(place, guide, _title(guide)) for guide in entry["guide"])
    parts = [
        f"# {entry['title']}",
        wrapped(entry["about"]),
        f"```sh\n{chr(10).join(entry['commands'])}\n```",
        picture(name, entry, found, place),
        facts(found),
        wrapped(f"Expect: {entry['expect']}"),
        "| File | Contents |\n| --- | --- |\n" + "\n".join(f"| [{file}]({file}) | {text} |" for file, text in rows),
        f"## What to change\n\n{changes(entry, '')}",
        f"More: {guides} · {link(place, 'docs/gallery.md', 'Gallery')}",
        "<!-- made by: python docs/gallery.py -->",
    ]
    return "\n\n".join(parts) + "\n"


def picture(name: str, entry: Mapping[str, Any], found: Mapping[str, Any], place: Path) -> str:
    """Returns the picture's Markdown."""
    return f"![{described(entry, found)}]({relpath(PICTURES / f'{name}.svg', place.parent)})"


def facts(found: Mapping[str, Any]) -> str:
    """Returns the result, size and time."""
    key, lines = list(found["curves"].items())[-1]
    ends = [line[-1][1] for line in lines]
    result = number(ends[0]) if len(ends) == 1 else f"{number(min(ends))} to {number(max(ends))}"
    processes = found["processes"]
    parts = [
        f"`{key}` {result}",
        *([f"{found['parameters']:,} parameters"] if found["parameters"] else []),
        f"{found['cpu_seconds']:.0f} seconds of a core, in {processes} process{'es' * (processes > 1)}",
    ]
    return " · ".join(parts)


def changes(entry: Mapping[str, Any], title: str) -> str:
    """Returns the values to try first as a list."""
    lines = [fill(f"- `{value}`: {reason}", 120, subsequent_indent="  ", **WHOLE) for value, reason in entry["change"]]
    return "\n".join([*([f"{title}\n"] if title else []), *lines])


WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def wrapped(text: str) -> str:
    """Returns a paragraph in lines of 120 columns."""
    return fill(text, 120, **WHOLE)


def link(place: Path, target: str, text: str) -> str:
    """Returns a link from a page to a file of the repository."""
    return f"[{text}]({relpath(ROOT / target, place.parent)})"


def _title(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def files(measured: Mapping[str, Any]) -> dict[Path, str]:
    """Returns the contents of every generated file."""
    found = {PAGE: page(measured)}
    for name, entry in entries().items():
        found[PICTURES / f"{name}.svg"] = drawn(entry, measured[name])
        if name.startswith("examples."):
            found[ROOT / "examples" / entry["name"] / "README.md"] = readme(name, entry, measured[name])
    return found


def main(arguments: Sequence[str]) -> None:
    """Trains the named entries after `--train`, then writes all files."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    if arguments[:1] == ["--train"]:
        known = entries()
        for name in arguments[1:] or stale():
            print(name, flush=True)
            measured[name] = train(name, known[name])
            kept = {one: measured[one] for one in known if one in measured}
            MEASURED.write_text(_json(kept), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for path, text in files(measured).items():
        path.write_text(text, encoding="utf-8")


def _json(measured: Mapping[str, Any]) -> str:
    """Returns JSON with a line for each curve."""
    text = json.dumps(measured, indent=1)
    return re.sub(r"\[\s+(?=[\[\d-])|(?<=[\d,\]])\s+(?=[\]\[\d-])", lambda one: one[0].strip(), text) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
