"""Simulated steps with fake tensors and fake ranks: memory, FLOPs and communication of the strategies' own code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.isolated import apart
from support.torch_versions import needs_pipelines
from torch.nn.parallel import DistributedDataParallel

from ddpforge.components.registry import Registry
from ddpforge.recipe.schema import TrainSection
from ddpforge.strategies.pipeline.strategy import StageSimulation
from ddpforge.tools.parity.specs import Spec, parse
from ddpforge.tools.simulation import forecast as forecasts
from ddpforge.tools.simulation import zero
from ddpforge.tools.simulation.devices import DEVICES, Seconds, Sent
from ddpforge.tools.simulation.fake import fake_world
from ddpforge.tools.simulation.forecast import Forecast, allowance, forecast
from ddpforge.tools.simulation.search import Choice, _changes, best

RECIPE = """
recipe = 2
name = "planned"
[model]
use = "gpt"
vocab_size = 256
block_size = 16
layers = 2
heads = 2
width = 64
[data.train]
use = "text"
split = "train"
block_size = 16
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "4st"
global_batch = 64
"""
MIB = 2**20

Plan = Callable[..., Forecast]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Returns a function that forecasts the recipe above, or another, under a strategy on `ranks` ranks."""

    def made(strategy: str, *sets: str, ranks: int = 1, text: str = RECIPE, device: str = "") -> Forecast:
        (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
        registry = Registry.installed()
        return apart(
            lambda: forecast(
                str(tmp_path / "recipe.toml"),
                parse(strategy, registry, ranks=ranks),
                ranks=ranks,
                registry=registry,
                sets=sets,
                device=DEVICES.get(device),
            )
        )

    return made


# ---------------------------------------------------------------------------------------------- persistent memory
@pytest.fixture(scope="module")
def of_zero(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns forecasts on 8 ranks from another process, because DeepSpeed reconfigures logging."""
    recipe = tmp_path_factory.mktemp("zero") / "recipe.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    # DeepSpeed does not shard small weights by default.
    third = "deepspeed:3:extra={zero_optimization={stage3_param_persistence_threshold=0}}"
    chosen = f"ddp,deepspeed:1,deepspeed:2,fsdp,{third}"
    command = [sys.executable, "-m", "ddpforge", "plan", str(recipe), "--ranks=8", "--json", f"--strategies={chosen}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {one["strategy"][:11]: one for one in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("strategy", "weights", "state"),
    [
        # Bytes for each parameter, and the number of ranks that share them: Rajbhandari et al., "ZeRO" (2020), figure
        # 1. Weights and gradients take 4 bytes (they are fp32 here), and Adam's moments 8.
        ("ddp", (4, 1), (8, 1)),
        ("deepspeed:1", (4, 1), (8, 8)),
        ("deepspeed:2", (4, 1), (8, 8)),
        ("deepspeed:3", (4, 8), (8, 8)),
        ("fsdp", (4, 8), (8, 8)),
    ],
)
def test_sizes_of_weights_and_optimizer_state_match_the_zero_paper(
    of_zero: dict[str, dict[str, Any]], strategy: str, weights: tuple[int, int], state: tuple[int, int]
) -> None:
    found = of_zero[strategy]
    assert not found["unsimulated"]
    for kind, (each, among) in (("weights", weights), ("optimizer state", state)):
        assert found["state"][kind] == pytest.approx(found["parameters"] * each / among, rel=0.02)
    assert found["checkpoint"] == pytest.approx(found["parameters"] * 12, rel=0.02)


@pytest.mark.parametrize(("strategy", "among"), [("ddp", 1), ("fsdp", 8), ("fsdp:replicas=2", 4)])
def test_gradients_are_sharded_as_in_the_contract(plan: Plan, strategy: str, among: int) -> None:
    found = plan(strategy, ranks=8)
    assert found.state["gradients"] == pytest.approx(found.parameters * 4 / among, rel=0.02)


def test_simulation_of_1024_ranks(plan: Plan) -> None:
    found = plan("fsdp", "train.global_batch=1024", ranks=1024)
    assert not found.unsimulated
    assert found.state["weights"] < 2 * found.parameters * 4 / 1024 + 50 * 256  # a row of each tensor, at the least
    assert found.batch["data_ranks"] == 1024


# ---------------------------------------------------------------------------------------------- the largest moment
def test_only_activations_grow_with_the_micro_batch(plan: Plan) -> None:
    one, two = (plan("ddp", f"train.micro_batch={size}", ranks=2) for size in (8, 16))
    assert one.kinds
    assert two.kinds
    assert one.state == two.state
    assert two.kinds["activations"] == pytest.approx(2 * one.kinds["activations"], rel=0.01)
    assert two.peak
    assert one.peak
    assert two.peak > one.peak


def test_peak_memory_does_not_depend_on_gradient_accumulation(plan: Plan) -> None:
    two, eight = (plan("ddp", f"train.global_batch={size}", "train.micro_batch=8", ranks=2) for size in (32, 128))
    assert (two.batch["accumulation"], eight.batch["accumulation"]) == (2, 8)
    assert two.peak == eight.peak
    assert eight.flops == 4 * (two.flops or 0)
    assert eight.wire == two.wire  # gradients are reduced once a step


def test_sharded_weights_are_gathered_for_every_micro_batch(plan: Plan) -> None:
    two, eight = (plan("fsdp", f"train.global_batch={size}", "train.micro_batch=8", ranks=2) for size in (32, 128))
    assert two.wire
    assert eight.wire
    assert eight.wire["all_gather over 2"] == 4 * two.wire["all_gather over 2"]


def test_memory_of_ema_weights_and_several_optimizers_is_counted(plan: Plan) -> None:
    plain = plan("ddp", ranks=2)
    averaged = plan("ddp", "callbacks.ema={use='ema',decay=0.99}", ranks=2)
    assert averaged.peak == pytest.approx((plain.peak or 0) + plain.parameters * 4, rel=0.001)
    muon = plan("ddp", "optimizer.groups.matrices={use='muon',parameters=['2d'],lr=0.01}", ranks=2)
    assert muon.state["optimizer state"] < plain.state["optimizer state"]  # momentum alone, for matrices


def test_contrastive_loss_with_all_gather_is_simulated(plan: Plan) -> None:
    found = plan("ddp", ranks=4, text=(Path(__file__).parents[3] / "recipes/contrastive-digits.toml").read_text())
    assert not found.unsimulated
    assert found.wire
    assert "all_gather over 4" in found.wire


def test_chunked_loss_needs_less_memory_and_the_same_flops(plan: Plan) -> None:
    long = ("model.vocab_size=4096", "train.micro_batch=32")
    whole, chunked = (plan(strategy, *long, *more) for strategy, more in (("ddp", []), ("ddp", ["task.loss_chunk=64"])))
    logits = 32 * 16 * 4096 * 4
    assert whole.peak
    assert chunked.peak
    assert chunked.peak < whole.peak - logits
    assert chunked.flops == whole.flops


@pytest.mark.parametrize(
    "key",
    [
        *("sync_batchnorm=true", 'device="cuda"'),
        *(
            pytest.param(key, marks=pytest.mark.full)
            for key in ("tf32=true", "cudnn_benchmark=true", "compile=default")
        ),
    ],
)
def test_gpu_options_can_be_planned_without_a_gpu(plan: Plan, key: str) -> None:
    assert plan("ddp", f"train.{key}").peak == plan("ddp").peak


def test_activation_checkpointing_needs_less_memory_and_more_flops(plan: Plan) -> None:
    kept, again = (plan("ddp", f"train.activation_checkpointing={flag}") for flag in ("false", "true"))
    assert again.peak
    assert kept.peak
    assert again.peak < 0.8 * kept.peak
    assert again.flops
    assert kept.flops
    assert 1.15 < again.flops / kept.flops < 4 / 3  # the head is not computed again


def test_adapters_with_ranks_by_layer_are_planned(plan: Plan) -> None:
    base = '{ use = "gpt", vocab_size = 256, block_size = 16, layers = 2, heads = 2, width = 64 }'
    adapters = 'targets = ["mlp.0"]\nr = 4\ninit = "pissa"\nrank_pattern = { "blocks.1.*" = 8 }'
    model = f'use = "lora"\nbase = {base}\n{adapters}'
    text = RECIPE.replace(RECIPE[RECIPE.index('use = "gpt"') : RECIPE.index("[data.train]")], model + "\n")
    found = plan("ddp", text=text)
    assert not found.unsimulated
    assert found.state["optimizer state"] == pytest.approx(2 * 4 * (4 + 8) * (64 + 256), abs=64)  # and counts of steps


@pytest.mark.parametrize("recomputed", ["true", "false"])
def test_activation_offload_needs_the_activations_of_two_blocks(plan: Plan, recomputed: str) -> None:
    long = (f"train.activation_checkpointing={recomputed}", "train.micro_batch=32", "model.block_size=64")
    offload = "train.activation_offload=true"
    four, eight = (plan("ddp", *long, offload, f"model.layers={layers}") for layers in (4, 8))
    kept = plan("ddp", *long, "model.layers=8")
    assert four.kinds["activations"] == pytest.approx(eight.kinds["activations"], rel=0.05)
    assert eight.kinds["activations"] < 0.7 * kept.kinds["activations"]
    assert eight.flops == kept.flops


@needs_pipelines
def test_pipeline_forecast_is_of_the_stage_with_the_most_memory(plan: Plan) -> None:
    whole, staged = plan("ddp", ranks=1), plan("pipeline", "train.micro_batch=16", ranks=2)
    assert not staged.unsimulated
    # The embedding is on both stages: it is tied to the head.
    assert 0.5 < staged.state["weights"] / whole.state["weights"] < 0.7
    assert staged.wire
    assert staged.wire["send over 2"] == pytest.approx(4 * 16 * 16 * 64 * 4, abs=4)  # torch 2.14 sends a number more
    assert staged.all_flops == pytest.approx(whole.flops, rel=0.01)


@needs_pipelines
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("GPipe", marks=pytest.mark.full), "ZBVZeroBubble"])
def test_long_pipeline_step_is_extrapolated_from_two_short_steps(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    strategy = f'pipeline:schedule="{schedule}"'
    reckoned = plan(strategy, "train.micro_batch=1", "train.global_batch=19", ranks=2)
    monkeypatch.setattr(StageSimulation, "micro_batches", lambda self, ranks: (18, 19))  # no extrapolation
    simulated = plan(strategy, "train.micro_batch=1", "train.global_batch=19", ranks=2)
    assert reckoned.batch["accumulation"] == 19
    assert reckoned.as_dict() == simulated.as_dict()


@needs_pipelines
@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline",
        pytest.param("pipeline:stages=4:tensor=2", marks=pytest.mark.full),
        pytest.param('pipeline:schedule="GPipe"', marks=pytest.mark.full),
    ],
)
def test_one_of_several_equal_stages_is_simulated(plan: Plan, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    ranks = 8 if "tensor" in strategy else 4
    quick = plan(strategy, "model.layers=8", "train.micro_batch=8", ranks=ranks)
    told = StageSimulation.ranks_to_simulate

    def each(*args: Any) -> dict[int, Any]:
        forms = told(*args)
        assert len(set(forms.values())) == 3 < len(forms)
        return {rank: rank for rank in forms}

    monkeypatch.setattr(StageSimulation, "ranks_to_simulate", each)
    assert plan(strategy, "model.layers=8", "train.micro_batch=8", ranks=ranks).as_dict() == quick.as_dict()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_zero_simulation_equals_deepspeeds_code_for_all_ranks(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    quick = plan("deepspeed:3", "train.global_batch=66", ranks=ranks)
    monkeypatch.setattr(zero, "_STAND_INS", zero._STAND_INS[:1])  # required for a step
    assert plan("deepspeed:3", "train.global_batch=66", ranks=ranks).as_dict() == quick.as_dict()


def test_tensor_parallel_rank_has_its_share_of_flops(plan: Plan) -> None:
    whole, shared = plan("ddp", ranks=1), plan("fsdp:tensor=2", ranks=2)
    assert shared.batch["data_ranks"] == 1
    assert shared.flops == pytest.approx((whole.flops or 0) / 2, rel=0.01)


def test_bf16_compression_halves_the_bytes_of_all_reduce(plan: Plan) -> None:
    plain, half = plan("ddp", ranks=2), plan('ddp:compression="bf16"', ranks=2)
    assert plain.wire
    assert half.wire
    assert half.wire["all_reduce over 2"] == plain.wire["all_reduce over 2"] / 2 == plain.parameters * 4 / 2


def test_largest_tensors_name_the_module_that_created_them(plan: Plan) -> None:
    found = plan("ddp", ranks=2)
    assert len(found.largest) == 10
    assert [one["bytes"] for one in found.largest] == sorted((one["bytes"] for one in found.largest), reverse=True)
    makers = " ".join(one["made_by"] for one in found.largest)
    assert "blocks.0.mlp" in makers
    assert "_log_softmax" in makers
    assert "head" not in makers, "logits are kept through the backward pass"


# ---------------------------------------------------------------------------------------------- work
def test_flops_of_gpt_2_match_the_formula(plan: Plan) -> None:
    """Expects 6 FLOPs per parameter and token (Kaplan et al., 2020), and 14 · layers · width · length for attention.

    Flash attention computes the scores a second time in its backward pass (Dao et al., 2022): 7 products, not 6.
    """
    sets = ["model={use=gpt,vocab_size=50257,block_size=1024,layers=12,heads=12,width=768}"]
    sets += ["data.train.block_size=1024", "train.global_batch=1"]
    found = plan("single", *(one.replace("=gpt,", '="gpt",') for one in sets))
    tokens, positions = 1024, 1024 * 768
    assert found.items == tokens
    assert found.parameters == pytest.approx(124.4e6, rel=0.002)
    expected = 6 * (found.parameters - positions) * tokens + 14 * 12 * 768 * tokens * tokens
    assert found.flops == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "sent"), [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("send", 1.0), ("recv", 0)]
)
def test_bytes_sent_match_ring_algorithms(name: str, sent: float) -> None:
    assert Sent(name, 4, 1000).wire == 1000 * sent


def test_faster_device_needs_less_time(plan: Plan) -> None:
    slow, fast = (plan("ddp", "train.precision=bf16", ranks=8, device=name).seconds for name in ("a100-80", "h100"))
    assert slow
    assert fast
    assert fast.compute < slow.compute
    assert fast.least == max(fast.compute, fast.communication) < fast.most == fast.compute + fast.communication


# ---------------------------------------------------------------------------------------------- not simulated
ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.layer = nn.Linear(64, outputs)
    def forward(self, x):
        x = x.flatten(1)
        if x.unique().tolist()[:1] == [0.5]:
            x = x + 1
        return self.layer(x)
"""
DIGITS = """
recipe = 2
name = "odd"
model = { use = "./odd.py:Odd", outputs = 10 }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "adamw", lr = 1e-3 }
train = { length = "4st", global_batch = 64 }
"""


def test_model_that_reads_values_is_reported_and_its_state_is_calculated(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    found = plan("ddp", ranks=2, text=DIGITS)
    assert "unique" in found.unsimulated
    assert (found.peak, found.kinds, found.flops, found.fits) == (None, None, None, None)
    assert found.state == {"weights": 2600, "gradients": 2600, "optimizer state": 5200 + 2 * 4}
    assert found.checkpoint == 2600 * 3 + 8


def test_calculated_state_has_gradients_of_trained_weights_only(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    found = plan("ddp", 'train.freeze=["layer.bias"]', ranks=2, text=DIGITS)
    assert found.unsimulated
    assert found.state == {"weights": 2600, "gradients": 2560, "optimizer state": 5120 + 4}


@pytest.mark.parametrize(
    ("needs", "budget", "fits"), [(9, 10, True), (10, 10, True), (11, 10, False), (None, 10, None)]
)
def test_a_forecast_fits_up_to_the_last_byte_of_its_budget(needs: int | None, budget: int, fits: bool | None) -> None:
    assert forecast_with(needs=needs, budget=budget).fits is fits


def test_a_gpu_needs_a_tenth_more_than_its_tensors_and_its_context() -> None:
    assert allowance(10 * MIB, None) == 10 * MIB
    assert allowance(10 * MIB, DEVICES["h100"]) == 11 * MIB + 1536 * MIB


def forecast_with(micro_batch: int = 1, **known: Any) -> Forecast:
    batch = {"micro_batch": micro_batch, "data_ranks": 2}
    numbers: dict[str, Any] = {"items": 1.0, "parameters": 1, "state": {}, "checkpoint": 1, "checkpoint_every": None}
    return Forecast(strategy="x", ranks=2, batch=batch, steps=1, items_name="samples", **numbers | known)


def chosen_among(*found: Forecast) -> int | None:
    """Returns the micro-batch of the best of these forecasts, which all fit."""
    spec = Spec("ddp", "ddp", (), 2)
    one = best([Choice(spec, False, each.batch["micro_batch"], each) for each in found])
    return one.micro_batch if one else None


def test_the_best_choice_has_the_least_time_then_work_then_bytes_then_forward_passes() -> None:
    slow, fast = (forecast_with(size, seconds=Seconds(size, 0.0)) for size in (2, 1))
    assert chosen_among(slow, fast) == 1
    assert chosen_among(forecast_with(1, flops=9), forecast_with(2, flops=8)) == 2
    sends = [forecast_with(size, flops=9, wire={"a": 1.0, "b": 10.0 - size}) for size in (1, 2)]
    assert chosen_among(*sends) == 2
    alike = [forecast_with(size, flops=9, wire={}) for size in (2, 8, 4)]
    assert chosen_among(*alike) == 8, "fewer forward passes"
    assert chosen_among() is None


def test_a_remedy_names_only_the_settings_that_differ_from_the_recipe() -> None:
    train = TrainSection.model_validate({"length": "1st", "global_batch": 16, "micro_batch": 4})
    own, other = Spec("ddp", "ddp", (), 2), Spec("fsdp", "fsdp", (), 2)
    cases: list[tuple[Spec, Any, int, dict[str, str]]] = [
        (own, False, 4, {}),
        (own, False, 2, {"train.micro_batch": "2"}),
        (own, True, 4, {"train.activation_checkpointing": "true"}),
        (other, False, 4, {"strategy.use": '"fsdp"'}),
    ]
    for spec, checkpointing, size, changes in cases:
        assert _changes(Choice(spec, checkpointing, size, forecast_with(size)), own, train, 2) == changes


@needs_pipelines
@pytest.mark.parametrize(
    ("sets", "simulated"),
    [((), [0, 1, 3]), (('optimizer.groups.odd={parameters=["blocks.5.*"], lr=1e-4}',), [0, 1, 2, 3])],
)
def test_equal_stages_with_optimizer_groups_are_simulated_apart(
    tmp_path: Path, sets: tuple[str, ...], simulated: list[int]
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    registry, sets = Registry.installed(), ("model.layers=8", "train.micro_batch=16", *sets)

    def ranks() -> list[int]:
        found: list[int] = []
        real = forecasts.simulate

        def noted(*given: Any, rank: int, **more: Any) -> Any:
            found.append(rank)
            return real(*given, rank=rank, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forecasts, "simulate", noted)
            spec = parse("pipeline", registry, ranks=4)
            forecast(str(tmp_path / "recipe.toml"), spec, ranks=4, registry=registry, sets=sets)
        return sorted(set(found))

    assert apart(ranks) == simulated


def test_recipe_that_cannot_train_is_rejected(plan: Plan) -> None:
    with pytest.raises(RuntimeError, match=r"RecipeError: .*heads"):
        plan("ddp", "model.heads=3")


def test_fake_worlds_do_not_nest() -> None:
    def twice() -> None:
        with fake_world(4), fake_world(2):
            pass

    with pytest.raises(RuntimeError, match=r"UsageError: .*joined other ranks"):
        apart(twice)


def test_simulation_restores_all_replaced_functions(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")

    def same() -> bool:
        def all_of() -> tuple[object, ...]:
            ours = DistributedDataParallel.__init__, torch.nn.Module._apply
            return *ours, torch.UntypedStorage.resize_, dist.get_backend, dist.all_gather_object

        before, registry = all_of(), Registry.installed()
        forecast(str(tmp_path / "recipe.toml"), parse("fsdp", registry, ranks=2), ranks=2, registry=registry)
        return before == all_of() and not dist.is_initialized() and torch.ones(2).sum().item() == 2

    assert apart(same)
