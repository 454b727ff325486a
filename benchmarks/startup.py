"""What ddpforge's commands cost before they do anything: CPU and wall time over that of an empty click command.

    python benchmarks/startup.py
    python benchmarks/startup.py --distributions 1000 --plugins 100

Among the installed distributions are as many as `--distributions` that stand in a folder of their own, `--plugins` of
them with a component of ddpforge; those of the environment come on top. The three commands take turns in fresh
processes; printed are medians, in milliseconds, and the difference from the empty command.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EMPTY = "import click\n\n\n@click.command()\ndef main():\n    pass\n\n\nmain()\n"
OURS = "from ddpforge.cli import main; main()"
METADATA = (
    "Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n"
    + "Requires-Dist: another-library>=1\n" * 40
    + "\n"
    + "text\n" * 500
)


def install(folder: Path, distributions: int, plugins: int) -> None:
    """Writes metadata as pip leaves it, with entry points in every third distribution."""
    for number in range(distributions):
        name = f"made_up_{number}"
        home = folder / f"{name}-1.0.dist-info"
        home.mkdir()
        (home / "METADATA").write_text(METADATA.format(name=name))
        (home / "RECORD").write_text("".join(f"{name}/module_{n}.py,sha256=0,1\n" for n in range(200)))
        if number < plugins:
            (home / "entry_points.txt").write_text(f"[ddpforge.model]\n{name} = {name}:Model\n")
        elif number % 3 == 0:
            (home / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")


def cost(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distributions", type=int, default=100)
    parser.add_argument("--plugins", type=int, default=10, help="how many of them have a component")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()

    commands = {
        "empty click": [sys.executable, "-c", EMPTY],
        "--help": [sys.executable, "-c", OURS, "--help"],
        "plugins list": [sys.executable, "-c", OURS, "plugins", "list"],
    }
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder), options.distributions, options.plugins)
        environment = os.environ | {"PYTHONPATH": folder}
        rounds = [{name: cost(each, environment) for name, each in commands.items()} for _ in range(options.repeats)]

    print(f"{'':14} {'CPU ms':>8} {'more':>7} {'wall ms':>8} {'more':>7}")
    empty = [statistics.median(each["empty click"][clock] for each in rounds) * 1e3 for clock in (0, 1)]
    for name in commands:
        found = [statistics.median(each[name][clock] for each in rounds) * 1e3 for clock in (0, 1)]
        columns = [f"{one:8.1f} {one - base:7.1f}" for one, base in zip(found, empty, strict=True)]
        print(f"{name:14}", *columns)


if __name__ == "__main__":
    main()
