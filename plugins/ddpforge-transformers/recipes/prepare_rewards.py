"""Writes a tiny model and prompts for grpo.toml: a digit plus 1 or 2, modulo 10. Downloads nothing.

`sum-model/` is a Llama of 0.1 M parameters with random weights, and a tokenizer of single characters. `sums.jsonl` has
20 sums, each with its answer.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

rows = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10) for b in (1, 2)]
Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

words = {text: number for number, text in enumerate(["<pad>", "<end>", *"0123456789+="])}
single = Tokenizer(WordLevel(words, unk_token="<pad>"))
single.pre_tokenizer = Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=single, pad_token="<pad>", eos_token="<end>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
AutoModelForCausalLM.from_config(config).save_pretrained("sum-model")
tokenizer.save_pretrained("sum-model")
print(f"sum-model/, {len(rows)} prompts")
