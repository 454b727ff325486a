"""DeepSpeed's ZeRO: ranks share out the optimizer's state, and with higher stages gradients and weights too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, cast

import torch
from packaging.version import Version
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, Contract, Exploring, Part, Refusal, SavedTensor, Sharded, World
from ddpforge.strategies.accelerated import GRAPHS, AcceleratedStrategy
from ddpforge.strategies.deepspeed_extra import Offload, merge, refuse_owned
from ddpforge.strategies.nvme import SMALLEST, Folder, check_root, is_swapped, mend_prefetch, require_io
from ddpforge.strategies.own_state import OwnState
from ddpforge.strategies.precision import LossScaling
from ddpforge.strategies.watch import refuse_loss
from ddpforge.strategies.zero import (
    Keys,
    ZeroWeights,
    import_deepspeed,
    keys_of,
    refuse_other_accelerator,
    require_deepspeed,
    start,
)

if TYPE_CHECKING:
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
_GATHERED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
_COMPILES = Version("2.12")  # torch 2.11: the compiled backward pass does not reach what stage 3 gathered


class DeepSpeed(AcceleratedStrategy):
    """The DeepSpeed engine with ZeRO, around the recipe's own optimizer.

    Stage 1 shards the optimizer's state and the weights it updates, stage 2 gradients too, stage 3 also the weights
    of the forward pass. See https://www.deepspeed.ai/docs/config-json/ and Rajbhandari et al., "ZeRO" (SC 2020).

    Offload to NVMe is for stage 3, and for tensors of a MiB and more on each rank; smaller ones stay in memory.
    """

    group = True
    allows_unused_parameters: ClassVar[bool] = False

    def __init__(
        self,
        *,
        stage: Annotated[
            Literal[1, 2, 3],
            Field(description="What is sharded: optimizer state (1), gradients too (2), weights too (3)."),
        ] = 2,
        offload_optimizer: Annotated[
            Offload, Field(description="Where optimizer state lives; if not on the device (none), the CPU updates it.")
        ] = "none",
        offload_parameters: Annotated[
            Offload, Field(description="Where weights wait until they are gathered; none: on the device. Stage 3 only.")
        ] = "none",
        nvme_path: Annotated[
            Path | None, Field(description="An existing folder on a local NVMe disk, for what is offloaded to nvme.")
        ] = None,
        extra: Annotated[
            dict[str, Any],
            Field(description="Further keys of the DeepSpeed configuration, for speed and for what it reports."),
        ] = {},  # noqa: B006 (copied, never changed)
    ) -> None:
        super().__init__()
        if offload_parameters != "none" and stage != 3:
            raise ValueError(f"offload_parameters needs stage 3: under stage {stage} every rank uses whole weights")
        if offload_optimizer == "nvme" and stage != 3:
            raise ValueError(
                f'offload_optimizer = "nvme" needs stage 3: under stage {stage} DeepSpeed keeps the state in memory'
            )
        offloads = (offload_optimizer, offload_parameters)
        if "nvme" in offloads and nvme_path is None:
            raise ValueError("nvme_path is missing: the folder for what is offloaded to nvme")
        if "nvme" not in offloads and nvme_path is not None:
            raise ValueError("nvme_path has no effect, for nothing is offloaded to nvme")
        self.stage = stage
        self.offload_optimizer, self.offload_parameters = offloads
        self.nvme_path = nvme_path
        self.extra = deepcopy(extra)
        refuse_owned(self.extra, *offloads)
        self.contract = Contract(
            shards=_SHARDS[stage],
            clips="DeepSpeed, after the reduction, by the norm over all parts",
            accumulates=_ACCUMULATES[stage],
        )

    def generated(self, train: TrainSection, ranks: int) -> Mapping[str, Any]:
        """The DeepSpeed configuration."""
        return {"deepspeed config": self.config(train, ranks)}

    def config(self, train: TrainSection, ranks: int) -> dict[str, Any]:
        """What DeepSpeed is told.

        Its own accumulation count is 1, because micro-batches are weighed by what is in them: the last step of an
        epoch may have fewer. The strategy tells it which micro-batch is a step's last.
        """
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload_optimizer != "none":
            zero["offload_optimizer"] = self._offload(self.offload_optimizer)
        if self.offload_parameters != "none":
            zero["offload_param"] = self._offload(self.offload_parameters)
        if self.offload_parameters == "nvme":
            zero["offload_param"]["max_in_cpu"] = 0  # else the first 1e9 elements stay in memory
        config = {
            "train_micro_batch_size_per_gpu": max(1, train.per_pass(ranks)),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": train.clip_norm or 0.0,
            "communication_data_type": "fp32",
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device twice per step
        }
        if train.precision != "fp32":
            # Master weights stay fp32 and so does communication: DeepSpeed would reduce the gradients of the modules
            # it holds safe for lower precision in that precision.
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[train.precision]
            config["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
        return merge(config, self.extra)

    def _offload(self, device: Offload) -> dict[str, Any]:
        return {"device": device, "nvme_path": str(self.nvme_path)} if device == "nvme" else {"device": device}

    # -- before the loop
    def refusals(self, train: TrainSection, ranks: int, device: str) -> Iterator[Refusal]:
        """What cannot be compiled, and a DeepSpeed that is not there."""
        yield from super().refusals(train, ranks, device)
        try:
            require_deepspeed()
        except StrategyError as error:
            yield Refusal("strategy.use", error.message, error.hints)
        if self.stage == 3 and device == "cuda" and train.compile in GRAPHS:
            yield Refusal(
                "train.compile",
                f'train.compile = "{train.compile}" replays CUDA graphs, which need weights that stay where they are, '
                "and ZeRO stage 3 gathers them anew for every pass",
                ('set train.compile = "default", or strategy.stage = 2',),
            )
        if self.stage == 3 and train.compile != "off" and Version(torch.__version__) < _COMPILES:
            yield Refusal(
                "train.compile",
                f"under ZeRO stage 3, torch {torch.__version__} compiles models whose gradients are zero in part",
                (f'update to torch {_COMPILES} or newer, set train.compile = "off", or strategy.stage = 2',),
            )

    def setup(self, train: TrainSection) -> World:
        """Joins the process group, and imports DeepSpeed for the device that it is on."""
        require_deepspeed()
        refuse_other_accelerator(self.device_type(train))
        if self.nvme_path is not None:
            check_root(self.nvme_path)
        world = super().setup(train)
        self.deepspeed = import_deepspeed(world.device)
        if self.nvme_path is not None:
            self._folder = Folder(self.nvme_path)
            require_io()
        if train.precision == "fp16":
            self.precision = _EngineScaling(world.device)
        return world

    def launcher_may_say(self, train: TrainSection) -> dict[str, str]:
        """`accelerate launch --use_deepspeed` may say what the recipe says."""
        return super().launcher_may_say(train) | {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(self.stage),
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": self.offload_optimizer,
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": self.offload_parameters,
            "ACCELERATE_GRADIENT_CLIPPING": "none" if train.clip_norm is None else str(train.clip_norm),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
        }

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves the model to the device, but under stage 3, where that happens parameter by parameter."""
        return self.converted(model) if self.stage == 3 else super().wrap(model, blocks)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Starts the engine around both, and proves that it is the one that was asked for."""
        self._parameters = list(model.parameters())
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._bare = model
        for parameter in self._parameters:
            self._refuse_form(parameter)
        if self.offload_optimizer == "nvme" and getattr(optimizer, "passes", 1) > 1:
            raise StrategyError(
                f"{type(optimizer).__name__} moves the weights between the passes of a step, and what is on NVMe can "
                "only be updated",
                hints=['set strategy.offload_optimizer = "cpu"'],
            )
        self._own = OwnState(optimizer)
        device = torch.device("cpu") if self.offload_optimizer != "none" else self.world.device
        self.look_at(model, optimizer)
        keys = keys_of(optimizer, device)

        self._watch()
        config = self.config(self.train, self.world.size)
        self._fit_buffers(config["zero_optimization"], keys)
        self.engine = start(self.deepspeed, model, optimizer, config, self.world)
        self.limit_waiting([self.engine.data_parallel_group])
        if self.offload_parameters == "nvme":
            mend_prefetch(self._parameters)
        self.check(self.engine)
        zero = self.engine.optimizer
        if zero.optimizer is not optimizer:
            raise StrategyError("asked for DeepSpeed around the recipe's optimizer, but it uses one of its own")
        if isinstance(self.precision, _EngineScaling):
            self.precision.attach(zero)
        if self.train.compile != "off" and not self.train.compile_blocks:
            self.engine.compile(compile_kwargs={"mode": self.train.compile})
        self._weights = ZeroWeights(self.engine, model, keys.per_parameter)
        self._weights.compare()
        return self.engine, optimizer

    def _fit_buffers(self, zero: dict[str, Any], keys: Keys) -> None:
        """Chooses the sizes that DeepSpeed leaves to its user: too small it fails, its own are 2 GB per rank."""
        if self.offload_optimizer == "nvme":
            weights_and_gradients = 2
            zero["offload_optimizer"] |= {
                "nvme_path": str(self._folder.path),
                "buffer_count": weights_and_gradients + max(2, len(keys.per_element)),
            }
        if self.offload_parameters == "nvme":
            for name, parameter in self._bare.named_parameters():
                if parameter.dtype != torch.float32:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    raise StrategyError(
                        f"parameter `{name}` is {dtype}, and DeepSpeed offloads only float32 to NVMe as it is",
                        hints=['set strategy.offload_parameters = "cpu", or build the model in float32'],
                    )
            largest = max(parameter.numel() for parameter in self._parameters)
            zero["offload_param"] |= {
                "nvme_path": str(self._folder.path),
                "buffer_size": -(-largest // self.world.size),
            }

    def _refuse_form(self, parameter: nn.Parameter) -> None:
        name = self._names[id(parameter)]
        if not parameter.numel() and (parameter.requires_grad or self.stage == 3):
            raise StrategyError(
                f"parameter `{name}` has no elements, and DeepSpeed cannot shard it",
                hints=["remove it from the model"],
            )
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and parameter.dtype == torch.float64:
            raise StrategyError(
                f"parameter `{name}` is float64, and DeepSpeed keeps and updates weights in float32",
                hints=['build the model in float32, or set strategy.use = "ddp", "single" or "fsdp"'],
            )
        if not parameter.requires_grad and self.stage == 3 and parameter.dtype not in _GATHERED:
            raise StrategyError(
                f"parameter `{name}` is {dtype}, and gloo and NCCL cannot gather that under stage 3",
                hints=["make it a buffer, or set strategy.stage = 2"],
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise StrategyError(
                f"parameter `{name}` is {dtype}, and DeepSpeed promises float32 master weights: updates smaller than a "
                "rounding step would vanish",
                hints=['build the model in float32; train.precision = "bf16" computes in bfloat16 all the same'],
            )

    def check(self, model: nn.Module) -> None:
        """Compares what runs with what was asked for: DeepSpeed falls back to something else in many places."""
        engine: Any = model
        zero = engine.optimizer
        stage3 = self.stage == 3
        found = {
            "optimizer": type(zero).__name__,
            "stage": engine.zero_optimization_stage(),
            "sharded gradients": True if stage3 else zero.partition_gradients,
            "data-parallel ranks": engine.dp_world_size,
            "device": str(engine.device).removesuffix(":0"),
            "gradient accumulation": engine.gradient_accumulation_steps(),
            "clipping": zero.clip_grad,
            "master weights": zero.master_weights_and_grads_dtype,
            "accumulated gradients": zero.gradient_accumulation_dtype,
            "reduced gradients": set(zero.ipg_buckets),
            "optimizer on the host": zero.offload_optimizer if stage3 else zero.cpu_offload,
            "weights on the host": zero.offload_param if stage3 else False,
            "optimizer on NVMe": zero.swap_optimizer if stage3 else False,
            "weights on NVMe": zero.params_in_nvme_and_cpu if stage3 else False,
        }
        asked = {
            "optimizer": "DeepSpeedZeroOptimizer_Stage3" if stage3 else "DeepSpeedZeroOptimizer",
            "stage": self.stage,
            "sharded gradients": self.stage >= 2,
            "data-parallel ranks": self.world.size,
            "device": str(self.world.device).removesuffix(":0"),
            "gradient accumulation": 1,
            "clipping": self.train.clip_norm or 0.0,
            "master weights": torch.float32,
            "accumulated gradients": torch.float32,
            "reduced gradients": {torch.float32},
            "optimizer on the host": self.offload_optimizer != "none",
            "weights on the host": self.offload_parameters != "none",
            "optimizer on NVMe": self.offload_optimizer == "nvme",
            "weights on NVMe": self.offload_parameters == "nvme",
        }
        for what, wanted in asked.items():
            if found[what] != wanted:
                raise StrategyError(f"asked DeepSpeed for {what}: {wanted}, and it runs with {found[what]}")

        groups = range(len(zero.fp16_groups)) if stage3 else ()
        if self.offload_optimizer == "nvme" and not any(zero._swappable_optimizer_subgroup(n) for n in groups):
            self._refuse_small("offload_optimizer", "group of parameters")
        if self.offload_parameters == "nvme" and not any(is_swapped(parameter) for parameter in self._parameters):
            self._refuse_small("offload_parameters", "parameter")

    def _refuse_small(self, option: str, what: str) -> NoReturn:
        smallest = max(SMALLEST, self.extra.get("aio", {}).get("block_size", 0))
        raise StrategyError(
            f'strategy.{option} = "nvme": no {what} has {smallest:,} bytes on each of {self.world.size} ranks, and '
            "what is smaller stays in memory",
            hints=[f'set strategy.{option} = "cpu"'],
        )

    # -- one step
    def _watch(self) -> None:
        """Notes which parameters a micro-batch's backward pass reaches."""
        self._reached: set[int] = set()
        self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: self._reached.add(id(p))
            )

    def _look(self) -> None:
        """Every trained parameter must have got a gradient, on every rank, in every micro-batch, and no other.

        DeepSpeed averages whatever gradients ranks have, in the order in which they come, even if they belong to
        different parameters; and where a micro-batch has none, stage 3 adds up those of an earlier step.
        """
        if len(self._reached) != len(self._trained):
            self.refuse_unused([p for p in self._trained if id(p) not in self._reached])
        thawed = [self._names[id(p)] for p in self._frozen if p.requires_grad]
        if thawed:
            raise StrategyError(
                f"parameter `{thawed[0]}` was frozen when the model was wrapped and gets gradients now; they are not "
                "synchronised over ranks, nor does the optimizer know it",
                hints=["leave requires_grad alone during a run; freeze and unfreeze between runs"],
            )
        self._reached.clear()

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast, which under stage 3 keeps no copies of gathered weights; the engine's own goes by this one."""
        if self.stage < 3:
            return super().autocast()
        return self.precision.sharded_forward(compiled=self.train.compile != "off")

    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Tells the engine whether the step ends with this micro-batch."""
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`."""
        refuse_loss(loss)
        # `_look` runs when the last gradient is there, before DeepSpeed reduces what is left in its bucket.
        execution: Any = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda gradient: execution.queue_callback(self._look))  # type: ignore[no-untyped-call]
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """DeepSpeed measures, clips, updates and clears; it leaves out a step whose norm is not finite."""
        self._updated = True
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.world.device)
        if isinstance(self.precision, _EngineScaling):
            self.precision.adapt(norm)
        return norm

    def explore(self, model: nn.Module, optimizer: Exploring) -> Tensor:
        """A step of the engine that does not clip, and in which the optimizer explores instead of updating."""
        zero, update = self.engine.optimizer, cast(Any, optimizer)

        def explore() -> None:
            optimizer.explore(float(zero._global_grad_norm))

        clip, zero.clip_grad, update.step = zero.clip_grad, 0.0, explore  # shadows the method
        try:
            return self.step(model, update)
        finally:
            zero.clip_grad = clip
            del update.step
            zero._hp_optimizer_states_linked = False  # there is no state yet that DeepSpeed could have a view of

    def observing(self) -> AbstractContextManager[Any]:
        """Refuses what callbacks write into parameters that DeepSpeed copies from elsewhere."""
        return self._weights.guard.on()

    # -- to disk and back
    def weights(self, model: nn.Module, optimizer: Optimizer) -> ZeroWeights:
        """Each rank's part of the fp32 weights that the optimizer updates."""
        return self._weights

    def state(self, model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
        """Each rank's parts."""
        return replace(self._weights.capture(optimizer), shared=self._own.capture())

    def load_state(
        self, model: nn.Module, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False
    ) -> None:
        """Every rank reads its parts."""
        self._weights.restore(optimizer, state, partial=partial)
        self._own.restore(state.shared)

    def load_loop_state(self, state: Mapping[str, int | float]) -> None:
        """The loss scale of fp16."""
        super().load_loop_state(state)
        if isinstance(self.precision, _EngineScaling):
            self.precision.tell()

    def close(self) -> None:
        """Takes the engine's hooks away, waits for all ranks, and leaves the process group."""
        if hasattr(self, "engine"):
            self.engine.destroy()
        super().close()
        if self.nvme_path is not None:
            self._folder.close()


class _EngineScaling(LossScaling):
    """fp16 by DeepSpeed, with the loss scale that torch's GradScaler decides on.

    DeepSpeed's own scaling for autocast measures and clips gradients that are still scaled, and never lowers a scale
    that overflowed. So the engine is told which scale to use; with that it multiplies the loss, divides the norm, and
    skips a step.
    """

    def attach(self, zero: Any) -> None:
        """Takes over from the engine's own scaler."""
        self._zero = zero
        self._stand_in = nn.Parameter(torch.zeros((), device=self.device))
        self._updated = torch.optim.SGD([self._stand_in], lr=0.0)
        zero.torch_autocast_gradscaler = None
        self.tell()

    def tell(self) -> None:
        """Gives the engine the present scale."""
        self.scaler.scale(torch.zeros((), device=self.device))  # before which there is none
        self._zero.override_loss_scale(self.scaler.get_scale())

    def adapt(self, norm: Tensor) -> None:
        """Lowers the scale when `norm` is not finite, raises it after many steps in which it was."""
        self._stand_in.grad = norm.clone()
        self.scaler.unscale_(self._updated)
        self.scaler.update()
        self.tell()
