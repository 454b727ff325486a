"""Draws commands in a terminal, and a report in a browser, into docs/assets: `python docs/picture.py [NAME…]`.

- `run` trains `digits` in a pseudo-terminal, and draws its screen at 70 % of the steps, for the README;
- `plan` draws the table of `ddpforge plan`;
- `report` trains two runs and takes pictures of their report, on a light and on a dark page, with Chromium.
"""

import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from subprocess import Popen
from termios import TIOCSWINSZ

import svg

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs/assets"
RUN = ("run", "digits")
PLAN = ("plan", "gpt-1-node", "--ranks", "8", "--device", "h100", "--strategies", "ddp,fsdp,deepspeed:3,pipeline")
REPORTED = (RUN, ("run", "digits", "name=small-rate", "optimizer.lr=3e-4"))  # the runs of the report
LINES = 50
WIDTH, HEIGHT = 8.4, 20  # of a character, in pixels
PALETTE = {
    "paper": svg.PALETTE["paper"],
    "faint": svg.PALETTE["faint"],
    "ink": svg.PALETTE["ink"],
    "black": ("#1b1f24", "#8b949e"),
    "red": ("#b3202c", "#ff8f8f"),
    "green": ("#116329", "#56d364"),
    "yellow": ("#7d4e00", "#e3b341"),
    "blue": ("#0550ae", "#79b8ff"),
    "magenta": ("#8a2b80", "#e08ad6"),
    "cyan": ("#0b6a75", "#4fd1d9"),
    "white": ("#57606a", "#e6edf3"),
}
NAMES = tuple(PALETTE)[3:]
STYLE = f"""{svg.themed(PALETTE)}
.paper {{ fill: var(--paper); stroke: var(--faint); }} .bold {{ font-weight: 700; }} .dim {{ opacity: .65; }}
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: var(--ink); }}
{" ".join(f".{name} {{ fill: var(--{name}); }}" for name in NAMES)}"""

Cell = tuple[str, str]  # a character, and its classes of style


def output(command: Sequence[str], columns: int = 100) -> str:
    """Returns everything that a command of ddpforge writes to its terminal."""
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    found = b""
    with tempfile.TemporaryDirectory() as folder:
        started = [sys.executable, "-m", "ddpforge", *command]
        with Popen(started, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its) as run:
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


def table(text: str) -> list[list[Cell]]:
    """Returns the output of a plan up to the details of each strategy."""
    *_, screen = screens(text)
    ends = [number for number, line in enumerate(screen) if not "".join(letter for letter, _ in line).strip()]
    return screen[: ends[1]]


def drawn(screen: list[list[Cell]], command: Sequence[str], about: str) -> str:
    """Returns the screen as SVG, for light and dark pages."""
    typed = [(letter, "bold") for letter in f"$ ddpforge {' '.join(command)}"]
    lines = [typed, *screen]
    while not any(letter.strip() for letter, _ in lines[-1]):
        lines.pop()
    texts = []
    for number, line in enumerate(lines):
        column = 0
        for style, cells in groupby(line, key=lambda cell: cell[1]):
            letters = "".join(letter for letter, _ in cells)
            # The width is set because fonts differ; the attribute keeps spaces.
            fixed = {"textLength": len(letters) * WIDTH, "xml:space": "preserve"}
            if letters.strip():
                texts.append(svg.text(12 + column * WIDTH, 28 + number * HEIGHT, letters, style, **fixed))
            column += len(letters)
    return svg.document(
        24 + max(map(len, lines)) * WIDTH,
        24 + HEIGHT * len(lines),
        texts,
        title=f"A terminal with the output of `ddpforge {' '.join(command)}`",
        description=about,
        style=STYLE,
    )


def photographed(page: Path) -> dict[str, bytes]:
    """Returns pictures of a report at the top of its page, as WebP, on a light and on a dark page."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            view = browser.new_page(viewport={"width": 1000, "height": 850}, color_scheme=scheme)
            view.goto(page.as_uri(), wait_until="load")
            picture = io.BytesIO()
            Image.open(io.BytesIO(view.screenshot())).save(picture, "WEBP", quality=80, method=6)
            found[scheme] = picture.getvalue()
    return found


def report() -> None:
    """Writes the pictures of a report."""
    with tempfile.TemporaryDirectory() as folder:
        for command in (*REPORTED, ("report", "digits", "small-rate")):
            started = [sys.executable, "-m", "ddpforge", *command]
            subprocess.run(started, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        for scheme, picture in photographed(Path(folder, "report.html")).items():
            (ASSETS / f"report-{scheme}.webp").write_bytes(picture)


def run() -> None:
    """Writes the picture of a run."""
    drawing = drawn(chosen(output(RUN), 70), RUN, "Settings, evaluations and a progress bar.")
    (ASSETS / "run.svg").write_text(drawing, encoding="utf-8")


def plan() -> None:
    """Writes the picture of a plan."""
    drawing = drawn(table(output(PLAN, 160)), PLAN, "Memory of a rank and time of a step under each strategy.")
    (ASSETS / "plan.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("run", "plan", "report"):
        {"run": run, "plan": plan, "report": report}[name]()
