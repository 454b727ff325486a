"""TrainingArguments of transformers, saved as JSON, as a recipe. Imports neither transformers nor torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpforge.errors import UsageError
from ddpforge.recipe.report import printable
from ddpforge.recipe.toml import toml_value

__all__ = ["read_arguments", "recipe_of"]

_SAVED = "save them in the script: open('args.json', 'w').write(args.to_json_string())"

# Values of `optim`, each with its optimizer in recipes.
_OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adagrad": "torch.optim:Adagrad",
    "rmsprop": "torch.optim:RMSprop",
    "adafactor": "torch.optim:Adafactor",
}
_SCHEDULES: Mapping[str, str] = {
    "linear": '"hf_linear"',
    "cosine": '"hf_cosine"',
    "constant": '"constant"',
    "constant_with_warmup": '"constant"',
    "polynomial": '"polynomial"',
    "inverse_sqrt": '"inverse_sqrt"',
    "cosine_with_restarts": '"cosine_restarts", period = "…"',
    "warmup_stable_decay": '"wsd", decay = "…"',
}

_EXACT = ("linear", "cosine", "constant")  # the rates of transformers at every step

# Arguments that change the training and have no counterpart, each with its neutral values and the way in ddpforge.
_ELSEWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "lr_scheduler_kwargs": ((None, {}), "options of [schedule]: `ddpforge plugins show NAME`"),
    "optim_args": ((None, ""), "options of [optimizer]"),
    "optim_target_modules": ((None,), "[optimizer.groups.NAME]"),
    "deepspeed": ((None,), '[strategy] use = "deepspeed"; ddpforge writes DeepSpeed\'s configuration'),
    "fsdp_config": ((None, {}), "options of [strategy]"),
    "neftune_noise_alpha": ((None,), "there is no NEFTune: add the noise in a task of your own"),
    "use_liger_kernel": ((False,), "there are no Liger kernels; train.compile fuses the loss"),
    "auto_find_batch_size": ((False,), "`ddpforge batch-size RECIPE` finds the largest micro_batch"),
    "eval_delay": ((0, 0.0, None), "evaluations begin with the first one of eval_every"),
    "eval_on_start": ((False,), "there is no evaluation before the first step"),
    "group_by_length": ((False,), '[data.sampler] use = "bucketed"'),
    "train_sampling_strategy": (("random",), "[data.sampler]: sequential, bucketed, …"),
    "data_seed": ((None,), "train.seed seeds the data, too"),
    "bf16_full_eval": ((False,), "evaluations compute in train.precision"),
    "fp16_full_eval": ((False,), "evaluations compute in train.precision"),
    "ddp_backend": ((None, "nccl", "gloo"), "the backend follows the device"),
    "parallelism_config": ((None,), 'options of [strategy] use = "fsdp": tensor, context, experts'),
    "push_to_hub": ((False,), "`ddpforge export RUN --push-to-hub USER/NAME`"),
    "average_tokens_across_devices": ((True,), "ddpforge always counts tokens over all devices"),
    "torch_compile_backend": ((None, "inductor"), "train.compile uses inductor"),
}


def read_arguments(path: Path) -> dict[str, Any]:
    """Reads TrainingArguments from the file of `to_json_string()`, or from a folder with `training_args.json`.

    Raises UsageError if the file is something else.
    """
    file = path / "training_args.json" if path.is_dir() else path
    if file.suffix in (".bin", ".pt", ".pkl"):
        raise UsageError(f"{file} is a pickle, which could run code when it is read", hints=[_SAVED])
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", hints=[_SAVED]) from None
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}", hints=[_SAVED]) from None
    if not isinstance(found, dict) or "per_device_train_batch_size" not in found:
        raise UsageError(f"{file} has no TrainingArguments: it lacks `per_device_train_batch_size`", hints=[_SAVED])
    return found


def recipe_of(arguments: Mapping[str, Any], *, devices: int) -> str:
    """Returns the text of a recipe that trains as `arguments` do on `devices` devices; model and data are left open."""
    a = _Arguments(arguments)
    per_device, accumulation = a.number("per_device_train_batch_size", 8), a.number("gradient_accumulation_steps", 1)
    lines = [
        "recipe = 2",
        f"name = {toml_value(str(a.get('run_name') or Path(str(a.get('output_dir') or 'run')).name or 'run'))}",
        "",
        '# Complete these three tables; a subclass of Trainer is a task, too: use = "./train.py:MyTrainer".',
        "[model]",
        'use = "causal_lm"  # or sequence_classification, masked_lm, "./train.py:build_model"',
        'pretrained = "…"',
        "[data.train]",
        'use = "tokenized_text"  # or tokenized_jsonl, collated, hugging_face, "./train.py:MyDataset"',
        'path = "…"',
        'tokenizer = "…"',
        "[task]",
        f'use = "causal_lm"{_smoothing(a)}',
        "",
        *_optimizer(a),
        "",
        *_schedule(a),
        "",
        "[train]",
        f"length = {_length(a)}",
        f"global_batch = {per_device * accumulation * devices}  # {per_device} per device × {accumulation} accumulation"
        f" × {devices} device{'s' if devices > 1 else ''}",
        f"micro_batch = {per_device}",
        *_train(a),
        *_strategy(a),
        "",
        "[checkpoint]",
        *_checkpoint(a),
        "",
        "[track]",
        *_track(a),
    ]
    if lost := list(_not_read(a)):
        lines += ["", "# Arguments without a key in this recipe:", *lost]
    return "\n".join(lines) + "\n"


class _Arguments:
    """Arguments by name; remembers which were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.read = values, set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        found = self.values.get(name)
        return default if found is None else found

    def number(self, name: str, default: int) -> int:
        """Returns a whole number of 1 or more; raises UsageError for anything else."""
        found = self.get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UsageError(f"`{name}` must be a whole number of 1 or more, not {found!r}")
        return found

    def real(self, name: str, default: float) -> float:
        """Returns a number; raises UsageError for anything else."""
        found = self.get(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise UsageError(f"`{name}` must be a number, not {found!r}")
        return found


def _comment(value: object) -> str:
    """Returns a value as the text of a comment, on one line."""
    return printable(str(value))


def _smoothing(a: _Arguments) -> str:
    factor = a.real("label_smoothing_factor", 0.0)
    return f"\nlabel_smoothing = {toml_value(factor)}" if factor else ""


def _optimizer(a: _Arguments) -> Iterator[str]:
    name = str(a.get("optim", "adamw_torch"))
    use = _OPTIMIZERS.get(name)
    betas = [a.real("adam_beta1", 0.9), a.real("adam_beta2", 0.999)]
    eps, decay = a.real("adam_epsilon", 1e-8), a.real("weight_decay", 0.0)
    yield "[optimizer]"
    yield f'use = "{use}"' if use else f'use = "adamw"  # instead of {_comment(name)}, which ddpforge does not have'
    yield f"lr = {toml_value(a.real('learning_rate', 5e-5))}"
    if use in (None, "adamw"):
        yield f"betas = {toml_value(betas)}"
        yield f"eps = {toml_value(eps)}"
    yield f"weight_decay = {toml_value(decay)}"
    if decay:
        yield 'no_decay = ["bias", "norm"]'


def _schedule(a: _Arguments) -> Iterator[str]:
    kind = str(a.get("lr_scheduler_type", "linear"))
    yield "[schedule]"
    if kind in _SCHEDULES:
        use, *rest = _SCHEDULES[kind].split(", ")
        yield f"use = {use}" + ("  # falls to 0, in transformers to 1e-7" if kind == "polynomial" else "")
        yield from (f"{one}  # as in lr_scheduler_kwargs" for one in rest)
    else:
        yield f'use = "constant"  # instead of {_comment(kind)}: `ddpforge plugins list` has all schedules'
    steps, ratio = a.real("warmup_steps", 0), a.real("warmup_ratio", 0.0)
    if 0 < steps < 1:
        steps, ratio = 0, steps  # transformers 5: below 1 it is a share of the run
    note = "" if kind in _EXACT else "  # its first step has the rate lr / warmup, in transformers 0"
    if steps:
        yield f'warmup = "{int(steps)}st"{note}'
    elif ratio:
        yield f'warmup = "{100 * ratio:g}%"{note}'


def _length(a: _Arguments) -> str:
    steps, epochs = a.real("max_steps", -1), a.real("num_train_epochs", 3.0)
    return f'"{int(steps)}st"' if steps > 0 else f'"{epochs:g}ep"'


def _train(a: _Arguments) -> Iterator[str]:
    if norm := a.real("max_grad_norm", 1.0):
        yield f"clip_norm = {toml_value(norm)}"
    precision = "bf16" if a.get("bf16", False) else "fp16" if a.get("fp16", False) else "fp32"
    yield f'precision = "{precision}"'
    if a.get("tf32"):
        yield "tf32 = true"
    # Both names are read: transformers 5 has renamed the argument.
    if any([a.get("gradient_checkpointing", False), a.get("activation_checkpointing", False)]):
        yield "activation_checkpointing = true"
    if a.get("activation_offloading", False):  # of TRL
        yield "activation_offload = true"
    mode = a.get("torch_compile_mode")
    if a.get("torch_compile", False):
        yield f"compile = {toml_value(str(mode or 'default'))}"
    evaluation = a.get("eval_strategy", "no")
    a.get("eval_steps")
    if evaluation == "steps":
        yield f'eval_every = "{_every(a.real("eval_steps", a.real("logging_steps", 500)))}"  # needs [data.eval]'
    elif evaluation == "epoch":
        yield 'eval_every = "1ep"  # needs [data.eval]'
    if (batch := a.number("per_device_eval_batch_size", 8)) != a.get("per_device_train_batch_size", 8):
        yield f"eval_batch = {batch}"
    if a.get("dataloader_drop_last", False):
        yield "drop_last = true"
    if a.get("full_determinism", False):
        yield "deterministic = true"
    yield f"seed = {int(a.real('seed', 42))}"
    if a.get("use_cpu", False):
        yield 'device = "cpu"'
    if (timeout := a.real("ddp_timeout", 1800)) != 1800:
        yield f'collective_timeout = "{timeout:g}s"'


def _every(number: float) -> str:
    """Returns a duration: below 1, transformers counts in shares of the run."""
    return f"{100 * number:g}%" if number < 1 else f"{int(number)}st"


def _strategy(a: _Arguments) -> Iterator[str]:
    fsdp, unused = a.get("fsdp"), a.get("ddp_find_unused_parameters", False)
    if fsdp:
        yield from ("", "[strategy]", 'use = "fsdp"')
    elif unused:
        yield from ("", "[strategy]", 'use = "ddp"', "find_unused_parameters = true")


def _checkpoint(a: _Arguments) -> Iterator[str]:
    when, steps = a.get("save_strategy", "steps"), a.real("save_steps", 500)
    if when == "steps":
        yield f'every = "{_every(steps)}"'
    elif when == "no":
        yield '# Training ends with a checkpoint, also with save_strategy = "no".'
    keep = [f"last = {limit}"] if a.get("save_total_limit") and (limit := a.number("save_total_limit", 1)) else []
    if a.get("load_best_model_at_end", False):
        metric = str(a.get("metric_for_best_model", "loss")).removeprefix("eval_")
        greater = a.get("greater_is_better")
        keep += ["best = 1", f"monitor = {toml_value(f'eval/{metric}')}"]
        keep += [f'mode = "{"max" if greater else "min"}"'] if greater is not None else []
    if keep:
        yield f"keep = {{ {', '.join(keep)} }}"


def _track(a: _Arguments) -> Iterator[str]:
    when, steps = a.get("logging_strategy", "steps"), a.real("logging_steps", 500)
    yield 'every = "1ep"' if when == "epoch" else f'every = "{_every(steps)}"'
    reports = a.get("report_to", [])
    for name in reports if isinstance(reports, list) else [reports]:
        if name in ("wandb", "tensorboard", "mlflow"):
            yield (
                f"{name} = {{ project = {toml_value(str(a.get('project', 'huggingface')))} }}"
                if name == "wandb"
                else f"{name} = {{}}"
            )
        elif name not in ("none", "all"):
            yield f"# report_to: there is no tracker for {_comment(name)}"


def _not_read(a: _Arguments) -> Iterator[str]:
    """Yields a comment for each argument that changes the training, is set, and has no key."""
    for name, (neutral, way) in _ELSEWHERE.items():
        if name in a.values and a.values[name] not in neutral:
            yield f"#   {name} = {_comment(json.dumps(a.values[name]))}: {way}"
