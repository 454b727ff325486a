"""Replica for ZeRO: a DeepSpeed engine around the recipe's model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, MultiPassOptimizer, Replica, SavedTensor, TensorShard
from ddpforge.ranks.join import limit_waiting
from ddpforge.strategies.buffers import equalise_buffers
from ddpforge.strategies.deepspeed.zero import ZeroWeights, keys_of, start
from ddpforge.strategies.gradients import EVERY_PASS, Gradients
from ddpforge.strategies.optimizer_extra_state import OptimizerExtraState
from ddpforge.strategies.optimizer_probe import check_sparse_gradients
from ddpforge.strategies.parameter_guard import check_loss, guarded_forward
from ddpforge.strategies.precision import LossScaling, check_float64, precision_for

if TYPE_CHECKING:
    from ddpforge.strategies.deepspeed.strategy import DeepSpeed

__all__ = ["ZeroReplica"]

_BUCKET = 500_000_000  # DeepSpeed's default: the largest number of elements whose gradients are reduced together
_GATHERED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


class ZeroReplica(Replica):
    """DeepSpeed engine, and this rank's part of the sharded weights and state."""

    weights: ZeroWeights

    def __init__(self, strategy: DeepSpeed, model: nn.Module, optimizer: Optimizer) -> None:
        """Starts the engine; raises StrategyError if it does not run with the requested settings."""
        self.strategy, self.world, self.train = strategy, strategy.world, strategy.train
        self.unwrapped, self.optimizer = model, optimizer
        # ZeRO-3 records the order of gathers in its first forward pass, and gathers small weights from then on.
        self.may_evaluate_first = strategy.stage != 3
        self.gradients = Gradients(model, self.world.global_ranks, hints=EVERY_PASS)
        self._updated = False  # True after the first step of this process
        fp16 = self.train.precision == "fp16"
        self.precision = (
            _EngineScaling(self.world.device) if fp16 else precision_for(self.train.precision, self.world.device)
        )
        for parameter in self.gradients.parameters:
            self._reject_form(parameter)
        self._own = OptimizerExtraState(optimizer)
        check_sparse_gradients(optimizer, model, sharded=True)
        check_float64(model, self.train)
        keys = keys_of(optimizer, torch.device("cpu") if strategy.offload_optimizer != "none" else self.world.device)
        self._watch()
        self.engine = self.module = self._start()
        self.weights = ZeroWeights(self.engine, model, keys.per_parameter, strategy.partial)
        self.weights.compare()
        if strategy.stage == 3:
            whole = (
                self.train.compile != "off" and not self.train.compile_blocks
            )  # then hooks of the model are compiled
            strategy.partial.add(model, "the model", called=self.engine if whole else model)

    def _start(self) -> Any:
        config = self.strategy.config(self.train, self.world.global_ranks.size)
        # DeepSpeed fails if its buffers are too small for the model; its defaults take 2 GB per rank.
        elements = sum(parameter.numel() for parameter in self.gradients.trained)
        config["zero_optimization"].setdefault("reduce_bucket_size", min(_BUCKET, elements))
        engine = start(self.strategy.deepspeed, self.unwrapped, self.optimizer, config, self.world)
        limit_waiting([engine.data_parallel_group], self.train)
        self._check(engine)
        zero = engine.optimizer
        if zero.optimizer is not self.optimizer:
            raise StrategyError("DeepSpeed uses its own optimizer instead of the recipe's")
        if isinstance(self.precision, _EngineScaling):
            self.precision.attach(zero)
        if self.train.compile != "off" and not self.train.compile_blocks:
            engine.compile(compile_kwargs={"mode": self.train.compile})
        return engine

    def _reject_form(self, parameter: nn.Parameter) -> None:
        name = self.gradients.names[id(parameter)]
        if not parameter.numel() and (parameter.requires_grad or self.strategy.stage == 3):
            raise StrategyError(
                f"parameter `{name}` has no elements: DeepSpeed cannot shard it",
                hints=["remove it from the model"],
            )
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and parameter.dtype == torch.float64:
            raise StrategyError(
                f"parameter `{name}` is float64, but DeepSpeed stores and updates weights in float32",
                hints=['build the model in float32, or set strategy.use = "ddp", "single" or "fsdp"'],
            )
        if not parameter.requires_grad and self.strategy.stage == 3 and parameter.dtype not in _GATHERED:
            raise StrategyError(
                f"parameter `{name}` is {dtype}, which gloo and NCCL cannot gather under stage 3",
                hints=["make it a buffer, or set strategy.stage = 2"],
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise StrategyError(
                f"parameter `{name}` is {dtype}, and DeepSpeed promises float32 master weights: updates smaller than a "
                "rounding step would vanish",
                hints=['build the model in float32; train.precision = "bf16" still computes in bfloat16'],
            )

    def _check(self, engine: Any) -> None:
        """Raises StrategyError unless the engine runs with the requested settings."""
        # DeepSpeed falls back to other settings in many places.
        zero = engine.optimizer
        stage3 = self.strategy.stage == 3
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
        }
        asked = {
            "optimizer": "DeepSpeedZeroOptimizer_Stage3" if stage3 else "DeepSpeedZeroOptimizer",
            "stage": self.strategy.stage,
            "sharded gradients": self.strategy.stage >= 2,
            "data-parallel ranks": self.world.global_ranks.size,
            "device": str(self.world.device).removesuffix(":0"),
            "gradient accumulation": 1,
            "clipping": self.train.clip_norm or 0.0,
            "master weights": torch.float32,
            "accumulated gradients": torch.float32,
            "reduced gradients": {torch.float32},
            "optimizer on the host": self.strategy.offload_optimizer != "none",
            "weights on the host": self.strategy.offload_parameters != "none",
        }
        for what, wanted in asked.items():
            if found[what] != wanted:
                raise StrategyError(f"requested from DeepSpeed: {what} = {wanted}, but it runs with {found[what]}")

    # -- one step
    def _watch(self) -> None:
        """Registers hooks that record the parameters with a gradient in a micro-batch."""
        self._reached: set[int] = set()
        for parameter in self.gradients.trained:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: self._reached.add(id(p))
            )

    def _look(self) -> None:
        """Raises StrategyError unless exactly the trained parameters got a gradient in this micro-batch."""
        # DeepSpeed averages the gradients of ranks in the order of their arrival, even of different parameters. If a
        # micro-batch lacks a gradient, stage 3 adds that of an earlier step.
        if len(self._reached) != len(self.gradients.trained):
            unused = [p for p in self.gradients.trained if id(p) not in self._reached]
            self.gradients.check_unused(unused, " for the samples of a micro-batch")
        for parameter in self.gradients.frozen:
            if parameter.requires_grad:
                self.gradients.check_thawed(parameter)
        self._reached.clear()

    @contextmanager
    def forward(self, *, last: bool = True) -> Iterator[None]:
        """Wraps a forward pass in autocast, which the engine uses too; sets if the step ends with this micro-batch.

        Under stage 3 autocast keeps no copies of gathered weights. Until the first step, training passes are checked.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        with self._autocast(), self.strategy.partial.refused():
            if self._updated or not self.unwrapped.training:
                yield
                return
            shards_weights, eager = self.strategy.stage == 3, self.train.compile == "off"
            with guarded_forward(self.unwrapped, shards_weights=shards_weights, shards_gradients=True, eager=eager):
                yield

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.strategy.stage < 3:
            return self.precision.forward()
        return self.precision.sharded_forward(compiled=self.train.compile != "off")

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        """Adds the gradients of `loss` times `scale`."""
        check_loss(loss)
        loss = loss * scale
        # `_look` runs after the last gradient, before DeepSpeed reduces the rest of its bucket.
        execution: Any = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda gradient: execution.queue_callback(self._look))  # type: ignore[no-untyped-call]
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> Tensor:
        """Makes DeepSpeed measure the norm, clip, update and clear; it skips the update if the norm is not finite."""
        self._updated = True
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.world.device)
        if isinstance(self.precision, _EngineScaling):
            self.precision.adapt(norm)
        return norm

    def perturb(self, optimizer: MultiPassOptimizer) -> Tensor:
        """Runs a step of the engine without clipping, in which the optimizer explores instead of updating."""
        zero, update = self.engine.optimizer, cast(Any, optimizer)

        def explore() -> None:
            optimizer.perturb(float(zero._global_grad_norm))

        clip, zero.clip_grad, update.step = zero.clip_grad, 0.0, explore  # shadows the method
        try:
            return self.step()
        finally:
            zero.clip_grad = clip
            del update.step
            zero._hp_optimizer_states_linked = False  # there is no optimizer state yet for DeepSpeed to link

    def overflowed(self) -> bool:
        """True if a non-finite norm only lowered the loss scale of fp16."""
        return self.precision.overflowed()

    def sync_buffers(self) -> None:
        """Averages BatchNorm's statistics over ranks, and sets other buffers to rank 0's values."""
        equalise_buffers(self.unwrapped, self.world.global_ranks)

    # -- to disk and back
    def state(self) -> CanonicalState[Tensor | TensorShard]:
        """Returns this rank's parts."""
        state = self.weights.capture(self.optimizer)
        return replace(state, extra_state=self._own.capture(), scalars=self.precision.state())

    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Reads this rank's parts."""
        self.weights.restore(self.optimizer, state, partial=partial)
        self._own.restore(state.extra_state)
        self.precision.load_state(state.scalars)
        if isinstance(self.precision, _EngineScaling):
            self.precision.tell()

    def close(self) -> None:
        """Removes the engine's hooks."""
        self.engine.destroy()


class _EngineScaling(LossScaling):
    """fp16 with DeepSpeed, with the loss scale of torch's GradScaler.

    The engine receives the scale. It multiplies the loss, divides the norm, and skips a step that overflowed.
    """

    # DeepSpeed's own scaling for autocast measures and clips gradients that are still scaled, and never lowers the
    # scale after an overflow.

    def attach(self, zero: Any) -> None:
        """Replaces the engine's own scaler."""
        self._zero = zero
        self._stand_in = nn.Parameter(torch.zeros((), device=self.device))
        self._updated = torch.optim.SGD([self._stand_in], lr=0.0)
        zero.torch_autocast_gradscaler = None
        self.tell()

    def tell(self) -> None:
        """Passes the current scale to the engine."""
        self.scaler.scale(torch.zeros((), device=self.device))  # the first call creates the scale
        self._zero.override_loss_scale(self.scaler.get_scale())

    def adapt(self, norm: Tensor) -> None:
        """Lowers the scale if `norm` is not finite; raises it after many steps with a finite norm."""
        self._stand_in.grad = norm.clone()
        self.scaler.unscale_(self._updated)
        self.scaler.update()
        self.tell()
