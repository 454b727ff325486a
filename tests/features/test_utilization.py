"""Model FLOPs utilization in the rows: peaks by device and dtype, FLOPs of a sample, and refusals."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Elsewhere, run_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ddpforge
from ddpforge.api import build_without_ranks, read_metrics
from ddpforge.builtin.callbacks.throughput import Throughput
from ddpforge.components.registry import Registry
from ddpforge.errors import UsageError
from ddpforge.features import utilization
from ddpforge.features.peak_flops import PEAKS, peak_of
from ddpforge.features.utilization import UtilizationRows, compute_dtype
from ddpforge.interfaces import DeviceKind, StepInfo, World
from ddpforge.recipe import Recipe, load_recipe
from ddpforge.tools.simulation.forecast import Forecast, forecast

REGISTRY = Registry.installed()
GPT = """
recipe = 2
name = "gpt"
[model]
use = "gpt"
vocab_size = 512
block_size = 256
layers = 4
heads = 8
width = 512
[data.train]
use = "text"
split = "train"
block_size = 256
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "4st"
global_batch = 4
"""


def planned(tmp_path: Path, *sets: str, ranks: int = 1) -> Forecast:
    (tmp_path / "gpt.toml").write_text(GPT)
    return forecast(str(tmp_path / "gpt.toml"), None, ranks=ranks, registry=REGISTRY, sets=sets)


def recipe(*sets: str) -> Recipe:
    return load_recipe("digits", sets=sets, registry=REGISTRY).recipe


# ---------------------------------------------------------------------------------------------- FLOPs
@pytest.mark.parametrize("sets", [(), ("train.micro_batch=1", "train.precision=bf16")])
def test_the_flops_of_gpt_are_those_of_nanogpts_formula(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """6 N + 12 L H Q T per token, with N without positions (Chowdhery et al., 2022, appendix B): to 1 %."""
    found = planned(tmp_path, *sets)
    length, layers, heads, width = 256, 4, 8, 512
    weights = found.parameters - length * width
    per_token = 6 * weights + 12 * layers * heads * (width // heads) * length
    assert found.model_flops == pytest.approx(per_token * length * 4, rel=0.01)
    assert (found.all_flops or 0) > (found.model_flops or 0)  # flash attention computes its scores again


def test_the_flops_of_gpt_are_those_of_torchs_flop_counter(tmp_path: Path) -> None:
    """Of a real step with attention by plain products, which computes nothing again."""
    found = planned(tmp_path)
    loaded = load_recipe(str(tmp_path / "gpt.toml"), registry=REGISTRY)
    model = build_without_ranks(loaded, REGISTRY, ranks=1, device="cpu").model.train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(4, 256, dtype=torch.int64)).float().logsumexp(-1).sum().backward()
    assert found.model_flops == counter.get_total_flops()


def test_model_flops_are_of_all_ranks_together(tmp_path: Path) -> None:
    assert planned(tmp_path, "strategy.use=fsdp", ranks=4).model_flops == planned(tmp_path).model_flops


# ---------------------------------------------------------------------------------------------- peaks
@pytest.mark.parametrize(
    ("product", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp16", 835.5e12),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("pretended H100", "bf16", None),
        (None, "fp32", None),
    ],
)
def test_the_peak_is_that_of_the_product_and_dtype(product: str | None, dtype: str, peak: float | None) -> None:
    assert peak_of(product, dtype) == peak


def test_every_peak_has_a_source_and_grows_with_narrower_dtypes() -> None:
    for name, one in PEAKS.items():
        assert one.source, name
        speeds = [speed for speed in (one.fp32, one.tf32, one.bf16, one.fp8) if speed is not None]
        assert speeds == sorted(speeds), name
        assert one.bf16 in (None, one.fp16), name


@pytest.mark.parametrize(
    ("sets", "dtype"),
    [
        ((), "fp32"),
        (("train.tf32=true",), "tf32"),
        (("train.precision=bf16", "train.tf32=true"), "bf16"),
        (("train.precision=fp16",), "fp16"),
    ],
)
def test_the_dtype_of_products_is_that_of_the_recipe(sets: tuple[str, ...], dtype: str) -> None:
    assert compute_dtype(recipe(*sets)) == dtype


# ---------------------------------------------------------------------------------------------- rows
class Planned:
    """Double of the process of a plan: `plans` is its result, and it is over from the second row on."""

    started: list[tuple[Any, ...]]
    plans: list[dict[str, Any]]

    def __init__(self, *arguments: Any) -> None:
        Planned.started.append(arguments)
        self.asked = 0

    def give_way(self, nice: int) -> None:
        assert nice > 0

    @property
    def is_over(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def said(self) -> list[dict[str, Any]]:
        return self.plans

    def end(self) -> None:
        Planned.started.append(("ended",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of a run on an "H100"; the plan of a step with 8 samples has 8e12 FLOPs."""
    (tmp_path / "recipe.resolved.toml").write_text("name = 'x'")
    monkeypatch.setattr(utilization, "PlanProcess", Planned)
    monkeypatch.setattr(DeviceKind, "product", lambda *_: "NVIDIA H100 80GB HBM3")
    Planned.started, Planned.plans = [], [{"model_flops": 8e12, "batch": {"global_batch": 8}, "unsimulated": ""}]
    return tmp_path


def started(
    folder: Path, *sets: str, stated: tuple[str, float] | None = None, device: str = "cuda", rank: int = 0
) -> UtilizationRows:
    ranks = Elsewhere(2, rank)
    world = World(global_ranks=ranks, dp_ranks=ranks, device=torch.device(device), local_rank=rank)
    rows = UtilizationRows(recipe("train.precision=bf16", *sets), stated)
    rows.on_start(run_of(nn.Linear(1, 1), world, folder=folder))
    return rows


def row(speed: float) -> StepInfo:
    return StepInfo(step=1, samples=1, lr=0.1, seconds=1, metrics={"train/samples_per_second": speed})


def test_rows_have_the_utilization_of_all_devices_as_soon_as_the_flops_are_counted(folder: Path) -> None:
    rows = started(folder)
    assert Planned.started == [(folder / "recipe.resolved.toml", 2, "train.activation_checkpointing=false")]
    assert rows.on_log(row(989.4)) == {}
    assert rows.on_log(row(989.4)) == {"perf/mfu": pytest.approx(0.5)}  # 989.4 samples/s × 1e12, on 2 × 989.4e12
    rows.on_end(None)
    assert len(Planned.started) == 1


def test_a_later_attempt_counts_nothing_again_unless_recipe_or_ranks_changed(folder: Path) -> None:
    rows = started(folder)
    for _ in range(2):
        rows.on_log(row(1))
    assert json.loads((folder / "flops.json").read_text())["flops_per_sample"] == 1e12
    assert started(folder).on_log(row(989.4)) == {"perf/mfu": pytest.approx(0.5)}
    assert len(Planned.started) == 1
    (folder / "recipe.resolved.toml").write_text("name = 'y'")
    started(folder)
    assert len(Planned.started) == 2


def test_a_run_that_ends_first_ends_the_count(folder: Path) -> None:
    started(folder).on_end(None)
    assert Planned.started[1:] == [("ended",)]
    assert not (folder / "flops.json").exists()


def test_a_model_that_cannot_be_simulated_has_no_utilization_and_the_reason_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Planned.plans = [{"model_flops": None, "batch": {"global_batch": 8}, "unsimulated": "NotImplementedError: no"}]
    rows = started(folder)
    assert [rows.on_log(row(1)) for _ in range(4)] == [{}] * 4
    assert caplog.text.count("no perf/mfu: the FLOPs of a step could not be counted: NotImplementedError: no") == 1


@pytest.mark.parametrize(
    ("sets", "device", "rank", "said"),
    [
        ((), "cpu", 0, ""),
        ((), "cuda", 1, ""),
        (("train.precision=fp32", "train.tf32=false"), "cuda", 0, None),
        (("train.max_tokens=100",), "cuda", 0, "no perf/mfu: with train.max_tokens"),
    ],
)
def test_only_rank_0_with_a_known_peak_counts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sets: tuple[str, ...],
    device: str,
    rank: int,
    said: str | None,
) -> None:
    # A CPU has no peak in the table.
    caplog.set_level(logging.INFO)
    if device == "cpu":
        monkeypatch.undo()
        monkeypatch.setattr(utilization, "PlanProcess", Planned)
    started(folder, *sets, device=device, rank=rank)
    assert len(Planned.started) == (said is None)
    assert (said or "") in caplog.text
    assert bool(caplog.text) == bool(said)


def test_a_device_without_a_known_peak_is_named_with_the_option_that_states_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(DeviceKind, "product", lambda *_: "NVIDIA H999")
    started(folder)
    assert "the peak speed of NVIDIA H999 in bf16 is not known; set peak_flops in [callbacks.throughput]" in caplog.text
    assert Planned.started == []
    rows = started(folder, stated=("throughput", 1e15))
    assert [rows.on_log(row(1000)) for _ in range(2)] == [{}, {"perf/mfu": pytest.approx(0.5)}]


def test_a_stated_peak_that_the_run_exceeds_is_refused_by_its_key(folder: Path) -> None:
    rows = started(folder, stated=("speed", 1e12))
    rows.on_log(row(3))
    with pytest.raises(
        UsageError, match=r"callbacks\.speed\.peak_flops = 1e\+12 cannot be .*: the run has 1\.50 times"
    ):
        rows.on_log(row(3))


def test_a_peak_of_the_table_that_the_run_exceeds_ends_the_column_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = started(folder)
    rows.on_log(row(1))
    assert [rows.on_log(row(3e3)) for _ in range(2)] == [{}] * 2
    assert caplog.text.count("no perf/mfu any more: it was 1.52") == 1


def test_a_run_has_the_column_in_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with a stated peak."""
    monkeypatch.setattr(utilization, "PlanProcess", Planned)
    Planned.started, Planned.plans = [], [{"model_flops": 64e6, "batch": {"global_batch": 64}}]
    sets = ["train.length=4st", "train.global_batch=64", "track.every=1st", "callbacks.throughput.peak_flops=1e15"]
    outcome = ddpforge.run("digits", sets=sets, out=tmp_path)
    assert Planned.started[0][1:] == (1, "train.activation_checkpointing=false")
    shares = [
        (one["perf/mfu"], one["train/samples_per_second"]) for one in read_metrics(outcome.folder) if "perf/mfu" in one
    ]
    assert len(shares) == 3  # the count is over from the second row on
    ddpforge.run("digits", sets=[*sets, "train.length=6st"], out=tmp_path, allow_change=["train.length"])
    assert sum("perf/mfu" in one for one in read_metrics(outcome.folder)) == 5
    assert all(share == pytest.approx(speed * 1e6 / 1e15) for share, speed in shares)


def test_options_of_throughput_that_give_more_than_1_are_refused() -> None:
    ranks = Elsewhere()
    throughput = Throughput(flops_per_sample=1e9, peak_flops=1e10)
    world = World(global_ranks=ranks, dp_ranks=ranks, device=torch.device("cpu"), local_rank=0)
    throughput.on_start(run_of(nn.Linear(1, 1), world))
    throughput.on_log(StepInfo(step=1, samples=0, lr=0.1, seconds=1))
    with pytest.raises(
        UsageError, match=r"peak_flops = 1e\+10 and flops_per_sample = 1e\+09 .*: the run has 2\.00 times"
    ):
        throughput.on_log(StepInfo(step=2, samples=20, lr=0.1, seconds=1))
