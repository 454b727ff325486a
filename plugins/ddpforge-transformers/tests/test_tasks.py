"""Losses of the tasks equal those of transformers, summed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddpforge.app.generation import Sampling, generate
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.sequence_classification import SequenceClassification
from ddpforge.errors import UsageError
from tiny import TINY

from ddpforge_transformers.data import TokenizedJSONL
from ddpforge_transformers.models import causal_lm, masked_lm, sequence_classification
from ddpforge_transformers.tasks import CausalLM


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_causal_lm_loss_equals_that_of_transformers(model_type: str, samples: Path, tokenizer: Path) -> None:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), prompt="ask")
    batch = data.collate([data[number] for number in range(7)])
    model, task = causal_lm(model_type=model_type, options=TINY[model_type]).eval(), CausalLM()
    task.check(model, data)
    loss, logits = task.loss(model, batch)
    theirs = model(**batch)
    count = task.count(batch)
    assert count == (batch["labels"][:, 1:] != -100).sum() < batch["attention_mask"].sum()
    torch.testing.assert_close(loss, theirs.loss * count)
    torch.testing.assert_close(logits, theirs.logits[:, :-1])


def test_causal_lm_predicts_losses_and_generates_text(samples: Path, tokenizer: Path) -> None:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), prompt="ask")
    batch = data.collate([data[number] for number in range(7)])
    model, task = causal_lm(model_type="llama", options=TINY["llama"]).eval(), CausalLM()
    found = task.predict(model, batch)
    assert found["tokens"].tolist() == (batch["labels"][:, 1:] != -100).sum(1).tolist()
    torch.testing.assert_close((found["loss"] * found["tokens"]).sum(), task.loss(model, batch)[0])

    text = data._rows[0]["text"]
    (written,) = generate(model, data, [text], Sampling(tokens=5, greedy=True))
    ids = torch.tensor([data.encode(text)])
    assert ids[0, -1] != data.tokenizer.eos_token_id
    theirs = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert written == data.decode(theirs[0, ids.shape[1] :].tolist())
    drawn = [list(generate(model, data, [text], Sampling(tokens=20, seed=seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sequence_classification_loss_equals_that_of_transformers(samples: Path, tokenizer: Path) -> None:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), classes=2)
    batch = data.collate([data[number] for number in range(7)])
    for model_type in ("bert", "llama"):
        model = sequence_classification(classes=2, model_type=model_type, options=TINY[model_type]).eval()
        task = SequenceClassification()
        task.check(model, data)
        loss, logits = task.loss(model, batch)
        theirs = model(**batch)
        torch.testing.assert_close(loss, theirs.loss * 7)
        torch.testing.assert_close(logits, theirs.logits)


def test_masked_lm_loss_equals_that_of_transformers(samples: Path, tokenizer: Path) -> None:
    """Padding is neither masked nor attended to; transformers computes the same loss for the same masked tokens."""
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer))
    batch = data.collate([data[number] for number in range(7)])
    model, task = (
        masked_lm(model_type="bert", options=TINY["bert"]).eval(),
        MaskedLM(mask_token=31, mlm_probability=0.4, keep=0),
    )
    task.check(model, data)
    loss, (logits, targets) = task.loss(model, batch)
    count = task.count(batch)
    assert count == (targets != -100).sum() > 7
    assert not ((targets != -100) & (batch["attention_mask"] == 0)).any()
    gaps = batch["input_ids"].masked_fill(targets != -100, 31)
    theirs = model(input_ids=gaps, attention_mask=batch["attention_mask"], labels=targets)
    torch.testing.assert_close(loss, theirs.loss * count)
    torch.testing.assert_close(logits, theirs.logits)


def test_data_and_model_that_do_not_fit_are_refused(samples: Path, tokenizer: Path) -> None:
    texts = TokenizedJSONL(path=samples, tokenizer=str(tokenizer))
    classes = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), classes=3)
    small = causal_lm(model_type="gpt2", options=TINY["gpt2"] | {"vocab_size": 8})
    for task, model, data, message in (
        (CausalLM(), small, texts, r"set model.options.vocab_size = 18"),
        (CausalLM(), torch.nn.Linear(1, 1), texts, "needs a model of transformers"),
        (CausalLM(), small, classes, "has classes"),
        (SequenceClassification(), small, texts, "no classes|vocab_size"),
        (
            SequenceClassification(),
            sequence_classification(classes=2, model_type="bert", options=TINY["bert"]),
            classes,
            "the data has 3 classes and the model 2 outputs",
        ),
        (
            SequenceClassification(),
            sequence_classification(classes=3, model_type="gpt2", options=TINY["gpt2"]),
            classes,
            "has no pad_token_id.*set model.options.pad_token_id = 0",
        ),
        (
            SequenceClassification(),
            sequence_classification(classes=3, model_type="gpt2", options=TINY["gpt2"] | {"pad_token_id": 5}),
            classes,
            "has pad_token_id = 5, other than the data.*set model.options.pad_token_id = 0",
        ),
    ):
        with pytest.raises((UsageError, ValueError), match=message):
            task.check(model, data)


@pytest.mark.parametrize("call", ["loss", "count", "predict"])
def test_a_batch_without_labels_by_name_is_refused_with_its_form(call: str) -> None:
    model, pair = causal_lm(model_type="llama", options=TINY["llama"]), [torch.zeros(2, 8).long()] * 2
    given = (pair,) if call == "count" else (model, pair)
    with pytest.raises(
        UsageError, match=r"takes a batch \{input_ids, labels\}; the data gives a list \(int64 \[2, 8\]"
    ):
        getattr(CausalLM(), call)(*given)


def test_flex_attention_is_refused_on_a_cpu() -> None:
    model = causal_lm(model_type="llama", options=TINY["llama"], attention="flex_attention")
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(UsageError, match="has no backward pass on a CPU"):
        CausalLM().start(model, world)
    world.device = torch.device("cuda")
    CausalLM().start(model, world)
