"""Throughput counts only the samples that were trained on."""

import pytest
import torch
from support.doubles import Elsewhere, run_of

from ddpforge.builtin.callbacks.throughput import Throughput
from ddpforge.interfaces import StepInfo, World

RANKS = Elsewhere(ranks=2)
WORLD = World(global_ranks=RANKS, dp_ranks=RANKS, device=torch.device("cpu"), local_rank=0)


def info(step: int, samples: int, seconds: float = 0.5) -> StepInfo:
    return StepInfo(step=step, samples=samples, lr=0.1, seconds=seconds)


def started(**options: float) -> Throughput:
    throughput = Throughput(**options)
    throughput.on_start(run_of(torch.nn.Linear(1, 1), WORLD))
    return throughput


def test_throughput_reports_step_time_and_memory() -> None:
    columns = started().on_log(info(10, 80))
    assert columns.keys() == {"perf/step_seconds", "perf/peak_memory_gib"}
    assert columns["perf/step_seconds"] == 0.5
    assert 0.01 < columns["perf/peak_memory_gib"] < 1000


def test_utilisation_counts_the_samples_of_the_window_on_all_devices() -> None:
    throughput = started(flops_per_sample=1e9, peak_flops=1e10)
    assert "perf/mfu" not in throughput.on_log(info(10, 80))
    # 10 steps of 0.5 s trained on 70 samples, one batch being short: 7e10 FLOPs of 2 x 5 s x 1e10
    assert throughput.on_log(info(20, 150))["perf/mfu"] == pytest.approx(0.7)


def test_utilisation_is_omitted_after_a_rollback() -> None:
    throughput = started(flops_per_sample=1e9, peak_flops=1e10)
    throughput.on_log(info(20, 160))
    assert "perf/mfu" not in throughput.on_log(info(10, 80))
    assert throughput.on_log(info(20, 160))["perf/mfu"] == pytest.approx(0.8)


def test_flops_per_sample_without_peak_flops_is_refused() -> None:
    with pytest.raises(ValueError, match="flops_per_sample: it requires peak_flops"):
        Throughput(flops_per_sample=1e12)
