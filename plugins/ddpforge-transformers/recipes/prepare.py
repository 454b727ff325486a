"""Writes the data of python-llama.toml: the standard library's sources, and a tokenizer trained on them."""

import shutil
import sysconfig
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
sources = sorted(file for file in Path(sysconfig.get_path("stdlib")).glob("*.py") if file.stat().st_size)
for number, file in enumerate(sources):
    folder = Path("python-sources", "train" if number % 10 else "eval")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / file.name)

bytes_and_pairs = ByteLevelBPETokenizer()
bytes_and_pairs.train([str(file) for file in sources], vocab_size=2048, special_tokens=[END], show_progress=False)
PreTrainedTokenizerFast(tokenizer_object=bytes_and_pairs._tokenizer, eos_token=END).save_pretrained("python-tokenizer")
