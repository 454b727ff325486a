"""DeepSpeed's ZeRO: shards the optimizer state over ranks; higher stages also shard gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge import compat
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Contract, Replica, Sharded, Strategy, Unsupported, Weights, World
from ddpforge.strategies.deepspeed.extra import Offload, check_owned_keys, merge

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ddpforge.recipe.schema import TrainSection

__all__ = ["DeepSpeed"]

_SHARDS: dict[int, tuple[Sharded, ...]] = {
    1: ("optimizer state",),
    2: ("optimizer state", "gradients"),
    3: ("optimizer state", "gradients", "weights"),
}
_ACCUMULATES = {
    1: "autograd, in the parameters' .grad; one reduction per step, in the last micro-batch",
    2: "DeepSpeed, in each rank's part of the gradients; one reduction per micro-batch",
    3: "DeepSpeed, in each rank's part of the gradients; one reduce-scatter per micro-batch",
}
_WHOLE = (  # how to read a whole weight
    "compute the number in the forward of the module that has the parameter, and return it with the outputs",
    'or set strategy.stage = 2, or strategy.use = "ddp"',
)


def _is_gathered(parameter: Any, in_backward: bool) -> bool:
    """True if DeepSpeed holds the whole parameter now, and if `in_backward`, also later."""
    return parameter.ds_status.name == "AVAILABLE" and (parameter.ds_persist or not in_backward)


class DeepSpeed(Strategy):
    """DeepSpeed engine with ZeRO, around the recipe's own optimizer.

    Stage 1 shards the optimizer state and the weights that it updates, stage 2 also gradients, stage 3 also the weights
    of the forward pass. See https://www.deepspeed.ai/docs/config-json/ and Rajbhandari et al., "ZeRO" (SC 2020).
    """

    needs_process_group = True

    def __init__(
        self,
        *,
        stage: Annotated[
            Literal[1, 2, 3],
            Field(description="Sharded state: optimizer state (1), also gradients (2), also weights (3)."),
        ] = 2,
        offload_optimizer: Annotated[
            Offload,
            Field(description="Place of the optimizer state; unless it is on the device (none), the CPU updates it."),
        ] = "none",
        offload_parameters: Annotated[
            Offload, Field(description="Place of the sharded weights; none: on the device. Stage 3 only.")
        ] = "none",
        extra: Annotated[
            dict[str, Any],
            Field(description="Further keys of the DeepSpeed configuration, for speed and reports."),
        ] = {},  # noqa: B006 (copied, never changed)
    ) -> None:
        if offload_parameters != "none" and stage != 3:
            raise ValueError(
                f'offload_parameters = "{offload_parameters}" needs stage 3: under stage {stage} every rank holds '
                "whole weights"
            )
        self.stage = stage
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters
        self.extra = deepcopy(extra)
        check_owned_keys(self.extra, offload_optimizer, offload_parameters)
        self.contract = Contract(
            shards=_SHARDS[stage],
            clipping="DeepSpeed, after the reduction, by the norm over all parts",
            accumulation=_ACCUMULATES[stage],
        )
        self.launcher = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": offload_optimizer,
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": offload_parameters,
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
        }

    @classmethod
    def layouts(cls, ranks: int) -> Iterator[Mapping[str, Any]]:
        """Yields the stages."""
        return ({"stage": stage} for stage in _SHARDS)

    def generated_config(self, train: TrainSection, ranks: int) -> Mapping[str, Any]:
        """Returns the DeepSpeed configuration, for `ddpforge show`."""
        return {"deepspeed config": self.config(train, ranks)}

    def config(self, train: TrainSection, ranks: int) -> dict[str, Any]:
        """Returns the configuration for DeepSpeed."""
        # DeepSpeed's accumulation count is 1: micro-batches are weighted by their number of items, and the last step of
        # an epoch may have fewer micro-batches. The replica marks the last micro-batch of a step.
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload_optimizer != "none":
            zero["offload_optimizer"] = {"device": self.offload_optimizer}
        if self.offload_parameters != "none":
            zero["offload_param"] = {"device": self.offload_parameters}
        config = {
            "train_micro_batch_size_per_gpu": max(1, train.per_pass(ranks)),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": train.clip_norm or 0.0,
            "communication_data_type": "fp32",
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "timers": {"throughput": {"enabled": False}},  # this timer waits for the device twice per step
        }
        if train.precision != "fp32":
            # Master weights and communication stay fp32. DeepSpeed would reduce gradients in lower precision for the
            # modules that it lists as safe, hence an empty list.
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[train.precision]
            config["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
        merged = merge(config, self.extra)
        zero = merged["zero_optimization"]
        if self.stage < 3 and zero.get("use_multi_rank_bucket_allreduce", True):
            # DeepSpeed's "scatter" is then an all-reduce of a copy; its slices are copied back.
            zero.setdefault("reduce_scatter", False)
        # On every path gradients are divided first and then summed, so that means are identical.
        merged["prescale_gradients"] = self.stage < 3 and not zero.get("reduce_scatter", True)
        return merged

    # -- before the loop
    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Refuses settings that cannot be compiled, and a missing or untested DeepSpeed."""
        import torch

        from ddpforge.strategies.deepspeed.zero import require_deepspeed

        try:
            require_deepspeed()
        except StrategyError as error:
            yield Unsupported("strategy.use", error.message, error.hints)
        if self.stage == 3 and device == "cuda" and train.uses_cuda_graphs:
            yield Unsupported(
                "train.compile",
                f'train.compile = "{train.compile}" replays CUDA graphs, which need weights at fixed addresses, '
                "but ZeRO stage 3 gathers them again for every pass",
                ('set train.compile = "default", or strategy.stage = 2',),
            )
        least = compat.COMPILED_STAGE_3
        if self.stage == 3 and train.compile != "off" and not compat.torch_has(least):
            yield Unsupported(
                "train.compile",
                f"under ZeRO stage 3, models compiled by torch {torch.__version__} get wrong gradients: some are zero",
                (f'update to torch {least} or newer, set train.compile = "off", or strategy.stage = 2',),
            )

    def setup(self, train: TrainSection, world: World) -> World:
        """Imports DeepSpeed for the device."""
        from ddpforge.strategies.deepspeed.zero import import_deepspeed
        from ddpforge.strategies.parameter_guard import PartialWeights

        self.partial = PartialWeights(_WHOLE, is_whole=_is_gathered)
        self.deepspeed = import_deepspeed(world.device)
        return super().setup(train, world)

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves the model to the device; under stage 3 `prepare` moves it, parameter by parameter."""
        return model if self.stage == 3 else super().wrap(model, blocks)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Starts the engine around both, and checks that it runs with the requested settings."""
        from ddpforge.strategies.deepspeed.replica import ZeroReplica

        return ZeroReplica(self, model, optimizer)

    def place_auxiliary(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Weights:
        """Shards the module with its own engine under stage 3; below stage 3 every rank holds the whole module.

        If the model's weights are offloaded, the module's are too.
        """
        if self.stage < 3 or not any(True for _ in module.parameters()):
            return super().place_auxiliary(module, blocks)
        from ddpforge.strategies.deepspeed.zero import AuxiliaryWeights, start

        zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}  # no old values may stay gathered
        if self.offload_parameters != "none":
            zero["offload_param"] = {"device": "cpu"}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        engine = start(self.deepspeed, module, None, config, self.world)
        self.partial.add(module, f"the auxiliary {type(module).__name__}", called=module)
        return AuxiliaryWeights(engine, module)
