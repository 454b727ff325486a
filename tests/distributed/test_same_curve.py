"""One recipe has one curve on any number of ranks."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import numpy as np
import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.parts import RaggedTokens

from ddpforge.app.build import WEIGHTS
from ddpforge.builtin.models.gpt import GPT
from ddpforge.data import mix
from ddpforge.interfaces.permutation import permute

RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "gpt"
vocab_size = 16
block_size = 8
layers = 2
heads = 2
width = 16
[data.train]
use = "./parts.py:RaggedTokens"
[data.eval]
use = "./parts.py:RaggedTokens"
samples = 11
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 1e-2
weight_decay = 0.1
no_decay = ["bias", "norm"]
[schedule]
use = "cosine"
warmup = "5st"
[train]
length = "50st"
global_batch = 12
micro_batch = 3
clip_norm = 0.5
eval_every = "25st"
seed = 3
[track]
every = "1st"
"""


def rows(folder: Path, key: str) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def by_hand() -> tuple[list[float], list[float]]:
    """Returns loss and gradient norm before clipping of 50 steps, in 40 lines of plain torch."""
    torch.manual_seed(mix(3, WEIGHTS))
    model = GPT(vocab_size=16, block_size=8, layers=2, heads=2, width=16)
    plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n]
    decayed = [p for p in model.parameters() if all(p is not other for other in plain)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    data = RaggedTokens()

    losses, norms = [], []
    for step in range(50):
        epoch, turn = divmod(step, 4)  # 43 samples: 12 + 12 + 12 + 7
        places = np.arange(turn * 12, min(43, turn * 12 + 12), dtype=np.uint64)
        ids = permute(places, np.full(len(places), epoch, dtype=np.uint64), 43, 3).astype(np.int64)

        warm = (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 44))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * warm
        logits = model(data.tokens[ids])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.targets[ids].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.fixture
def curves(ddpforge: Callable[..., Ranks], tmp_path: Path) -> dict[int, Path]:
    copy(SUPPORT / "parts.py", tmp_path)
    folders = {}
    for nproc in (1, 2, 4):
        (tmp_path / f"{nproc}.toml").write_text(RECIPE.format(name=f"on-{nproc}"))
        ddpforge("run", f"{nproc}.toml", nproc=nproc)
        folders[nproc] = tmp_path / "runs" / f"on-{nproc}"
    return folders


def test_one_two_and_four_ranks_match_a_hand_written_loop(curves: dict[int, Path]) -> None:
    """Covers traps 01, 02, 04, 15, 24, 27: token-weighted loss, accumulation 4, 2, 1, clipping, ragged last batch."""
    losses, norms = by_hand()
    assert sum(norm > 0.5 for norm in norms) > 25  # the clipping is active
    for folder in curves.values():
        assert rows(folder, "train/loss") == pytest.approx(losses, rel=1e-5)
        assert rows(folder, "train/grad_norm") == pytest.approx(norms, rel=1e-4)
        assert rows(folder, "samples") == [43 * (s // 4) + min(43, s % 4 * 12) for s in range(1, 51)]

    evaluations = [rows(folder, "eval/loss") for folder in curves.values()]
    assert len(evaluations[0]) == 2
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
    assert evaluations[2] == pytest.approx(evaluations[0], rel=1e-5)
