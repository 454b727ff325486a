"""Whole runs: curves on any ranks, resumed runs, evaluation, predictions, exported folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BERT, rows_of, save_tokenizer, write_corpus, write_rows

MODEL = "{ " + ", ".join(f"{key} = {value}" for key, value in BERT.items()) + " }"
RECIPE = f"""
recipe = 2
name = "tiny"
[model]
use = "text_encoder"
model_type = "bert"
options = {MODEL}
pooling = "mean"
normalize = true
dense = {{ features = 16, activation = "tanh" }}
[data.train]
use = "pairs"
path = "rows.jsonl"
tokenizer = "words"
max_length = 32
negatives = ["negative_0", "negative_1"]
query_prompt = "query : "
[data.sampler]
use = "no_duplicates"
[data.eval.search]
use = "retrieval"
path = "search"
tokenizer = "words"
max_length = 32
query_prompt = "query : "
[data.eval.sts]
use = "pairs"
path = "rows.jsonl"
tokenizer = "words"
max_length = 32
score = "score"
[task]
use = "multiple_negatives"
symmetric = true
mask_duplicates = true
[optimizer]
use = "sgd"
lr = 0.02
[train]
length = "6st"
global_batch = 12
eval_every = "3st"
[checkpoint]
every = "3st"
[track]
every = "1st"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "words")
    rows = rows_of(48, 2)
    rows[5]["anchor"] = rows[2]["anchor"]  # a false negative in some steps
    write_rows(tmp_path / "rows.jsonl", rows)
    write_corpus(tmp_path / "search")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


def curve(folder: Path, name: str) -> dict[tuple[int, str], float]:
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    keys = ("train/loss", "train/grad_norm", "train/accuracy")
    return {
        (row["step"], key): value
        for row in rows
        for key, value in row.items()
        if key in keys or (key.startswith("eval/") and "time" not in key)
    }


def compare(folder: Path, name: str, wanted: dict[tuple[int, str], float]) -> None:
    """Compares all values; prints the largest relative difference of losses and norms, and the largest of metrics."""
    found = curve(folder, name)
    assert found.keys() == wanted.keys()
    trained = {key: abs(found[key] / value - 1) for key, value in wanted.items() if key[1].endswith(("loss", "norm"))}
    others = {key: abs(found[key] - value) for key, value in wanted.items() if key not in trained}
    print(name, *(f"{max(one.values()):.1e} at {max(one, key=lambda key: one[key])}" for one in (trained, others)))
    assert max(trained.values()) < 1e-5
    assert max(others.values()) < 1e-6


@pytest.fixture
def wanted(folder: Path, ddpforge: Callable[..., str]) -> dict[tuple[int, str], float]:
    """Returns the curve and the evaluations of a run on one rank."""
    said = ddpforge("run", "tiny.toml")
    assert "which no checkpoint holds" not in said
    found = curve(folder, "tiny")
    assert len(found) == 6 * 3 + 2 * (8 + 3)
    assert found[6, "eval/sts/loss"] != found[3, "eval/sts/loss"]
    assert (3, "eval/search/loss") not in found
    return found


def test_curves_and_evaluations_are_the_same_on_two_ranks_in_chunks(
    folder: Path, ddpforge: Callable[..., str], wanted: dict[tuple[int, str], float]
) -> None:
    ddpforge("run", "tiny.toml", "name=two", "task.chunk=5", ranks=2)
    compare(folder, "two", wanted)


@pytest.mark.full
def test_curves_and_evaluations_are_the_same_with_fsdp_and_resumed(
    folder: Path, ddpforge: Callable[..., str], wanted: dict[tuple[int, str], float]
) -> None:
    """Two ranks with FSDP in chunks; one rank until step 3, then two ranks."""
    ddpforge("run", "tiny.toml", "name=fsdp", "task.chunk=5", "strategy.use=fsdp", ranks=2)
    compare(folder, "fsdp", wanted)
    ddpforge("run", "tiny.toml", "name=resumed", "train.length=3st")
    ddpforge("run", "tiny.toml", "name=resumed", ranks=2)
    compare(folder, "resumed", wanted)


@pytest.mark.full
@pytest.mark.slow
def test_planned_memory_is_measured(folder: Path, ddpforge: Callable[..., str]) -> None:
    evaluated = ("--set=~data.eval", "--set=~train.eval_every")
    for name, chunk in (("whole", ()), ("chunked", ("--set=task.chunk=6",))):
        said = ddpforge("plan", "tiny.toml", *evaluated, *chunk, "--json")
        planned = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))[0]["peak"]
        ddpforge("run", "tiny.toml", f"--set=name={name}", "--set=track.memory_check=on", *evaluated, *chunk)
        measured = json.loads((folder / "runs" / name / "memory.json").read_text())["measured"]["peak"]
        assert planned == pytest.approx(measured, rel=0.1)  # texts of a step have other lengths


def test_ranks_with_different_numbers_of_chunks_evaluate_together(folder: Path, ddpforge: Callable[..., str]) -> None:
    """Of 25 texts, one rank has 13 in 13 chunks and the other 12: FSDP needs the same number of forward passes."""
    write_corpus(folder / "odd", documents=19)
    (folder / "tiny.toml").write_text(RECIPE.replace('path = "search"', 'path = "odd"'))
    ddpforge("run", "tiny.toml", "train.length=3st")
    ddpforge("run", "tiny.toml", "name=fsdp", "task.chunk=1", "train.length=3st", "strategy.use=fsdp", ranks=2)
    compare(folder, "fsdp", curve(folder, "tiny"))


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.full), True])
def test_predictions_and_an_exported_folder(lora: bool, folder: Path, ddpforge: Callable[..., str]) -> None:
    """Checks that the folder has the files of sentence-transformers, and is a model with the same embeddings."""
    from ddpforge_embeddings.data import Texts
    from ddpforge_embeddings.models import text_encoder

    adapters = ['model.lora={ targets = ["query", "value"], r = 4 }'] if lora else []
    ddpforge("run", "tiny.toml", "train.length=2st", *adapters)
    ddpforge("predict", "tiny", "--data", "eval.search", "-o", "found.jsonl")
    found = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [f"q{n}" for n in range(6)] + [f"d{n}" for n in range(20)]
    assert [len(row["embedding"]) for row in found] == [16] * 26
    ddpforge("export", "tiny", *(["--merge"] if lora else []), "-o", "st/")
    names = {path.relative_to(folder / "st").as_posix() for path in (folder / "st").rglob("*") if path.is_file()}
    assert names >= {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "model.safetensors"}
    about = json.loads((folder / "st" / "config_sentence_transformers.json").read_text())
    assert about["prompts"] == {"query": "query : "}
    assert json.loads((folder / "st" / "config.json").read_text())["architectures"] == ["BertModel"]
    from ddpforge.app.api import load

    trained: Any = load(folder / "runs" / "tiny").model()
    saved: Any = text_encoder(pretrained=str(folder / "st")).eval()
    assert (saved.pooling, saved.normalize, saved.dimension) == ("mean", True, 16)
    write_rows(folder / "texts.jsonl", [{"text": row["anchor"]} for row in rows_of(5)])
    data = Texts(path=folder / "texts.jsonl", tokenizer=str(folder / "st"), max_length=32)
    batch = data.collate([data[number] for number in range(5)])["texts"]
    with torch.no_grad():
        one, other = saved([batch])[0], trained([batch])[0]
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.full
def test_sentence_transformers_loads_an_exported_folder(folder: Path, ddpforge: Callable[..., str]) -> None:
    """Compares embeddings, also with the prompt, and the metrics of its evaluator."""
    st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    lines = (folder / "search" / "qrels" / "test.tsv").read_text().replace("\t2\n", "\t1\n")
    (folder / "search" / "qrels" / "test.tsv").write_text(lines)  # its gains are 1
    recipe = RECIPE.replace("[data.eval.sts]", "[data.eval.zzz]")
    for include in (True, False):
        (folder / "tiny.toml").write_text(
            recipe.replace("normalize = true", f"include_prompt = {str(include).lower()}")
        )
        name = f"run-{include}"
        ddpforge("run", "tiny.toml", f"name={name}", "train.length=3st")
        ddpforge("export", name, "-o", f"{name}/")
        model = st.SentenceTransformer(str(folder / name), device="cpu")
        queries, corpus = (
            {row["_id"]: row["text"] for row in map(json.loads, (folder / "search" / file).read_text().splitlines())}
            for file in ("queries.jsonl", "corpus.jsonl")
        )
        relevant: dict[str, set[str]] = {}
        for line in lines.splitlines()[1:]:
            query, document, grade = line.split("\t")
            if int(grade):
                relevant.setdefault(query, set()).add(document)
        asked = {key: queries[key] for key in relevant}
        found = InformationRetrievalEvaluator(
            asked, corpus, relevant, query_prompt_name="query", map_at_k=[100], show_progress_bar=False
        )(model)
        mine = curve(folder, name)
        for ours, theirs in (
            ("ndcg@10", "ndcg@10"),
            ("mrr@10", "mrr@10"),
            ("map@100", "map@100"),
            ("accuracy@1", "accuracy@1"),
            ("recall@5", "recall@5"),
            ("recall@10", "recall@10"),
        ):
            assert mine[3, f"eval/search/retrieval/{ours}"] == pytest.approx(found[f"cosine_{theirs}"], abs=1e-9), ours
        ddpforge("predict", name, "--data", "eval.search", "-o", f"{name}.jsonl")
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        ours = torch.tensor([row["embedding"] for row in rows])
        theirs = model.encode(list(asked.values()), prompt_name="query", convert_to_tensor=True)
        documents = model.encode(list(corpus.values()), convert_to_tensor=True)
        worst = float((ours - torch.cat([theirs, documents])).abs().max())
        print(f"include_prompt {include}: embeddings {worst:.1e}")
        assert worst < 1e-6
