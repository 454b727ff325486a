"""`ddpforge parity`: the notation of strategies, the definition of drift, and comparisons of real runs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import IO, Any

import pytest
import torch
from support import SUPPORT
from support.launched import Zygote

from ddpforge.components.installed import Entry
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, RecipeError, UsageError
from ddpforge.guard.comparison import TOLERANCES, VISIBLE, Quantity, Record, compare, first_drift
from ddpforge.tools.parity.runs import ParityReport, RunFailed, parity
from ddpforge.tools.parity.specs import parse, split

FP32 = TOLERANCES["fp32"]
INF, NAN = math.inf, math.nan

# ---------------------------------------------------------------------------------------------- names
REGISTRY = Registry(
    [
        Entry("strategy", "ddp", "ddpforge", "1", "ddpforge.strategies.ddp:DDP"),
        Entry("strategy", "single", "ddpforge", "1", "ddpforge.strategies.single:Single"),
        Entry("strategy", "zero", "forge-extras", "1", "ddpforge.strategies.ddp:DDP"),
        Entry("strategy", "twin", "one", "1", "ddpforge.strategies.ddp:DDP"),
        Entry("strategy", "twin", "twin", "1", "ddpforge.strategies.ddp:DDP"),
    ]
)


@pytest.mark.parametrize(
    ("text", "use", "options", "ranks"),
    [
        ("ddp", "ddp", (), 2),
        ("ddp@4", "ddp", (), 4),
        ("ddp:50", "ddp", ("bucket_cap_mb=50",), 2),
        ("ddp:50@1", "ddp", ("bucket_cap_mb=50",), 1),
        ("ddp:50:static_graph=true", "ddp", ("bucket_cap_mb=50", "static_graph=true"), 2),
        ("ddp:compression = 'a:b,c=d@7'", "ddp", ("compression = 'a:b,c=d@7'",), 2),
        ('ddp:"x=1"', "ddp", ('bucket_cap_mb="x=1"',), 2),
        ("ddp:[1, [2, 3]]@3", "ddp", ("bucket_cap_mb=[1, [2, 3]]",), 3),
        ("ddp:static", "ddp", ("bucket_cap_mb=static",), 2),  # not the attribute `static` of a module ddp
        ("zero:3", "zero", ("bucket_cap_mb=3",), 2),
        ("forge_extras:zero", "forge_extras:zero", (), 2),
        ("forge-extras:zero:3@4", "forge-extras:zero", ("bucket_cap_mb=3",), 4),
        ("twin:twin:3", "twin:twin", ("bucket_cap_mb=3",), 2),
        ("./wrong_strategies.py:Slips", "./wrong_strategies.py:Slips", (), 2),
        ("./wrong_strategies.py:Slips:5@3", "./wrong_strategies.py:Slips", ("at=5",), 3),
        ("support.wrong_strategies:Slips:at=5", "support.wrong_strategies:Slips", ("at=5",), 2),
        ("ddpforge.strategies.ddp:DDP:5", "ddpforge.strategies.ddp:DDP", ("bucket_cap_mb=5",), 2),
    ],
)
def test_strategy_spec_has_name_options_and_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, text: str, use: str, options: tuple[str, ...], ranks: int
) -> None:
    monkeypatch.chdir(SUPPORT)
    spec = parse(text, REGISTRY, ranks=2)
    assert (spec.use, spec.options, spec.ranks) == (use, options, ranks)
    assert spec.sets == [f'strategy.use="{use}"', *(f"strategy.{option}" for option in options)]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "the name of a strategy is missing", ""),
        (":3", "the name of a strategy is missing", ""),
        ("dpp:3", "there is no strategy named `dpp`", "did you mean `ddp`?"),
        ("ddp@0", "from 1 to 1024, not 0", ""),
        ("ddp@two", "there is no strategy named `ddp@two`", "did you mean `ddp`?"),
        ("twin:3", "is provided by one 1 and by twin 1", 'use = "one:twin"'),
        ("single:3", "strategy `single` has no options", ""),
        ("ddp:3:4", "`4` is a value without an option", "key=value"),
        ("ddp:", "`` is a value without an option", "key=value"),
        ("ddp:3:bucket_cap_mb=4", "`bucket_cap_mb` is set twice", ""),
        ("no.such:Thing", "No module named 'no'", ""),
        ("./wrong_strategies.py", "names a module without a class or function", "./wrong_strategies.py:Name"),
        ("./wrong_strategies.py:Slps", "has no `Slps`", "did you mean `Slips`?"),
    ],
)
def test_error_in_a_strategy_spec_has_its_place(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str, hint: str
) -> None:
    monkeypatch.chdir(SUPPORT)
    with pytest.raises(RecipeError) as caught:
        parse(text, REGISTRY, ranks=2)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert hint in " ".join(problem.hints)
    assert problem.place
    assert (problem.place.file, problem.place.text) == ("--strategies", text)


def test_commas_separate_strategies_outside_brackets_and_quotes() -> None:
    assert split(["ddp, fsdp:2", 'a:x=[1,2]:y="3,4",b']) == ["ddp", "fsdp:2", 'a:x=[1,2]:y="3,4"', "b"]


# ---------------------------------------------------------------------------------------------- comparison
ROWS = [{"step": n, "lr": 0.1 / n, "train/loss": 2.0 / n, "train/grad_norm": 0.5} for n in range(1, 6)]
INITIAL = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
FINAL = {
    "w": torch.tensor([3.0, 4.2]),
    "b": torch.tensor([0.0, 0.1]),
    "mean": torch.tensor([10.0]),
    "n": torch.tensor(7),
}
REFERENCE = Record(ROWS, INITIAL, FINAL)


def run_with(rows: Mapping[int, Mapping[str, Any]] = {}, **tensors: Mapping[str, Any]) -> Record:
    """Returns the reference run with other values, by step, and with other tensors."""
    changed = [{**row, **rows.get(number, {})} for number, row in enumerate(ROWS, start=1)]
    initial, final = ({**old, **tensors.get(key, {})} for key, old in (("initial", INITIAL), ("final", FINAL)))
    return Record(changed, initial, {name: x for name, x in final.items() if x is not None})


def found(run: Record, reference: Record = REFERENCE) -> dict[str, Quantity]:
    return {quantity.name: quantity for quantity in compare(run, reference, FP32)}


def verdict(run: Record, reference: Record = REFERENCE) -> tuple[str, int] | None:
    """Returns the name and step of the first quantity that drifts."""
    drift = first_drift(compare(run, reference, FP32))
    return (drift[0].name, drift[1].step) if drift else None


def test_identical_runs_have_no_drift() -> None:
    quantities = found(REFERENCE)
    assert [*quantities] == ["initial weights", "lr", "train/loss", "train/grad_norm", "weights", "buffers"]
    assert all(quantity.largest.difference == 0 for quantity in quantities.values())
    assert verdict(REFERENCE) is None


def test_differences_are_relative_to_the_reference() -> None:
    loss = found(run_with({2: {"train/loss": 1.0 + 4e-6}, 4: {"train/loss": 0.5 - 4e-6}}))["train/loss"]
    assert [point.difference for point in loss.points] == pytest.approx([0, 4e-6, 0, 8e-6, 0], rel=1e-6)
    assert (loss.largest.step, loss.largest.value, loss.largest.reference) == (4, 0.5 - 4e-6, 0.5)
    assert loss.drift is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({3: {"train/loss": 2 / 3 + 1e-4}}, ("train/loss", 3)),
        ({3: {"train/loss": 2 / 3 + 1e-4}, 2: {"train/grad_norm": 0.501}}, ("train/grad_norm", 2)),
        ({3: {"train/loss": 9.0, "train/grad_norm": 9.0, "lr": 9.0}}, ("lr", 3)),  # the learning rate is checked first
        ({2: {"train/grad_norm": 0.50001}}, None),
        ({2: {"lr": 0.05 * (1 + 1e-11)}}, ("lr", 2)),  # a function of the step, without rounding
        ({4: {"train/loss": NAN}}, ("train/loss", 4)),
        ({4: {"train/loss": INF}}, ("train/loss", 4)),
        ({4: {"train/loss": None}}, ("train/loss", 4)),
    ],
)
def test_drift_is_the_first_step_beyond_its_tolerance(
    changes: dict[int, dict[str, Any]], expected: tuple[str, int] | None
) -> None:
    assert verdict(run_with(changes)) == expected


def test_same_nonfinite_values_in_both_runs_are_not_drift() -> None:
    odd = {2: {"train/loss": NAN, "train/grad_norm": INF}}
    assert verdict(run_with(odd), run_with(odd)) is None
    assert verdict(run_with(odd), run_with({2: {"train/loss": INF, "train/grad_norm": INF}})) == ("train/loss", 2)


def test_tiny_loss_is_compared_relative_to_its_initial_value() -> None:
    tiny = {5: {"train/loss": 1e-9}}
    assert verdict(run_with({5: {"train/loss": 2e-9}}), run_with(tiny)) is None
    assert verdict(run_with({5: {"train/loss": 1e-6}}), run_with(tiny)) == ("train/loss", 5)


def test_losses_of_zero_are_compared() -> None:
    still = {step: {"train/loss": 0.0} for step in range(1, 6)}
    assert verdict(run_with(still), run_with(still)) is None
    assert verdict(run_with({**still, 2: {"train/loss": 1e-30}}), run_with(still)) == ("train/loss", 2)


def test_run_that_ends_early_drifts_at_its_end_without_a_comparison_of_weights() -> None:
    short = Record(ROWS[:3], INITIAL, INITIAL)
    for run, reference in ((short, REFERENCE), (REFERENCE, short)):
        assert verdict(run, reference) == ("steps", 4)
        assert "weights" not in found(run, reference)
    assert (found(short)["steps"].largest.value, found(short)["steps"].largest.reference) == (3, 5)


def test_gradient_norms_of_ranks_that_average_weights_are_not_compared() -> None:
    run = replace(run_with({2: {"train/grad_norm": 9.0}}), averages="weights")
    for reference in (REFERENCE, replace(REFERENCE, averages="weights")):  # they depend on the number of ranks
        assert "train/grad_norm" not in found(run, reference)
        assert verdict(run, reference) is None


def test_weight_difference_is_relative_to_the_distance_from_the_initial_weights() -> None:
    moved = math.hypot(0.2, 0.1)
    changed = {"w": FINAL["w"] + torch.tensor([3e-5, 0.0]), "b": FINAL["b"] + torch.tensor([0.0, 4e-5])}
    weights = found(run_with(final=changed))["weights"]
    assert weights.largest.difference == pytest.approx(5e-5 / moved, rel=1e-2)
    assert (weights.where, weights.largest.step, weights.drift) == ("b", 5, None)
    assert verdict(run_with(final={"w": FINAL["w"] + 1e-3})) == ("weights", 5)


def test_weights_that_hardly_moved_are_compared_relative_to_their_norm() -> None:
    still = run_with(final={"w": INITIAL["w"], "b": INITIAL["b"]})
    assert found(run_with(final={"w": INITIAL["w"] + 1e-6, "b": INITIAL["b"]}), still)[
        "weights"
    ].largest.difference == pytest.approx(math.hypot(1e-6, 1e-6) / 5e-3, rel=0.5)  # float32 of 4 + 1e-6


@pytest.mark.parametrize(
    ("tensors", "expected", "where"),
    [
        ({"final": {"w": None}}, "weights", "w"),
        ({"final": {"w": torch.zeros(3)}}, "weights", "w"),
        ({"final": {"w": torch.tensor([3.0, NAN])}}, "weights", "w"),
        ({"final": {"mean": torch.tensor([10.1])}}, "buffers", "mean"),
        ({"final": {"n": torch.tensor(8)}}, "buffers", "n"),
        ({"final": {"mean": None}}, "buffers", "mean"),
        ({"final": {"more": torch.zeros(1)}}, "buffers", "more"),
        ({"initial": {"b": torch.tensor([0.0, 1e-4])}}, "initial weights", "b"),
    ],
)
def test_difference_in_any_tensor_is_drift(tensors: dict[str, Any], expected: str, where: str) -> None:
    run = run_with(**tensors)
    assert verdict(run) == (expected, 0 if expected == "initial weights" else 5)
    assert found(run)[expected].where == where


def test_infinite_reference_value_is_drift() -> None:
    assert verdict(REFERENCE, run_with(initial={"w": torch.tensor([INF, 4.0])})) == ("initial weights", 0)


def test_weight_missing_in_both_checkpoints_is_drift() -> None:
    lost = run_with(final={"w": None})
    assert verdict(lost, lost) == ("weights", 5)


def test_the_last_evaluation_is_compared() -> None:
    def evaluated(loss: float, accuracy: float) -> Record:
        return run_with({5: {"eval/loss": loss, "eval/accuracy": accuracy}})

    assert verdict(evaluated(1.0, 0.5), evaluated(1.0 + 1e-6, 0.5 + 1e-5)) is None
    assert verdict(evaluated(1.0, 0.5), evaluated(1.001, 0.5)) == ("eval/loss", 5)
    assert verdict(evaluated(1.0, 0.5), evaluated(1.0, 0.502)) == ("eval/accuracy", 5)
    assert verdict(evaluated(1.0, 0.0), evaluated(1.0, 0.0)) is None
    assert verdict(REFERENCE, evaluated(1.0, 0.5)) == ("eval/loss", 5)
    assert verdict(evaluated(1.0, 0.5)) == ("eval/loss", 5)


def test_one_tolerance_scales_the_others() -> None:
    scaled = FP32.scaled(1e-3)
    assert (scaled.loss, scaled.grad_norm) == pytest.approx((1e-3, FP32.grad_norm * 100))
    assert (scaled.weights, scaled.metrics) == pytest.approx((FP32.weights * 100, FP32.metrics * 100))


# ---------------------------------------------------------------------------------------------- measured rounding
def near(factor: float) -> Record:
    """Returns the reference as if its weights had been perturbed: losses and weights differ by `factor`."""
    rows = {step: {"train/loss": 2.0 / step * (1 + factor)} for step in range(1, 6)}
    begins = {"w": INITIAL["w"] * (1 + factor)}
    return run_with(rows, initial=begins, final={"w": begins["w"] + torch.tensor([0.0, 0.2 * (1 + factor)])})


def tolerance(name: str, record: Record, *perturbed: Record) -> float:
    return next(one for one in compare(record, REFERENCE, VISIBLE, perturbed) if one.name == name).tolerance


def test_tolerances_are_four_times_measured_rounding_and_at_most_visible_differences() -> None:
    assert tolerance("train/loss", REFERENCE, near(1e-4), near(2e-4)) == pytest.approx(8e-4)
    assert tolerance("train/loss", REFERENCE, near(1e-9)) == pytest.approx(1e-5)
    assert tolerance("train/loss", REFERENCE, near(0.5)) == VISIBLE.loss
    assert tolerance("lr", REFERENCE, near(1e-4)) == 1e-12  # a function of the step


def test_a_perturbation_of_the_initial_weights_is_not_a_difference_of_their_change() -> None:
    """Perturbs `w` so that its change differs by 1e-3, and its initial value by more."""
    assert tolerance("weights", REFERENCE, near(1e-3)) == pytest.approx(4 * 0.2e-3 / math.hypot(0.2, 0.1), rel=1e-2)


def test_metrics_that_count_samples_have_a_tolerance_without_a_measured_difference() -> None:
    evaluated = run_with({5: {"eval/accuracy": 0.5, "eval/loss": 1.0}})
    found = {one.name: one.tolerance for one in compare(evaluated, evaluated, VISIBLE, [evaluated])}
    assert (found["eval/accuracy"], found["eval/loss"]) == (1e-3, 1e-5)


def test_the_gradient_of_one_parameter_is_named_although_the_norm_of_all_is_the_same() -> None:
    gradients = {"w": torch.tensor([3.0, 4.0]), "router": torch.tensor([0.01, 0.0])}
    reference = replace(REFERENCE, gradients=gradients)
    wrong = replace(REFERENCE, gradients=gradients | {"router": torch.tensor([0.005, 0.0])})
    drift = first_drift(compare(wrong, reference, VISIBLE, [reference]))
    assert drift is not None
    assert (drift[0].name, drift[1].step, drift[0].where) == ("gradients", 1, "router")
    assert [(one.name, one.multiple) for one in drift[0].worst] == [("router", pytest.approx(0.5))]


def test_the_change_of_one_weight_is_named() -> None:
    half = run_with(final={"b": torch.tensor([0.0, 0.05])})
    found = {one.name: one for one in compare(half, REFERENCE, VISIBLE, [near(1e-6)])}
    assert [(one.name, one.multiple) for one in found["updates"].worst] == [("b", pytest.approx(0.5))]


# ---------------------------------------------------------------------------------------------- real runs
RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 0.01 }
schedule = { use = "cosine", warmup = "10st" }
train = { length = "1ep", global_batch = 24, micro_batch = 6, eval_every = "1ep" }
checkpoint.keep = { last = 1, best = 1, monitor = "eval/accuracy" }
track.loud = { use = "./wrong_strategies.py:Loud", file = "tracked" }
callbacks.ema = { decay = 0.9 }
"""
Compare = Callable[..., ParityReport]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    copy(SUPPORT / "wrong_strategies.py", tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def compared(zygote: Zygote, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Returns `parity` with forked ranks, which are fast; tests/cli/test_parity.py starts the launcher."""

    def launch(command: Sequence[str], *, nproc: int, output: IO[bytes], variables: Any) -> int:
        ended = zygote.run(command[command.index("run") :], nproc=nproc, cwd=folder)
        output.write((ended.stdout + ended.stderr).encode())
        return next((code for code in ended.codes if code), 0)

    def run(*strategies: str, ranks: int = 2, steps: int = 4, measured: bool = False, **more: Any) -> ParityReport:
        more = ({} if measured else {"tolerance": FP32.loss}) | more  # saves the two runs that measure rounding
        return parity("tiny.toml", strategies, ranks=ranks, steps=steps, out=folder / "out", **more)

    monkeypatch.setattr("ddpforge.launchers.process.launch", launch)
    return run


def drift(report: ParityReport, number: int) -> tuple[str, int] | None:
    first = report.verdicts[number].drift
    return (first[0].name, first[1].step) if first else None


def test_correct_strategies_do_not_drift_and_wrong_ones_do(compared: Compare) -> None:
    wrong = "./wrong_strategies.py"
    report = compared(
        "ddp", "single@1", f"{wrong}:ForgetsToAverage", f"{wrong}:Slips", f"{wrong}:Slips:2@4", measured=True
    )
    assert [drift(report, number) for number in range(5)] == [
        None,
        None,
        ("train/grad_norm", 1),
        ("train/grad_norm", 3),
        ("train/grad_norm", 2),
    ]
    slip = report.verdicts[3].drift
    assert slip is not None
    assert slip[1].difference == pytest.approx(0.1, rel=1e-3)
    assert not report.same
    assert {one.name for one in report.measured} >= {
        "train/loss",
        "train/grad_norm",
        "weights",
        "gradients",
        "updates",
    }
    assert all(1e-5 <= one.tolerance < 1e-3 for one in report.measured if one.name in ("gradients", "weights"))
    assert not Path("tracked").exists()  # parity disables the recipe's trackers


def test_bf16_is_compared_by_its_own_rounding_and_each_gradient_has_its_factor(compared: Compare) -> None:
    report = compared(
        "ddp@1", "./wrong_strategies.py:Slips:1@1", "single@1", sets=["train.precision=bf16"], measured=True
    )
    wrong, right = report.verdicts[1:]
    assert wrong.drift is not None
    gradients = next(one for one in wrong.quantities if one.name == "gradients")
    assert {round(one.multiple or 0, 2) for one in gradients.worst} == {1.1}
    assert len(gradients.worst) == 4
    assert right.same
    assert 1e-2 < next(one.tolerance for one in report.measured if one.name == "gradients") < 0.5


def test_a_given_tolerance_is_used_without_a_measurement(compared: Compare, folder: Path) -> None:
    report = compared("ddp@1", "single@1", steps=2, tolerance=1e-3)
    assert (report.measured, report.tolerances) == ((), FP32.scaled(1e-3))
    assert sorted(one.name for one in (folder / "out").iterdir() if one.is_dir()) == ["1-ddp-1", "2-single-1"]


def test_every_run_begins_with_the_weights_of_the_first(compared: Compare) -> None:
    """Reports a strategy that would begin with other weights by itself."""
    elsewhere = compared("ddp", "./wrong_strategies.py:BeginsElsewhere").verdicts[1]
    initial, *others = elsewhere.quantities
    assert (initial.name, elsewhere.drift) == ("initial weights", (initial, initial.points[0]))
    assert initial.largest.difference > 0.5
    assert [quantity.name for quantity in others if quantity.drift] == []
    assert {"train/loss", "weights", "eval/accuracy"} <= {quantity.name for quantity in others}


def test_weights_in_the_checkpoint_are_compared(compared: Compare) -> None:
    report = compared("ddp", "./wrong_strategies.py:SavesRounded")
    assert drift(report, 1) == ("weights", 4)


def test_learning_rate_schedule_and_length_of_the_recipe_are_kept(compared: Compare) -> None:
    """Uses 15 steps per epoch: a schedule compressed to the compared steps would have other rates."""
    report = compared("single", "ddp", ranks=1, steps=4)
    rates = next(quantity for quantity in report.verdicts[1].quantities if quantity.name == "lr")
    assert [point.value for point in rates.points] == pytest.approx([0.001, 0.002, 0.003, 0.004])

    Path("out").rename("before")
    assert [verdict.steps for verdict in compared("single", "ddp", ranks=1, steps=40).verdicts] == [15, 15]


def test_the_folders_of_the_runs_are_kept(compared: Compare, folder: Path) -> None:
    compared("ddp", "ddp:50", ranks=1, steps=1, sets=["train.seed=5"])
    for run in ("1-ddp", "2-ddp-50"):
        status = json.loads((folder / "out" / run / "status.json").read_text())
        assert (status["state"], status["step"]) == ("done", 1)
        assert "done at step 1" in (folder / "out" / f"{run}.log").read_text()
    assert "bucket_cap_mb = 50" in (folder / "out/2-ddp-50/recipe.resolved.toml").read_text()
    assert "seed = 5" in (folder / "out/1-ddp/recipe.resolved.toml").read_text()


def test_a_failed_run_is_a_row_with_its_error_and_the_others_are_compared(compared: Compare, folder: Path) -> None:
    report = compared("ddp@1", "./wrong_strategies.py:GivesUp@1", "ddp@1", steps=1)
    reference, failed, equal = report.verdicts
    assert (reference.same, failed.same, equal.same, report.same) == (True, False, True, False)
    assert [error.code for error in report.failed] == [ExitCode.ENVIRONMENT]
    assert report.failed[0].reason == "this machine has no flux capacitor"
    assert "`./wrong_strategies.py:GivesUp@1` ended with exit code 3" in report.failed[0].message
    assert "    error: this machine has no flux capacitor" in report.failed[0].message
    assert [run["failed"] for run in report.as_dict()["runs"]] == [
        None,
        {"exit_code": 3, "reason": "this machine has no flux capacitor"},
        None,
    ]
    assert equal.steps == 1


def test_a_failed_reference_ends_parity(compared: Compare, folder: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        compared("./wrong_strategies.py:GivesUp@1", "ddp@1", steps=1)
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert not (folder / "out/2-ddp-1").exists()


@pytest.mark.parametrize(
    ("gpus", "device", "hidden"),
    [(0, "auto", False), (1, "auto", True), (2, "auto", False), (1, "cpu", False), (1, "cuda", False)],
)
def test_all_runs_use_the_cpu_if_there_are_too_few_gpus(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: int, device: str, hidden: bool
) -> None:
    """Needs a GPU for each process of the largest run. A device in the recipe is used, or it is an error."""
    told: list[Any] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("ddpforge.launchers.process.launch", lambda *_, variables, **__: told.append(variables) or 1)
    with pytest.raises(RunFailed):
        parity(
            "tiny.toml", ["single@1", "ddp@2"], ranks=1, steps=1, out=Path("out"), sets=[f"train.device={device}"],
            say=told.append,
        )  # fmt: skip
    assert told[-1] == ({"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if hidden else {})
    assert ("comparing on the CPU: 2 processes need 2 GPUs, but there is 1" in told) is hidden


def test_stopping_a_run_stops_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.launchers.process.launch", lambda *_, **__: ExitCode.PREEMPTED)
    with pytest.raises(RunFailed) as caught:
        parity("tiny.toml", ["ddp", "single"], ranks=1, steps=1, out=Path("out"))
    assert caught.value.code == ExitCode.INTERRUPTED
    assert caught.value.message == "stopped during the run of `ddp`; nothing was compared"


# ---------------------------------------------------------------------------------------------- errors
@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.launchers.process.launch", None)


@pytest.mark.usefixtures("nothing_starts")
def test_all_errors_are_reported_at_once_with_their_places(folder: Path) -> None:
    strategies = ["dpp", "ddp:bucket_cap_mb=-1", "ddp@5", "ddp:compression=zip:powersgd=1", "ddp"]
    with pytest.raises(RecipeError) as caught:
        parity("tiny.toml", strategies, ranks=2, steps=1, out=folder / "out", sets=["train.lenght=1ep"])
    places = [(problem.place.file, problem.place.text) for problem in caught.value.problems if problem.place]
    assert places == [
        ("--strategies", "dpp"),
        ("--strategies", "ddp:bucket_cap_mb=-1"),
        ("--set", "train.lenght=1ep"),  # once, although it is wrong under every strategy
        ("--strategies", "ddp:compression=zip:powersgd=1"),
        ("--strategies", "ddp:compression=zip:powersgd=1"),
    ]

    with pytest.raises(RecipeError, match=r"is not a multiple of `train\.micro_batch` × ranks = 6 × 5"):
        parity("tiny.toml", ["ddp", "ddp@5"], ranks=2, steps=1, out=folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_single_strategy_and_non_empty_folder_are_rejected(folder: Path) -> None:
    with pytest.raises(UsageError, match="nothing to compare with"):
        parity("tiny.toml", ["ddp"], ranks=2, steps=1, out=folder / "out")
    with pytest.raises(UsageError, match="is not empty"):
        parity("tiny.toml", ["ddp", "ddp"], ranks=2, steps=1, out=folder)
