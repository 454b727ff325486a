"""Keys of DeepSpeed's configuration that a recipe may add with `strategy.extra`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal

__all__ = ["Offload", "check_owned_keys", "merge"]

Offload = Literal["none", "cpu"]

# Keys for speed and reports, which do not change results. DeepSpeed ignores unknown keys silently, so ddpforge refuses
# all other keys.
_PASSED_ON = {
    "comms_logger",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "timers",
    "wall_clock_breakdown",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.allgather_partitions",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.enable_sanity_checks",
    "zero_optimization.log_trace_cache_warnings",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.overlap_comm",
    "zero_optimization.parameter_alignment",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.reduce_scatter",
    "zero_optimization.stage3_allgather_sequential",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    "zero_optimization.sub_group_size",
    "zero_optimization.use_multi_rank_bucket_allreduce",
}
_OWNERS = {
    "activation_checkpointing": "train.activation_checkpointing",
    "amp": "train.precision",
    "bf16": "train.precision",
    "checkpoint": "[checkpoint]",
    "comet": "[track]",
    "compile": "train.compile",
    "csv_monitor": "[track]",
    "curriculum_learning": "[data.train]",
    "data_efficiency": "[data.train]",
    "data_types": "train.precision",
    "dataloader_drop_last": "train.drop_last",
    "fp16": "train.precision",
    "gradient_accumulation_steps": "train.micro_batch",
    "gradient_clipping": "train.clip_norm",
    "managed_gradient_accumulation": "train.micro_batch",
    "optimizer": "[optimizer]",
    "scheduler": "[schedule]",
    "steps_per_print": "track.every",
    "tensorboard": "[track]",
    "torch_autocast": "train.precision",
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "wandb": "[track]",
    "zero_optimization.cpu_offload": "strategy.offload_optimizer",
    "zero_optimization.cpu_offload_param": "strategy.offload_parameters",
    "zero_optimization.offload_optimizer": "strategy.offload_optimizer",
    "zero_optimization.offload_param": "strategy.offload_parameters",
    "zero_optimization.stage": "strategy.stage",
} | dict.fromkeys(
    (
        "communication_data_type",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "prescale_gradients",
        "sparse_gradients",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    "ddpforge, which averages all gradients in float32 and tests every optimizer",
)


def merge(into: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `into` with the keys of `extra`; nested tables are merged."""
    merged = dict(into)
    for key, value in extra.items():
        known = merged.get(key)
        merged[key] = merge(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return merged


def check_owned_keys(extra: Mapping[str, Any], optimizer: Offload, parameters: Offload) -> None:
    """Raises ValueError for keys that the recipe or ddpforge sets, that have no effect, or that are unknown."""
    used = {
        "zero_optimization.offload_optimizer.": optimizer != "none",
        "zero_optimization.offload_param.": parameters != "none",
    }
    for section, key in _keys(extra):
        path = f"{section}{key}"
        if path in _PASSED_ON:
            if not all(needed for start, needed in used.items() if path.startswith(start)):
                raise ValueError(f"extra: `{path}` has no effect, because nothing is offloaded there")
        elif owner := next((_OWNERS[name] for name in _OWNERS if f"{path}.".startswith(f"{name}.")), None):
            raise ValueError(f"extra: `{path}` belongs to {owner}")
        else:
            near = ", ".join(get_close_matches(path, sorted(_PASSED_ON), n=3, cutoff=0))
            raise ValueError(f"extra: `{path}` is not a key that ddpforge passes on to DeepSpeed; near it are {near}")


def _keys(extra: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yields (section, key); lists the keys within `zero_optimization` and `aio` one by one."""
    for key, value in extra.items():
        path = f"{section}{key}"
        opened = path in ("aio", "zero_optimization") or path.startswith("zero_optimization.offload_")
        if opened and isinstance(value, Mapping):
            yield from _keys(value, f"{path}.")
        else:
            yield section, key
