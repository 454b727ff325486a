"""Every strategy has the same curve: accumulation, active clipping, a schedule, token-weighted losses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from support import SUPPORT
from support.launched import Zygote
from support.sharding import CNN, GPT, RECIPE

from ddpforge.tools.parity.runs import ParityReport, parity

STRATEGIES = ["ddp", "single@1", "fsdp", "fsdp:2@4", "deepspeed:1", "deepspeed:2", "deepspeed:3"]
IN_MAKE_TEST = [name for name in STRATEGIES if name != "deepspeed:2"]  # which computes as stage 1


@pytest.fixture
def compare(tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ParityReport]:
    """Returns a function that runs `ddpforge parity` with ranks that the tests' own launcher forks."""
    copy(SUPPORT / "parts.py", tmp_path)
    monkeypatch.chdir(tmp_path)

    def launch(arguments: Sequence[str], *, nproc: int, output: Any, variables: Any) -> int:
        ranks = zygote.run(["run", *arguments], nproc=nproc, cwd=tmp_path, timeout=300, watched=False)
        output.write((ranks.stdout + ranks.stderr).encode())
        return max(map(abs, ranks.codes))

    monkeypatch.setattr("ddpforge.tools.parity.runs.torchrun_command", lambda arguments, **_: arguments)
    monkeypatch.setattr("ddpforge.launchers.process.launch", launch)

    def run(kind: str, strategies: Sequence[str], train: str = "") -> ParityReport:
        parts = {"gpt": GPT, "cnn": CNN}[kind].format(model="")
        text = RECIPE.format(name=kind, parts=parts, strategy='use = "ddp"', length="30st", train=train, more="")
        Path(f"{kind}.toml").write_text(text)
        return parity(f"{kind}.toml", strategies, ranks=2, steps=20, out=tmp_path / "out")

    return run


def check(report: ParityReport) -> None:
    """Asserts that every run equals the first one; the message has the quantities that differ.

    BatchNorm's running statistics depend on the number of micro-batches of a rank. So they, and evaluations that use
    them, are compared between equal numbers of ranks only.
    """
    ranks = report.verdicts[0].spec.ranks
    for verdict in report.verdicts:
        statistics = ("buffers", "eval/") if verdict.spec.ranks != ranks and "cnn" in report.recipe else ()
        judged = [quantity for quantity in verdict.quantities if not quantity.name.startswith(statistics or "-")]
        assert {quantity.name: quantity.largest for quantity in judged if quantity.drift} == {}, verdict.spec.text
        assert verdict.steps == 20


@pytest.mark.parametrize(
    "kind", [pytest.param("gpt", marks=pytest.mark.slow), pytest.param("cnn", marks=pytest.mark.full)]
)
def test_every_strategy_has_the_same_curve(compare: Callable[..., ParityReport], kind: str) -> None:
    """Covers traps 01, 02, 04, 05, 06, 07, 24, 27: the losses of 20 steps equal those of DDP to 1e-5."""
    report = compare(kind, IN_MAKE_TEST if kind == "gpt" else STRATEGIES)
    check(report)
    losses = [one for verdict in report.verdicts for one in verdict.quantities if one.name == "train/loss"]
    assert max(one.largest.difference for one in losses) < 1e-5

    rows = map(json.loads, (Path("out") / report.verdicts[0].name / "metrics.jsonl").read_text().splitlines())
    assert sum(row.get("train/grad_norm", 0) > 0.5 for row in rows) > 10  # the clipping is active


@pytest.mark.full
def test_every_strategy_has_the_same_curve_in_bf16(compare: Callable[..., ParityReport]) -> None:
    """Covers trap 26: the tolerance is the measured rounding of bf16."""
    check(compare("gpt", STRATEGIES, 'precision = "bf16"'))
