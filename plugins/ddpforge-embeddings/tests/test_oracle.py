"""Losses and gradients, step by step, are those of sentence-transformers."""

import json
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BERT, rows_of, save_tokenizer, write_rows

from ddpforge_embeddings.data import Pairs
from ddpforge_embeddings.models import text_encoder

STEPS, BATCH = 10, 8
RECIPE = """
recipe = 2
name = "tiny"
[model]
use = "text_encoder"
pretrained = "model"
[data.train]
use = "pairs"
path = "rows.jsonl"
tokenizer = "model"
max_length = 32
{data}
[data.sampler]
use = "sequential"
[task]
{task}
[optimizer]
use = "sgd"
lr = 0.003
[train]
length = "10st"
global_batch = 8
[checkpoint]
every = "5st"
keep = {{ last = 5 }}
[track]
every = "1st"
"""
TWO = 'negatives = ["negative_0", "negative_1"]'
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # data, task, class of sentence-transformers, its arguments
    "pairs": ("", 'use = "multiple_negatives"', "MultipleNegativesRankingLoss", {}),
    "negatives": (TWO, 'use = "multiple_negatives"\nscale = 10', "MultipleNegativesRankingLoss", {"scale": 10.0}),
    "symmetric": (
        TWO,
        'use = "multiple_negatives"\nsymmetric = true',
        "MultipleNegativesRankingLoss",
        {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    ),
    "cached": (
        TWO,
        'use = "multiple_negatives"\nchunk = 3',
        "CachedMultipleNegativesRankingLoss",
        {"mini_batch_size": 3},
    ),
    "cosine": ('score = "score"', 'use = "cosine_similarity"', "CosineSimilarityLoss", {}),
    "triplet": ('negatives = ["negative_0"]', 'use = "triplet"', "TripletLoss", {}),
    "triplet_cosine": (
        'negatives = ["negative_0"]',
        'use = "triplet"\ndistance = "cosine"\nmargin = 0.3',
        "TripletLoss",
        {"distance_metric": "COSINE", "triplet_margin": 0.3},
    ),
    "matryoshka": (
        TWO,
        'use = "multiple_negatives"\nmatryoshka_dims = [32, 8]\nmatryoshka_weights = [1.0, 0.5]',
        "MatryoshkaLoss",
        {"matryoshka_dims": [32, 8], "matryoshka_weights": [1.0, 0.5]},
    ),
}


def prepare(folder: Path, pooling: str = "mean", **options: Any) -> None:
    """Writes the rows, and a folder of sentence-transformers with random weights."""
    save_tokenizer(folder / "model")
    write_rows(folder / "rows.jsonl", rows_of(STEPS * BATCH, 2))
    torch.manual_seed(0)
    model: Any = text_encoder(model_type="bert", options=BERT, pooling=pooling, **options)
    model.save_pretrained(folder / "model")
    data = Pairs(path=folder / "rows.jsonl", tokenizer=str(folder / "model"), max_length=32)
    model.save_extra_files(folder / "model", data, model.state_dict())


def loss_of(case: str, model: Any, **more: Any) -> Any:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    _, _, name, options = CASES[case]
    options = dict(options)
    if "distance_metric" in options:
        options["distance_metric"] = getattr(losses.TripletDistanceMetric, options["distance_metric"])
    if name == "MatryoshkaLoss":
        options["loss"] = losses.MultipleNegativesRankingLoss(model, **more)
        more = {}
    return getattr(losses, name)(model, **options, **more)


def batches(case: str, model: Any, folder: Path, rank: int = 0, ranks: int = 1) -> Iterator[tuple[list[Any], Any]]:
    """Yields the tokens of each column of a step's rows on a rank, and the scores."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    keys = ["anchor", "positive", *(key for key in ("negative_0", "negative_1") if key in CASES[case][0])]
    mine = BATCH // ranks
    for step in range(STEPS):
        part = rows[step * BATCH + rank * mine :][:mine]
        yield (
            [model.preprocess([row[key] for row in part]) for key in keys],
            torch.tensor([row["score"] for row in part]),
        )


def by_sentence_transformers(case: str, folder: Path, rank: int = 0, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Trains by SGD; returns the losses and gradient norms of all steps, means over ranks, and the weights."""
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    model.eval()  # there is no dropout
    loss_function = loss_of(case, model, **more)
    parameters = {name: one for name, one in model[0].auto_model.named_parameters() if not name.startswith("pooler.")}
    found: dict[str, Any] = {"loss": [], "norm": []}
    for features, labels in batches(case, model, folder, rank, ranks):
        for one in parameters.values():
            one.grad = None
        loss = loss_function(features, labels)
        loss.backward()
        gradients = [one.grad for one in parameters.values()]
        total = loss.detach().clone()
        if ranks > 1:
            for value in (*gradients, total):
                torch.distributed.all_reduce(value)
                value /= ranks
        found["loss"].append(float(total))
        found["norm"].append(float(torch.nn.utils.get_total_norm(gradients)))
        with torch.no_grad():
            for one in parameters.values():
                one -= 0.003 * one.grad
    return found | {"weights": {name: one.detach().clone() for name, one in parameters.items()}}


def mine(folder: Path, name: str = "tiny") -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row for row in rows if "train/loss" in row}
    assert list(by_step) == list(range(1, STEPS + 1))
    return {
        "loss": [row["train/loss"] for row in by_step.values()],
        "norm": [row["train/grad_norm"] for row in by_step.values()],
    }


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Compares to 1e-5; returns the largest relative difference."""
    assert len(set(found["loss"])) == STEPS
    worst = 0.0
    for key in ("loss", "norm"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-6), key
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(found[key], wanted[key], strict=True)))
    return worst


def trained_weights(folder: Path, name: str = "tiny") -> dict[str, torch.Tensor]:
    from ddpforge.app.api import load

    return load(folder / "runs" / name).model().state_dict()


LAYOUTS = {
    "one": (1, ""),
    "two": (2, ""),
    "fsdp": (2, '[strategy]\nuse = "fsdp"'),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_each_step_is_that_of_sentence_transformers(
    case: str, ddpforge: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient norm of 10 steps, and the weights after them, on one and two ranks, with ddp and fsdp."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    wanted = by_sentence_transformers(case, tmp_path)
    data, task, _, _ = CASES[case]
    for name, (ranks, strategy) in LAYOUTS.items():
        recipe = RECIPE.format(data=data, task=task).replace('name = "tiny"', f'name = "{name}"')
        (tmp_path / f"{name}.toml").write_text(recipe + strategy)
        ddpforge("run", f"{name}.toml", ranks=ranks)
        worst = compare(mine(tmp_path, name), wanted)
        weights = trained_weights(tmp_path, name)
        apart = max(float((weights[key] - value).abs().max()) for key, value in wanted["weights"].items())
        print(f"{case} {name}: relative {worst:.1e}, weights {apart:.1e}")
        assert apart < 1e-5


def _rank(rank: int, port: int, folder: Path, case: str, queue: Any) -> None:
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    found = by_sentence_transformers(case, folder, rank, 2, gather_across_devices=True)
    if rank == 0:
        queue.put({key: found[key] for key in ("loss", "norm")})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("case", ["negatives", "symmetric", "cached"])
def test_two_ranks_are_those_of_gather_across_devices(case: str, ddpforge: Callable[..., str], tmp_path: Path) -> None:
    """sentence-transformers gathers documents of both ranks, and its gradients are means over ranks."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    prepare(tmp_path)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, port, tmp_path, case, queue)) for rank in range(2)]
    for one in ranks:
        one.start()
    wanted = queue.get(timeout=120)
    for one in ranks:
        one.join()
    data, task, _, _ = CASES[case]
    (tmp_path / "tiny.toml").write_text(RECIPE.format(data=data, task=task))
    ddpforge("run", "tiny.toml", ranks=2)
    print(f"{case}: relative {compare(mine(tmp_path), wanted):.1e}")
