"""Known traps of distributed training, each with the correct number."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, each_strategy, each_strategy_and_one_process, weights_in

RECIPE = """
recipe = 2
name = "run"
[model]
use = "./parts.py:Scalars"
{model}
[data.train]
use = "./parts.py:Values"
values = {values}
[task]
use = "./parts.py:SumOfLosses"
[optimizer]
use = "sgd"
lr = 1.0
[strategy]
{strategy}
[train]
length = "{length}"
global_batch = {batch}
{train}
[track]
every = "1st"
{more}
"""


class Run:
    """One recipe in one folder, run under any number of ranks."""

    def __init__(self, folder: Path, ddpforge: Callable[..., Ranks]) -> None:
        self.folder, self.ddpforge = folder, ddpforge
        copy(SUPPORT / "parts.py", folder)

    def __call__(self, *, nproc: int, fails: bool = False, **text: Any) -> Ranks:
        options = {"model": "", "strategy": DDP, "train": "", "more": "", "batch": 2, "length": "1st"} | text
        (self.folder / "run.toml").write_text(RECIPE.format(**options))
        return self.ddpforge("run", "run.toml", "--fresh", nproc=nproc, fails=fails)

    def weights(self) -> dict[str, float]:
        newest = max((self.folder / "runs/run/checkpoints").glob("step-*"))
        return {name: tensor.item() for name, tensor in weights_in(newest).items()}

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs/run/metrics.jsonl").read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "runs/run/status.json").read_text())
        return found


@pytest.fixture
def run(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Run:
    return Run(tmp_path, ddpforge)


# ---------------------------------------------------------------------------------------------- the step
@each_strategy_and_one_process
def test_incomplete_last_step_is_weighted_by_its_samples(run: Run, nproc: int, strategy: str) -> None:
    """Covers traps 02 and 24: gradient 1 per sample, 5 samples in steps of 4, learning rate 1: w is -1, then -2."""
    run(nproc=nproc, strategy=strategy, values=[1.0] * 5, batch=4, length="1ep", train="micro_batch = 1")
    assert run.weights()["a"] == -2.0
    assert [row["samples"] for row in run.rows()] == [4, 5]  # trap 31: samples processed, not configured


@each_strategy
def test_gradients_are_not_clipped_by_default(run: Run, strategy: str) -> None:
    """Covers trap 07."""
    run(nproc=2, strategy=strategy, values=[100.0] * 2)
    assert run.weights()["a"] == -100.0
    assert run.rows()[0]["train/grad_norm"] == 100.0


@each_strategy
def test_clipping_does_not_scale_up_a_small_gradient(run: Run, strategy: str) -> None:
    run(nproc=2, strategy=strategy, values=[0.25] * 2, train="clip_norm = 0.5")
    assert run.weights()["a"] == -0.25


@each_strategy
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_clipping_uses_the_unscaled_gradient_at_every_precision(run: Run, precision: str, strategy: str) -> None:
    """Covers traps 07 and 35b: fp16's scaled gradient is unscaled before it is measured and clipped."""
    run(nproc=2, strategy=strategy, values=[100.0] * 2, train=f'clip_norm = 0.5\nprecision = "{precision}"')
    assert run.weights()["a"] == pytest.approx(-0.5, rel=1e-5)
    assert run.rows()[0]["train/grad_norm"] == pytest.approx(100.0)


@each_strategy
def test_master_weights_are_fp32_under_bf16(run: Run, strategy: str) -> None:
    """Covers trap 26: thirty steps of 0.001 from 1.0; in bf16 none of them would change the weight."""
    run(
        nproc=2,
        strategy=strategy,
        values=[1.0] * 2,
        length="30st",
        model="start = 1.0",
        train='precision = "bf16"\nclip_norm = 1e-3',
    )
    assert run.weights()["a"] == pytest.approx(0.97, abs=1e-4)


@each_strategy
def test_logged_loss_is_the_mean_over_all_ranks(run: Run, strategy: str) -> None:
    """Covers trap 15: the samples 1 and 3 on two ranks, weights of one: the loss of the step is 2."""
    run(nproc=2, strategy=strategy, values=[1.0, 3.0], model="start = 1.0")
    (row,) = run.rows()
    assert row["train/loss"] == 2.0
    assert row["train/mean"] == 2.0


@each_strategy
def test_all_ranks_start_with_the_weights_of_rank_0(run: Run, tmp_path: Path, strategy: str) -> None:
    """Covers trap 11: a model that seeds itself by rank."""
    copy(SUPPORT / "odd_models.py", tmp_path)
    text = (
        RECIPE.replace("./parts.py:Scalars", "./odd_models.py:OwnSeed")
        .replace('use = "./parts.py:Values"\nvalues = {values}', 'use = "./parts.py:Points"')
        .replace("./parts.py:SumOfLosses", "regression")
    )
    options = {"model": "", "strategy": strategy, "train": "", "batch": 2, "length": "1st"}
    more = "[checkpoint]\nat_start = true"
    (tmp_path / "run.toml").write_text(text.format(**options, more=more))
    run.ddpforge("run", "run.toml", nproc=2)

    torch.manual_seed(0)
    first = min((tmp_path / "runs/run/checkpoints").glob("step-*"))
    assert torch.equal(weights_in(first)["head.weight"], torch.nn.Linear(4, 1).weight)


# ---------------------------------------------------------------------------------------------- parameters
@each_strategy
def test_unused_parameter_is_named(run: Run, strategy: str) -> None:
    """Covers trap 30 (2)."""
    failed = run(nproc=2, strategy=strategy, values=[1.0] * 2, model='weights = "ab"\nuses = "a"', fails=True)
    assert set(failed.codes) == {3}
    assert "parameter `b` got no gradient on rank 0: forward did not use it" in failed.stderr
    assert ("or set strategy.find_unused_parameters" in failed.stderr) == (strategy == DDP)
    assert ("if no sample uses it: remove it from the model" in failed.stderr) == (strategy != DDP)


def test_parameters_used_on_one_rank_only_are_refused_or_averaged(run: Run) -> None:
    """Covers trap 30 (3): refused by name or, if the recipe allows it, averaged over both ranks."""
    failed = run(nproc=2, values=[1.0, 1.0], model='weights = "ab"\nuses = "one by rank"', fails=True)
    assert 0 not in failed.codes
    assert "forward did not use it" in failed.stderr

    run(
        nproc=2,
        values=[1.0, 1.0],
        model='weights = "ab"\nuses = "one by rank"',
        strategy=f"{DDP}\nfind_unused_parameters = true",
    )
    assert run.weights() == {"a": -0.5, "b": -0.5}


@pytest.mark.parametrize("nproc", [1, 2])
def test_parameters_used_in_some_micro_batches_have_correct_gradients(tmp_path: Path, run: Run, nproc: int) -> None:
    """Covers trap 30 (1): samples 1, 2 for `a` and 1, 2 for `b`, one per micro-batch: both gradients are 3 / 4."""
    text = RECIPE.replace("parts.py:Scalars", "parts.py:Branches")
    options = {"model": "", "more": "", "length": "1st", "batch": 4, "values": [1.0, 2.0, 11.0, 12.0]}
    strategy, train = f"{DDP}\nfind_unused_parameters = true", "micro_batch = 1"
    (tmp_path / "run.toml").write_text(text.format(strategy=strategy, train=train, **options))
    run.ddpforge("run", "run.toml", nproc=nproc)
    assert run.weights() == {"a": -0.75, "b": -0.75}


@each_strategy
def test_frozen_parameters_stay_unchanged(run: Run, strategy: str) -> None:
    run(nproc=2, strategy=strategy, values=[1.0, 1.0], model='weights = "ab"\nfrozen = "b"\nstart = 3.0')
    assert run.weights() == {"a": 2.0, "b": 3.0}


@each_strategy
def test_parameter_unfrozen_during_training_is_refused(run: Run, strategy: str) -> None:
    """Covers trap 38: each rank would train the parameter separately."""
    failed = run(
        nproc=2,
        strategy=strategy,
        values=[1.0, 3.0],
        length="3st",
        model='weights = "ab"\nuses = "a"\nfrozen = "b"',
        more='[callbacks.thaw]\nuse = "./parts.py:Thaw"',
        fails=True,
    )
    assert set(failed.codes) == {3}
    assert "parameter `b` was frozen when the model was wrapped" in failed.stderr


# ---------------------------------------------------------------------------------------------- non-finite
NAN = f"{[1.0] * 12}\nnan = 4"


@each_strategy_and_one_process
def test_nan_on_one_rank_stops_all_before_the_update(run: Run, nproc: int, strategy: str) -> None:
    """Covers trap 14."""
    failed = run(
        nproc=nproc, strategy=strategy, values=NAN, length="1ep", fails=True, more='[checkpoint]\nevery = "1st"'
    )
    assert set(failed.codes) == {4}
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("diverged", 4)

    bad = status["step"]
    assert f"the gradient of step {bad} is not finite" in failed.stderr
    assert all(math.isfinite(value) for value in run.weights().values())
    assert run.rows()[-1]["step"] == bad
    assert "train/loss" in run.rows()[-1]["nonfinite"]  # the row reports the NaN loss


@each_strategy_and_one_process
def test_nan_step_is_skipped_on_all_ranks_and_counted(run: Run, nproc: int, strategy: str) -> None:
    """Covers trap 14: six steps, one of them skipped, gradient 1 and learning rate 1."""
    run(nproc=nproc, strategy=strategy, values=NAN, length="1ep", train='on_nonfinite = "skip"')
    assert run.weights()["a"] == -5.0
    assert run.rows()[-1]["train/skipped_steps"] == 1
    steps = [row["step"] for row in run.rows()]
    assert steps == sorted(set(steps))  # one row per step, also for the skipped one


@each_strategy
def test_rollback_skips_the_nan_step(run: Run, strategy: str) -> None:
    run(
        nproc=2,
        strategy=strategy,
        values=NAN,
        length="1ep",
        train='on_nonfinite = "rollback"',
        more='[checkpoint]\nevery = "2st"',
    )
    assert run.weights()["a"] == -5.0
    steps = [row["step"] for row in run.rows()]
    assert len(steps) == len(set(steps))


# ---------------------------------------------------------------------------------------------- buffers
@each_strategy
def test_batchnorm_statistics_are_averaged_over_ranks_for_evaluation_and_checkpoints(
    tmp_path: Path, run: Run, strategy: str
) -> None:
    """Covers trap 13: rank 0 has 0 and 2 (mean 1), rank 1 has 10 and 12 (mean 11): both evaluate and save with 6."""
    more = '[callbacks.show]\nuse = "./parts.py:ShowBuffers"\n[data.eval]\nuse = "./parts.py:Values"\nvalues = [0.0]'
    text = {"model": "", "values": "[0.0, 2.0, 10.0, 12.0]", "batch": 4, "more": more}
    recipe = RECIPE.replace("parts.py:Scalars", "parts.py:Statistics")
    options = {"strategy": strategy, "train": "", "length": "3st"} | text
    (tmp_path / "run.toml").write_text(recipe.format(**options))
    run.ddpforge("run", "run.toml", nproc=2)

    means = {float((tmp_path / f"mean-{rank}.txt").read_text()) for rank in (0, 1)}
    checkpoint = max((tmp_path / "runs/run/checkpoints").glob("step-*"))
    assert means == {weights_in(checkpoint)["norm.running_mean"].item()} == {6.0}


@each_strategy
def test_other_buffers_are_those_of_rank_0_for_evaluation_and_checkpoints(
    tmp_path: Path, run: Run, strategy: str
) -> None:
    """Keeps each rank's newest sample, 1 and 3, in a buffer: evaluation adds it to samples of 0 on both ranks."""
    recipe = RECIPE.replace("parts.py:Scalars", "parts.py:Remembers")
    more = '[data.eval]\nuse = "./parts.py:Values"\nvalues = [0.0, 0.0]'
    options = {"model": "", "strategy": strategy, "train": "eval_batch = 1", "length": "1st", "batch": 2, "more": more}
    (tmp_path / "run.toml").write_text(recipe.format(values=[1.0, 3.0], **options))
    run.ddpforge("run", "run.toml", nproc=2)
    checkpoint = max((tmp_path / "runs/run/checkpoints").glob("step-*"))
    assert run.rows()[-1]["eval/mean"] == weights_in(checkpoint)["newest"].item() == seen_first(run)


def seen_first(run: Run) -> float:
    """Returns the first training sample of rank 0."""
    return float((run.folder / "seen-0.txt").read_text().split()[0])


def test_gradients_are_all_reduced_once_per_step(tmp_path: Path, run: Run) -> None:
    """Covers DDP's contract: the first three micro-batches of a step are not all-reduced."""
    strategy = 'use = "./parts.py:CountsReductions"'
    run(nproc=2, strategy=strategy, values=[1.0] * 8, batch=8, length="2st", train="micro_batch = 1")
    assert [(tmp_path / f"reductions-{rank}.txt").read_text() for rank in (0, 1)] == ["2", "2"]


def test_sync_batchnorm_is_refused_on_a_cpu(run: Run) -> None:
    """Covers trap 13."""
    failed = run(nproc=2, values=[1.0] * 2, train="sync_batchnorm = true", fails=True)
    assert set(failed.codes) == {2}
    assert "train.sync_batchnorm needs CUDA, but this run is on cpu" in failed.stderr


# ---------------------------------------------------------------------------------------------- evaluation
@each_strategy
@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.full), 3])
def test_eleven_samples_are_evaluated_once_each(run: Run, nproc: int, strategy: str) -> None:
    """Covers traps 03 and 12: the mean of 0 to 10 is 5 on any number of ranks."""
    values = [float(value) for value in range(11)]
    more = f'[data.eval]\nuse = "./parts.py:Values"\nvalues = {values}'
    run(nproc=nproc, strategy=strategy, values=[-1.0] * 6, batch=6, train="eval_batch = 2", more=more)
    assert run.weights()["a"] == 1.0
    assert run.rows()[-1]["eval/mean"] == 5.0


# ---------------------------------------------------------------------------------------------- what ranks share
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_metrics_are_reduced_by_name(tmp_path: Path, run: Run, nproc: int) -> None:
    """Uses ids 0 to 3 in order: of two ranks, one has the names in another order than the other, or lacks one."""
    text = RECIPE.replace("SumOfLosses", "ByParity")
    more = '[data.eval]\nuse = "./parts.py:Values"\nvalues = [0.0, 2.0, 1.0, 3.0]'
    options = {"model": "", "strategy": DDP, "train": "eval_batch = 2", "batch": 6, "length": "1st", "more": more}
    (tmp_path / "run.toml").write_text(text.format(values=[0.0, 2.0, 4.0, 1.0, 3.0, 5.0], **options))
    run.ddpforge("run", "run.toml", nproc=nproc)
    training, evaluation = run.rows()
    assert (training["train/even"], training["train/odd"]) == (2.0, 3.0)
    assert (evaluation["eval/even"], evaluation["eval/odd"]) == (1.0, 2.0)


@pytest.mark.parametrize("nproc", [1, 2])
def test_mean_loss_is_refused_before_the_first_update(tmp_path: Path, run: Run, nproc: int) -> None:
    options = {"model": "start = 1.0", "strategy": DDP, "train": "", "batch": 4, "length": "9st", "more": ""}
    text = RECIPE.replace("SumOfLosses", "MeanOfLosses").format(values=[1.0, 2.0, 3.0, 4.0], **options)
    (tmp_path / "run.toml").write_text(text)
    failed = run.ddpforge("run", "run.toml", nproc=nproc, fails=True)
    assert set(failed.codes) == {2}
    assert "MeanOfLosses.loss returns a mean over the batch" in failed.stderr
    assert run.status()["step"] == 0


@each_strategy_and_one_process
def test_sample_weights_may_be_less_than_one(tmp_path: Path, run: Run, nproc: int, strategy: str) -> None:
    """Uses weights 0.1, 0.3, 0.5: the gradient is (0.1·1 + 0.3·3 + 0.5·5) / 0.9; the last rank has a padding sample."""
    text = RECIPE.replace("SumOfLosses", "WeighedSamples")
    options = {"model": "start = 1.0", "strategy": strategy, "train": "micro_batch = 1", "batch": 4, "more": ""}
    (tmp_path / "run.toml").write_text(text.format(values=[1.0, 3.0, 5.0], length="1ep", **options))
    run.ddpforge("run", "run.toml", nproc=nproc)
    (row,) = run.rows()
    assert row["train/loss"] == pytest.approx(3.5 / 0.9)
    assert run.weights()["a"] == pytest.approx(1.0 - 3.5 / 0.9)


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_shuffled_with_the_global_rng_is_read_once(tmp_path: Path, run: Run, workers: int) -> None:
    text = RECIPE.replace('Values"\nvalues = {values}', 'NumbersByRank"\nshuffled = true').replace("Scalars", "Seen")
    options = {"model": "", "strategy": DDP, "train": "", "batch": 2, "length": "10st"}
    more = f'[checkpoint]\nevery = "10st"\n[data]\nworkers = {workers}'
    (tmp_path / "run.toml").write_text(text.format(more=more, **options))
    run.ddpforge("run", "run.toml", nproc=2)
    seen = [(tmp_path / f"seen-{rank}.txt").read_text().split() for rank in (0, 1)]
    epochs = [[float(x) for hand in seen for x in hand[first : first + 5]] for first in (0, 5)]
    assert [sorted(epoch) for epoch in epochs] == [[float(n) for n in range(10)]] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("where", ["train", "eval"])
def test_different_streams_on_ranks_are_refused(tmp_path: Path, run: Run, where: str) -> None:
    text = RECIPE.replace('Values"\nvalues = {values}', 'NumbersByRank"\napart = {apart}')
    more = '[checkpoint]\nevery = "10st"\n[data.eval]\nuse = "./parts.py:NumbersByRank"\napart = {apart}'
    text = text.format(
        **{"model": "", "strategy": DDP, "train": 'eval_every = "2st"', "batch": 2, "length": "5st"},
        apart="true" if where == "train" else "false",
        more=more.format(apart="true" if where == "eval" else "false"),
    )
    (tmp_path / "run.toml").write_text(text)
    failed = run.ddpforge("run", "run.toml", nproc=2, fails=True)
    assert set(failed.codes) == {3}
    step = 1 if where == "train" else 2
    assert f"ranks read different samples from the iterable dataset, by step {step}" in failed.stderr


# ---------------------------------------------------------------------------------------------- failures, the world
def test_error_of_a_failing_rank_ends_the_run_and_is_reported(run: Run) -> None:
    """Covers trap 28b."""
    more = '[callbacks.fail]\nuse = "./parts.py:FailAt"\nstep = 3\nrank = 1'
    failed = run(nproc=2, values=[1.0] * 20, length="10st", more=more, fails=True)
    assert 0 not in failed.codes
    assert "ValueError: the disk of rank 1 is on fire" in failed.stderr
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["error"] == "rank 1: ValueError: the disk of rank 1 is on fire"


def test_single_refuses_several_processes(tmp_path: Path, run: Run) -> None:
    """Covers trap 05b."""
    options = {
        "model": "",
        "strategy": 'use = "single"',
        "train": "",
        "more": "",
        "batch": 2,
        "length": "1st",
        "values": [1.0] * 2,
    }
    (tmp_path / "run.toml").write_text(RECIPE.format(**options))
    failed = run.ddpforge("run", "run.toml", nproc=2, fails=True)
    assert set(failed.codes) == {2}
    assert 'strategy.use = "single" was started in 2 processes' in failed.stderr


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "train.precision"),
        ("ACCELERATE_USE_FSDP", "true", "strategy.use"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "strategy.use"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "train.micro_batch"),
    ],
)
def test_launcher_variables_that_contradict_the_recipe_are_refused(
    run: Run, variable: str, value: str, key: str
) -> None:
    """Covers traps 05 and 24."""
    run(nproc=1, values=[1.0] * 2)
    failed = run.ddpforge("run", "run.toml", "--fresh", nproc=2, env={variable: value}, fails=True)
    assert set(failed.codes) == {3}
    assert f"{variable}={value}, but `{key}` in the recipe decides this" in failed.stderr
