"""Writes a tiny chat model, chats and preference pairs for sft-chat, sft-packed, qlora and dpo. Downloads nothing.

`chat-model/` is a Llama of 0.9 M parameters with random weights in bf16, and a tokenizer with a chat template. For a
real model set `pretrained` and `tokenizer` in the recipes to its folder or its name on the hub, and `path` to your own
file.
"""

import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SOUNDS = {
    "cat": "meow",
    "dog": "woof",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "horse": "neigh",
    "owl": "hoot",
    "pig": "oink",
    "crow": "caw",
    "frog": "ribbit",
    "bee": "buzz",
    "snake": "hiss",
}
QUESTIONS = ("Which sound has a {}?", "How does a {} sound?", "Tell me how the {} sounds.", "The {}: what noise?")


def user(text: str) -> dict[str, str]:
    """Returns a message of the user."""
    return {"role": "user", "content": text}


def answer(animal: str, sound: str) -> dict[str, str]:
    """Returns an answer of the model."""
    return {"role": "assistant", "content": f"The {animal} says {sound}."}


chats, pairs = [], []
animals = list(SOUNDS)
for number, question in enumerate(QUESTIONS):
    for place, animal in enumerate(animals):
        asked, other = [user(question.format(animal))], animals[(place + number + 1) % len(animals)]
        good = answer(animal, SOUNDS[animal])
        chats.append({"messages": [*asked, good]})
        follow = [user(f"And the {other}?"), answer(other, SOUNDS[other])]
        chats.append({"messages": [*asked, good, *follow]})
        pairs.append({"prompt": asked, "chosen": [good], "rejected": [answer(animal, SOUNDS[other])]})
for name, rows in (("chats.jsonl", chats), ("pairs.jsonl", pairs)):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
words = ByteLevelBPETokenizer()
texts = [message["content"] for chat in chats for message in chat["messages"]] + ["user\nassistant\nsystem\n"]
words.train_from_iterator(texts, vocab_size=512, special_tokens=special, show_progress=False)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words._tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=TEMPLATE
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=2,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained("chat-model")
tokenizer.save_pretrained("chat-model")
print(f"chat-model/ ({model.num_parameters():,} parameters), {len(chats)} chats, {len(pairs)} pairs")
