"""examples/nano: from text to a chat. One dial sets all sizes; each stage improves its own number."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddpforge.recipe import load_recipe

ROOT = Path(__file__).parents[3] / "examples/nano"
STAGES = ("pretrain", "sft", "dpo", "grpo")


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT, tmp_path / "nano", ignore=shutil.ignore_patterns("__pycache__"))


def call(nano: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DDPFORGE_DISABLE_PLUGINS": "", "PATH": path}
    return subprocess.run(words, cwd=nano, env=environment, capture_output=True, text=True, timeout=3000)


@pytest.mark.parametrize(
    ("depth", "parameters", "steps", "batch", "block"),
    [(2, 507_904, 248, 8, 128), (20, 559_349_760, 21_338, 256, 2048)],
)
def test_the_dial_sets_the_sizes_of_all_stages(
    nano: Path, depth: int, parameters: int, steps: int, batch: int, block: int
) -> None:
    (nano / "dial.toml").write_text(f"depth = {depth}")
    assert f"{parameters:,} parameters" in call(nano, sys.executable, "dial.py").stdout
    tables: dict[str, Any] = {stage: load_recipe(nano / f"{stage}.toml").tables for stage in STAGES}
    pretrain = tables["pretrain"]
    assert (pretrain["train"]["length"], pretrain["train"]["global_batch"]) == (f"{steps}st", batch)
    options = pretrain["model"]["options"]
    assert (options["num_hidden_layers"], options["hidden_size"]) == (depth, 64 * depth)
    assert options["max_position_embeddings"] == block == pretrain["data"]["train"]["block_size"]
    rates = [tables[stage]["optimizer"]["lr"] for stage in STAGES]
    assert rates == pytest.approx([6e-3 / depth / part for part in (1, 1, 30, 10)])


@pytest.mark.parametrize("depth", ["0", "33", "true", "2.5", '"4"', ""])
def test_a_depth_that_is_not_a_whole_number_from_1_to_32_is_refused(nano: Path, depth: str) -> None:
    (nano / "dial.toml").write_text(f"depth = {depth}" if depth else "")
    found = call(nano, sys.executable, "dial.py")
    assert found.returncode == 1
    assert found.stderr.startswith("dial.toml: depth must be a whole number from 1 to 32, is ")


def test_another_depth_is_refused_once_there_are_runs(nano: Path) -> None:
    assert call(nano, sys.executable, "dial.py").returncode == 0
    (nano / "runs").mkdir()
    (nano / "dial.toml").write_text("depth = 3")
    assert "runs/ has models of depth 2" in call(nano, sys.executable, "dial.py").stderr


@pytest.mark.full
def test_all_stages_learn_and_the_export_answers_as_the_run(nano: Path) -> None:
    found = call(nano, "sh", "run.sh")
    assert found.returncode == 0, found.stdout + found.stderr
    scores: dict[str, Any] = {row["stage"]: row for row in json.loads((nano / "scores.json").read_text())}
    assert scores["pretrain"]["last"] < scores["pretrain"]["first"] - 1
    assert scores["sft"]["right"] > scores["pretrain"]["right"] + 0.05
    assert scores["dpo"]["last"] > 0.05
    assert scores["dpo"]["letters"] < scores["sft"]["letters"]
    assert scores["grpo"]["last"] > scores["grpo"]["first"]
    assert scores["grpo"]["right"] > scores["sft"]["right"]

    again = call(nano, "sh", "run.sh")  # every stage is done: nothing is trained
    assert again.returncode == 0, again.stdout + again.stderr
    assert {row["stage"]: row for row in json.loads((nano / "scores.json").read_text())} == scores

    questions = [json.loads(line)["question"] for line in (nano / "data/held-out.jsonl").read_text().splitlines()[:10]]
    (nano / "questions.txt").write_text("\n".join(questions))
    options = ("--chat", "--greedy", "--tokens", "16", "--json", "--prompts", "questions.txt")
    script = "import json, sys; from score import answer; print(json.dumps(answer(sys.argv[1], sys.argv[2:])))"
    for run, export in (("sft", "chat"), ("grpo", "nano")):
        said = call(nano, "ddpforge", "generate", run, *options).stdout.splitlines()
        of_export = json.loads(call(nano, sys.executable, "-c", script, export, *questions).stdout)
        assert [json.loads(line)["text"].strip() for line in said] == [text.strip() for text in of_export]
