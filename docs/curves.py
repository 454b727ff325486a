"""Trains docs/curves.toml under five strategies on 1, 2 and 4 ranks, and draws the loss curves, one on the other.

`python docs/curves.py` runs `ddpforge parity` for about three minutes on two cores, and writes curves.json and
curves.svg in docs/assets. `python docs/curves.py --draw` only draws the numbers of curves.json again.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import svg

ROOT = Path(__file__).parents[1]
DATA, PICTURE = ROOT / "docs/assets/curves.json", ROOT / "docs/assets/curves.svg"
STEPS = 60
# Strategies as arguments of `ddpforge parity`: the name in the picture, and its color.
STRATEGIES = {
    "ddp": ("DDP", "one"),
    "fsdp": ("FSDP2", "two"),
    "deepspeed:3": ("DeepSpeed ZeRO-3", "three"),
    "fsdp:tensor=2": ("tensor parallel", "four"),
    "pipeline": ("pipeline", "five"),
}
COMMAND = (
    *("parity", "docs/curves.toml", "--steps", str(STEPS), "--strategies"),
    ",".join(["single@1", *(f"{name}@{ranks}" for name in STRATEGIES for ranks in (2, 4))]),
)
LEFT, RIGHT, WIDTH, HEIGHT = 62, 544, 560, 580
LOSS, DIFFERENCE = (46, 256), (378, 528)  # top and bottom of the two panels
DECADES = (-9, -4)  # of the relative difference; 0 is drawn at the lower edge
DASH = 6
STYLE = "\n".join(
    [
        ".curve { stroke-width: 3; } .all { stroke: var(--faint); stroke-width: 9; stroke-linejoin: round; }",
        ".limit { stroke: var(--ink); stroke-dasharray: 5 4; } .largest { stroke: var(--ink); stroke-width: 1.5; }",
        ".grid { stroke: var(--faint); }",
        ".dots { stroke-width: 3.5; }",
        *(f".{name} {{ stroke: var(--{name}); }}" for _, name in STRATEGIES.values()),
    ]
)

Run = Mapping[str, Any]


def trained() -> dict[str, Any]:
    """Trains all runs, and returns the loss of each step of each run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ddpforge", *COMMAND, "--json"]
    report = json.loads(subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    curves = {run["strategy"]: run["quantities"]["train/loss"]["points"] for run in report["runs"][1:]}
    reference = [point["reference"] for point in next(iter(curves.values()))]
    return {
        "command": f"ddpforge {' '.join(COMMAND)}",
        "tolerance": report["measured"]["train/loss"],
        "runs": [
            {"strategy": name.partition("@")[0], "ranks": int(name.partition("@")[2]), "loss": loss}
            for name, loss in {
                report["reference"]: reference,
                **{name: [point["value"] for point in points] for name, points in curves.items()},
            }.items()
        ],
    }


def differences(run: Run, reference: Run) -> list[float]:
    """Returns the relative difference of the loss at each step."""
    pairs = zip(run["loss"], reference["loss"], strict=True)
    return [abs(mine - theirs) / abs(theirs) for mine, theirs in pairs]


def drawn(data: Mapping[str, Any]) -> str:
    """Returns the picture of the numbers in curves.json."""
    reference, *runs = data["runs"]
    apart = [differences(run, reference) for run in runs]
    largest = max(chain(*apart))
    claim = f"{len(runs) + 1} runs of one recipe differ by at most {power(largest)}"
    return svg.document(
        WIDTH,
        HEIGHT,
        [
            *_losses(reference, runs),
            *_legend(),
            *_differences(apart, data["tolerance"], runs),
            svg.text((LEFT + RIGHT) / 2, HEIGHT - 14, "step", "small middle"),
        ],
        title="Loss curves of one recipe on 1, 2 and 4 ranks under five strategies",
        description=f"{claim}, relative to one process: {', '.join(name for name, _ in STRATEGIES.values())}, each on "
        "2 and 4 ranks.",
        style=svg.common(STYLE),
    )


def _losses(reference: Run, runs: Sequence[Run]) -> list[str]:
    """Returns the upper panel. The dashes of the runs take turns, so that every run is seen on the common curve."""
    losses = reference["loss"]
    low, high = math.floor(min(losses)), math.ceil(max(losses))
    top, bottom = LOSS

    def points(run: Run) -> list[tuple[float, float]]:
        return [
            (_across(step), bottom - (loss - low) / (high - low) * (bottom - top))
            for step, loss in enumerate(run["loss"])
        ]

    parts = [
        svg.text(16, 28, "loss", "bold"),
        svg.text(62, 28, "of one process, and of five strategies on 2 and on 4 ranks", "small soft"),
    ]
    for value in range(low, high + 1):
        y = bottom - (value - low) / (high - low) * (bottom - top)
        parts += _grid_line(y, str(value))
    parts += [*_step_numbers(bottom), svg.path(points(reference), "all")]
    turns = DASH * len(runs)
    return parts + [
        svg.path(
            points(run),
            f"curve {STRATEGIES[run['strategy']][1]}",
            stroke_dasharray=f"{DASH} {turns - DASH}",
            stroke_dashoffset=-DASH * number,
        )
        for number, run in enumerate(runs)
    ]


def _differences(apart: Sequence[Sequence[float]], tolerance: float, runs: Sequence[Run]) -> list[str]:
    """Returns the lower panel: a point for each run and step, and a line through the largest of each step."""
    top, bottom = DIFFERENCE

    def height(value: float) -> float:
        power = math.log10(value) if value else DECADES[0]
        return bottom - (max(DECADES[0], power) - DECADES[0]) / (DECADES[1] - DECADES[0]) * (bottom - top)

    parts = [svg.text(16, top - 20, "relative difference from one process", "bold")]
    for decade in range(DECADES[0], DECADES[1] + 1):
        name = f"1e{decade}" if decade > DECADES[0] else "0"
        parts += _grid_line(height(10.0**decade), name)
    parts += _step_numbers(bottom)
    for run, values in zip(runs, apart, strict=True):
        points = [(_across(step), height(value)) for step, value in enumerate(values)]
        parts.append(svg.dots(points, STRATEGIES[run["strategy"]][1]))
    most = [max(values) for values in zip(*apart, strict=True)]
    note = f"largest of all runs: {power(max(most))}, at step {most.index(max(most)) + 1}"
    return [
        *parts,
        svg.path([(_across(step), height(value)) for step, value in enumerate(most)], "largest"),
        svg.path([(LEFT, height(tolerance)), (RIGHT, height(tolerance))], "limit"),
        svg.text(RIGHT - 4, height(tolerance) - 6, f"tolerance: {power(tolerance)}", "small end"),
        svg.text(RIGHT - 4, height(max(most)) - 12, note, "small end"),
    ]


def _legend() -> list[str]:
    names = [("one process", "all"), *((name, f"curve {color}") for name, color in STRATEGIES.values())]
    parts = []
    for number, (name, style) in enumerate(names):
        x, y = LEFT + number % 3 * 162, LOSS[1] + 44 + number // 3 * 20
        parts += [svg.path([(x, y - 5), (x + 18, y - 5)], style), svg.text(x + 25, y, name, "small")]
    return parts


def _across(step: int) -> float:
    return LEFT + step / (STEPS - 1) * (RIGHT - LEFT)


def _grid_line(y: float, name: str) -> list[str]:
    return [svg.path([(LEFT, y), (RIGHT, y)], "grid"), svg.text(LEFT - 8, y + 5, name, "small end")]


def _step_numbers(bottom: float) -> list[str]:
    return [
        svg.text(_across(step - 1), bottom + 18, str(step), "small middle") for step in (1, *range(10, STEPS + 1, 10))
    ]


def power(value: float) -> str:
    """Returns a number with one digit, such as 7e-8."""
    return f"{value:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        lines = json.dumps(trained(), indent=1).replace(",\n    ", ", ")  # a line for each run
        DATA.write_text(f"{lines}\n", encoding="utf-8")
    PICTURE.write_text(drawn(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
