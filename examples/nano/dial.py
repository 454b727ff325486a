"""Derives all sizes from `depth` in dial.toml, and writes them into dial/, which the recipes extend.

Depth 20 has the sizes of nanochat's d20 (https://github.com/karpathy/nanochat): 561 M parameters, 11 B tokens.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any


def read_depth() -> int:
    """Returns `depth` of dial.toml; exits with a message unless it is a whole number from 1 to 32."""
    depth = tomllib.loads(Path("dial.toml").read_text(encoding="utf-8")).get("depth")
    if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= 32:
        sys.exit(f"dial.toml: depth must be a whole number from 1 to 32, is {depth!r}")
    return depth


def count_parameters(model: dict[str, Any]) -> int:
    """Returns the weights of a Llama without those of its norms: attention, SwiGLU, embeddings and output layer."""
    width, inner = model["hidden_size"], model["intermediate_size"]
    return model["num_hidden_layers"] * (4 * width**2 + 3 * width * inner) + 2 * model["vocab_size"] * width


def derive(depth: int) -> dict[str, Any]:
    """Returns the table that each recipe extends, by its name."""
    block = min(2048, 2 ** (6 + depth // 2))
    model = {
        "hidden_size": 64 * depth,
        "intermediate_size": 64 * max(1, round(64 * depth * 8 / 3 / 64)),
        "num_hidden_layers": depth,
        "num_attention_heads": depth,
        "vocab_size": 2 ** max(9, min(16, 8 + depth // 2)),
        "max_position_embeddings": block,
    }
    batch = 2 ** (3 + depth // 4)
    tokens = count_parameters(model) * max(0.5, min(20, depth**2 / 8))  # 20 per parameter (Hoffmann et al., 2022)
    rate = 6e-3 / depth
    train: dict[str, Any] = {}
    if depth >= 8:  # on a GPU
        train = {"precision": "bf16", "micro_batch": 8}
    pretraining = {"length": f"{round(tokens / batch / block)}st", "global_batch": batch}
    text = {"block_size": block}
    return {
        "pretrain": {
            "model": {"options": model},
            "data": {"train": text, "eval": text},
            "optimizer": {"lr": rate},
            "train": train | pretraining,
        },
        "sft": {
            "data": {"train": text},
            "optimizer": {"lr": rate},
            "train": train | {"length": f"{max(1, 120 // depth)}ep"},
        },
        "dpo": {"optimizer": {"lr": rate / 30}, "train": train | {"length": f"{max(1, 6 // depth)}ep"}},
        "grpo": {"optimizer": {"lr": rate / 10}, "train": train | {"length": f"{max(50, 240 // depth)}st"}},
    }


def write(table: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """Returns a table as TOML."""
    values = [f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict)]
    head = f"[{'.'.join(path)}]\n" if path and values else ""
    return head + "".join(values) + "".join(write(v, (*path, k)) for k, v in table.items() if isinstance(v, dict))


def main() -> None:
    """Writes dial/; refuses another depth than that of the runs in this folder."""
    depth, folder = read_depth(), Path("dial")
    before = folder / "depth"
    if Path("runs").exists() and before.exists() and before.read_text() != str(depth):
        sys.exit(f"runs/ has models of depth {before.read_text()}: set it in dial.toml, or copy the example again")
    folder.mkdir(exist_ok=True)
    before.write_text(str(depth))
    for name, table in derive(depth).items():
        (folder / f"{name}.toml").write_text(write(table), encoding="utf-8")
    model = derive(depth)["pretrain"]["model"]["options"]
    print(f"depth {depth}: {count_parameters(model):,} parameters; sizes of all stages in dial/")


if __name__ == "__main__":
    main()
