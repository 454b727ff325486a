"""Writes tokenizer/ and data/: text, chats, pairs, prompts and held-out questions. Downloads nothing.

The text is Python's standard library. The chats are sums of digits, spelling and facts.
"""

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

from dial import derive, read_depth
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDINGS = Path("wordings.txt").read_text(encoding="utf-8").splitlines()  # with places for two digits
SOUNDS = {"cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "owl": "hoot", "pig": "oink"}
WORDS = (*SOUNDS, "tree", "house", "water", "stone", "green", "paper", "light", "train", "model", "token")


def chat(question: str, answer: str) -> dict[str, Any]:
    """Returns a line for the dataset `chat`."""
    return {"messages": [ask(question), {"role": "assistant", "content": answer}]}


def ask(question: str) -> dict[str, str]:
    """Returns the message of a user."""
    return {"role": "user", "content": question}


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    """Writes data/NAME.jsonl."""
    Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_text(tokens: int) -> list[str]:
    """Writes about four bytes of text for each token to data/text and a tenth of that to data/text-eval."""
    texts: list[str] = []
    size = 0
    for number, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if size > 4 * tokens or not text:
            continue
        folder = Path("data", "text" if number % 10 else "text-eval")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_text(text, encoding="utf-8")
        texts.append(text)
        size += len(text)
    return texts


def write_chats() -> list[str]:
    """Writes the data of all stages after pretraining; returns the texts of the chats.

    Of 500 questions for a sum, 100 are held out from all stages. SFT and DPO see 150, GRPO 400, without answers.
    """
    sums = [(one.format(a, b), a, b) for one in WORDINGS for a in range(10) for b in range(10)]
    random.Random(0).shuffle(sums)
    held, seen = sums[:100], sums[100:]
    chats, pairs = [], []
    for number, (question, a, b) in enumerate(seen[:150]):
        right, long = f"{a + b}", f"Well, {a} plus {b} makes {a + b}."
        chats += [chat(question, right), chat(question, long)]
        rejected = long if number % 2 else f"{a + b + 1 + number % 7}"
        answers = {"chosen": chat("", right)["messages"][1:], "rejected": chat("", rejected)["messages"][1:]}
        pairs.append({"prompt": [ask(question)], **answers})
    chats += [chat(f"Spell {word}.", "-".join(word)) for word in WORDS]
    chats += [chat(f"Which sound has a {animal}?", f"The {animal} says {sound}.") for animal, sound in SOUNDS.items()]
    write_rows("chats", chats)
    write_rows("pairs", pairs)
    write_rows("prompts", [{"prompt": [ask(question)], "answer": a + b} for question, a, b in seen])
    write_rows("held-out", [{"question": question, "answer": a + b} for question, a, b in held])
    write_rows("chats-eval", [chat(question, str(a + b)) for question, a, b in held])
    return [message["content"] for row in chats for message in row["messages"]]


def train_tokenizer(texts: list[str], vocabulary: int) -> None:
    """Writes tokenizer/: bytes and pairs (BPE), each digit alone, and the chat template."""
    words = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained("tokenizer")


def main() -> None:
    """Writes everything; data/done is written last."""
    recipe = derive(read_depth())["pretrain"]
    steps = int(recipe["train"]["length"].removesuffix("st"))
    tokens = steps * recipe["train"]["global_batch"] * recipe["data"]["train"]["block_size"]
    texts = write_text(tokens)
    said = write_chats()
    vocabulary = recipe["model"]["options"]["vocab_size"]
    train_tokenizer([*texts, *said * 20, "user\nassistant\n" * 1000], vocabulary)
    Path("data/done").touch()
    print(f"tokenizer/ of {vocabulary} tokens at most; data/: {sum(map(len, texts)):,} letters of text")


if __name__ == "__main__":
    main()
