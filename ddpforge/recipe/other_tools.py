"""Other tools' names for the things that a recipe says: hints for the keys that people bring along."""

from __future__ import annotations

import re
from typing import NamedTuple

from ddpforge.recipe.origins import KeyPath


class Foreign(NamedTuple):
    """A hint for another tool's key, and the path of its namesake here (empty where it has none).

    Where there is a namesake, `text` is how it is written, with an example's value.
    """

    hint: str
    path: KeyPath = ()
    text: str = ""

    def of(self, alias: str, value: object) -> str:
        """The hint for `alias = value`: with that value, where it can be the namesake's."""
        if not self.text:
            return self.hint
        return self.hint.replace(f"`{self.text}`", f"`{_with(self.text, alias.lower(), value)}`")


# (section, what to write) → what other tools call it
_KEYS = {
    ("", 'name = "my-run"'): "run_name experiment experiment_name run title",
    ("", 'output_dir = "runs"'): "out output out_dir save_dir log_dir logdir work_dir default_root_dir",
    ("train", 'length = "5ep"'): "epoch epochs num_epochs n_epochs max_epochs num_train_epochs",
    ("train", 'length = "1000st"'): (
        "step steps max_steps num_steps total_steps train_steps iterations max_iters num_iterations"
    ),
    ("train", 'length = "2h"'): "max_time max_duration time_limit",
    (
        "train",
        "global_batch = 256",
    ): "train_batch_size effective_batch_size global_batch_size",
    ("train", "micro_batch = 32"): (
        "micro_batch_size per_device_train_batch_size per_device_batch_size batch_size_per_gpu"
        " train_micro_batch_size_per_gpu"
    ),
    ("train", "eval_batch = 64"): "eval_batch_size per_device_eval_batch_size val_batch_size test_batch_size",
    ("train", 'eval_every = "1ep"'): "eval_steps eval_interval val_check_interval val_every eval_strategy",
    ("train", 'precision = "bf16"'): "mixed_precision amp amp_dtype use_amp fp16 bf16 dtype half",
    ("train", "clip_norm = 1.0"): (
        "max_grad_norm gradient_clipping gradient_clip_val grad_clip grad_clip_norm clip_grad clip_grad_norm max_norm"
    ),
    ("train", "seed = 0"): "random_seed manual_seed rng_seed",
    ("train", 'compile = "default"'): "torch_compile compile_mode",
    ("train", "activation_checkpointing = true"): (
        "gradient_checkpointing activation_checkpoint use_gradient_checkpointing recompute checkpoint_activations"
    ),
    ("train", 'blocks = ["Block"]'): (
        "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap transformer_cls_names_to_wrap"
        " auto_wrap_policy fsdp_auto_wrap_policy"
    ),
    ("train", 'fp8 = "tensorwise"'): "float8 enable_float8 use_fp8 fp8_recipe float8_recipe fp8_format",
    ("train", "tf32 = true"): "allow_tf32 matmul_precision float32_matmul_precision",
    ("train", "deterministic = true"): "cudnn_deterministic use_deterministic_algorithms full_determinism",
    ("train", "cudnn_benchmark = true"): "benchmark",
    ("train", "channels_last = true"): "memory_format",
    ("train", "sync_batchnorm = true"): "sync_bn sync_batch_norm convert_sync_batchnorm",
    ("train", 'timeout = "10m"'): "ddp_timeout nccl_timeout process_group_timeout",
    ("strategy", "stage = 3"): "zero_stage zero_optimization zero",
    ("strategy", "replicas = 2"): "data_parallel_replicate_degree num_replicate hybrid_shard",
    ("strategy", 'offload_optimizer = "cpu"'): "offload_optimizer_device cpu_offload_optimizer",
    ("optimizer", "lr = 1e-3"): "learning_rate learningrate base_lr initial_lr max_lr peak_lr",
    ("optimizer", "weight_decay = 0.01"): "wd decay l2 weightdecay",
    ("optimizer", 'no_decay = ["bias", "norm"]'): "no_weight_decay skip_weight_decay exclude_from_decay",
    ("optimizer", "layer_decay = 0.75"): "layer_lr_decay layerwise_lr_decay layer_wise_lr_decay lr_layer_decay llrd",
    ("schedule", 'warmup = "100st"'): "warmup_steps num_warmup_steps warmup_ratio warmup_epochs warm_up",
    ("data", "workers = 4"): "num_workers dataloader_num_workers n_workers",
    ("data", "prefetch = 2"): "prefetch_factor",
    ("checkpoint", 'every = "1ep"'): (
        "save_every save_steps save_interval save_freq checkpoint_every checkpoint_interval save_strategy"
    ),
    (
        "checkpoint",
        "keep = { last = 3 }",
    ): "save_total_limit keep_last max_to_keep total_limit max_checkpoints",
    ("checkpoint", 'keep = { best = 1, by = "eval/loss" }'): "save_best save_top_k keep_best monitor",
    ("track", 'every = "10st"'): "log_every logging_steps log_interval log_every_n_steps log_freq",
}
_ACCUMULATION = (
    "accumulate accumulation accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps"
    " gradient_accumulation gradient_accumulation_steps"
)
_WORLD = (
    "num_processes world_size devices gpus n_gpus num_gpus ngpus nproc nproc_per_node num_nodes nodes ranks"
    " num_machines"
)
_UNITS = {"epoch": "ep", "step": "st", "iter": "st", "interval": "st", "freq": "st"}  # of another tool's numbers
_SENTENCES = {
    "ema ema_decay use_ema model_ema": "averaged weights are a callback: add [callbacks.ema]",
    "early_stopping patience early_stopping_patience": "add [callbacks.early_stopping] with `metric` and `patience`",
    "report_to log_with": "each tracker is a table, e.g. [track.wandb]; metrics.jsonl is always written",
    "push_to_hub hub_model_id hub_token": "`ddpforge export RUN --push-to-hub USER/NAME` uploads a trained model",
    "peft lora lora_r lora_rank lora_alpha qlora adapter": (
        'adapters are a model around another: model.use = "lora" with base, r, alpha and targets'
    ),
    "model_name_or_path pretrained_model_name_or_path pretrained": (
        "pretrained weights are `init_from` in [checkpoint], or an option of the model, e.g. of the plugin"
        " ddpforge-transformers"
    ),
    "resume resume_from resume_from_checkpoint ckpt_path load_from": (
        "the same command resumes a run by itself; to begin with other weights, set `init_from` in [checkpoint]"
    ),
    "shuffle sampler drop_last pin_memory persistent_workers": (
        "training data is shuffled unless [data.order] says otherwise, memory pinned on GPUs, loader processes kept;"
        " `last_batch` in [train] drops the last batch"
    ),
}
_PRECISIONS = {"16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16", "fp16": "fp16"}
_PRECISIONS |= {"bf16-mixed": "bf16", "bfloat16": "bf16", "bf16": "bf16"}
_PRECISIONS |= {"32": "fp32", "32-true": "fp32", "float32": "fp32", "fp32": "fp32", "no": "fp32"}
_SECTIONS = {
    "train": "trainer training training_args fit",
    "optimizer": "optim optimiser optimizers",
    "schedule": "scheduler lr_scheduler lr_schedule",
    "data.train": "train_data train_dataset training_data dataset datasets dataloader loader",
    "data.eval": "val valid validation test val_data eval_data eval_dataset validation_data",
    "model": "net network module arch architecture",
    "task": "loss criterion objective",
    "strategy": "distributed parallel parallelism accelerator deepspeed fsdp ddp",
    "checkpoint": "checkpoints checkpointing save saving",
    "track": "logger loggers logging log tracking trackers tracker",
    "track.wandb": "wandb weights_and_biases",
    "callbacks": "callback hooks",
}


def precision_meant(value: object) -> str | None:
    """The precision that another tool spells so, e.g. "16-mixed"."""
    return _PRECISIONS.get(str(value).lower())


def _with(text: str, alias: str, value: object) -> str:
    """`text`, a key with an example's value, with `value` instead where that can be meant."""
    key, _, example = text.partition(" = ")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "precision":
        meant = precision_meant(alias) if isinstance(value, bool) else precision_meant(value)
        return f'precision = "{meant if value and meant else "fp32" if value is False else "bf16"}"'
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}" if example in ("true", "false") else text
    if "{" in example:
        return re.sub(r"\d+", str(value), text, count=1) if isinstance(value, int) else text
    if re.fullmatch(r'"\d+\w+"', example):
        if "ratio" in alias:
            return f'{key} = "{value * 100:g}%"' if isinstance(value, float) and 0 < value < 1 else text
        unit = next((unit for word, unit in _UNITS.items() if word in alias), re.sub(r'["\d]', "", example))
        whole = unit != "st" or (number and float(str(value)).is_integer())
        return f'{key} = "{value}{unit}"' if number and whole else text
    quoted = f'"{value}"' if isinstance(value, str) and example.startswith('"') else text
    return f"{key} = {value}" if number and example[0].isdigit() else f"{key} = {quoted}" if quoted != text else text


def _hints() -> dict[str, Foreign]:
    hints: dict[str, Foreign] = {}
    for (section, text), aliases in _KEYS.items():
        where = f"in [{section}]" if section else "at the top of the recipe"
        key = text.partition(" ")[0]
        entry = Foreign(f"ddpforge writes `{text}` {where}", (section, key) if section else (key,), text)
        hints |= dict.fromkeys(aliases.split(), entry)
    batch = Foreign(
        "a batch has two sizes: `global_batch` per step, over all ranks, and `micro_batch` per forward pass",
        ("train", "global_batch"),
    )
    hints |= dict.fromkeys(("batch_size", "batchsize", "batch"), batch)
    hints |= {alias: Foreign(hint) for aliases, hint in _SENTENCES.items() for alias in aliases.split()}
    derived = Foreign("accumulation is derived: global_batch / (micro_batch × ranks); `ddpforge show` prints it")
    launched = Foreign("the launcher decides how many ranks there are: torchrun, accelerate or `ddpforge launch`")
    return hints | dict.fromkeys(_ACCUMULATION.split(), derived) | dict.fromkeys(_WORLD.split(), launched)


FOREIGN_KEYS = _hints()
"""Another tool's key, in lower case → what to do instead."""

FOREIGN_SECTIONS = {alias: section for section, aliases in _SECTIONS.items() for alias in aliases.split()}
"""What another tool calls a section, in lower case → the section."""

FOREIGN_USE = frozenset({"name", "type", "kind", "target", "_target_", "class", "class_name", "class_path", "cls"})
"""What other tools write where a recipe says `use`."""
