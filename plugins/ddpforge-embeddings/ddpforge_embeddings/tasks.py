"""Tasks of text embeddings: `multiple_negatives`, `cosine_similarity` and `triplet`. Losses are sums over rows."""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from ddpforge.errors import UsageError
from ddpforge.interfaces import SampleColumns, Task, Total, World
from ddpforge_transformers.tasks import check_attention, check_fit
from pydantic import Field
from torch import Tensor, nn

from ddpforge_embeddings.corpus import RetrievalData
from ddpforge_embeddings.data import Pairs, Texts
from ddpforge_embeddings.metrics import Correlation, Retrieval
from ddpforge_embeddings.models import TextEncoder

__all__ = ["CosineSimilarity", "MultipleNegatives", "TripletMargin"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

Batch = Mapping[str, Any]

_Chunk = Annotated[
    int | None,
    Field(
        ge=1,
        description="Number of texts to compute at a time, and again in the backward pass: less memory, the same loss."
        " Absent: all texts of a rank at once.",
    ),
]
_Dims = Annotated[
    Sequence[Annotated[int, Field(ge=1)]],
    Field(description="Matryoshka: sizes of shortened embeddings; their losses are added. Empty: whole embeddings."),
]
_Weights = Annotated[
    Sequence[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None,
    Field(description="Weights of these losses; absent: 1 each."),
]


class _Embeddings(Task):
    """Task on the embeddings of texts; in an evaluation it also searches the corpus of the dataset `retrieval`."""

    items = "rows"
    evaluation_loss = "some"  # not of `retrieval` and `texts`
    needs = "pairs"
    similarity = "cosine"
    _ranks: Any = None  # until `start`

    def __init__(self, chunk: int | None, dims: Sequence[int], weights: Sequence[float] | None) -> None:
        if weights is not None and len(weights) != len(dims):
            raise ValueError(f"matryoshka_weights has {len(weights)} numbers, but matryoshka_dims {len(dims)}")
        if len(set(dims)) != len(dims):
            raise ValueError("matryoshka_dims has a number twice")
        self._chunk, self._dims, self._weights = chunk, tuple(dims), weights
        self.reports = {"retrieval": Retrieval(self.similarity), "cosine": Correlation()}

    def start(self, model: nn.Module, world: World) -> None:
        """Stores the data-parallel process group; raises UsageError for an attention that cannot be trained."""
        check_attention(model, world)
        self._ranks = world.dp_ranks

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError for a model that is not a text encoder, and for data that the task cannot use."""
        if not isinstance(model, TextEncoder):
            raise ValueError('this task needs a text encoder: set model.use = "text_encoder"')
        if not isinstance(data, Pairs | RetrievalData | Texts):
            raise ValueError(
                f'this task needs the dataset `{self.needs}`, not {type(data).__name__}: set its use = "{self.needs}"'
            )
        check_fit(model, data)
        if large := [one for one in self._dims if one > model.dimension]:
            raise ValueError(f"matryoshka_dims has {large[0]}, but embeddings have {model.dimension} numbers")
        _check_prompts(model, data)
        if isinstance(data, Pairs):
            self.check_pairs(data)

    def check_pairs(self, data: Pairs) -> None:
        """Raises ValueError for pairs that lack a part of the loss."""

    @abstractmethod
    def sum_of_losses(self, query: Tensor, documents: Tensor, batch: Batch) -> Tensor:
        """Returns the summed loss of this rank's rows: embeddings [B, D] and [B, 1 + K, D]."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor | None, Any]:
        """Returns the summed loss and the embeddings; for batches of `retrieval` the loss is None."""
        if "query" not in batch:
            if model.training:
                kind = "retrieval" if "is_query" in batch else "texts"
                raise UsageError(
                    f"the dataset `{kind}` is for evaluations and predictions", hints=[f"train with `{self.needs}`"]
                )
            return None, {"texts": self._embed(model, batch["texts"])[0]}
        query, documents = self._embed(model, batch["query"], batch["documents"])
        documents = documents.view(len(query), -1, documents.shape[-1])
        outputs = {"query": query, "documents": documents}
        if not self._dims:
            return self.sum_of_losses(query, documents, batch), outputs
        total = query.new_zeros(())
        for place, size in enumerate(self._dims):
            part, parts = (F.normalize(one[..., :size], dim=-1) for one in (query, documents))
            weight = 1.0 if self._weights is None else self._weights[place]
            total = total + weight * self.sum_of_losses(part, parts, batch)
        return total, outputs

    def _embed(self, model: nn.Module, *groups: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the embeddings of each group of texts. Collective if they are computed in chunks."""
        if self._chunk is None or self._ranks is None:
            found: list[Tensor] = model(groups, chunk=self._chunk)
            return found
        ids = [group["input_ids"] for group in groups]
        counts = torch.tensor([[-(-len(one) // self._chunk) for one in ids]], device=ids[0].device)
        passes = self._ranks.all_gather(counts)[0].amax(0).tolist()
        found = model(groups, chunk=self._chunk, passes=passes)
        return found

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns rows for retrieval, rows for the correlation with scores, or the metrics of pairs."""
        if "is_query" in batch:
            return {"retrieval": self.reports["retrieval"](outputs["texts"], batch)}  # type: ignore[arg-type]
        if "query" not in batch:
            return {}
        query, documents = outputs["query"].detach(), outputs["documents"].detach()
        if "score" in batch:
            return {"cosine": self.reports["cosine"](F.cosine_similarity(query, documents[:, 0]), batch["score"])}
        return self.metrics_of_pairs(query, documents)

    def metrics_of_pairs(self, query: Tensor, documents: Tensor) -> Mapping[str, Total | SampleColumns]:
        """Returns the metrics of pairs without scores."""
        return {}

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Returns the `embedding` of each text, with `id` and `is_query` of `retrieval`; of pairs, both embeddings."""
        if "query" in batch:
            query, documents = self._embed(model, batch["query"], batch["documents"])
            documents = documents.view(len(query), -1, documents.shape[-1])
            found = {"anchor_embedding": query, "positive_embedding": documents[:, 0]}
            if "score" in batch:
                found["cosine"] = F.cosine_similarity(query, documents[:, 0])
            return found
        columns = {name: batch[name] for name in ("id", "is_query") if name in batch}
        return {**columns, "embedding": self._embed(model, batch["texts"])[0]}


class MultipleNegatives(_Embeddings):
    """InfoNCE: each anchor must identify its positive among all documents of the global batch, on all ranks.

    The documents are the positives and hard negatives of all rows. With `symmetric`, each positive must also identify
    its anchor among all anchors, and the loss is the mean of both directions. See van den Oord et al.,
    "Representation Learning with Contrastive Predictive Coding" (2018), and MultipleNegativesRankingLoss of
    sentence-transformers. A batch is that of `pairs` or `triplets`. Also reported: `accuracy`, the fraction of anchors
    whose positive is the most similar of their own documents, if there are hard negatives.

    `chunk` gives a global batch that is larger than the memory (cached gradients). `mask_duplicates` leaves out of the
    softmax documents that equal the positive or the anchor, and documents of other rows with the same anchor.
    """

    whole_batch = True

    def __init__(
        self,
        *,
        scale: Annotated[
            float | None,
            Field(gt=0, le=10_000, description="Factor of similarities; absent: 20 for cosine, 1 for dot."),
        ] = None,
        similarity: Annotated[Literal["cosine", "dot"], Field(description="Similarity of embeddings.")] = "cosine",
        symmetric: Annotated[bool, Field(description="Also let positives identify their anchors.")] = False,
        mask_duplicates: Annotated[bool, Field(description="Leave out false negatives: equal texts.")] = False,
        chunk: _Chunk = None,
        matryoshka_dims: _Dims = (),
        matryoshka_weights: _Weights = None,
    ) -> None:
        self.similarity = similarity
        super().__init__(chunk, matryoshka_dims, matryoshka_weights)
        self.scale = scale if scale is not None else {"cosine": 20.0, "dot": 1.0}[similarity]
        self._symmetric, self._mask = symmetric, mask_duplicates

    def sum_of_losses(self, query: Tensor, documents: Tensor, batch: Batch) -> Tensor:
        """Returns the summed cross-entropy of this rank's anchors, and of its positives. Collective."""
        if self.similarity == "cosine":
            query, documents = F.normalize(query, dim=-1), F.normalize(documents, dim=-1)
        everyones, begin = self._ranks.all_gather(documents)
        rows = torch.arange(begin, begin + len(query), device=query.device)
        similar = self.scale * query @ everyones.flatten(0, 1).T
        keys = self._ranks.all_gather(batch["keys"])[0] if self._mask else None
        if keys is not None:
            similar = similar.masked_fill(_false_negatives(batch["keys"], keys, rows), -torch.inf)
        loss = F.cross_entropy(similar, rows * everyones.shape[1], reduction="sum")
        if not self._symmetric:
            return loss
        anchors, _ = self._ranks.all_gather(query)
        back = self.scale * documents[:, 0] @ anchors.T
        if keys is not None:
            mine, all_keys = batch["keys"][:, None, :2], keys[None, :, :2]
            same = (mine == all_keys).any(-1) | (batch["keys"][:, None, 1] == keys[None, :, 0])
            back = back.masked_fill(same.scatter(1, rows[:, None], False), -torch.inf)
        return (loss + F.cross_entropy(back, rows, reduction="sum")) / 2

    def metrics_of_pairs(self, query: Tensor, documents: Tensor) -> Mapping[str, Total | SampleColumns]:
        """Returns the accuracy among the documents of each row."""
        if documents.shape[1] == 1:
            return {}
        if self.similarity == "cosine":
            query, documents = F.normalize(query, dim=-1), F.normalize(documents, dim=-1)
        best = (documents @ query.unsqueeze(-1)).squeeze(-1).argmax(1)
        return {"accuracy": Total((best == 0).sum(), len(best))}


def _false_negatives(mine: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Returns which documents are not negatives, [b, B (1 + K)]; `keys` has checksums of all texts, [B, 2 + K]."""
    documents = keys[None, :, 1:]
    false = (documents == mine[:, 1, None, None]) | (documents == mine[:, 0, None, None])
    false[:, :, 0] |= keys[None, :, 0] == mine[:, 0, None]
    false[torch.arange(len(mine), device=mine.device), rows, 0] = False  # the positive itself
    return false.flatten(1)


class CosineSimilarity(_Embeddings):
    """Mean squared error of the cosine of both texts and their score, as CosineSimilarityLoss of sentence-transformers.

    A batch is that of `pairs` with `score`. Also reported: `cosine/spearman` and `cosine/pearson`.
    """

    def __init__(
        self, *, chunk: _Chunk = None, matryoshka_dims: _Dims = (), matryoshka_weights: _Weights = None
    ) -> None:
        super().__init__(chunk, matryoshka_dims, matryoshka_weights)

    def check_pairs(self, data: Pairs) -> None:
        """Raises ValueError for pairs without scores, or with negatives."""
        if not data.has_scores:
            raise ValueError("cosine_similarity needs a score of each pair: set `score` of the data to its key")
        if data.negatives:
            raise ValueError("cosine_similarity takes pairs, and the data also has negatives: set negatives = []")

    def sum_of_losses(self, query: Tensor, documents: Tensor, batch: Batch) -> Tensor:
        """Returns the summed squared errors."""
        found: Tensor = (F.cosine_similarity(query, documents[:, 0]) - batch["score"]).square().sum()
        return found


class TripletMargin(_Embeddings):
    """Triplet loss: max(0, d(anchor, positive) - d(anchor, negative) + margin), a mean over the negatives of a row.

    As TripletLoss of sentence-transformers. A batch is that of `triplets`. Also reported: `accuracy`, the fraction of
    rows whose positive is closer than all negatives. Hermans et al., "In Defense of the Triplet Loss" (2017).
    """

    needs = "triplets"

    def __init__(
        self,
        *,
        margin: Annotated[float, Field(gt=0, le=1000, description="Margin, in the unit of the distance.")] = 5.0,
        distance: Annotated[
            Literal["euclidean", "cosine", "manhattan"], Field(description="Distance of embeddings.")
        ] = "euclidean",
        chunk: _Chunk = None,
        matryoshka_dims: _Dims = (),
        matryoshka_weights: _Weights = None,
    ) -> None:
        super().__init__(chunk, matryoshka_dims, matryoshka_weights)
        if distance == "cosine" and margin > 2:
            raise ValueError(f"margin = {margin:g}: a cosine distance is at most 2; set a margin such as 0.3")
        self._margin, self._distance = margin, distance

    def check_pairs(self, data: Pairs) -> None:
        """Raises ValueError for rows without a negative."""
        if not data.negatives:
            raise ValueError('triplet needs a negative of each row: set use = "triplets", or `negatives` of the data')

    def sum_of_losses(self, query: Tensor, documents: Tensor, batch: Batch) -> Tensor:
        """Returns the summed loss of rows."""
        distances = self._distances(query, documents)
        return torch.relu(distances[:, :1] - distances[:, 1:] + self._margin).mean(1).sum()

    def _distances(self, query: Tensor, documents: Tensor) -> Tensor:
        """Returns the distance of each document to its anchor, [B, 1 + K]."""
        if self._distance == "cosine":
            return 1 - F.cosine_similarity(query.unsqueeze(1), documents, dim=-1)
        order = 2 if self._distance == "euclidean" else 1
        found: Tensor = torch.linalg.vector_norm(query.unsqueeze(1) - documents, ord=order, dim=-1)
        return found

    def metrics_of_pairs(self, query: Tensor, documents: Tensor) -> Mapping[str, Total | SampleColumns]:
        """Returns the fraction of rows whose positive is closest."""
        distances = self._distances(query, documents)
        return {"accuracy": Total((distances[:, :1] < distances[:, 1:]).all(1).sum(), len(query))}


def _check_prompts(model: TextEncoder, data: Any) -> None:
    """Logs a warning if the folder of a saved encoder names prompts that the data does not use."""
    saved = model.saved.prompts if model.saved else {}
    for name in ("query", "document"):
        if saved.get(name) and saved[name] != data.prompts.get(name) and not isinstance(data, Texts):
            log.warning(
                "the model was saved with the %s prompt %r, but the data has %r: set %s_prompt",
                name,
                saved[name],
                data.prompts.get(name, ""),
                name,
            )
