"""Strategy of docs/extend/strategy.md: the loss curve of DDP, and checkpoints in both directions."""

import ast
from pathlib import Path

import pytest
from support.trained import Trained, trained
from test_docs import ROOT, blocks

PAGE = ROOT / "docs/extend/strategy.md"
RECIPE = """
recipe = 2
name = "run"
model = {{ use = "mlp", inputs = 64, outputs = 10, hidden = [64, 64, 64] }}
data.train = {{ use = "digits", split = "train" }}
data.eval = {{ use = "digits", split = "test" }}
task = {{ use = "classification", metrics = ["accuracy"] }}
optimizer = {{ use = "adamw", lr = 2e-3, fused = false }}
strategy.use = "{strategy}"
train = {{ length = "{length}st", global_batch = 64, clip_norm = 0.5, eval_every = "4st", device = "cpu" }}
checkpoint = {{ every = "4st" }}
track.every = "1st"
"""
OWN = "./mini_tp.py:MiniTP"


def run(folder: Path, strategy: str, length: int = 8) -> list[Trained]:
    folder.mkdir(exist_ok=True)
    (text,) = (text for text in blocks(PAGE, "python") if text.startswith("# mini_tp.py"))
    (folder / "mini_tp.py").write_text(text)
    return trained(folder, RECIPE.format(strategy=strategy, length=length), 2)


def test_the_loss_curve_equals_that_of_ddp_and_checkpoints_are_interchangeable(tmp_path: Path) -> None:
    expected, found = run(tmp_path / "ddp", "ddp"), run(tmp_path / "own", OWN)
    moved = tmp_path / "moved"
    parts = [run(moved, strategy, length)[0] for strategy, length in ((OWN, 4), ("ddp", 8), (OWN, 12))]
    longer = run(tmp_path / "ddp", "ddp", 12)[0]
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy"):
        curve = expected[0].column(key)
        assert found[0].column(key) == found[1].column(key) == pytest.approx(curve, rel=1e-5), key
        gone = [value for part in parts for value in part.column(key)]
        assert gone == pytest.approx([*curve, *longer.column(key)], rel=1e-5), key
    assert len(expected[0].column("train/loss")) == 8
    assert [one.held for one in found] < [one.held for one in expected]


def test_the_strategy_is_as_short_as_its_page_claims() -> None:
    """Counts lines without blank lines, docstrings and imports. Their maximum is in the page's title."""
    (text,) = (text for text in blocks(PAGE, "python") if text.startswith("# mini_tp.py"))
    nodes = [node for node in ast.parse(text).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    lines = text.splitlines()
    code = [line for node in nodes for line in lines[node.lineno - 1 : node.end_lineno] if line.strip()]
    assert len([line for line in code if '"""' not in line]) <= 55
    assert "\n## A tensor-parallel strategy in 55 lines\n" in PAGE.read_text(encoding="utf-8")
