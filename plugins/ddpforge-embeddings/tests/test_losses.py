"""Losses, metrics, pooling and the order of samples, by hand."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ddpforge.errors import UsageError
from scipy import stats
from small import BERT, rows_of, save_tokenizer, text, write_rows

from ddpforge_embeddings.data import Pairs
from ddpforge_embeddings.metrics import rank_correlation, retrieval_metrics
from ddpforge_embeddings.models import Dense, text_encoder
from ddpforge_embeddings.sampler import NoDuplicates
from ddpforge_embeddings.tasks import MultipleNegatives


class Alone:
    """A single rank."""

    def all_gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        return rows, 0


def task_of(**options: Any) -> MultipleNegatives:
    task = MultipleNegatives(**options)
    task._ranks = Alone()
    return task


def unit(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))), dim=-1)


def test_equal_texts_are_not_negatives() -> None:
    """Row 1 has the positive of row 0, row 2 its anchor, and the negative of row 3 is the anchor of row 0."""
    query, documents = unit(4, 8), unit(4, 2, 8)
    keys = torch.tensor([[1, 11, 21], [2, 11, 22], [1, 13, 23], [4, 14, 1]])
    found = task_of(scale=5, mask_duplicates=True).sum_of_losses(query, documents, {"keys": keys})
    left_out = {0: {(1, 0), (2, 0), (3, 1)}, 1: {(0, 0)}, 2: {(0, 0), (3, 1)}, 3: set()}
    wanted = 0.0
    for row in range(4):
        similar = {(i, k): float(5 * query[row] @ documents[i, k]) for i in range(4) for k in range(2)}
        total = sum(math.exp(value) for place, value in similar.items() if place not in left_out[row])
        wanted += math.log(total) - similar[row, 0]
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_a_symmetric_loss_leaves_out_equal_anchors() -> None:
    query, documents = unit(3, 8), unit(3, 1, 8)
    keys = torch.tensor([[1, 11], [1, 12], [3, 13]])
    found = task_of(scale=5, mask_duplicates=True, symmetric=True).sum_of_losses(query, documents, {"keys": keys})
    similar = 5 * query @ documents[:, 0].T
    mask = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    similar = similar.masked_fill(mask, -torch.inf)
    rows = torch.arange(3)
    wanted = sum(F.cross_entropy(one, rows, reduction="sum") for one in (similar, similar.T)) / 2
    torch.testing.assert_close(found, wanted)


def test_retrieval_metrics_are_those_of_the_definitions() -> None:
    """Query 0 ranks its documents (grades 1 and 3) first and fourth; query 1 misses its only one among ten."""
    documents = torch.eye(12, dtype=torch.float64)
    scores = torch.arange(12, 0, -1, dtype=torch.float64)
    queries = torch.stack([scores, scores])
    relevant = [torch.tensor([[0, 1], [3, 3]]), torch.tensor([[11, 1]])]
    found = retrieval_metrics(queries, documents, relevant)
    ideal = 3 / math.log2(2) + 1 / math.log2(3)
    assert found["ndcg@10"] == pytest.approx((1 / math.log2(2) + 3 / math.log2(5)) / ideal / 2)
    assert found["mrr@10"] == pytest.approx(0.5)
    assert found["map@100"] == pytest.approx(((1 + 2 / 4) / 2 + 1 / 12) / 2)
    assert [found[f"recall@{k}"] for k in (1, 5, 10, 100)] == pytest.approx([0.25, 0.5, 0.5, 1.0])


def test_spearman_is_that_of_scipy_with_equal_values() -> None:
    one, other = np.array([0.1, 0.4, 0.4, 0.9, -0.3]), np.array([1, 2, 3, 3, 0])
    found = rank_correlation(torch.tensor(one), torch.tensor(other))
    assert found == pytest.approx(stats.spearmanr(one, other).statistic, abs=1e-12)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_embeddings_do_not_depend_on_padding_or_chunks(tmp_path: Path, pooling: Any, include_prompt: bool) -> None:
    torch.manual_seed(0)
    model: Any = text_encoder(model_type="bert", options=BERT, pooling=pooling, include_prompt=include_prompt).eval()
    save_tokenizer(tmp_path)
    write_rows(tmp_path / "rows.jsonl", rows_of(7))
    data = Pairs(path=tmp_path / "rows.jsonl", tokenizer=str(tmp_path), max_length=32, query_prompt="query : ")
    batch = data.collate([data[number] for number in range(7)])
    assert batch["query"]["prompt_length"].tolist() == [3] * 7  # [CLS], query, :
    whole = model([batch["query"]])[0]
    for number in range(7):
        alone = model([data.collate([data[number]])["query"]])[0]
        torch.testing.assert_close(whole[number : number + 1], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model([batch["query"]], chunk=3)[0], whole, rtol=1e-5, atol=1e-6)


def test_gradients_in_chunks_are_those_of_the_whole_also_with_dropout() -> None:
    """Each chunk of 3 texts draws its own dropout, so the whole is three groups of 3 in the same order."""
    torch.manual_seed(0)
    options = BERT | {"hidden_dropout_prob": 0.2}
    model: Any = text_encoder(model_type="bert", options=options, dense=Dense(features=8)).train()
    ids = torch.randint(4, 60, (9, 6), generator=torch.Generator().manual_seed(1))
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_length": torch.zeros(9).long()}
    gradients = []
    for chunk in (3, None):
        model.zero_grad()
        torch.manual_seed(5)
        groups = [texts] if chunk else [{key: one[n : n + 3] for key, one in texts.items()} for n in (0, 3, 6)]
        embedded = torch.cat(model(groups, chunk=chunk))
        (F.normalize(embedded, dim=-1) @ F.normalize(embedded, dim=-1).T).exp().sum().backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_rank_with_fewer_chunks_computes_as_many_with_the_same_results() -> None:
    torch.manual_seed(0)
    model: Any = text_encoder(model_type="bert", options=BERT).eval()
    ids = torch.randint(4, 60, (3, 6), generator=torch.Generator().manual_seed(1))
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_length": torch.zeros(3).long()}
    passes = []
    model.encoder.register_forward_pre_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        whole, apart = model([texts])[0], model([texts], chunk=2, passes=[5])[0]
    assert len(passes) == 1 + 5
    torch.testing.assert_close(apart, whole, rtol=1e-5, atol=1e-6)


def test_rows_of_csv_and_tsv_files_are_those_of_jsonl(tmp_path: Path) -> None:
    """With commas and quotes in texts, and scores as text."""
    rows = [{"anchor": 'a "big", dog', "positive": "the cat", "hard": "one, two", "score": score} for score in (1, 4)]
    write_rows(tmp_path / "rows.jsonl", rows)
    for suffix, dialect in (("csv", "excel"), ("tsv", "excel-tab")):
        with (tmp_path / f"rows.{suffix}").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
    words = str(save_tokenizer(tmp_path / "words"))
    options: Any = {"tokenizer": words, "negatives": ["hard"], "score": "score", "max_score": 5}
    wanted, *others = (Pairs(path=tmp_path / f"rows.{suffix}", **options) for suffix in ("jsonl", "csv", "tsv"))
    assert wanted[0] == (('a "big", dog', "the cat", "one, two"), 0.2)
    for data in others:
        assert [data[number] for number in range(len(data))] == [wanted[0], wanted[1]]


def data_of(rows: list[list[int]]) -> Any:
    return SimpleNamespace(text_keys=lambda: np.array(rows))


def test_no_text_comes_twice_in_a_step() -> None:
    """60 samples, 20 of them with 5 anchors. Steps are the same if they are computed in another order."""
    rows = [[number % 5 if number < 20 else 1000 + number, 2000 + number] for number in range(60)]
    order = NoDuplicates(data_of(rows), seed=3, global_batch=8, drop_last=True)
    assert order.steps_per_epoch == 7
    steps = [list(order(step)) for step in range(21)]
    for step in steps:
        texts = [text for sample in step for text in rows[sample]]
        assert len(step) == 8
        assert len(set(texts)) == len(texts)
    other = NoDuplicates(data_of(rows), seed=3, global_batch=8, drop_last=True)
    assert [list(other(step)) for step in reversed(range(21))] == steps[::-1]
    for epoch in range(3):
        seen = [sample for step in steps[7 * epoch :][:7] for sample in step]
        assert len(set(seen)) >= 52
    assert steps[:7] != steps[7:14]


def test_without_duplicates_the_order_is_the_default_one() -> None:
    from ddpforge.interfaces import Shuffled

    rows = [[number, 1000 + number] for number in range(40)]
    data = type("Data", (), {"text_keys": lambda self: np.array(rows), "__len__": lambda self: 40})()
    mine = NoDuplicates(data, seed=7, global_batch=8, drop_last=True)
    default = Shuffled(data, 7, 8, True)
    assert [list(mine(step)) for step in range(15)] == [list(default(step)) for step in range(15)]


def test_too_few_different_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="only 3 samples could be found that share no text"):
        NoDuplicates(data_of([[number % 3, 10 + number] for number in range(30)]), 0, 4, True)
    with pytest.raises(UsageError, match="no_duplicates needs data with texts"):
        NoDuplicates(object(), 0, 4, True)


def test_texts_of_different_numbers_differ() -> None:
    assert len({text(number, 9) for number in range(1000)}) == 1000
