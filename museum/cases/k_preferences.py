"""Preference training: DPO by ddpforge and TRL, beside the same pairs in one batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from museum.case import Case
from museum.language import prepare

THEME = "Preference training"
WORDS = ["the", "old", "cat", "sees", "a", "dog"]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": "What does the cat see"}],
        "chosen": [{"role": "assistant", "content": " ".join(WORDS[: 1 + number])}],
        "rejected": [{"role": "assistant", "content": " ".join(WORDS[5 - number :])}],
    }
    for number in range(4)
]


def by_trl(folder: Path, micro: int, accumulate: int, pairs: list[Any]) -> float:
    """Returns the gradient norm of the first step by DPOTrainer."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare(folder)
    arguments = trl.DPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=micro, gradient_accumulation_steps=accumulate,
        max_steps=1, learning_rate=0.1, optim="sgd", logging_steps=1, report_to=[], max_grad_norm=0, use_cpu=True,
        bf16=False, gradient_checkpointing=False, train_sampling_strategy="sequential", disable_tqdm=True,
        max_length=64, save_strategy="no",
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2)]
    trainer = trl.DPOTrainer(
        model=models[0], ref_model=models[1], args=arguments, train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )  # fmt: skip
    trainer.train()
    return next(float(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row)


def by_forge(folder: Path, micro: int, accumulate: int, pairs: list[Any]) -> float:
    """Returns the gradient norm of the first step by the task `dpo`."""
    import ddpforge

    prepare(folder)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe: dict[str, Any] = {
        "name": "dpo",
        "model": {"use": "causal_lm", "pretrained": str(folder / "model")},
        "data": {
            "train": {
                "use": "preferences", "path": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "tokenizer"),
            },
            "sampler": {"use": "sequential"},
        },
        "task": {"use": "dpo"},
        "optimizer": {"use": "sgd", "lr": 0.1},
        "train": {"length": "1st", "global_batch": micro * accumulate, "micro_batch": micro, "device": "cpu"},
        "track": {"every": "1st"},
    }  # fmt: skip
    outcome = ddpforge.run(recipe, out=folder / "runs")
    rows = map(json.loads, (outcome.folder / "metrics.jsonl").read_text().splitlines())
    return next(float(row["train/grad_norm"]) for row in rows if "train/grad_norm" in row)


def _beside_one_batch(by: Callable[..., float], pairs: list[Any]) -> Callable[[Path], float]:
    """Returns a trial: the norm of the gradient of two micro-batches, divided by that of one batch."""

    def trial(folder: Path) -> float:
        norms = []
        for name, micro, accumulate in (("split", 2, 2), ("whole", len(pairs), 1)):
            (folder / name).mkdir()
            norms.append(by(folder / name, micro, accumulate, pairs))
        return norms[0] / norms[1]

    return trial


CASES = [
    Case(
        name=f"dpo-{name}",
        wrong=wrong,
        references=references,
        trials={"forge": _beside_one_batch(by_forge, pairs), "trl_sft": _beside_one_batch(by_trl, pairs)},
        right=lambda: 1.0,
        tolerance=1e-4,
        seconds=150,
    )
    for name, wrong, references, pairs in (
        (
            "with-accumulation",
            "The loss of pairs is averaged per micro-batch and added.",
            ["TRL#6439", "verl#7200"],
            PAIRS,
        ),
        (
            "incomplete-micro-batch",
            "The pair of a smaller micro-batch counts more.",
            ["TRL#6439", "SkyRL#1504"],
            PAIRS[:3],
        ),
    )
]
