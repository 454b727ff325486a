"""Prints a table of all stages: time, loss or reward, and right answers to held-out sums by the exported models."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from answers import last_number
from transformers import AutoModelForCausalLM, AutoTokenizer

STAGES = {"pretrain": "base", "sft": "chat", "dpo": "preferred", "grpo": "nano"}  # runs, and folders of their exports
NUMBERS = {"dpo": "train/rewards/margins", "grpo": "train/reward"}


def answer(folder: str, questions: list[str]) -> list[str]:
    """Returns the most probable answers of the model in a folder, of at most 16 tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    chats = [[{"role": "user", "content": question}] for question in questions]
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    batch = tokenizer.apply_chat_template(chats, **options)
    with torch.inference_mode():
        tokens = model.generate(**batch, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return list(tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def measure(stage: str, folder: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of a stage; `first` and `last` are means of five logged steps."""
    lines = Path(f"runs/{stage}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    name = NUMBERS.get(stage, "train/loss")
    curve = [row[name] for row in metrics if name in row]
    said = answer(folder, [row["question"] for row in rows])
    right = sum(last_number(text) == row["answer"] for text, row in zip(said, rows, strict=True))
    return {
        "stage": stage,
        "steps": metrics[-1]["step"],
        "number": name.removeprefix("train/"),
        "first": mean(curve[:5]),
        "last": mean(curve[-5:]),
        "right": right / len(rows),
        "letters": sum(map(len, said)) / len(said),
    }


def main() -> None:
    """Writes scores.json and prints the table."""
    rows = [json.loads(line) for line in Path("data/held-out.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [measure(stage, folder, rows) for stage, folder in STAGES.items()]
    Path("scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")
    print(f"{'stage':10}{'steps':>7}  {'number':17}{'first':>8}{'last':>8}{'right':>8}{'letters':>9}")
    for one in scores:
        print(
            f"{one['stage']:10}{one['steps']:7}  {one['number']:17}{one['first']:8.3f}{one['last']:8.3f}"
            f"{one['right']:8.0%}{one['letters']:9.1f}"
        )


if __name__ == "__main__":
    main()
