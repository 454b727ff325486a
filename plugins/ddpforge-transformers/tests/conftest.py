"""Fixtures: a tokenizer, texts, and ddpforge runs. Nothing is downloaded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chats import byte_tokenizer
from ddpforge.testing.ranks import preload, run_ddpforge
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

os.environ["HF_HUB_OFFLINE"] = "1"
preload("transformers.models.llama.modeling_llama", "peft", "ddpforge_transformers.tasks", "ddpforge_transformers.chat")
WORDS = ["the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "fears", "big", "small", "old", "and", ",", "."]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a folder with a tokenizer of whole words."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", "<unknown>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = Whitespace()
    words.decoder = WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["bare", "begins", "ends"])
def added(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Returns a tokenizer of bytes, and its tokens before and after a text: none, a begin, or an end token."""
    kind = request.param
    folder = byte_tokenizer(tmp_path_factory.mktemp(kind), begins=kind == "begins", ends=kind == "ends")
    return folder, "<|pad|>" if kind == "begins" else "", "<|im_end|>" if kind == "ends" else ""


def sentence(number: int) -> str:
    """Returns a sentence of five to nine words that is easy to predict."""
    subject, verb, thing = (
        WORDS[(number * step) % size + first] for step, first, size in ((1, 2, 3), (3, 5, 4), (5, 2, 3))
    )
    return f"the {'big ' * (number % 3)}{subject} {verb} the {'old ' * (number % 2)}{thing} ."


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Writes a folder with a text file and a .jsonl file."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [sentence(number) for number in range(200)]
    (folder / "a.txt").write_text(" ".join(lines[:100]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[100:]))
    return folder


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Writes a .jsonl file of prompts, texts and classes."""
    file = tmp_path / "samples.jsonl"
    rows = [{"ask": "the cat", "text": sentence(number), "label": number % 2} for number in range(46)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def ddpforge(tmp_path: Path) -> Callable[..., str]:
    """Runs e.g. `ddpforge("run", "x.toml", ranks=2)` in the test's folder; returns the output. `launcher`: torchrun."""

    def run(*arguments: str, ranks: int = 1, code: int = 0, launcher: bool = False) -> str:
        if launcher:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *torchrun, "-m", "ddpforge", *arguments]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        else:
            done = run_ddpforge(*arguments, cwd=tmp_path, ranks=ranks)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run
