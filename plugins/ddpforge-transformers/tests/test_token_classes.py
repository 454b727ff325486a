"""Token classification: batches and losses are those of transformers, entities are counted as seqeval does."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import byte_tokenizer
from hand_curves import check_curves
from transformers import AutoModelForTokenClassification

from ddpforge_transformers.models import token_classification
from ddpforge_transformers.token_classes import TaggedWords, TokenClassification

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
BERT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 400, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0},
}
NAMES = {"Ada": "B-PER", "Lovelace": "I-PER", "Paris": "B-LOC", "lives": "O", "in": "O", "today": "O"}
ROWS: list[dict[str, Any]] = [
    {"tokens": words, "tags": [NAMES[word] for word in words]}
    for number in range(24)
    for words in [["Ada", *(["Lovelace"] if number % 2 else []), "lives", "in", "Paris", *["today"] * (number % 4)]]
]
RECIPE = """
recipe = 2
name = "tiny"
[model]
use = "token_classification"
pretrained = "model"
classes = 5
[data.train]
use = "tagged_words"
path = "train.jsonl"
tokenizer = "tokenizer"
tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
[data.eval]
use = "tagged_words"
path = "train.jsonl"
tokenizer = "tokenizer"
tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
[data.sampler]
use = "sequential"
[task]
use = "token_classification"
[optimizer]
use = "sgd"
lr = 0.5
[train]
length = "6st"
global_batch = 4
{micro}
[checkpoint]
every = "3st"
[track]
every = "1st"
[strategy]
use = "{strategy}"
"""


def prepare(folder: Path) -> None:
    byte_tokenizer(folder / "tokenizer")
    torch.manual_seed(0)
    model: Any = token_classification(model_type="bert", options=BERT, classes=5)
    model.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def data(folder: Path, **options: Any) -> TaggedWords:
    given: dict[str, Any] = {"path": folder / "train.jsonl", "tokenizer": str(folder / "tokenizer"), "tags": TAGS}
    return TaggedWords(**given | options)


def test_the_first_token_of_each_word_has_its_tag(tmp_path: Path) -> None:
    prepare(tmp_path)
    mine = data(tmp_path)
    batch = mine.collate([mine[0], mine[1]])
    for row, sample in enumerate(ROWS[:2]):
        tags = [TAGS[label] for label in batch["labels"][row].tolist() if label != -100]
        assert tags == sample["tags"]
        first = mine.tokenizer([sample["tokens"]], is_split_into_words=True).word_ids(0).index(1)
        assert batch["labels"][row, first] == TAGS.index(sample["tags"][1])
    assert batch["attention_mask"].sum(1).tolist() == mine.lengths()[:2].tolist()
    cut = data(tmp_path, max_length=3).collate([mine[1]])
    assert cut["input_ids"].shape == (1, 3)
    assert cut["labels"][0, 0] == TAGS.index("B-PER")


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    prepare(tmp_path)
    model, mine = AutoModelForTokenClassification.from_pretrained(tmp_path / "model"), data(tmp_path)
    batch = mine.collate([mine[number] for number in range(8)])
    task: Any = TokenClassification()
    loss, logits = task.loss(model, batch)
    torch.testing.assert_close(loss / task.count(batch), model(**batch).loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(task.loss_from_outputs(logits, batch), loss)


def test_entities_are_counted_as_by_seqeval(tmp_path: Path) -> None:
    """500 random sentences with words of several tokens, padding, and tags in any order."""
    metrics = pytest.importorskip("seqeval.metrics", reason="seqeval is not installed")
    prepare(tmp_path)
    draw = random.Random(0)
    task = TokenClassification()
    task.check(token_classification(model_type="bert", options=BERT, classes=5), data(tmp_path))
    labels = torch.full((500, 12), -100)
    found = torch.randint(5, (500, 12), generator=torch.Generator().manual_seed(0))
    for row in range(500):
        for place in range(draw.randint(1, 12)):
            if draw.random() < 0.7 or not place:
                labels[row, place] = draw.choice([0, 0, 1, 2, 3, 4])
    found = torch.where(torch.rand(500, 12, generator=torch.Generator().manual_seed(1)) < 0.6, labels.clamp(0), found)
    totals = task.metrics(torch.nn.functional.one_hot(found, 5).float(), {"labels": labels})
    mine = task.finish({name: float(total.sum) / float(total.count) for name, total in totals.items()})
    true = [[TAGS[tag] for tag in row if tag != -100] for row in labels.tolist()]
    pairs = zip(found.tolist(), labels.tolist(), strict=True)
    predicted = [[TAGS[tag] for tag, label in zip(*pair, strict=True) if label != -100] for pair in pairs]
    for name, metric in (("precision", "precision_score"), ("recall", "recall_score"), ("f1", "f1_score")):
        assert mine[name] == pytest.approx(getattr(metrics, metric)(true, predicted), rel=1e-12), name
    assert mine["accuracy"] == pytest.approx(metrics.accuracy_score(true, predicted))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tokens": ["a"]}, "needs \"tags\", a list that is not empty: it has the keys 'tokens'"),
        ({"tokens": "a", "tags": [0]}, "needs \"tokens\", a list that is not empty: it is 'a'"),
        ({"tokens": ["a", "b"], "tags": [0]}, "has 2 words, but 1 tags"),
        ({"tokens": ["a"], "tags": ["B-ORG"]}, "has the tag 'B-ORG', which is not in `tags`: known are O, B-PER"),
        ({"tokens": ["a"], "tags": [5]}, "has the tag 5, which is not in `tags`: numbers are 0 to 4"),
        ({"tokens": ["a"], "tags": [True]}, "has the tag True, which is not in `tags`"),
        ({"tokens": [3], "tags": [0]}, '"tokens" holds 3, which is not a text'),
        ({"tokens": [0], "tags": [0]}, '"tokens" holds 0, which is not a text'),
        ({"tokens": [None], "tags": [0]}, '"tokens" holds None, which is not a text'),
        ({"tokens": ["a", " "], "tags": [0, 1]}, '"tokens" holds an empty word'),
    ],
)
def test_invalid_rows_are_refused_with_their_line(tmp_path: Path, row: Any, said: str) -> None:
    prepare(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="line 25") as error:
        data(tmp_path)
    assert said in str(error.value)
    assert len(data(tmp_path, on_invalid="drop")) == 24


def test_evaluation_data_with_another_order_of_tags_is_refused(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    """Checks it, because the numbers of tags would have another meaning."""
    prepare(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE.format(micro="", strategy="ddp"))
    order = '--set=data.eval.tags=["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]'
    said = ddpforge("check", "tiny.toml", "--build", order, code=2)
    assert "B-LOC" in said
    assert "data.eval" in said


def test_models_and_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    task = TokenClassification()
    with pytest.raises(ValueError, match=r"the data has 5 tags, but the model 3 classes; set model.classes = 5"):
        task.check(token_classification(model_type="bert", options=BERT, classes=3), data(tmp_path))
    with pytest.raises(ValueError, match=r"`.*model` has no files of a tokenizer"):
        data(tmp_path, tokenizer=str(tmp_path / "model"))
    with pytest.raises(ValueError, match="each tag may be there once"):
        data(tmp_path, tags=["O", "O"])
    with pytest.raises(ValueError, match="this task needs a model of transformers, not a Linear"):
        task.check(torch.nn.Linear(1, 1), data(tmp_path))


@pytest.mark.full
def test_each_step_is_that_of_a_loop_with_transformers(tmp_path: Path, ddpforge: Callable[..., str]) -> None:
    """Loss and gradient norm of six steps: 1 and 2 ranks, accumulation, fsdp, and a resume after three."""
    prepare(tmp_path)
    model, mine = AutoModelForTokenClassification.from_pretrained(tmp_path / "model"), data(tmp_path)
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(6):
        loss = model(**mine.collate([mine[number] for number in range(4 * step, 4 * step + 4)])).loss
        loss.backward()
        wanted.append((float(loss), float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))))
        optimizer.step()
        optimizer.zero_grad()
    rows = check_curves(ddpforge, tmp_path, RECIPE, wanted)
    assert {"eval/accuracy", "eval/f1", "eval/precision", "eval/recall"} <= rows[-1].keys()
