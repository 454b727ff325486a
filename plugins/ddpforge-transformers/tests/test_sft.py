"""Supervised fine-tuning, step by step, is that of TRL's SFTTrainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHAT, MARKED, byte_tokenizer
from tiny import TINY

from ddpforge_transformers.models import causal_lm

OPTIONS = TINY["llama"] | {"vocab_size": 400}
WORDS = ["the", "old", "cat", "sees", "a", "dog", "and", "What", "does", "be", "kind"]
CHATS = [
    [CHAT[1], {"role": "assistant", "content": " ".join(WORDS[: number % 7 + 1])}, *CHAT[3 : 3 + 2 * (number % 2)]]
    for number in range(24)
]
TEXTS = [
    {"prompt": f"The cat number {number} sees", "completion": " a dog" + " and a bird" * (number % 3)}
    for number in range(24)
]
RECIPE = """
recipe = 2
name = "tiny"
[model]
use = "causal_lm"
pretrained = "model"
[data.train]
{data}
[data.sampler]
use = "sequential"
[task]
use = "causal_lm"
metrics = ["accuracy"]
[optimizer]
use = "sgd"
lr = 0.5
[train]
length = "3st"
global_batch = {batch}
{micro}
[checkpoint]
every = "3st"
[track]
every = "1st"
"""


def prepare(folder: Path, rows: list[Any]) -> None:
    """Writes a model, a tokenizer whose template has generation marks, and the samples."""
    torch.manual_seed(0)
    model: Any = causal_lm(model_type="llama", options=OPTIONS)
    model.save_pretrained(folder / "model")
    byte_tokenizer(folder / "tokenizer", MARKED)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_trl(folder: Path, rows: list[Any], **options: Any) -> list[dict[str, float]]:
    """Trains by TRL for 3 steps of SGD in fp32, in the order of the data; returns its rows."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=3,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        report_to=[],
        max_grad_norm=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        **{"max_length": 64, **options},
    )
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def mine(folder: Path, name: str = "tiny") -> list[dict[str, float]]:
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


def compare(found: list[dict[str, float]], wanted: list[dict[str, float]], *, accuracy: bool = True) -> None:
    assert len(found) == len(wanted) == 3
    assert len({row["train/loss"] for row in found}) == 3
    pairs = {"train/loss": "loss", "train/grad_norm": "grad_norm"}
    pairs |= {"train/accuracy": "mean_token_accuracy"} if accuracy else {}
    for key, name in pairs.items():
        assert [row[key] for row in found] == pytest.approx([row[name] for row in wanted], rel=1e-5, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("form", ["chats", "completions"])
def test_each_step_is_that_of_trl(
    ddpforge: Callable[..., str], tmp_path: Path, form: str, accumulation: int, ranks: int
) -> None:
    """TRL has one rank. Its accuracy is a mean over forward passes, so that of steps without accumulation counts."""
    rows: list[Any] = [{"messages": chat} for chat in CHATS] if form == "chats" else TEXTS
    prepare(tmp_path, rows)
    data = 'use = "chat"\npath = "train.jsonl"\ntokenizer = "tokenizer"\nmax_length = 64'
    micro = f"micro_batch = {8 // accumulation // ranks}"
    (tmp_path / "tiny.toml").write_text(RECIPE.format(data=data, batch=8, micro=micro))
    ddpforge("run", "tiny.toml", ranks=ranks)
    learnt = {"assistant_only_loss": form == "chats"}
    compare(mine(tmp_path), by_trl(tmp_path, rows, per_device_train_batch_size=8, **learnt))
    if accumulation > 1:
        how = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
        compare(mine(tmp_path), by_trl(tmp_path, rows, **how, **learnt), accuracy=False)


@pytest.mark.slow
def test_packed_steps_are_those_of_trl(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    """Each step has all samples, since the order of blocks differs."""
    rows: list[Any] = [{"messages": chat} for chat in CHATS]
    prepare(tmp_path, rows)
    data = 'use = "packed"\nblock_size = 80\nof = { use = "chat", path = "train.jsonl", tokenizer = "tokenizer" }'
    (tmp_path / "tiny.toml").write_text(RECIPE.format(data=data, batch=10, micro=""))
    ddpforge("run", "tiny.toml")
    wanted = by_trl(
        tmp_path, rows, per_device_train_batch_size=10, assistant_only_loss=True, packing=True, max_length=80
    )
    compare(mine(tmp_path), wanted)
