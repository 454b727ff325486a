"""Draws a run in a terminal as `docs/assets/run.svg`, the picture of the README.

`python docs/picture.py [PERCENT]` trains `digits` in a pseudo-terminal, and draws its screen when the progress bar has
reached PERCENT of the steps (default: 70).
"""

import os
import pty
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from fcntl import ioctl
from html import escape
from itertools import groupby
from pathlib import Path
from subprocess import Popen
from termios import TIOCSWINSZ

ROOT = Path(__file__).parents[1]
COMMAND = ("run", "digits")
COLUMNS, LINES = 100, 50
WIDTH, HEIGHT = 8.4, 20  # of a character, in pixels
NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
LIGHT = ("#1b1f24", "#b3202c", "#116329", "#7d4e00", "#0550ae", "#8a2b80", "#0b6a75", "#57606a")
DARK = ("#8b949e", "#ff8f8f", "#56d364", "#e3b341", "#79b8ff", "#e08ad6", "#4fd1d9", "#e6edf3")
STYLE = f"""svg {{ --paper: #f6f8fa; --ink: #1b1f24; --line: #d0d7de; LIGHT }}
@media (prefers-color-scheme: dark) {{ svg {{ --paper: #161b22; --ink: #e6edf3; --line: #3d444d; DARK }} }}
rect {{ fill: var(--paper); stroke: var(--line); }}
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: var(--ink); }}
.bold {{ font-weight: 700; }} .dim {{ opacity: .65; }}
{" ".join(f".{name} {{ fill: var(--{name}); }}" for name in NAMES)}"""

Cell = tuple[str, str]  # a character, and its classes of style


def output() -> str:
    """Returns everything that the run writes to its terminal."""
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    found = b""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ddpforge", *COMMAND]
        with Popen(command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its) as run:
            os.close(its)
            try:
                while part := os.read(ours, 65536):
                    found += part
            except OSError:  # the run has closed its end
                pass
        if run.returncode:
            sys.exit(found.decode())
    os.close(ours)
    return found.decode()


def screens(text: str) -> Iterator[list[list[Cell]]]:
    """Yields the screen before each return to the start of a line, and at the end."""
    screen: list[list[Cell]] = [[]]
    row, style = 0, ""
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r\n|\r|\n|[^\x1b\r\n]+", text):
        if token == "\r":
            yield [line.copy() for line in screen]
        elif token.endswith("\n"):
            row += 1
            screen += [[]] * (row == len(screen))
        elif not token.startswith("\x1b"):
            screen[row] = screen[row] + [(letter, style) for letter in token]
        elif token.endswith("m"):
            style = styled(style, token[2:-1])
        elif token.endswith("A"):
            row -= int(token[2:-1] or 1)
        elif token.endswith("K"):
            screen[row] = []
    yield screen


def styled(style: str, codes: str) -> str:
    """Returns the classes of style after an escape sequence with these codes."""
    classes = set(style.split())
    for code in (int(code or 0) for code in codes.split(";")):
        if code in (0, 39):
            classes -= set(NAMES) if code else classes
        elif code in (1, 2):
            classes.add(("bold", "dim")[code - 1])
        elif code == 22:
            classes -= {"bold", "dim"}
        elif code // 10 in (3, 9) and code % 10 < 8:
            classes = classes - set(NAMES) | {NAMES[code % 10]}
    return " ".join(sorted(classes))


def chosen(text: str, percent: int) -> list[list[Cell]]:
    """Returns the last screen with a progress bar that has not passed `percent`, and is as new as the evaluations."""
    found = None
    for screen in screens(text):
        words = "\n".join("".join(letter for letter, _ in line) for line in screen)
        bars, evaluated = re.findall(r"(\d+)/\d+ +(\d+)%", words), re.findall(r"eval step +(\d+)", words)
        # The bar is drawn once a second; lines of evaluations come at once.
        if bars and int(bars[-1][1]) <= percent and int(bars[-1][0]) >= int(evaluated[-1] if evaluated else 0):
            found = screen
    if found is None:
        sys.exit(f"no progress bar in:\n{text}")
    return found


def drawn(screen: list[list[Cell]]) -> str:
    """Returns the screen as SVG, for light and dark pages."""
    command = [(letter, "bold") for letter in f"$ ddpforge {' '.join(COMMAND)}"]
    lines = [command, *screen]
    while not any(letter.strip() for letter, _ in lines[-1]):
        lines.pop()
    texts = []
    for number, line in enumerate(lines):
        column = 0
        for style, cells in groupby(line, key=lambda cell: cell[1]):
            letters = "".join(letter for letter, _ in cells)
            place = f'x="{12 + column * WIDTH:g}" y="{28 + number * HEIGHT}" textLength="{len(letters) * WIDTH:g}"'
            if letters.strip():
                texts.append(f'<text {place} class="{style}" xml:space="preserve">{escape(letters)}</text>')
            column += len(letters)
    width, height = 24 + COLUMNS * WIDTH, 24 + HEIGHT * len(lines)
    colors = {
        mode: " ".join(f"--{name}: {color};" for name, color in zip(NAMES, values, strict=True))
        for mode, values in (("light", LIGHT), ("dark", DARK))
    }
    style = STYLE.replace("LIGHT", colors["light"]).replace("DARK", colors["dark"])
    title = f"A terminal with the output of `ddpforge {' '.join(COMMAND)}`: settings, evaluations and a progress bar"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{style}</style>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1}" rx="6"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    percent = int(sys.argv[1]) if len(sys.argv) > 1 else 70
    (ROOT / "docs" / "assets" / "run.svg").write_text(drawn(chosen(output(), percent)), encoding="utf-8")
