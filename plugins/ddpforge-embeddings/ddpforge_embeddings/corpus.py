"""The dataset `retrieval`: queries, a corpus and relevance judgements in the layout of BEIR."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from ddpforge.errors import UsageError, not_there
from ddpforge_transformers.data import TokenizerName
from pydantic import Field

from ddpforge_embeddings.data import _Encoded
from ddpforge_embeddings.text_rows import MaxLength, Prompt, checked_text, rows_of

__all__ = ["RetrievalData"]

ddpforge_plugin_api = 3


class _Sample(NamedTuple):
    name: str
    text: str
    is_query: bool
    number: int  # among queries, or among documents
    relevant: list[tuple[int, int]]  # (document, grade) of a query


class RetrievalData(_Encoded):
    """Dataset of queries, and of the documents to search, for evaluations: all tasks of this package report metrics.

    The folder `path` has the files of BEIR: `queries.jsonl` and `corpus.jsonl` with {_id, text} and perhaps title, and
    `qrels/SPLIT.tsv` with a header and the columns query-id, corpus-id, score. Only queries with a relevant document
    count. A document is its title and its text. A batch is {texts, is_query, number, relevant, id}.

    Raises ValueError for invalid rows and for judgements of unknown ids, with file and line.
    """

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="Folder with queries.jsonl, corpus.jsonl and qrels/.")],
        tokenizer: TokenizerName,
        split: Annotated[str, Field(min_length=1, description="Name of the file in qrels/, without .tsv.")] = "test",
        query_prompt: Prompt = "",
        document_prompt: Prompt = "",
        max_length: MaxLength = 256,
    ) -> None:
        super().__init__(tokenizer, max_length, {"query": query_prompt, "document": document_prompt})
        self._prompts = (document_prompt, query_prompt)
        if not path.is_dir():
            raise UsageError(f"path: there is no folder {path}", hints=not_there(path), key="path")
        documents, queries = _texts(path / "corpus.jsonl"), _texts(path / "queries.jsonl")
        numbers = {name: number for number, name in enumerate(documents)}
        relevant = _judgements(path / "qrels" / f"{split}.tsv", queries, numbers)
        judged = [name for name in queries if name in relevant]
        self._samples = [
            _Sample(name, queries[name], True, number, relevant[name]) for number, name in enumerate(judged)
        ]
        self.queries = len(judged)
        self._samples += [_Sample(name, text, False, numbers[name], []) for name, text in documents.items()]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> _Sample:
        return self._samples[index]

    def collate(self, samples: Sequence[_Sample]) -> dict[str, Any]:
        """Returns the batch: tokens, `is_query` and `number` [B], `relevant` (int64 [n, 2] for each), and ids."""
        prompts = [self._prompts[one.is_query] for one in samples]
        return {
            "texts": self.tokens([one.text for one in samples], prompts),
            "is_query": torch.tensor([one.is_query for one in samples]),
            "number": torch.tensor([one.number for one in samples]),
            "relevant": [torch.tensor(one.relevant, dtype=torch.int64).view(-1, 2) for one in samples],
            "id": [one.name for one in samples],
        }


def _texts(file: Path) -> dict[str, str]:
    """Returns the texts of a file by their ids, with titles before them."""
    found: dict[str, str] = {}
    for where, row in rows_of(file):
        if isinstance(row, ValueError):
            raise row
        name = row.get("_id")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ValueError(f'{where} needs "_id", a text; it has the keys {", ".join(map(repr, row))}')
        if str(name) in found:
            raise ValueError(f'{where}: the "_id" {name!r} is used twice')
        title, text = row.get("title") or "", row.get("text")
        if not isinstance(title, str) or (title.strip() and text == ""):
            text = None if not isinstance(title, str) else title
            found[str(name)] = checked_text({"title": text}, "title", where)
            continue
        text = checked_text(row, "text", where)
        found[str(name)] = f"{title} {text}" if title else text
    return found


def _judgements(file: Path, queries: dict[str, str], documents: dict[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Returns the documents of each query with a grade above 0.

    Raises ValueError for ids that are not in the files, for grades that are not whole numbers, and without a judgement.
    """
    if not file.is_file():
        others = sorted(one.stem for one in file.parent.glob("*.tsv"))
        hints = [f"there are the splits {', '.join(others)}"] if others else not_there(file)
        raise UsageError(f"split: there is no file {file}", hints=hints, key="split")
    found: dict[str, dict[int, int]] = {}
    for where, row in rows_of(file):
        if isinstance(row, ValueError):
            raise row
        names = list(row)
        if names != ["query-id", "corpus-id", "score"]:
            raise ValueError(
                f"{file}:1 has the columns {', '.join(map(repr, names))}; expected a header query-id, corpus-id, score,"
                " separated by tabs"
            )
        query, document, grade = (str(row[name]).strip() for name in names)
        for name, known, where_else in ((query, queries, "queries.jsonl"), (document, documents, "corpus.jsonl")):
            if name not in known:
                raise ValueError(f"{where}: the id {name!r} is not in {where_else}")
        if not grade.lstrip("-").isdecimal():
            raise ValueError(f"{where}: the score {grade!r} is not a whole number")
        if int(grade) > 0:
            found.setdefault(query, {})[documents[document]] = int(grade)
    if not found:
        raise ValueError(f"{file}: no query has a document with a score above 0")
    return {query: sorted(judged.items()) for query, judged in found.items()}
