"""A tokenizer of bytes with the control tokens of ChatML, chat templates, and chats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What does the cat see?"},
    {"role": "assistant", "content": "a dog"},
    {"role": "user", "content": "And the dog?"},
    {"role": "assistant", "content": "the old cat"},
]


def byte_tokenizer(
    folder: Path, template: str | None = CHATML, *, begins: bool = False, ends: bool = False, **special: str | None
) -> Path:
    """Writes a folder with a byte-level BPE tokenizer of 400 tokens.

    `begins`, `ends`: it adds <|pad|> before, and <|im_end|> after a text.
    """
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator([message["content"] + " system user assistant\n" for message in CHAT], trainer)
    if begins or ends:
        single = f"{'<|pad|> ' if begins else ''}$A{' <|im_end|>' if ends else ''}"
        bpe.post_processor = TemplateProcessing(single=single, special_tokens=[("<|pad|>", 0), ("<|im_end|>", 2)])
    tokens = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>"} | special
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, **{name: token for name, token in tokens.items() if token is not None}
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def damaged(file: Path, foreign: bytes) -> Iterator[None]:
    """Writes damaged, foreign and older contents into a cache file, one after the other."""
    right = file.read_bytes()
    older = file.with_name("older.npy")
    np.save(older, np.load(file) * -1)  # as older versions wrote it; a negative number of blocks
    contents = [b"", right[:140], right[:-1], foreign, older.read_bytes()]
    older.unlink()
    for place in range(0, len(right), len(right) // 25):
        flipped = bytearray(right)
        flipped[place] ^= 4
        contents.append(bytes(flipped))
    target = file.parent.parent / "target"
    for content in contents:
        file.write_bytes(content)
        yield
        assert file.read_bytes() == right
    target.write_bytes(contents[4])
    file.unlink()
    file.symlink_to(target)
    yield
    assert (file.read_bytes(), target.read_bytes()) == (right, contents[4])
