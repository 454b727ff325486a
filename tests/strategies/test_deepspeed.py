"""Checks of the `deepspeed` strategy before an engine starts: options, configuration, versions, optimizers."""

import os
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn

from ddpforge.errors import StrategyError
from ddpforge.recipe.schema import TrainSection
from ddpforge.strategies.deepspeed import DeepSpeed, zero
from ddpforge.strategies.deepspeed.zero import Keys, keys_of


def train(**options: Any) -> TrainSection:
    return TrainSection.model_validate({"length": "1st", "global_batch": 12, **options})


# ---------------------------------------------------------------------------------------------- options
def test_the_configuration_follows_from_the_recipe() -> None:
    assert DeepSpeed().config(train(), ranks=4) == {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "prescale_gradients": True,
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
    }

    strategy = DeepSpeed(
        stage=3,
        offload_optimizer="cpu",
        offload_parameters="cpu",
        extra={
            "wall_clock_breakdown": True,
            "zero_optimization": {"overlap_comm": False, "offload_optimizer": {"pin_memory": True}},
        },
    )
    generated = strategy.generated_config(train(clip_norm=0.5, micro_batch=2, precision="bf16"), 2)
    config = generated["deepspeed config"]
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_clipping"] == 0.5
    assert config["wall_clock_breakdown"] is True
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    }


@pytest.mark.parametrize(
    ("stage", "zero", "scatters"),
    [
        (1, {}, False),
        (2, {}, False),
        (2, {"reduce_scatter": True}, True),
        (2, {"use_multi_rank_bucket_allreduce": True}, False),
        (2, {"use_multi_rank_bucket_allreduce": False}, True),  # it has no effect if gradients are not scattered
        (3, {}, True),
        (3, {"reduce_scatter": False}, False),
    ],
)
def test_gradients_are_divided_before_they_are_summed(stage: Any, zero: dict[str, Any], scatters: bool) -> None:
    """DeepSpeed always divides scattered gradients first, and does not allow setting that."""
    config = DeepSpeed(stage=stage, extra={"zero_optimization": zero}).config(train(), ranks=3)
    assert config["zero_optimization"].get("reduce_scatter", True) is scatters
    assert config["prescale_gradients"] is (not scatters and stage < 3)


def test_the_micro_batch_is_that_of_a_virtual_rank() -> None:
    config = DeepSpeed().config(train(global_batch=24, virtual_ranks=8), 2)
    assert config["train_micro_batch_size_per_gpu"] == 3


@pytest.mark.parametrize(
    ("stage", "shards"),
    [
        (1, ("optimizer state",)),
        (2, ("optimizer state", "gradients")),
        (3, ("optimizer state", "gradients", "weights")),
    ],
)
def test_the_contract_depends_on_the_stage(stage: Any, shards: tuple[str, ...]) -> None:
    assert DeepSpeed(stage=stage).contract.shards == shards


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"gradient_clipping": 1.0}, "extra: `gradient_clipping` belongs to train.clip_norm"),
        ({"train_batch_size": 8}, "belongs to train.global_batch"),
        ({"fp16": {"enabled": True}}, "extra: `fp16` belongs to train.precision"),
        ({"optimizer": {"type": "Adam"}}, "belongs to [optimizer]"),
        ({"communication_data_type": "bf16"}, "belongs to ddpforge"),
        ({"zero_optimization": {"stage": 1}}, "extra: `zero_optimization.stage` belongs to strategy.stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "extra: `zero_optimization.offload_optimizer.device` belongs to strategy.offload_optimizer",
        ),
        (
            {"zero_optimization": {"offload_param": {"pin_memory": True}}},
            "has no effect, because nothing is offloaded there",
        ),
        (
            {"zero_optimization": {"overlap_com": True}},
            "`zero_optimization.overlap_com` is not a key that ddpforge passes on to DeepSpeed; near it are "
            "zero_optimization.overlap_comm",
        ),
        # It confuses parameters when weights are read or written.
        ({"zero_optimization": {"round_robin_gradients": True}}, "is not a key that ddpforge passes on"),
    ],
)
def test_extra_keys_that_other_settings_control_are_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        DeepSpeed(extra=extra)
    assert said in str(refused.value)


def test_only_stage_3_offloads_parameters() -> None:
    with pytest.raises(ValueError, match=r"offload_parameters = .* needs stage 3"):
        DeepSpeed(stage=2, offload_parameters="cpu")


# ---------------------------------------------------------------------------------------------- versions, device
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "needs DeepSpeed, which is not installed"),
        ("0.18.2", "DeepSpeed 0.18.2 is installed, but ddpforge is tested with deepspeed<0.20,>=0.19.8"),
        ("0.20.0", "DeepSpeed 0.20.0 is installed"),
    ],
)
def test_an_untested_deepspeed_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str | None, said: str
) -> None:
    monkeypatch.setattr(zero, "version", lambda name: found)
    (refused,) = DeepSpeed().unsupported(train(), 1, "cpu")
    assert said in refused.message
    assert refused.hints == ("pip install 'deepspeed<0.20,>=0.19.8'",)


def test_the_package_requirement_equals_the_tested_versions() -> None:
    stated = [line for line in metadata.requires("ddpforge") or () if line.startswith("deepspeed")]
    (line,) = {line.partition(";")[0].removeprefix("deepspeed").strip() for line in stated}
    assert set(line.split(",")) == set(str(zero.TESTED).split(","))


def test_a_different_accelerator_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cuda")
    with pytest.raises(StrategyError, match="the environment has DS_ACCELERATOR=cuda, but this run is on cpu"):
        zero.import_deepspeed(torch.device("cpu"))


@pytest.mark.parametrize(
    ("version", "stage", "mode", "fits"),
    [
        ("2.11.0+cu130", 3, "default", False),
        ("2.11.0+cu130", 3, "off", True),
        ("2.11.0+cu130", 2, "default", True),
        ("2.12.1", 3, "default", True),
    ],
)
def test_a_compiler_that_loses_gradients_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, stage: Any, mode: Any, fits: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    refusals = list(DeepSpeed(stage=stage).unsupported(train(compile=mode), 1, "cpu"))
    assert [refusal.key for refusal in refusals] == ([] if fits else ["train.compile"])
    assert fits or "get wrong gradients" in refusals[0].message


# ---------------------------------------------------------------------------------------------- optimizers
def optimizer(name: str, **options: Any) -> torch.optim.Optimizer:
    weights, biases = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    groups = [{"params": [weights], "weight_decay": 0.1}, {"params": [biases], "weight_decay": 0.0}]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=1e-3, **options)
    return made


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("AdamW", {}, Keys({"step"}, {"exp_avg", "exp_avg_sq"})),
        ("AdamW", {"fused": True, "amsgrad": True}, Keys({"step"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})),
        ("SGD", {"momentum": 0.9}, Keys(set(), {"momentum_buffer"})),
        ("NAdam", {}, Keys({"step", "mu_product"}, {"exp_avg", "exp_avg_sq"})),
        ("ASGD", {}, Keys({"step", "eta", "mu"}, {"ax"})),
        ("RMSprop", {"centered": True}, Keys({"step"}, {"square_avg", "grad_avg"})),
    ],
)
def test_an_element_wise_optimizer_is_accepted(name: str, options: dict[str, Any], keys: Keys) -> None:
    tried = optimizer(name, **options)
    assert keys_of(tried, torch.device("cpu")) == keys
    assert not tried.state  # a copy of the optimizer made the step
    assert all(bool((parameter == 1).all()) for group in tried.param_groups for parameter in group["params"])
    assert [group["lr"] for group in tried.param_groups] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Adafactor", "Adafactor does not update each element of a parameter by itself"),
        ("Adagrad", "DeepSpeed replaces Adagrad by its own"),
        ("SparseAdam", "SparseAdam cannot be used under ZeRO"),
    ],
)
def test_an_optimizer_with_a_different_loss_curve_is_refused(name: str, said: str) -> None:
    made = torch.optim.SparseAdam([nn.Parameter(torch.ones(3))]) if name == "SparseAdam" else optimizer(name)
    with pytest.raises(StrategyError) as refused:
        keys_of(made, torch.device("cpu"))
    assert said in refused.value.message
