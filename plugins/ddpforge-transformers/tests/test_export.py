"""Exports are folders that transformers loads, and a run's model answers chats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHAT, CHATML, byte_tokenizer
from click.testing import CliRunner
from ddpforge.app.api import load
from ddpforge.app.generation import Sampling
from ddpforge.cli import main
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddpforge_transformers.chat_rendering import ChatRenderer

RECIPE = """
recipe = 2
name = "chat"
[model]
use = "causal_lm"
model_type = "llama"
options = { hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4, \
vocab_size = 400, max_position_embeddings = 512, eos_token_id = 9 }
[data.train]
use = "chat"
path = "chats.jsonl"
tokenizer = "words"
max_length = 512
template = "chat.jinja"
[task]
use = "causal_lm"
loss_chunk = 16
[optimizer]
use = "adamw"
lr = 1e-2
[train]
length = "60st"
global_batch = 2
"""
LORA = 'lora = { targets = ["q_proj", "v_proj"], r = 4 }\n[data.train]'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes a chat, a tokenizer without a template, a template and recipes."""
    byte_tokenizer(tmp_path / "words", template=None)
    (tmp_path / "chat.jinja").write_text(CHATML)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 2)
    (tmp_path / "chat.toml").write_text(RECIPE)
    (tmp_path / "lora.toml").write_text(RECIPE.replace("[data.train]", LORA).replace("60st", "2st"))
    return tmp_path


def cli(*arguments: str, text: str = "", code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments, input=text)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(("recipe", "options"), [("chat", ()), ("lora", ("--merge",)), ("lora", ("--merge", "bf16"))])
def test_an_exported_folder_loads_without_a_callback_in_the_recipe(
    recipe: str, options: tuple[str, ...], folder: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    flags = [*(one for one in options if one != "bf16"), *(["--dtype", "bf16"] if "bf16" in options else [])]
    ddpforge("run", f"{recipe}.toml", "--set=name=run", "--set=train.length=2st")
    monkeypatch.chdir(folder)
    cli("export", "run", *flags, "-o", "hf/")
    model = AutoModelForCausalLM.from_pretrained("hf")
    assert model.dtype == dtype
    ids = torch.arange(3, 19).view(2, 8)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.01}
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.float(), load("runs/run").model()(ids).logits, **tolerance)
    words = AutoTokenizer.from_pretrained("hf")
    found = words.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False)
    expected = ChatRenderer(AutoTokenizer.from_pretrained("words"), CHATML).prompt(CHAT[:2])
    assert found == expected
    assert found.endswith("<|im_start|>assistant\n")
    end = words.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [9, end]


def test_the_weights_of_a_callback_are_exported_with_the_config(
    folder: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpforge("run", "chat.toml", "--set=train.length=2st", "--set=callbacks.ema={use='ema',decay=0.5}")
    monkeypatch.chdir(folder)
    cli("export", "chat", "--weights", "ema", "-o", "hf/")
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained("hf")(ids).logits
        averaged, trained = (load("runs/chat", weights=kind).model()(ids).logits for kind in ("ema", "model"))
    torch.testing.assert_close(found, averaged)
    assert not torch.equal(averaged, trained)


def test_adapters_are_not_written_as_a_model(
    folder: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpforge("run", "lora.toml")
    monkeypatch.chdir(folder)
    assert "the model has adapters" in cli("export", "chat", "-o", "hf/", code=2)
    cli("export", "chat", "-o", "hf/", "--format", "safetensors")
    assert [path.name for path in Path("hf").iterdir()] == ["model.safetensors"]
    assert any("lora_A" in name for name in load_file("hf/model.safetensors"))
    cli("export", "chat", "-o", "part/", "--include", "*lora_*")
    assert [path.name for path in Path("part").iterdir()] == ["model.safetensors"]


def test_of_a_run_without_a_readable_recipe_only_the_weights_are_written(
    folder: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpforge("run", "chat.toml", "--set=train.length=1st")
    monkeypatch.chdir(folder)
    recipe = Path("runs/chat/recipe.resolved.toml")
    recipe.write_text(recipe.read_text().replace('use = "causal_lm"', 'use = "gone"', 1))
    said = cli("export", "chat", "-o", "hf/")
    assert "only the weights are written, because the recipe is not readable" in said
    assert [path.name for path in Path("hf").iterdir()] == ["model.safetensors"]


def test_a_trained_model_answers_and_stops_at_the_end_token(
    folder: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpforge("run", "chat.toml")
    monkeypatch.chdir(folder)
    first, second = (message["content"] for message in CHAT if message["role"] == "user")
    chat = ("generate", "chat", "--chat", "--greedy", "--tokens", "40", "--system", CHAT[0]["content"])
    assert cli(*chat, "-p", first) == "a dog\n", "40 tokens are allowed, and the answer ends after its end token"
    assert cli(*chat, text=f"{first}\n\n{second}\n") == "a dog\nthe old cat\n", "lines are turns of one chat"
    rows = [json.loads(line) for line in cli(*chat, "--json", text=f"{first}\n{second}\n").splitlines()]
    assert rows == [{"prompt": first, "text": "a dog"}, {"prompt": second, "text": "the old cat"}]

    # Each line of a file is a chat of its own.
    Path("questions.txt").write_text(f"{first}\n{first}\n")
    assert cli(*chat, "--prompts", "questions.txt") == "a dog\na dog\n"

    # The tokens of the prompt are those of transformers, and so is the answer.
    trained = load("chat")
    cli("export", "chat", "-o", "hf/")
    words, model = AutoTokenizer.from_pretrained("hf"), AutoModelForCausalLM.from_pretrained("hf")
    ids = words.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert trained.data().encode_chat(CHAT[:2]) == ids["input_ids"][0].tolist()
    theirs = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert words.decode(theirs) == "a dog<|im_end|>"
    drawn = [list(trained.answers([first], Sampling(tokens=9, seed=seed, temperature=9.0))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_chats_that_cannot_work_are_refused(
    folder: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RECIPE.replace('template = "chat.jinja"\n', "").replace('use = "chat"', 'use = "tokenized_jsonl"')
    (folder / "plain.toml").write_text(text.replace("chats.jsonl", "texts.jsonl").replace("60st", "1st"))
    (folder / "texts.jsonl").write_text('{"text": "a dog"}\n' * 4)
    ddpforge("run", "plain.toml", "--set=name=plain")
    monkeypatch.chdir(folder)
    assert "has no chat template" in cli("generate", "plain", "--chat", "-p", "x", code=2)
    assert "--system is the system message of a chat" in cli("generate", "plain", "--system", "x", "-p", "x", code=2)
    assert "expected exactly one of --prompt and --prompts" in cli("generate", "plain", code=2)


MARKS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|pad|>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|pad|>{% endif %}{% endfor %}",
            ["<|pad|>"],
        ),
    ],
)
def test_the_end_of_an_answer_is_the_special_token_after_it(template: str, ends: list[Any], tmp_path: Path) -> None:
    words: Any = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path, template=template))
    assert words.convert_ids_to_tokens(ChatRenderer(words).ends()) == ends
