"""Mistakes of users: each is refused before training, with its place."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ddpforge.cli import main
from small import rows_of, save_tokenizer, write_corpus, write_rows
from test_runs import RECIPE

TASK = 'use = "multiple_negatives"\nsymmetric = true\nmask_duplicates = true'
KEYS = 'negatives = ["negative_0", "negative_1"]'
TRAIN, SAMPLER = '[data.train]\nuse = "pairs"\npath = "rows.jsonl"', '[data.sampler]\nuse = "no_duplicates"'
MODEL = 'model_type = "bert"'


def row(**changed: Any) -> dict[str, Any]:
    return rows_of(1, 2)[0] | changed


# name: (replacements in the recipe, changed files, words of the message)
CASES: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "no file": ({'"rows.jsonl"': '"row.jsonl"'}, {}, "there is no file row.jsonl"),
    "folder": ({'"rows.jsonl"': '"search"'}, {}, "search is a folder"),
    "empty file": ({}, {"rows.jsonl": ""}, "is empty"),
    "no JSON": ({}, {"rows.jsonl": "anchor\tpositive\n"}, "line 1 is not JSON"),
    "no anchor": ({}, {"rows.jsonl": json.dumps({"query": "a", "positive": "b"})}, 'lacks "anchor"; it has the keys'),
    "list of a .csv": (
        {'"rows.jsonl"\ntokenizer = "words"\nmax_length = 32\nneg': '"rows.csv"\ntokenizer = "words"\nneg'},
        {"rows.csv": "anchor,positive,negative_0\na,b,c\n"},
        'lacks "negative_1"',
    ),
    "number": ({}, {"rows.jsonl": json.dumps(row(anchor=3))}, '"anchor" is 3, not a text'),
    "blank": ({}, {"rows.jsonl": json.dumps(row(positive=" "))}, '"positive" is empty'),
    "no negative": ({KEYS: 'negatives = ["hard"]'}, {}, 'lacks "hard"'),
    "negatives differ": (
        {KEYS: 'negatives = ["hard"]'},
        {"rows.jsonl": "\n".join(json.dumps(row(hard=hard)) for hard in (["a"], ["b", "c"]))},
        "line 2 has 2 negatives, but rows.jsonl, line 1 has 1",
    ),
    "few negatives": ({KEYS: KEYS + "\nmax_negatives = 3"}, {}, "has 2 negatives, fewer than max_negatives = 3"),
    "positive is negative": ({}, {"rows.jsonl": json.dumps(row(negative_1=row()["positive"]))}, "is also a negative"),
    "key twice": ({KEYS: 'negatives = ["anchor"]'}, {}, "'anchor' is named twice"),
    "score text": ({KEYS: 'score = "anchor"'}, {}, "expected a number"),
    "score large": ({}, {"rows.jsonl": json.dumps(row(score=4))}, "set max_score to the largest score"),
    "long prompt": ({'"query : "': f'"{"query " * 40}"'}, {}, "leaves no place for a text in max_length = 32"),
    "max_length": ({"max_length = 32": "max_length = 128"}, {}, "the data has 128 tokens per sample"),
    "vocabulary": ({"vocab_size = 64": "vocab_size = 16"}, {}, "the model takes 16"),
    "tokenizer": ({'"words"': '"word"'}, {}, "there is no folder word"),
    "few rows": ({"global_batch = 12": "global_batch = 64"}, {}, "fewer than train.global_batch = 64"),
    "few texts": (
        {},
        {"rows.jsonl": "\n".join(json.dumps(row(positive=f"one {one}", score=0)) for one in ["two", "ten"] * 9)},
        "that share no text",
    ),
    "sampler": (
        {'use = "pairs"\npath = "rows.jsonl"\ntokenizer = "words"\nmax_length = 32\nneg': 'use = "digits"\nneg'},
        {},
        "negatives",
    ),
    "micro_batch": ({"global_batch = 12": "global_batch = 12\nmicro_batch = 4"}, {}, "would cut it into"),
    "eval_batch": ({"global_batch = 12": "global_batch = 12\neval_batch = 4"}, {}, "`train.eval_batch`"),
    "cosine without score": ({TASK: 'use = "cosine_similarity"'}, {}, "needs a score of each pair"),
    "triplet without negative": ({TASK: 'use = "triplet"', KEYS: ""}, {}, "triplet needs a negative of each row"),
    "cosine margin": ({TASK: 'use = "triplet"\ndistance = "cosine"'}, {}, "a cosine distance is at most 2"),
    "matryoshka large": ({TASK: f"{TASK}\nmatryoshka_dims = [64]"}, {}, "embeddings have 16 numbers"),
    "matryoshka weights": ({TASK: f"{TASK}\nmatryoshka_weights = [1]"}, {}, "matryoshka_weights has 1 numbers"),
    "scale": ({TASK: f"{TASK}\nscale = 0"}, {}, "scale"),
    "pooling": ({'pooling = "mean"': 'pooling = "average"'}, {}, "pooling"),
    "encoder-decoder": ({MODEL: 'model_type = "t5"', "options = {": "attention = 'eager' #"}, {}, "and a decoder"),
    "other model": (
        {'use = "text_encoder"': 'use = "masked_lm"', "pooling": "#", "normalize": "#", "dense": "#"},
        {},
        'set model.use = "text_encoder"',
    ),
    "dense": ({"features = 16": "size = 16"}, {}, "size"),
    "no queries": ({'path = "search"': 'path = "nothing"'}, {}, "there is no folder nothing"),
    "split": ({'path = "search"': 'path = "search"\nsplit = "dev"'}, {}, "there are the splits test"),
    "header": ({}, {"search/qrels/test.tsv": "q0\td0\t1\nq1\td1\t1\n"}, "expected a header query-id, corpus-id, score"),
    "unknown id": (
        {},
        {"search/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq0\tx\t1\n"},
        "the id 'x' is not in corpus.jsonl",
    ),
    "grades": ({}, {"search/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq0\td0\t0.5\n"}, "is not a whole number"),
    "nothing relevant": ({}, {"search/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq0\td0\t0\n"}, "score above 0"),
    "id twice": ({}, {"search/queries.jsonl": '{"_id": "q0", "text": "a"}\n' * 2}, "is used twice"),
    "train on retrieval": (
        {TRAIN: '[data.train]\nuse = "retrieval"\npath = "search"', KEYS: "", SAMPLER: ""},
        {},
        "is for evaluations and predictions",
    ),
    "module": (
        {MODEL: 'pretrained = "saved"', "options = {": "weights = false #"},
        {"saved/modules.json": '[{"type": "x.StaticEmbedding", "path": ""}]'},
        "has a module 'StaticEmbedding'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "words")
    write_rows(tmp_path / "rows.jsonl", rows_of(48, 2))
    write_corpus(tmp_path / "search")
    replaced, files, words = CASES[case]
    recipe = RECIPE
    for old, new in replaced.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (tmp_path / "tiny.toml").write_text(recipe)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(main, ["check", "tiny.toml", "--build"])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert "Traceback" not in result.output
