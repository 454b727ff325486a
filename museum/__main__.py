"""Runs the museum, and writes museum/results.json and docs/museum.md.

    python -m museum                          all that results.json lacks or has for other versions: `make museum`
    python -m museum CASE...                  these cases, whatever results.json has
    python -m museum --trainer forge          one trainer
    python -m museum --fresh                  everything again
    python -m museum --prove                  `ddpforge prove` on the scripts of museum/scripts
    python -m museum --page                   only the page

Results are kept as they come, so the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import platform
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from museum.case import all_cases
from museum.page import write_page
from museum.planted import SCRIPTS, prove_script
from museum.trainers import TRAINERS

RESULTS = Path(__file__).with_name("results.json")
_ALSO = ("deepspeed", "peft")  # whose versions matter, in addition to those of the trainers
_LOCK = threading.Lock()


def load() -> dict[str, Any]:
    """Returns the kept results."""
    empty: dict[str, Any] = {"versions": {}, "cases": {}, "scripts": {}}
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else empty


@contextmanager
def changing() -> Iterator[dict[str, Any]]:
    """Yields the results and writes them back, in the order of the cases; two commands may run at the same time."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = load()
        yield results
        _order(results)
        new = RESULTS.with_suffix(".new")
        new.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        new.rename(RESULTS)


def _order(results: dict[str, Any]) -> None:
    """Sorts the results, and removes those of cases and scripts that are gone."""
    names = all_cases()
    results["cases"] = {
        name: {
            trainer: results["cases"][name][trainer]
            for trainer in TRAINERS
            if trainer in results["cases"][name] and trainer in case.tried_by()
        }
        for name, case in names.items()
        if name in results["cases"]
    }
    results["scripts"] = {name: results["scripts"][name] for name in SCRIPTS if name in results["scripts"]}
    results["versions"] = {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in (*(one.package for one in TRAINERS.values()), *_ALSO)},
    }


def run_cases(names: Sequence[str], trainers: Sequence[str], jobs: int, *, again: bool) -> bool:
    """Judges cases in the processes of `jobs` trainers at a time; returns False if a case of ddpforge is not right."""
    results, cases, good = load(), all_cases(), True
    waiting = []
    for trainer in trainers:
        version = TRAINERS[trainer].version()
        mine = [
            name
            for name in names
            if trainer in cases[name].tried_by()
            and (again or results["cases"].get(name, {}).get(trainer, {}).get("version") != version)
        ]
        if mine:
            waiting.append((trainer, version, mine))

    def work() -> None:
        nonlocal good
        while True:
            with _LOCK:
                if not waiting:
                    return
                trainer, version, mine = waiting.pop(0)
            command = [sys.executable, "-m", "museum.worker", trainer, *mine]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    row = json.loads(line)
                    print(f"{row['verdict']:<15} {trainer:<12} {row['case']:<36} {row['text'][:80]}", flush=True)
                    good = good and (trainer != "forge" or row["verdict"] in ("right", "refused"))
                    # Another folder in each call.
                    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/museum-\w+", "FOLDER", row["text"])
                    kept = {"verdict": row["verdict"], "text": text, "seconds": row["seconds"]}
                    with _LOCK, changing() as now:
                        now["cases"].setdefault(row["case"], {})[trainer] = {**kept, "version": version}

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return good


def run_prove(names: Sequence[str], jobs: int, *, again: bool) -> None:
    """Runs `ddpforge prove` on scripts."""
    results = load()
    version = metadata.version("ddpforge")
    kept = {name for name, row in results["scripts"].items() if row["version"] == version and row["answer"] != "failed"}
    waiting = [name for name in names if again or name not in kept]

    def work() -> None:
        while True:
            with _LOCK:
                if not waiting:
                    return
                name = waiting.pop(0)
            row = prove_script(SCRIPTS[name])
            print(f"{row['answer']:<10} {name:<40} {row['text'][:90]}", flush=True)
            with _LOCK, changing() as now:
                now["scripts"][name] = {**row, "version": version}

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Runs what the command names."""
    parser = argparse.ArgumentParser(prog="museum", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--trainer", action="append", choices=list(TRAINERS))
    parser.add_argument("--jobs", type=int, default=2, help="trainers at a time; default 2")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    known = SCRIPTS if given.prove else all_cases()
    if unknown := [name for name in given.cases if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are: {', '.join(known)}")
    good = True
    again = given.fresh or bool(given.cases)
    if given.prove:
        run_prove(given.cases or list(SCRIPTS), given.jobs, again=again)
    elif not given.page:
        good = run_cases(given.cases or list(known), given.trainer or list(TRAINERS), given.jobs, again=again)
    write_page(load())
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
