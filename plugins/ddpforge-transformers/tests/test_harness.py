"""`ddpforge eval --lm-eval` has the log-likelihoods that the model gives, on local tasks."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHAT, byte_tokenizer
from click.testing import CliRunner
from ddpforge.app.api import load
from ddpforge.cli import main
from ddpforge.errors import UsageError
from test_export import RECIPE

from ddpforge_transformers import harness

pytest.importorskip("lm_eval")

CHOICE = """
task: mine
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {file} }} }}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {file} }} }}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: bits_per_byte
"""
WORDS = ["a dog", "the old cat", "the cat", "a big dog", "What does", "kind"]
ROWS = [(f"{WORDS[number % 6]} sees", [WORDS[(number + k) % 6] for k in (1, 2, 4)], number % 3) for number in range(12)]


def cli(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["eval", *arguments])
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


@pytest.fixture
def folder(tmp_path: Path, ddpforge: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trains a run, and writes two tasks with local data."""
    byte_tokenizer(tmp_path / "words")
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 2)
    text = RECIPE.replace('template = "chat.jinja"\n', "").replace("60st", "3st")
    (tmp_path / "chat.toml").write_text(text)
    ddpforge("run", "chat.toml")
    (tmp_path / "tasks").mkdir()
    rows = [dict(zip(("question", "choices", "label"), row, strict=True)) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("mine", CHOICE), ("texts", TEXTS)):
        (tmp_path / f"tasks/{name}.yaml").write_text(task.format(file=tmp_path / "rows.jsonl"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def likelihood(model: Any, before: Sequence[int], after: Sequence[int]) -> float:
    ids = torch.tensor([[*before, *after]])
    with torch.no_grad():
        each = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return float(each[len(before) - 1 :].sum())


def test_accuracy_and_bits_per_byte_equal_those_by_hand(folder: Path) -> None:
    found = json.loads(cli("chat", "--lm-eval", "mine", "--lm-eval", "texts", "--include", "tasks", "--json"))
    trained = load("chat")
    model, words = trained.model(), trained.data().tokenizer
    right, bits, size = 0, 0.0, 0
    for question, choices, label in ROWS:
        before = words(question)["input_ids"]
        scores = []
        for choice in choices:
            whole = words(f"{question} {choice}")["input_ids"]
            scores.append(likelihood(model, before, whole[len(before) :]))
        right += scores.index(max(scores)) == label
        bits -= likelihood(model, [words.eos_token_id], before) / math.log(2)
        size += len(question.encode())
    assert found["step"] == 3
    assert found["mine/acc"] == pytest.approx(right / len(ROWS))
    assert 0 < right < len(ROWS)
    assert found["texts/bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
    assert "mine/acc" in cli("chat", "--lm-eval", "mine", "--include", "tasks")

    # With the chat template, the question is a message.
    prompted = json.loads(cli("chat", "--lm-eval", "mine", "--include", "tasks", "--chat", "--json"))
    right = 0
    for question, choices, label in ROWS:
        before = trained.data().encode_chat([{"role": "user", "content": question}])
        scores = [likelihood(model, before, words(choice)["input_ids"]) for choice in choices]
        right += scores.index(max(scores)) == label
    assert prompted["mine/acc"] == pytest.approx(right / len(ROWS))
    assert 0 < right < len(ROWS)


def test_impossible_evaluations_are_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("--include", "tasks")
    unknown = cli("chat", "--lm-eval", "mime", *here, code=2)
    assert "--lm-eval mime: the harness has no such task" in unknown
    assert "similar names: mine" in unknown
    assert "--include nowhere is not a folder" in cli("chat", "--lm-eval", "mine", "--include", "nowhere", code=2)
    assert "--set cannot be combined with --lm-eval" in cli("chat", "--lm-eval", "mine", *here, "--set=name=x", code=2)
    assert "--include is for tasks of --lm-eval" in cli("chat", *here, code=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--lm-eval runs in one process" in cli("chat", "--lm-eval", "mine", *here, code=2)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert "pip install lm-eval" in cli("chat", "--lm-eval", "mine", *here, code=3)


@pytest.mark.parametrize(
    "line",
    [
        "doc_to_text: !function words.text",
        "class: !function words.Mine",
        "%TAG !e! !func",
        "include: ../outside.yaml",
        'include: "/etc/outside.yaml"',
        "unsafe_code: true",
    ],
)
def test_a_folder_of_tasks_that_names_code_is_refused_without_trust(tmp_path: Path, line: str) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine.yaml").write_text(f"task: mine\n{line}\n")
    (tmp_path / "below" / "words.py").write_text("import pathlib\npathlib.Path('ran').write_text('')\n")
    with pytest.raises(UsageError, match=r"mine.yaml, line 2 names code or a file outside of the folder") as caught:
        harness._manager(["mine"], [tmp_path], trust=False)
    assert "--trust" in caught.value.hints[0]
    assert not Path("ran").exists()


def test_a_trusted_folder_of_tasks_may_name_code(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\ndoc_to_text: !function words.text\n")
    (tmp_path / "words.py").write_text("def text(row):\n    return row\n")
    assert harness._manager(["mine"], [tmp_path], trust=True).match_tasks(["mine"]) == ["mine"]
