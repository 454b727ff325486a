"""Trains the same two ranks again and again: `python benchmarks/soak.py FOLDER --runs 500`, for faults that are rare.

Every run that does not end with 0 leaves its folder, its exit code and all that its ranks wrote to stderr in FOLDER.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

RECIPE = """
recipe = 2
name = "soak"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [32, 32] }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "adamw", lr = 0.001 }
strategy = { use = "STRATEGY" }
train = { length = "30st", global_batch = 32, collective_timeout = "60s" }
"""


def main() -> None:
    """Runs them one after the other, and prints how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--strategy", default="fsdp")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    recipe = asked.folder / "soak.toml"
    recipe.write_text(RECIPE.replace("STRATEGY", asked.strategy))
    failed = 0
    for number in range(asked.runs):
        out = asked.folder / f"run-{number}"
        command = [sys.executable, "-m", "ddpforge", "launch", str(recipe), "--nproc", str(asked.nproc)]
        ended = subprocess.run([*command, "--fresh", "--out", str(out)], capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            shutil.rmtree(out)
            continue
        failed += 1
        out.mkdir(exist_ok=True)
        (out / "stderr.txt").write_text(ended.stderr)
        print(f"run {number}: exit code {ended.returncode}, see {out}", flush=True)
    print(f"{failed} of {asked.runs} runs failed", flush=True)


if __name__ == "__main__":
    main()
