"""Tiny language models and chats for the cases of fine-tuning, and how HF Trainer, TRL and ddpforge train them.

All begin from the same saved weights, and take steps of SGD in the order of the data. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["CHATS", "Language", "prepare"]

_WORDS = ["the", "old", "cat", "sees", "a", "dog", "and", "What", "does", "be", "kind"]
_CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}{% if message.role == 'assistant' %}"
    "MARK{{ message.content + '<|im_end|>' }}ENDMARK{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
_MARKED = _CHATML.replace("ENDMARK", "{% endgeneration %}").replace("MARK", "{% generation %}")
_UNMARKED = _CHATML.replace("ENDMARK", "").replace("MARK", "")
LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
CHATS = [
    [
        {"role": "user", "content": "What does the cat see"},
        {"role": "assistant", "content": " ".join(_WORDS[: 1 + (5 * number) % 9])},
    ]
    for number in range(16)
]
"""Chats whose answers have 1 to 9 words."""


def prepare(folder: Path, *, model_type: str = "llama", options: Mapping[str, Any] = LLAMA, marks: bool = True,
            padding: str = "<|pad|>") -> None:  # fmt: skip
    """Writes `folder`/model and `folder`/tokenizer: a tokenizer of words with a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"]
    words = [*special, "user", "assistant", "see", "system", " ", *_WORDS]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = Split(" ", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=padding, eos_token="<|im_end|>", unk_token="<|unknown|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = _MARKED if marks else _UNMARKED
    fast.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    ends = {"pad_token_id": fast.pad_token_id, "eos_token_id": 2, "bos_token_id": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options, **ends), dtype=torch.float32)
    model.save_pretrained(folder / "model")


class Language:
    """A fine-tuning with a mean over learnt tokens.

    Args:
        chats: lists of messages; answers are learnt, with their end token.
        micro: samples of a forward pass.
        evaluation: evaluate on the chats after the last step.
        trl: further options of SFTConfig.
        task: further options of ddpforge's task.
        data: further options of ddpforge's dataset.
        train: further keys of [train] in ddpforge's recipe.
        hf: further TrainingArguments.
    """

    def __init__(
        self,
        chats: Sequence[Any] = CHATS,
        *,
        micro: int = 8,
        accumulate: int = 1,
        ranks: int = 1,
        steps: int = 2,
        evaluation: bool = False,
        packed: int = 0,
        model: Mapping[str, Any] | None = None,
        trl: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        hf: Mapping[str, Any] | None = None,
        columns: Sequence[str] = ("loss", "grad_norm"),
    ) -> None:
        self.chats, self.micro, self.accumulate, self.ranks, self.steps = chats, micro, accumulate, ranks, steps
        self.evaluation, self.packed, self.columns = evaluation, packed, columns
        self.model, self.trl, self.train, self.hf = model or {}, trl or {}, train or {}, hf or {}

    # ------------------------------------------------------------------------------------------ the right result
    def encoded(self, folder: Path) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens of each chat, and which of them are learnt: the answers and their end tokens."""
        from transformers import AutoTokenizer

        prepare(folder, **self.model)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        rows = []
        for chat in self.chats:
            tokens, learnt = [], []
            for message in chat:
                before = tokenizer.encode(f"<|im_start|>{message['role']} ", add_special_tokens=False)
                after = tokenizer.encode(f"{message['content']}<|im_end|>", add_special_tokens=False)
                tokens += before + after
                learnt += [0] * len(before) + [int(message["role"] == "assistant")] * len(after)
            rows.append((tokens, learnt))
        return rows

    def oracle(self) -> list[Any]:
        """Returns loss and gradient norm of each step, each sample alone, in float64; then the evaluation's loss."""
        from tempfile import TemporaryDirectory

        from transformers import AutoModelForCausalLM

        with TemporaryDirectory() as name:
            rows = self.encoded(Path(name))
            model: Any = AutoModelForCausalLM.from_pretrained(Path(name) / "model", dtype=torch.float64).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found: list[Any] = []
        size = len(rows) if self.packed else self.micro * self.accumulate * self.ranks  # a step has all blocks
        for step in range(self.steps):
            chosen = [rows[(step * size + number) % len(rows)] for number in range(size)]
            total = sum(sum(learnt[1:]) for _, learnt in chosen)
            loss = sum(self._loss(model, row) for row in chosen) / total
            optimizer.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
            optimizer.step()
            found.append([float(loss), float(norm)][: len(self.columns)])
        if self.evaluation:
            with torch.no_grad():
                model.eval()
                found.append(float(sum(self._loss(model, row) for row in rows)) / sum(sum(row[1][1:]) for row in rows))
        return found

    def _loss(self, model: Any, row: tuple[list[int], list[int]]) -> Any:
        tokens, learnt = (torch.tensor([one]) for one in row)
        logits = model(input_ids=tokens).logits
        losses = F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
        return (losses * learnt[0, 1:]).sum()

    def beside(self, other: Language, trainer: str) -> Callable[[Path], float]:
        """Returns a trial: the ratio of the gradient norms of this training and another one by the same trainer."""

        def trial(folder: Path) -> float:
            norms = []
            for number, trained in enumerate((self, other)):
                part = folder / str(number)
                part.mkdir(exist_ok=True)
                norms.append(getattr(trained, f"by_{trainer}")(part)[0][1])
            return float(norms[0] / norms[1])

        return trial

    # ------------------------------------------------------------------------------------------ trainers
    def by_trl(self, folder: Path) -> list[Any]:
        """Trains by SFTTrainer with `assistant_only_loss`."""
        import trl
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not (folder / "model").exists():
            _once(folder, lambda: prepare(folder, **self.model))
        options = {"assistant_only_loss": True, "max_length": self.packed or 64, "packing": bool(self.packed)}
        arguments = trl.SFTConfig(**{**self._arguments(folder), **options, **self.trl})
        data = Dataset.from_list([{"messages": chat} for chat in self.chats])
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
            args=arguments,
            train_dataset=data,
            eval_dataset=data if self.evaluation else None,
            processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        )
        trainer.train()
        return self._rows(trainer)

    def by_hf(self, folder: Path) -> list[Any]:
        """Trains by Trainer with labels of -100 and DataCollatorForSeq2Seq."""
        from transformers import (
            AutoModelForCausalLM,
            AutoTokenizer,
            DataCollatorForSeq2Seq,
            Trainer,
            TrainingArguments,
        )

        _once(folder, lambda: self.encoded(folder))
        rows = self.encoded(folder) if self.ranks == 1 else self.encoded(folder / f"rank{_rank()}")
        data = [
            {
                "input_ids": tokens,
                "attention_mask": [1] * len(tokens),
                "labels": [token if learnt else -100 for token, learnt in zip(*row, strict=True)],
            }
            for row in rows
            for tokens in [row[0]]
        ]
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
            TrainingArguments(**{**self._arguments(folder), **self.hf}),
            train_dataset=data,  # type: ignore[arg-type]
            eval_dataset=data if self.evaluation else None,  # type: ignore[arg-type]
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
        trainer.train()
        return self._rows(trainer)

    def _arguments(self, folder: Path) -> dict[str, Any]:
        return {
            "output_dir": str(folder / "hf"), "max_steps": self.steps, "learning_rate": 0.5,
            "lr_scheduler_type": "constant", "optim": "sgd", "logging_steps": 1, "report_to": [], "max_grad_norm": 0,
            "use_cpu": True, "bf16": False, "train_sampling_strategy": "sequential", "disable_tqdm": True,
            "per_device_train_batch_size": self.micro, "per_device_eval_batch_size": self.micro,
            "gradient_accumulation_steps": self.accumulate, "save_strategy": "no", "gradient_checkpointing": False,
            "ddp_backend": "gloo" if self.ranks > 1 else None, "dataloader_pin_memory": False,
            **({"eval_strategy": "steps", "eval_steps": self.steps} if self.evaluation else {}),
        }  # fmt: skip

    def _rows(self, trainer: Any) -> list[Any]:
        found: list[Any] = [
            [row[column] for column in self.columns] for row in trainer.state.log_history if "loss" in row
        ]
        if self.evaluation:
            found += [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        return found

    def by_forge(self, folder: Path) -> list[Any]:
        """Trains by ddpforge with the dataset `chat`, `packed` if asked for."""
        import ddpforge

        def write() -> None:
            prepare(folder, **self.model)
            (folder / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in self.chats))

        _once(folder, write)
        data: dict[str, Any] = {
            "use": "chat", "path": str(folder / "train.jsonl"), "tokenizer": str(folder / "tokenizer"),
        }  # fmt: skip
        chat = data
        if self.packed:
            data = {"use": "packed", "block_size": self.packed, "of": data}
        recipe: dict[str, Any] = {
            "name": "language",
            "model": {"use": "causal_lm", "pretrained": str(folder / "model")},
            "data": {"train": data, "sampler": {"use": "sequential"}},
            "task": {"use": "causal_lm"},
            "optimizer": {"use": "sgd", "lr": 0.5},
            "train": {
                "length": f"{self.steps}st", "global_batch": self.micro * self.accumulate * self.ranks,
                "micro_batch": self.micro, "device": "cpu", **self.train,
            },
            "track": {"every": "1st"},
        }  # fmt: skip
        if self.evaluation:
            recipe["data"]["eval"] = chat
            recipe["train"]["eval_every"] = f"{self.steps}st"
        outcome = ddpforge.run(recipe, out=folder / "runs")
        rows = list(map(json.loads, (outcome.folder / "metrics.jsonl").read_text().splitlines()))
        names = {"loss": "train/loss", "grad_norm": "train/grad_norm"}
        found: list[Any] = [[row[names[name]] for name in self.columns] for row in rows if "train/loss" in row]
        if self.evaluation:
            found += [row["eval/loss"] for row in rows if "eval/loss" in row]
        return found


def _rank() -> int:
    import os

    return int(os.environ.get("RANK", "0"))


def _once(folder: Path, write: Any) -> None:
    """Runs `write` on rank 0; the others wait for it."""
    import time

    done = folder / "prepared"
    if not _rank():
        write()
        done.touch()
    while not done.exists():
        time.sleep(0.02)
