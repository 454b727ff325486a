"""Encoder-decoder models: losses, steps and batches are those of transformers' Seq2SeqTrainer."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chats import byte_tokenizer
from hand_curves import check_curves
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from ddpforge_transformers.encoder_decoder import Seq2SeqLM, SourceTarget
from ddpforge_transformers.models import causal_lm, seq2seq_lm
from ddpforge_transformers.tasks import CausalLM

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 400, "dropout_rate": 0.0}
BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 400, "dropout": 0.0},
    **{"max_position_embeddings": 64, "decoder_start_token_id": 2},
}
OPTIONS = {"t5": T5, "bart": BART}
ROWS = [{"source": f"add {n % 5} and {n % 3}", "target": "the sum is " + "one " * (n % 5 + n % 3)} for n in range(24)]
RECIPE = """
recipe = 2
name = "tiny"
[model]
use = "seq2seq_lm"
pretrained = "model"
[data.train]
use = "source_target"
path = "train.jsonl"
tokenizer = "tokenizer"
prefix = "calculate: "
max_length = 64
max_target_length = 64
[data.sampler]
use = "sequential"
[task]
use = "seq2seq_lm"
metrics = ["accuracy"]
[optimizer]
use = "sgd"
lr = 0.1
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


def prepare(folder: Path, kind: str) -> Any:
    """Writes a model, a tokenizer and the samples; returns the tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(byte_tokenizer(folder / "tokenizer", ends=True))
    torch.manual_seed(0)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    seq2seq_lm(model_type=kind, options=OPTIONS[kind] | special).save_pretrained(folder / "model")  # type: ignore[operator]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tokenizer


def data(folder: Path, **options: Any) -> SourceTarget:
    return SourceTarget(path=folder / "train.jsonl", tokenizer=str(folder / "tokenizer"), **options)


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_batches_and_the_loss_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Compares with the collator of transformers, which makes the inputs of the decoder; here the task does."""
    tokenizer = prepare(tmp_path, kind)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    mine = data(tmp_path, max_length=20, max_target_length=12)
    samples = [
        {
            "input_ids": tokenizer(row["source"], truncation=True, max_length=20)["input_ids"],
            "attention_mask": [1] * len(tokenizer(row["source"], truncation=True, max_length=20)["input_ids"]),
            "labels": tokenizer(text_target=row["target"], truncation=True, max_length=12)["input_ids"],
        }
        for row in ROWS
    ]
    batch = mine.collate([mine[number] for number in range(len(mine))])
    wanted = DataCollatorForSeq2Seq(tokenizer, model=model)(samples)
    for name, tensor in batch.items():
        assert torch.equal(tensor, wanted[name]), name
    task: Any = Seq2SeqLM()
    task.check(model, mine)
    task.start(model, SimpleNamespace(device=torch.device("cpu")))
    loss, logits = task.loss(model, batch)
    outputs = model(**wanted)
    torch.testing.assert_close(loss / task.count(batch), outputs.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, outputs.logits)
    torch.testing.assert_close(task.loss_from_outputs(logits, batch), loss)
    losses = task.predict(model, batch)
    torch.testing.assert_close(losses["losses"].sum(), loss)
    assert losses["tokens"].sum() == task.count(batch)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"source": "a"}, "needs \"target\", a text that is not empty: it has the keys 'source'"),
        ({"source": "a", "target": ""}, "needs \"target\", a text that is not empty: it is ''"),
        ({"source": 3, "target": "a"}, 'needs "source", a text that is not empty: it is 3'),
        (["source"], "is a list: expected one JSON object per line"),
    ],
)
def test_invalid_rows_are_refused_with_their_line(tmp_path: Path, row: Any, said: str) -> None:
    prepare(tmp_path, "t5")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="line 25") as error:
        data(tmp_path)
    assert said in str(error.value)
    assert len(data(tmp_path, on_invalid="drop")) == 24


def test_models_and_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    prepare(tmp_path, "bart")
    task, mine = Seq2SeqLM(), data(tmp_path)
    with pytest.raises(ValueError, match=r"is not an encoder-decoder model: set model.use = \"seq2seq_lm\""):
        task.check(causal_lm(model_type="gpt2", options={"n_layer": 1, "n_embd": 8, "n_head": 1}), mine)
    with pytest.raises(ValueError, match=r"has an encoder and a decoder: set task.use = \"seq2seq_lm\""):
        CausalLM().check(seq2seq_lm(model_type="t5", options=T5), data(tmp_path))
    with pytest.raises(ValueError, match=r'a gpt2 model has no encoder and decoder: set model.use = "causal_lm"'):
        seq2seq_lm(model_type="gpt2")
    model = seq2seq_lm(pretrained=str(tmp_path / "model"))
    with pytest.raises(ValueError, match="the data has max_length = 512, but the model takes 64 tokens"):
        task.check(model, mine)
    model.config.pad_token_id = 9
    with pytest.raises(ValueError, match=r"but the model with 9; set model.options.pad_token_id"):
        task.check(model, data(tmp_path, max_length=64, max_target_length=64))
    small = seq2seq_lm(model_type="t5", options=T5 | {"vocab_size": 9})
    with pytest.raises(ValueError, match=r"different tokens, but the model takes 9; set model.options.vocab_size"):
        task.check(small, mine)


@pytest.mark.full
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_each_step_is_that_of_a_loop_with_transformers(tmp_path: Path, kind: str, ddpforge: Callable[..., str]) -> None:
    """Loss and gradient norm of six steps: 1 and 2 ranks, accumulation, fsdp, and a resume after three."""
    prepare(tmp_path, kind)
    check_curves(ddpforge, tmp_path, RECIPE, reference(tmp_path))
    answer = ddpforge("generate", "one", "--prompt", "calculate", "--greedy", "--tokens", "4")
    assert answer.strip()


def reference(folder: Path) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of a loop by hand with the collator and the loss of transformers."""
    tokenizer: Any = data(folder).tokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model", dtype=torch.float32)
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(6):
        rows = ROWS[4 * step : 4 * step + 4]
        samples = [
            {
                **tokenizer("calculate: " + row["source"]),
                "labels": tokenizer(text_target=row["target"])["input_ids"],
            }
            for row in rows
        ]
        loss = model(**collate([{k: v for k, v in one.items() if k != "token_type_ids"} for one in samples])).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    return found
