"""`ddpforge parity`: table, JSON and exit codes with a fake comparison, and one test with the real launcher."""

import json
import math
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import SUPPORT

from ddpforge.cli import main
from ddpforge.errors import ExitCode
from ddpforge.guard.comparison import TOLERANCES, Point, Quantity
from ddpforge.guard.rounding import Excess
from ddpforge.tools.parity.runs import ParityReport, RunFailed, Verdict
from ddpforge.tools.parity.specs import Spec

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "adamw", lr = 0.01 }
train = { length = "1ep", global_batch = 8 }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["parity", *arguments])


class Comparison:
    """Fake of `ddpforge.tools.parity.runs.parity`: records its arguments, and returns or raises `answer`."""

    def __init__(self) -> None:
        self.answer: ParityReport | Exception = report()
        self.asked: dict[str, Any] = {}

    def __call__(self, recipe: str, strategies: tuple[str, ...], **options: Any) -> ParityReport:
        self.asked = {"recipe": recipe, "strategies": strategies, **options}
        options["say"]("ddp: training")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    comparison = Comparison()
    monkeypatch.setattr("ddpforge.tools.parity.runs.parity", comparison)
    return comparison


def curve(name: str, tolerance: float, *points: tuple[float, float]) -> Quantity:
    """Returns a quantity with these pairs of value and reference value."""
    return Quantity(name, tolerance, tuple(Point(n, abs(a - b) / b, a, b) for n, (a, b) in enumerate(points, start=1)))


def report(*drifting: Quantity, ranks: int = 2) -> ParityReport:
    """Returns a report with a run equal to the reference and, if given, one with drifting quantities."""
    loss, weights = curve("train/loss", 1e-5, (2.0, 2.0), (1.0000012, 1.0)), Quantity("weights", 1e-3, (Point(2, 0.0),))
    verdicts = [
        Verdict(Spec("single@1", "single", (), 1), "1-single-1", 2, []),
        Verdict(Spec("ddp", "ddp", (), ranks), "2-ddp", 2, [loss, weights]),
    ]
    if drifting:
        other = Spec("./mine.py:Mine:3", "./mine.py:Mine", ("a=3",), ranks)
        verdicts.append(Verdict(other, "3-mine", 2, list(drifting)))
    return ParityReport("tiny.toml", "fp32", TOLERANCES["fp32"], verdicts)


# ---------------------------------------------------------------------------------------------- the table
def test_equal_runs_exit_with_0(comparison: Comparison) -> None:
    result = invoke("tiny.toml", "--strategies", "single@1,ddp")
    assert result.exit_code == 0
    assert result.stdout == (
        "strategy  ranks  loss          gradient norm  weights  verdict\n"
        "single@1  1                                            reference\n"
        "ddp       2      1.2e-06 at 2                 0        same\n"
        "\n"
        "Largest relative differences from `single@1` in 2 steps, in fp32.\n"
        "Expected from rounding: loss 1e-05, gradient norm 1e-04, "
        "weights 1e-03 (relative to their change in training).\n"
    )
    assert result.stderr == "ddp: training\n"


def test_measured_tolerances_and_the_worst_parameters_are_shown(comparison: Comparison) -> None:
    worst = (Excess("router.weight", 0.5, 0.02, 0.5), Excess("head.bias", 0.3, 0.02, None))
    wrong = report(Quantity("gradients", 0.02, (Point(1, 0.5, allowed=0.02),), "router.weight", worst))
    measured = (Quantity("train/loss", 3e-3, (Point(1, 0.0),)), Quantity("weights", 2e-2, (Point(2, 0.0),)))
    comparison.answer = replace(wrong, measured=measured)
    result = invoke("tiny.toml", "--strategies", "single@1,ddp,./mine.py:Mine:3")
    assert "drifts: gradients at step 1 by 5.0e-01, mostly in router.weight" in result.stdout
    assert "Measured rounding explains loss 3e-03, gradient norm 1e-04, weights 2e-02" in result.stdout
    assert "./mine.py:Mine:3, gradients at step 1: router.weight × 0.5, head.bias by 3.0e-01\n" in result.stdout


def test_a_table_without_gradient_norms_gives_the_reason(comparison: Comparison) -> None:
    comparison.answer = replace(report(), verdicts=[replace(each, averages="weights") for each in report().verdicts])
    result = invoke("tiny.toml", "--strategies", "single@1,ddp")
    assert "If ranks average weights instead of gradients, there is no gradient norm to compare." in result.stdout


@pytest.mark.parametrize(
    ("quantity", "says"),
    [
        (curve("train/grad_norm", 1e-4, (0.9871, 0.9871), (1.0213, 0.9871)), "at step 2 (1.0213 instead of 0.9871)"),
        (curve("train/loss", 1e-9, (1.00000003, 1.0)), "train/loss at step 1 (1.00000003 instead of 1)"),
        (curve("lr", 1e-12, (0.1 + 1e-9, 0.1)), "lr at step 1 (0.100000001 instead of 0.1)"),
        (Quantity("train/loss", 1e-5, (Point(2, math.inf, math.nan, 1.0),)), "step 2 (nan instead of 1)"),
        (Quantity("eval/loss", 1e-5, (Point(2, math.inf, None, 1.0),)), "eval/loss at step 2 (absent instead of 1.0)"),
        (Quantity("steps", 0.0, (Point(3, math.inf, 2, 20),)), "drifts: ended after 2 steps instead of 20"),
        (
            Quantity("weights", 1e-3, (Point(2, 0.43),), "head.bias"),
            "weights at step 2 by 4.3e-01, mostly in head.bias",
        ),
        (Quantity("initial weights", 1e-6, (Point(0, math.inf),), "w"), "initial weights at step 0, mostly in w"),
    ],
)
def test_a_drift_is_shown_with_its_first_step_and_both_values(
    comparison: Comparison, quantity: Quantity, says: str
) -> None:
    comparison.answer = report(quantity, ranks=1)
    result = invoke("tiny.toml", "--strategies", "x,y")
    assert result.exit_code == 1
    assert says in result.stdout.splitlines()[3]
    assert result.stdout.splitlines()[2].endswith("  same")
    assert "Dropout" not in result.stdout


def test_a_drift_between_different_world_sizes_gets_a_note(comparison: Comparison) -> None:
    comparison.answer = report(curve("train/loss", 1e-5, (2.0, 1.0)))
    assert "Dropout and BatchNorm depend on the number of ranks" in invoke("x", "--strategies", "x").stdout


# ---------------------------------------------------------------------------------------------- options
def test_options_are_passed_to_the_comparison(comparison: Comparison, folder: Path) -> None:
    sets = ["--set", "train.seed=1", "-s", "train.precision=bf16"]
    invoke("tiny.toml", "--strategies", "a,b", "--strategies", "c", "-n", "3", "--steps", "7", *sets, "--out", "kept")
    say = comparison.asked.pop("say")
    assert callable(say)
    assert comparison.asked == {
        "recipe": "tiny.toml",
        "strategies": ("a,b", "c"),
        "ranks": 3,
        "steps": 7,
        "out": Path("kept"),
        "sets": ("train.seed=1", "train.precision=bf16"),
        "tolerance": None,
    }
    invoke("tiny.toml", "--strategies", "a,b", "--tolerance", "1e-3")
    assert (comparison.asked["tolerance"], comparison.asked["steps"]) == (1e-3, 20)
    assert not comparison.asked["out"].exists()  # the default folder is temporary


@pytest.mark.parametrize(("gpus", "expected"), [(0, 2), (1, 2), (8, 8)])
def test_parity_uses_one_process_per_gpu_and_at_least_two(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    invoke("tiny.toml", "--strategies", "a,b")
    assert comparison.asked["ranks"] == expected


def test_json_holds_every_value_and_no_nan(comparison: Comparison) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    comparison.answer = report(
        Quantity("train/loss", 1e-5, (Point(1, 0.0, 2.0, 2.0), Point(2, math.inf, math.nan, 1.0)))
    )
    result = invoke("tiny.toml", "--strategies", "a,b", "--json")
    told = json.loads(result.stdout, parse_constant=refuse)

    assert result.exit_code == 1
    assert (told["same"], told["reference"], told["precision"]) == (False, "single@1", "fp32")
    assert told["tolerances"]["loss"] == 1e-5
    assert [run["same"] for run in told["runs"]] == [True, True, False]
    mine = told["runs"][2]
    assert (mine["use"], mine["options"], mine["ranks"], mine["run"]) == ("./mine.py:Mine", ["a=3"], 2, "3-mine")
    bad = {"step": 2, "difference": None, "value": None, "reference": 1.0, "allowed": None}
    assert mine["drift"] == {"quantity": "train/loss", **bad}
    assert mine["quantities"]["train/loss"]["points"] == [
        {"step": 1, "difference": 0.0, "value": 2.0, "reference": 2.0, "allowed": None},
        bad,
    ]


# ---------------------------------------------------------------------------------------------- failures
def test_a_failed_run_gives_its_output_and_its_exit_code(comparison: Comparison) -> None:
    comparison.answer = RunFailed(Spec("mine", "mine", (), 2), 137, "one\ntwo\n")
    result = invoke("tiny.toml", "--strategies", "a,b", "--json")
    assert (result.exit_code, result.stdout) == (137, "")
    assert "error: `mine` ended with exit code 137; its last output:\n    one\n    two" in result.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_run_has_a_row_and_its_exit_code_is_that_of_the_command(comparison: Comparison, as_json: bool) -> None:
    said = "mine\n[rank 1] error: no gradient\n  = help: none\nerror: another\n"
    broken = Spec("mine", "mine", (), 2)
    comparison.answer = report()
    comparison.answer.verdicts.insert(1, Verdict(broken, "2-mine", 0, [], failed=RunFailed(broken, 3, said)))
    result = invoke("tiny.toml", "--strategies", "a,b", *(["--json"] if as_json else []))
    assert result.exit_code == 3
    assert "error: `mine` ended with exit code 3; its last output:\n    mine" in result.stderr
    if as_json:
        runs = json.loads(result.stdout)["runs"]
        assert [run["same"] for run in runs] == [True, False, True]
        assert runs[1]["failed"] == {"exit_code": 3, "reason": "no gradient"}
        return
    rows = [line.split() for line in result.stdout.splitlines()[1:4]]
    assert rows[1] == ["mine", "2", "failed:", "no", "gradient"]
    assert rows[2][-1] == "same"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.toml", "--strategies", "ddp,single"], "no such recipe: `nowhere.toml`"),
        (["tiny.toml", "--strategies", "ddp,dpp"], "there is no strategy named `dpp`"),
        (["tiny.toml", "--strategies", "ddp,ddp:zip"], "`strategy.bucket_cap_mb` must be an integer"),
        (["tiny.toml", "--strategies", "ddp,ddp@3"], "cannot be divided evenly among 3 ranks"),
        (["tiny.toml", "--strategies", "ddp,,single"], "the name of a strategy is missing"),
        (["tiny.toml", "--strategies", "ddp"], "there is nothing to compare with"),
        (["tiny.toml"], "Missing option '--strategies'"),
        (["tiny.toml", "--strategies", "ddp,single", "--tolerance", "0"], "0.0 is not in the range"),
        (["tiny.toml", "--strategies", "ddp,single", "--steps", "0"], "expected 1 to 1048576, not 0"),
    ],
)
def test_a_usage_error_is_printed_once_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: list[str], complaint: str
) -> None:
    monkeypatch.setattr("ddpforge.launchers.process.launch", None)
    result = invoke(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.count(complaint) == 1
    assert result.stdout == ""
    assert [path.name for path in folder.iterdir()] == ["tiny.toml"]


# ---------------------------------------------------------------------------------------------- end to end
@pytest.mark.full
def test_the_command_from_end_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares strategies with the real launcher; `tests/distributed/test_matrix.py` has real runs that are equal.

    In `make test`, the tests of ddpforge-sam run the command with the real launcher.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    copy(SUPPORT / "wrong_strategies.py", folder)
    strategies = "single@1,./wrong_strategies.py:ForgetsToAverage"
    result = invoke("tiny.toml", "--strategies", strategies, "--nproc", "2", "--steps", "3")

    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[1].endswith("reference")
    assert "drifts: train/grad_norm at step 1 (" in lines[2]
    assert len(result.stderr.splitlines()) == 2  # no output of the ranks
