"""Runs tests in one environment per row of tests/versions.toml: each supported version of torch, Python and libraries.

    make test-versions                          all rows
    python tests/versions.py --only torch-2.11  one row; --only may be repeated
    python tests/versions.py --all              all fast tests, instead of the table's part of them
    python tests/versions.py --keep             keeps the environments (2 to 6 GB each); otherwise each is removed
    python tests/versions.py --pins torch-2.11  prints the pins of a row, one per line: a constraints file for pip

Slow tests never run. `--tests PATH` runs other files or folders. A plugin's tests run in its folder. uv makes the
environment if it is installed, else venv and pip. The table on the screen is also in build/versions/results.json, where
a row keeps its result until it runs again. The exit code is 1 if a test failed, or if a row did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/versions.toml"
OUT = ROOT / "build/versions"
SHOWN = ("torch", "torchvision", "torchao", "accelerate", "deepspeed", "transformers")
_VERSIONS = """
import json, platform, sys
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))
"""


@dataclass(frozen=True)
class Row:
    """A row of tests/versions.toml."""

    name: str
    python: str
    pins: tuple[str, ...]
    note: str = ""

    def pin(self, package: str) -> str | None:
        """Returns the version specifier of a package, without spaces, e.g. "==2.11.*"; None if it has none."""
        found = (pin.removeprefix(package) for pin in self.pins if pin.startswith(package))
        return next((rest for rest in found if rest[0] in "<>=~!"), None)


@dataclass(frozen=True)
class Result:
    """The result of a row; `not_run` has the reason if its tests did not run."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: int = 0
    tests: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    not_run: str = ""

    @property
    def good(self) -> bool:
        """True if tests ran and none failed."""
        return not self.not_run and not self.failed and self.passed > 0


class NotRunError(Exception):
    """The tests of a row could not run; the message has the reason."""


def rows() -> list[Row]:
    """Returns the rows of the table, in its order."""
    return [Row(**row | {"pins": tuple(row["pins"])}) for row in table()["row"]]


def table() -> dict[str, Any]:
    """Returns tests/versions.toml: `tests`, `row` and `needs`."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------ environments
def make_environment(row: Row, place: Path) -> Path:
    """Makes an environment with the row's versions, the package and its plugins; returns its Python.

    Raises:
        NotRunError: The row's Python is missing, or the versions cannot be installed.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    plugins = (f"./{path.relative_to(ROOT)}" for path in sorted((ROOT / "plugins").glob("*/pyproject.toml")))
    wanted = [*row.pins, "--editable", ".[dev]"]
    for plugin in plugins:
        wanted += ["--editable", str(Path(plugin).parent)]
    python, base = place / "bin/python", installed_python(row.python)
    if uv := shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])):
        _call([uv, "venv", "--quiet", "--python", base or row.python, str(place)])
        _call([uv, "pip", "install", "--quiet", "--python", str(python), *wanted])
        return python
    if base is None:
        raise NotRunError(f"no Python {row.python}: install it, or `pip install uv`, which downloads it")
    _call([base, "-m", "venv", str(place)])
    # A constraint of the machine's own pip configuration could exclude the row's versions.
    pins = place / "pins.txt"
    pins.write_text("\n".join(row.pins))
    _call([str(python), "-m", "pip", "install", "--quiet", *wanted], PIP_CONSTRAINT=str(pins))
    return python


def installed_python(version: str) -> str | None:
    """Returns the path of a Python of this version, e.g. "3.12", on PATH or of pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    # A shim of pyenv is on PATH for each installed version, but runs only the chosen ones.
    works = (path for path in found if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode)
    return next(works, None)


def _call(command: Sequence[str], **environment: str) -> None:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunError(f"`{' '.join(command[:3])} …`: {(done.stderr or done.stdout).strip()[-2000:]}")


# ------------------------------------------------------------------------------------------------ tests
def run_tests(row: Row, python: Path, tests: Sequence[str], processes: int) -> Result:
    """Runs the tests in an environment, and returns the result.

    Raises:
        NotRunError: pytest did not run to its end.
    """
    begun = time.monotonic()
    reports = []
    for folder, paths in by_folder(tests).items():
        report = OUT / f"{row.name}-{folder.name}.xml"
        report.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "-m", "not slow and not full", "-p", "no:cacheprovider", "--tb=short"]
        command += [f"--junitxml={report}", *paths]
        if processes > 1 and folder == ROOT:
            command += [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"]
        # Commands of the environment come first: tests start `ddpforge` and `torchrun` by name.
        path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
        with report.with_suffix(".log").open("w") as log:
            subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, stdout=log, stderr=log, check=False)
        if not report.exists():
            raise NotRunError(f"pytest ended without a report: {log.name}")
        reports.append(report)
    return counted(row.name, reports, round(time.monotonic() - begun), versions(python), tests)


def by_folder(tests: Sequence[str]) -> dict[Path, list[str]]:
    """Returns the tests by the folder in which pytest runs: a plugin's own folder, else the clone."""
    found: dict[Path, list[str]] = {}
    for test in tests or [""]:
        parts = Path(test).parts
        folder = ROOT / "plugins" / parts[1] if parts[:1] == ("plugins",) else ROOT
        paths = found.setdefault(folder, [])
        if test and ROOT / test != folder:
            paths.append(str(ROOT / test))
    return found


def versions(python: Path) -> dict[str, str]:
    """Returns the versions of Python and of the packages in `SHOWN` that are installed."""
    done = subprocess.run([str(python), "-c", _VERSIONS, *SHOWN], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def counted(
    name: str, reports: Sequence[Path], seconds: int, installed: dict[str, str], tests: Sequence[str]
) -> Result:
    """Returns the result of a row from the JUnit reports of its tests."""
    cases = [case for report in reports for case in ElementTree.parse(report).iter("testcase")]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return Result(
        name,
        installed,
        passed=len(cases) - len(failed) - len(skipped),
        failed=len(failed),
        skipped=len(skipped),
        seconds=seconds,
        tests=tuple(tests),
        failures=tuple(f"{case.get('classname')}::{case.get('name')}" for case in failed),
    )


def run_row(row: Row, tests: Sequence[str], processes: int, keep: bool) -> Result:
    """Makes the row's environment, runs the tests in it, and removes it unless `keep`."""
    place = OUT / row.name
    try:
        return run_tests(row, make_environment(row, place), tests, processes)
    except NotRunError as reason:
        return Result(row.name, not_run=str(reason))
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ results
def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields the lines of a table of results, then the tests that failed."""
    yield f"{'row':<14}{'python':<9}{'torch':<14}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>8}"
    for one in results:
        start = f"{one.name:<14}{one.versions.get('python', ''):<9}{one.versions.get('torch', ''):<14}"
        if one.not_run:
            yield f"{one.name:<14}not run: {one.not_run}"
        else:
            yield f"{start}{one.passed:>7}{one.failed:>7}{one.skipped:>8}{one.seconds:>8}"
    for one in results:
        yield from (f"{one.name}: FAILED {test}" for test in one.failures)


def write(result: Result, file: Path) -> None:
    """Writes a result to the JSON file of all rows; results of other rows remain."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known | {result.name: asdict(result)}, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rows that the command line chooses; returns the exit code."""
    known = {row.name: row for row in rows()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=known, metavar="NAME", help=f"a row: {', '.join(known)}")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/versions")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--tests", action="append", metavar="PATH", help="a test file or folder instead of the table's")
    part.add_argument("--all", action="store_true", help="all fast tests")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="processes that run tests (2)")
    parser.add_argument("--pins", choices=known, metavar="NAME", help="print the pins of a row and exit")
    options = parser.parse_args(arguments)
    if options.pins:
        print("\n".join(known[options.pins].pins))
        return 0
    tests = [] if options.all else options.tests or table()["tests"]
    results = []
    for name in options.only or known:
        results.append(run_row(known[name], tests, options.processes, options.keep))
        write(results[-1], OUT / "results.json")
        print("\n".join(lines(results[-1:])), flush=True)
    if len(results) > 1:
        print("", *lines(results), sep="\n")
    return 0 if all(one.good for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
