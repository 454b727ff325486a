"""Packed samples: plans, blocks, and models whose outputs are those of each sample alone."""

import json
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chats import CHAT, byte_tokenizer, damaged
from ddpforge.builtin.tasks.forms import cross_entropy
from tiny import TINY
from torch import Tensor

from ddpforge_transformers.chat import ChatData
from ddpforge_transformers.data import TokenizedJSONL, TokenizedText, positions_of
from ddpforge_transformers.models import causal_lm
from ddpforge_transformers.packing import PackedData, check_document_mask, pack
from ddpforge_transformers.probe import check_causal
from ddpforge_transformers.tasks import CausalLM

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BARE = {key: value for key, value in SMALL.items() if key != "pad_token_id"}  # transformers 5.0 lacks this key there
HEADS = {"head_dim": 8}
SLIDES = {"sliding_window": 6}  # shorter than most samples
LATER = SLIDES | {"use_sliding_window": True, "max_window_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "cohere2": SMALL | SLIDES,
    "gemma": SMALL | HEADS,
    "gemma2": SMALL | HEADS | SLIDES,
    "gemma3_text": SMALL | HEADS | SLIDES,
    "glm4": SMALL | HEADS,
    "gpt2": TINY["gpt2"] | {"vocab_size": 400, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {key: value for key, value in BARE.items() if key != "num_key_value_heads"},
    "granite": SMALL,
    "llama": SMALL,
    "mistral": SMALL | SLIDES,
    "mixtral": SMALL | SLIDES | {"num_local_experts": 4},
    "olmo2": SMALL,
    "olmo3": SMALL | SLIDES,
    "phi": BARE,
    "phi3": SMALL | SLIDES,
    "qwen2": SMALL | LATER,
    "qwen3": SMALL | HEADS | LATER,
    "smollm3": SMALL | SLIDES | {"use_sliding_window": True},
    "stablelm": BARE,
    "starcoder2": SMALL | SLIDES,
}
PROVEN = ("llama", "qwen3", "gemma2", "mistral", "gpt2")  # also the gradients
SLOW = pytest.mark.slow  # models whose attention and masks are those of one in PROVEN, or that take seconds to import


def kinds(models: Iterable[str], now: Collection[str]) -> list[Any]:
    """Returns parameters of tests: models in `now`, and others that are `slow`."""
    return [pytest.param(kind, marks=() if kind in now else SLOW) for kind in models]


WORDS = ["the", "old", "cat", "sees", "a", "dog", "and", "What", "does", "be", "kind"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ChatData:
    """Builds 23 chats of 15 to 40 tokens."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [
        [CHAT[1], {"role": "assistant", "content": " ".join(WORDS[: number % 7 + 1])}, *CHAT[3 : 3 + 2 * (number % 2)]]
        for number in range(23)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return ChatData(path=folder / "chats.jsonl", tokenizer=str(byte_tokenizer(folder / "tokenizer")))


# ---------------------------------------------------------------------------------------------- plans
def test_a_plan_has_every_sample_once_and_few_blocks() -> None:
    lengths = np.random.default_rng(0).integers(1, 256, 2000)
    blocks = pack(lengths, 512)
    assert sorted(sample for block in blocks for sample in block) == list(range(2000))
    filled = [int(lengths[block].sum()) for block in blocks]
    assert max(filled) <= 512
    assert len(blocks) <= lengths.sum() / 512 * 1.01 + 1
    assert pack(lengths, 512) == blocks


def test_the_longest_sample_goes_first_into_the_fullest_block_with_room() -> None:
    assert pack(np.array([2, 6, 3, 5, 4, 10]), 10) == [[0, 2, 3], [1, 4], [5]]
    assert pack(np.array([10, 10]), 10) == [[0], [1]]


def test_a_cached_plan_is_used_until_lengths_or_block_size_change(chats: ChatData, tmp_path: Path) -> None:
    plain = PackedData(of=chats, block_size=64)
    for block_size, files in ((64, 1), (64, 1), (80, 2)):
        data = PackedData(of=chats, block_size=block_size, index=str(tmp_path / "plans"))
        assert len(list((tmp_path / "plans").iterdir())) == files
        assert (len(data) == len(plain)) == (block_size == 64)
    (again,) = (PackedData(of=chats, block_size=64, index=str(tmp_path / "plans")),)
    assert all(torch.equal(again[n]["input_ids"], plain[n]["input_ids"]) for n in range(len(plain)))


def test_a_damaged_or_foreign_plan_is_made_again(chats: ChatData, tmp_path: Path) -> None:
    index = tmp_path / "plans"
    PackedData(of=chats, block_size=80, index=str(index))
    (other,) = index.iterdir()
    foreign = other.read_bytes()
    other.unlink()
    PackedData(of=chats, block_size=64, index=str(index))
    plain = PackedData(of=chats, block_size=64)
    (kept,) = index.iterdir()
    for _ in damaged(kept, foreign):
        again = PackedData(of=chats, block_size=64, index=str(index))
        assert len(again) == len(plain)
        assert all(torch.equal(again[n]["input_ids"], plain[n]["input_ids"]) for n in range(len(plain)))


# ---------------------------------------------------------------------------------------------- blocks
def test_positions_start_at_0_in_each_document() -> None:
    starts = torch.tensor([[False, False, True, False, True, True]])
    assert positions_of(starts).tolist() == [[0, 1, 0, 1, 0, 0]]


def documents(block: dict[str, Tensor]) -> list[slice]:
    """Returns the places of the documents of a block, and of its padding."""
    begins = [*(block["position_ids"] == 0).nonzero().flatten().tolist(), len(block["input_ids"])]
    return [slice(*pair) for pair in pairwise(begins)]


def test_blocks_have_whole_samples_whose_first_token_is_not_a_target(chats: ChatData) -> None:
    data = PackedData(of=chats, block_size=64)
    alone = sorted(tuple(chats[number]["input_ids"].tolist()) for number in range(len(chats)))
    found, counted = [], 0
    for number in range(len(data)):
        block = data[number]
        counted += int((block["labels"][1:] != -100).sum())
        for place in documents(block):
            tokens = block["input_ids"][place].tolist()
            assert block["labels"][place][0] == -100
            assert block["position_ids"][place].tolist() == list(range(len(tokens)))
            if tokens[0] == 0:  # padding
                assert (block["labels"][place] == -100).all()
                assert set(tokens) == {0}
            else:
                found.append(tuple(tokens))
    assert sorted(found) == alone
    assert counted == sum(int((chats[number]["labels"][1:] != -100).sum()) for number in range(len(chats)))
    assert len(data) == 12 < len(chats)
    assert data.lengths().tolist() == [64] * 12


def test_samples_longer_than_a_block_are_refused_or_cut(chats: ChatData) -> None:
    most = int(chats.lengths().max())
    with pytest.raises(
        ValueError, match="sample 1 has 39 tokens, more than block_size = 24; samples that are too long: 16 of 23"
    ):
        PackedData(of=chats, block_size=24)
    data = PackedData(of=chats, block_size=24, long_samples="cut")
    assert all(data[number]["input_ids"].shape == (24,) for number in range(len(data)))
    assert PackedData(of=chats, block_size=most).lengths()[0] == most


def test_samples_that_are_tokenized_in_batches_can_be_packed(samples: Path, tokenizer: Path) -> None:
    of = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), prompt="ask")
    data = PackedData(of=of, block_size=32)
    block = data[0]
    place = documents(block)[0]
    batch = of.collate([of[int(data._samples[0])]])
    assert torch.equal(block["input_ids"][place], batch["input_ids"][0])
    assert torch.equal(block["labels"][place], batch["labels"][0])
    assert 2 * len(data) < len(of)


def test_other_datasets_are_refused(samples: Path, tokenizer: Path, texts: Path, chats: ChatData) -> None:
    classes = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), classes=2)
    blocks = TokenizedText(path=texts, tokenizer=str(tokenizer), block_size=16)
    for of, message in (
        (classes, "TokenizedJSONL has no samples {input_ids, labels} for language models"),
        (blocks, "samples of TokenizedText are blocks of documents already"),
        (PackedData(of=chats, block_size=64), "samples of PackedData are blocks of documents already"),
        ([1, 2], "list cannot be packed: expected a dataset with a `tokenizer`"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedData(of=of, block_size=64)


def test_documents_of_texts_do_not_see_each_other(texts: Path, tokenizer: Path) -> None:
    data = TokenizedText(path=texts, tokenizer=str(tokenizer), block_size=16)
    batch = data.__getitems__(list(range(len(data))))
    ends = batch["input_ids"].flatten() == data.tokenizer.eos_token_id
    starts = torch.cat([torch.ones(1, dtype=torch.bool), ends[:-1]]).view(-1, 16)
    starts[:, 0] = True
    assert torch.equal(batch["position_ids"] == 0, starts)
    assert torch.equal(batch["labels"] == -100, starts)
    assert starts.sum() > len(data) + 50
    plain = TokenizedText(path=texts, tokenizer=str(tokenizer), block_size=16, document_mask=False)
    assert plain[0].keys() == {"input_ids", "labels"}
    assert torch.equal(plain.__getitems__([0, 3])["labels"], batch["input_ids"][[0, 3]])


# ---------------------------------------------------------------------------------------------- models
def per_token(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of each next token, 0 for ignored ones, [B, T - 1]."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits, targets = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=SLOW), "sdpa"])
@pytest.mark.parametrize("kind", kinds(MODELS, ("llama", "qwen3", "gemma3_text", "mistral", "gpt2", "cohere2")))
def test_logits_of_packed_samples_are_those_of_each_sample_alone(kind: str, attention: Any, chats: ChatData) -> None:
    if kind == "gemma2" and attention == "sdpa":
        pytest.skip("Gemma 2 has only eager and flex attention")
    if kind in ("phi", "stablelm") and transformers.__version__.startswith("5.0."):
        pytest.skip("transformers 5.0 cannot build it: its config lacks pad_token_id")
    torch.manual_seed(0)
    model: Any = causal_lm(model_type=kind, options=MODELS[kind], attention=attention).eval()
    data = PackedData(of=chats, block_size=80)
    CausalLM().check(model, data)
    batch = data.collate([data[number] for number in range(3)])
    with torch.no_grad():
        packed = model(**{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits
        mixed = model(input_ids=batch["input_ids"], use_cache=False).logits
        leaks = []
        for row in range(3):
            assert len(documents(data[row])) > 2
            for place in documents(data[row]):
                alone = model(input_ids=batch["input_ids"][row : row + 1, place], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, place], alone, rtol=0, atol=1e-5)
                leaks.append((mixed[row, place] - alone).abs().max().item())
    assert max(leaks) > 1e-3  # without positions, the test would see other samples


@pytest.mark.parametrize("kind", kinds(PROVEN, ("llama", "gemma2", "gpt2")))
def test_packed_losses_and_gradients_are_those_of_padded_samples(kind: str, chats: ChatData) -> None:
    torch.manual_seed(0)
    model: Any = causal_lm(model_type=kind, options=MODELS[kind]).train()
    data = PackedData(of=chats, block_size=80)
    found = []
    for source in (data, chats):
        model.zero_grad()
        losses = []
        for start in range(0, len(source), 4):
            batch = source.collate([source[n] for n in range(start, min(start + 4, len(source)))])
            each = per_token(model, batch)
            each.sum().backward()
            losses += each[batch["labels"][:, 1:] != -100].tolist()
        found.append((sorted(losses), {name: one.grad.clone() for name, one in model.named_parameters()}))
    (packed, grads), (padded, wanted) = found
    assert len(packed) == len(padded) > 100
    assert packed == pytest.approx(padded, abs=1e-5)
    counted = len(packed)  # the step's gradient is a mean over tokens
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient / counted, wanted[name] / counted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", kinds(PROVEN, ("qwen3", "gemma2", "gpt2")))
def test_padded_losses_are_those_of_each_sample_alone(kind: str, chats: ChatData) -> None:
    torch.manual_seed(0)
    model: Any = causal_lm(model_type=kind, options=MODELS[kind]).eval()
    batch = chats.collate([chats[number] for number in range(6)])
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel()
    with torch.no_grad():
        padded = per_token(model, batch)
        for number in range(6):
            alone = per_token(model, chats.collate([chats[number]]))[0]
            torch.testing.assert_close(padded[number, : len(alone)], alone, rtol=0, atol=1e-5)
            assert not padded[number, len(alone) :].any()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "rwkv",
            {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 400, "context_length": 2048},
            r"in this model \(rwkv\) they do: ",
        ),
        (
            "opt",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 400},
            r"\(opt\) they do: ",
        ),
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 400}, r"\(bloom\) they do: "),
        (
            "llama",
            SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_models_that_may_mix_documents_are_refused_by_name(
    kind: str, options: dict[str, Any], message: str, chats: ChatData
) -> None:
    model = causal_lm(model_type=kind, options=options)
    CausalLM().check(model, chats)
    with pytest.raises(ValueError, match=message):
        CausalLM().check(model, PackedData(of=chats, block_size=64))


WITHOUT = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FLAT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 400}
MIXES = {key: SMALL[key] for key in ("hidden_size", "vocab_size")}
SEPARATE: dict[str, dict[str, Any]] = {
    "apertus": SMALL,
    "arcee": SMALL,
    "codegen": FLAT | {"rotary_dim": 4},
    "cohere": SMALL,
    "ernie4_5": SMALL | HEADS,
    "glm": SMALL | HEADS,
    "gptj": FLAT | {"rotary_dim": 4},
    "granitemoe": SMALL,
    "helium": SMALL | HEADS,
    "hunyuan_v1_dense": SMALL | HEADS,
    "nemotron": SMALL,
    "olmo": SMALL,
    "olmoe": SMALL | EXPERTS,
    "persimmon": WITHOUT,
    "phimoe": SMALL | {"num_local_experts": 4},
    "qwen2_moe": SMALL | EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_moe": SMALL | EXPERTS | {"moe_intermediate_size": 32},
    "seed_oss": SMALL | HEADS,
}
MIXED_UP: dict[str, dict[str, Any]] = {
    "biogpt": MIXES | {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "bloom": MIXES | {"n_layer": 1, "n_head": 2},
    "mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 400},
    "opt": MIXES | {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32},
    "rwkv": MIXES | {"num_hidden_layers": 2},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 400},
}


@pytest.mark.parametrize("kind", kinds([*SEPARATE, *MIXED_UP], {*SEPARATE, *MIXED_UP} - {"helium"}))
def test_packing_is_for_models_whose_documents_do_not_see_each_other_by_a_probe(kind: str, chats: ChatData) -> None:
    torch.manual_seed(0)
    model = causal_lm(model_type=kind, options=SEPARATE.get(kind) or MIXED_UP[kind]).train()
    state, data = torch.get_rng_state(), PackedData(of=chats, block_size=64)
    check_causal(model)
    if kind in SEPARATE:
        CausalLM().check(model, data)
    else:
        with pytest.raises(ValueError, match=rf"in this model \({kind}\) they do: document 2 of a block has logits"):
            CausalLM().check(model, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_model_without_values_is_probed_by_a_small_copy(kind: str, chats: ChatData) -> None:
    with torch.device("meta"):
        model = causal_lm(model_type=kind, options=(MODELS | MIXED_UP)[kind])
    data = PackedData(of=chats, block_size=64)
    if kind == "llama":
        CausalLM().check(model, data)
    else:
        with pytest.raises(ValueError, match=r"in this model \(opt\) they do"):
            CausalLM().check(model, data)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_are_refused_as_causal_models(kind: str, chats: ChatData) -> None:
    model = causal_lm(model_type=kind, options=TINY["bert"] | {"vocab_size": 400})
    with pytest.raises(ValueError, match=rf"the model sees later tokens: .* {kind} is an encoder"):
        CausalLM().check(model, PackedData(of=chats, block_size=64))
    decoder = causal_lm(model_type=kind, options=TINY["bert"] | {"vocab_size": 400, "is_decoder": True})
    check_causal(decoder)


def test_the_auxiliary_loss_of_a_router_is_refused_by_name(chats: ChatData) -> None:
    model = causal_lm(model_type="mixtral", options=MODELS["mixtral"] | {"output_router_logits": True})
    with pytest.raises(ValueError, match=r"set model.options.output_router_logits = false"):
        CausalLM().check(model, chats)


def test_flash_attention_is_refused(chats: ChatData) -> None:
    model: Any = causal_lm(model_type="llama", options=SMALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match=r"attention = 'flash_attention_2' .* set model.attention to one of eager, sdpa"
    ):
        check_document_mask(model, PackedData(of=chats, block_size=64))


def test_tasks_without_document_masks_refuse_blocks_of_documents(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    many_chats(tmp_path)
    (tmp_path / "packed.toml").write_text(RECIPE.format(folder=tmp_path))
    message = ddpforge("check", "packed.toml", "--build", "--set=task.use=model_loss", code=2)
    assert "have several documents that must not see each other, but the task ModelLoss does not" in message
    assert "Traceback" not in message


# ---------------------------------------------------------------------------------------------- runs
RECIPE = """
recipe = 2
name = "packed"
[model]
use = "causal_lm"
model_type = "llama"
options = {{ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4, \
vocab_size = 400, pad_token_id = 0 }}
[data.train]
use = "packed"
block_size = 80
[data.train.of]
use = "chat"
path = "{folder}/chats.jsonl"
tokenizer = "{folder}/tokenizer"
[task]
use = "causal_lm"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "6st"
global_batch = 8
micro_batch = 2
[checkpoint]
every = "6st"
[track]
every = "1st"
"""


def curve(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def many_chats(folder: Path) -> None:
    byte_tokenizer(folder / "tokenizer")
    answers = [" ".join(WORDS[(number * step) % 10] for step in range(1, number % 9 + 2)) for number in range(120)]
    lines = [{"messages": [CHAT[1], {"role": "assistant", "content": answer}]} for answer in answers]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


ZERO = ("--set=strategy.use=deepspeed", "--set=strategy.stage={}")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one-micro-batch": (1, ("--set=train.micro_batch=8",)),
    "checkpointed": (1, ("--set=train.activation_checkpointing=true",)),
    "two": (2, ()),
    "four": (4, ()),
    "fsdp": (2, ("--set=strategy.use=fsdp",)),
    "pipeline": (2, ("--set=strategy.use=pipeline",)),
    "zero-2": (2, tuple(one.format(2) for one in ZERO)),
    "zero-3": (2, tuple(one.format(3) for one in ZERO)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_packed_run_has_the_same_curve_on_any_ranks_and_strategy(
    name: str, ddpforge: Callable[..., str], tmp_path: Path
) -> None:
    many_chats(tmp_path)
    (tmp_path / "packed.toml").write_text(RECIPE.format(folder=tmp_path))
    ranks, sets = RUNS[name]
    ddpforge("run", "packed.toml")
    ddpforge("run", "packed.toml", f"--set=name={name}", *sets, ranks=ranks)
    single = curve(tmp_path / "runs/packed")
    assert len(single) == 6
    assert single[-1] < single[0]
    assert curve(tmp_path / "runs" / name) == pytest.approx(single, abs=1e-5)


MIXED = """
[data.train.first]
use = "chat"
path = "{folder}/chats.jsonl"
tokenizer = "{folder}/tokenizer"
weight = 3
[data.train.again]
use = "chat"
path = "{folder}/chats.jsonl"
tokenizer = "{folder}/tokenizer"
last_turn_only = true
weight = 1
[data.eval]
use = "packed"
block_size = 80
of = {{ use = "chat", path = "{folder}/chats.jsonl", tokenizer = "{folder}/tokenizer" }}
"""


def test_chats_are_sources_of_a_mixture_with_a_limit_of_tokens(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    many_chats(tmp_path)
    before, _, after = RECIPE.partition("[data.train]")
    recipe = before + MIXED + "[task]" + after.partition("[task]")[2]
    (tmp_path / "mixed.toml").write_text(recipe.format(folder=tmp_path))
    ddpforge("run", "mixed.toml")
    ddpforge("run", "mixed.toml", "--set=name=limited", "--set=train.max_tokens=90", ranks=2)
    plain = curve(tmp_path / "runs/packed")
    assert len(plain) == 6
    assert curve(tmp_path / "runs/limited") == pytest.approx(plain, abs=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "runs/limited/metrics.jsonl").read_text().splitlines()]
    whole = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]

    padded = ["~data.eval", 'data.eval={use="chat",path="chats.jsonl",tokenizer="tokenizer"}']
    ddpforge("run", "mixed.toml", "--set=name=padded", *padded)
    rows = [json.loads(line) for line in (tmp_path / "runs/padded/metrics.jsonl").read_text().splitlines()]
    assert [row["eval/loss"] for row in rows if "eval/loss" in row][-1] == pytest.approx(whole, abs=1e-5)


def test_packed_and_padded_sources_are_not_mixed(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    many_chats(tmp_path)
    before, _, after = RECIPE.partition("[data.train]")
    recipe = before + MIXED + "[task]" + after.partition("[task]")[2]
    (tmp_path / "mixed.toml").write_text(recipe.format(folder=tmp_path))
    of = '{use="chat",path="chats.jsonl",tokenizer="tokenizer"}'
    sets = ["~data.train.first", f'data.train.first={{use="packed",weight=3,of={of}}}']
    message = ddpforge("check", "mixed.toml", "--build", *sets, code=2)
    assert "a sample of [data.train.first] is a dict with input_ids int64 [1, 2048]" in message
    assert "of one structure" in message


def test_a_packed_run_resumes_with_the_same_curve(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    many_chats(tmp_path)
    (tmp_path / "packed.toml").write_text(RECIPE.format(folder=tmp_path))
    ddpforge("run", "packed.toml", ranks=2)
    cut = "--set=name=cut"
    ddpforge("run", "packed.toml", cut, "--set=train.length=3st", ranks=2)
    ddpforge("run", "packed.toml", cut)
    assert curve(tmp_path / "runs/cut") == pytest.approx(curve(tmp_path / "runs/packed"), abs=1e-5)
