"""Scripts of the page for users of other tools: each trains as well as the recipe that replaces it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched import Zygote
from test_docs import DOCS, recipes, write_files

from ddpforge.runs.metrics import read_metrics

PAGE = DOCS / "migrate.md"
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """Writes the files of the page, and trains its recipe."""
    folder = tmp_path_factory.mktemp("migrate")
    write_files(PAGE, folder)
    (folder / "rings.toml").write_text(recipes(PAGE)[0])
    zygote.run(["run", "rings.toml"], nproc=1, cwd=folder).check()
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "library", "env"),
    [
        ("train_hf.py", "transformers", {}),
        ("train_lightning.py", "lightning", {}),
        ("train_accelerate.py", "accelerate", {}),
        ("train_ddp.py", "torch", ONE_RANK),
    ],
)
def test_a_script_trains_as_well_as_the_recipe(folder: Path, script: str, library: str, env: dict[str, str]) -> None:
    pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(re.findall(r"^accuracy ([\d.]+)$", done.stdout, re.MULTILINE)[-1])
    expected = read_metrics(folder / "runs/rings")[-1]["eval/accuracy"]
    assert expected > 0.97
    assert accuracy == pytest.approx(expected, abs=0.02)


@pytest.mark.full  # tests/tools/script_comparison compares a script of each kind
def test_the_command_of_the_page_finds_the_same_losses(folder: Path, zygote: Zygote) -> None:
    command = re.findall(r"^ddpforge (compare-script .*)$", PAGE.read_text(), re.MULTILINE)[0]
    done = zygote.run(command.split(), nproc=1, cwd=folder).check()
    assert "same: 20 steps, largest difference of the loss" in done.stdout
