"""Mistakes are refused before training, with the fault and no traceback."""

from pathlib import Path

import numpy as np
import pytest
from ddpforge.testing.ranks import run_ddpforge
from mistakes import MISTAKES, OWN
from small_nets import RECIPE

QUICK = ("unknown option", "too few labels", "data without seeds", "values out of range", "fewer labels than latents")


def write_files(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    (folder / "damaged.safetensors").write_bytes(b"not a file of tensors")
    latents = np.zeros((6, 4, 8, 8), dtype=np.float32)
    np.savez(folder / "other.npz", images=latents)
    np.savez(folder / "fewer.npz", latents=latents, labels=np.zeros(3, dtype=np.int64))
    embeddings, pooled = np.zeros((6, 5, 12), dtype=np.float32), np.zeros((6, 6), dtype=np.float32)
    np.savez(folder / "good.npz", latents=latents, embeddings=embeddings, pooled=pooled)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MISTAKES]
)
def test_mistake_is_refused_before_training(tmp_path: Path, name: str) -> None:
    old, new, said = MISTAKES[name]
    text = RECIPE
    for part, other in zip(old.split("|"), new.split("|"), strict=False):
        assert part in text
        text = text.replace(part, other)
    write_files(tmp_path)
    (tmp_path / "flow.toml").write_text(text)
    done = run_ddpforge("run", "flow.toml", "--set=train.length=12st", cwd=tmp_path, timeout=200)
    shown = " ".join((done.stdout + done.stderr).split())
    assert done.returncode in (2, 3), shown
    assert said in shown
    assert "Traceback" not in shown
