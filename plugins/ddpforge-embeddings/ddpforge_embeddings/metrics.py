"""Metrics of embeddings: retrieval (nDCG, MRR, recall, MAP) and correlation with scores (STS)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from ddpforge.interfaces import Metric, SampleColumns
from torch import Tensor

__all__ = ["Correlation", "Retrieval", "rank_correlation", "retrieval_metrics"]

_AT_ONCE = 2**24  # scores in memory


class Retrieval(Metric):
    """Quality of searching all documents for each query, over all samples of an evaluation set.

    Reports ndcg@10, mrr@10, map@100, accuracy@1 and recall@1, @5, @10 and @100 as means over queries. Documents of
    equal similarity are ranked in the order of the corpus. Similarities are in float64, as all rows of metrics: their
    rounding, which depends on the sizes of a product, then does not change the ranks of close documents.
    """

    name = "retrieval"
    lower_is_better = False

    def __init__(self, similarity: str) -> None:
        self._similarity = similarity

    def __call__(self, outputs: Any, targets: Any) -> SampleColumns:
        """Returns the embeddings and the batch's columns as rows."""
        return SampleColumns(targets["is_query"].long(), targets["number"], outputs, targets["relevant"])

    def finish(self, sum: Any, count: Any, *more: Any) -> Mapping[str, float]:
        """Returns the metrics of the columns `is_query`, `number`, `embedding` and `relevant`."""
        is_query, numbers = sum.bool(), count
        embeddings, relevant = more
        if self._similarity == "cosine":
            embeddings = F.normalize(embeddings, dim=-1)
        order = numbers.argsort(stable=True)
        asked, searched = order[is_query[order]], order[~is_query[order]]
        judged = [relevant[place] for place in asked.tolist()]
        if not judged or max(int(one[:, 0].max()) for one in judged) >= len(searched):
            return {}  # the first batch alone, before training
        return retrieval_metrics(embeddings[asked], embeddings[searched], judged)


def retrieval_metrics(queries: Tensor, documents: Tensor, relevant: list[Tensor]) -> dict[str, float]:
    """Returns the metrics of embeddings [Q, D] and [N, D]; `relevant` has (document, grade) [n, 2] of each query.

    The gain of nDCG is the grade, as in trec_eval and BEIR.
    """
    found: dict[str, float] = {}
    rows = max(1, _AT_ONCE // len(documents))
    for first in range(0, len(queries), rows):
        scores = queries[first : first + rows] @ documents.T
        ranked = scores.sort(dim=1, descending=True, stable=True).indices[:, :100].cpu()
        for ranks, judged in zip(ranked, relevant[first : first + rows], strict=True):
            for name, value in _of_query(ranks.tolist(), judged.tolist()).items():
                found[name] = found.get(name, 0.0) + value
    return {name: value / len(queries) for name, value in found.items()}


def _of_query(ranked: list[int], judged: list[list[int]]) -> dict[str, float]:
    grades = {document: grade for document, grade in judged}  # noqa: C416  # lists of two are not pairs to mypy
    gains = torch.tensor([grades.get(document, 0) for document in ranked], dtype=torch.float64)
    hits, total = (gains > 0).double(), len(judged)
    discounts = 1 / torch.arange(2, 12, dtype=torch.float64).log2()
    ideal = torch.tensor(sorted(grades.values(), reverse=True)[:10], dtype=torch.float64)
    first = hits[:10].nonzero()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return {
        "ndcg@10": float((gains[:10] * discounts[: len(gains[:10])]).sum() / (ideal * discounts[: len(ideal)]).sum()),
        "mrr@10": 1 / (int(first[0]) + 1) if len(first) else 0.0,
        "map@100": float((precision * hits).sum() / min(total, 100)),
        "accuracy@1": float(hits[0]),
        **{f"recall@{k}": float(hits[:k].sum() / total) for k in (1, 5, 10, 100)},
    }


class Correlation(Metric):
    """Correlation of cosine similarities with scores: `spearman` and `pearson`, over all samples."""

    name = "cosine"
    lower_is_better = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> SampleColumns:
        """Returns similarities and scores, [B] each, as rows."""
        return SampleColumns(outputs, targets)

    def finish(self, sum: Any, count: Any) -> Mapping[str, float]:
        """Returns both correlations of the columns; NaN if one of them is constant."""
        return {"spearman": rank_correlation(sum, count), "pearson": _pearson(sum, count)}


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Returns Spearman's correlation of two vectors; equal values have their mean rank."""
    return _pearson(_ranks(one), _ranks(other))


def _ranks(values: Tensor) -> Tensor:
    values = values.double()
    _, places, counts = values.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    found: Tensor = (counts.cumsum(0) - (counts - 1) / 2)[places]
    return found


def _pearson(one: Tensor, other: Tensor) -> float:
    one, other = (x.double() - x.double().mean() for x in (one, other))
    return float((one * other).sum() / (one.norm() * other.norm()))
