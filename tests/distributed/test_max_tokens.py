"""`train.max_tokens` on real ranks: the same curve as with micro-batches of samples, on any number of ranks."""

from pathlib import Path

import pytest
from support.trained import trained

RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "./ragged.py:Tagger"
[data.train]
use = "./ragged.py:Texts"
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 0.01
[train]
length = "2ep"
global_batch = 16
{train}
[strategy]
use = "{strategy}"
[track]
every = "1st"
"""
CODE = '''
import numpy as np
import torch
from torch import nn

class Texts:
    """100 sequences of 1 to 60 tokens; a batch is padded with 0, and its targets with -100."""

    random = False

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self.lengths = draws.integers(1, 60, 100)
        self.tokens = [torch.from_numpy(draws.integers(0, 9, length)) for length in self.lengths]

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.tokens[index]

    def collate(self, rows):
        pad = nn.utils.rnn.pad_sequence
        tokens = pad(rows, batch_first=True)
        with open("passes.txt", "a") as file:
            file.write(f"{tokens.numel()}\\n")
        return tokens, pad([row % 3 for row in rows], batch_first=True, padding_value=-100)

class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens).tanh())
'''


def curve(folder: Path, name: str, train: str, ranks: int, strategy: str = "ddp") -> list[float]:
    recipe = RECIPE.format(name=name, train=train, strategy=strategy)
    (folder / "passes.txt").unlink(missing_ok=True)
    found = trained(folder, recipe, ranks)
    assert all(one.column() == found[0].column() for one in found)
    return found[0].column()


def test_the_loss_per_token_does_not_depend_on_the_division_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "ragged.py").write_text(CODE)
    alone = curve(tmp_path, "alone", "micro_batch = 16", 1)
    assert len(alone) == 14  # two epochs of 100 samples, the last step of each with 4
    for number, (ranks, train, strategy) in enumerate(
        [
            (1, "max_tokens = 128", "ddp"),
            (2, "max_tokens = 128", "ddp"),
            (4, "max_tokens = 100\nmicro_batch = 2", "ddp"),
            (2, "max_tokens = 128", "fsdp"),
            (2, "max_tokens = 128\nvirtual_ranks = 4", "ddp"),
        ]
    ):
        assert curve(tmp_path, f"run{number}", train, ranks, strategy) == pytest.approx(alone, rel=1e-5)
        passes = list(map(int, (tmp_path / "passes.txt").read_text().split()))
        assert max(passes) <= 128
