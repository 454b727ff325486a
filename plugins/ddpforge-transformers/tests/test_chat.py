"""Chats: forms, rendering, learnt tokens, and errors with file and line."""

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHAT, CHATML, MARKED, byte_tokenizer, damaged
from tiny import TINY
from transformers import AutoTokenizer

from ddpforge_transformers.chat import ChatData
from ddpforge_transformers.chat_rendering import ChatRenderer
from ddpforge_transformers.models import causal_lm

Build = Callable[..., ChatData]


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def chats(tmp_path: Path, words: Path) -> Build:
    """Builds the dataset of these lines: JSON values, or text as it is."""

    def build(*lines: Any, **options: Any) -> ChatData:
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return ChatData(**{"path": file, "tokenizer": str(words), **options})

    return build


def learnt(data: ChatData, sample: int = 0) -> str:
    """Returns the learnt text of a sample; learnt tokens that are not neighbours are separated by |."""
    labels, parts = data[sample]["labels"].tolist(), [[]]
    for label in labels:
        if label == -100:
            parts.append([])
        else:
            parts[-1].append(label)
    return "|".join(data.tokenizer.decode(part) for part in parts if part)


def whole(data: ChatData, sample: int = 0) -> str:
    return str(data.tokenizer.decode(data[sample]["input_ids"]))


TURN = {"messages": CHAT[1:3]}
ASKED = "<|im_start|>user\nWhat does the cat see?<|im_end|>\n<|im_start|>assistant\na dog<|im_end|>\n"


# ---------------------------------------------------------------------------------------------- forms
@pytest.mark.parametrize(
    "line",
    [
        TURN,
        {"messages": [CHAT[1], {"role": "assistant", "content": [{"type": "text", "text": "a dog"}]}]},
        {"prompt": CHAT[1:2], "completion": CHAT[2:3]},
        {"conversations": [{"from": "human", "value": CHAT[1]["content"]}, {"from": "gpt", "value": "a dog"}]},
        {"instruction": "What does the cat see?", "input": "", "output": "a dog"},
        {"instruction": "What does the cat see?", "output": "a dog", "id": 7},
    ],
    ids=["messages", "parts", "prompt_completion", "sharegpt", "alpaca", "alpaca-without-input"],
)
def test_every_form_of_a_chat_gives_the_same_tokens(chats: Build, line: dict[str, Any]) -> None:
    data = chats(line)
    assert whole(data) == ASKED
    assert learnt(data) == "a dog<|im_end|>"


def test_alpaca_has_its_input_on_a_line_of_its_own_and_a_system_text(chats: Build) -> None:
    data = chats({"system": "Be kind.", "instruction": "Translate.", "input": "dog", "output": "cat"})
    assert whole(data).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nTranslate.\ndog<|im_end|>")


def test_plain_prompts_need_no_template_and_end_with_an_end_token(tmp_path: Path, chats: Build) -> None:
    bare = byte_tokenizer(tmp_path / "bare", template=None)
    data = chats({"prompt": "the cat", "completion": " sees a dog"}, tokenizer=str(bare))
    assert whole(data) == "the cat sees a dog<|im_end|>"
    assert learnt(data) == " sees a dog<|im_end|>"


def test_only_the_completion_of_a_prompt_with_several_turns_is_learnt(chats: Build) -> None:
    assert learnt(chats({"prompt": CHAT[:4], "completion": CHAT[4:]})) == "the old cat<|im_end|>"


def test_the_lines_of_a_folder_are_one_dataset(tmp_path: Path, words: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "x", "completion": name}) + "\n\n")
    copies = tmp_path / ".ipynb_checkpoints"
    copies.mkdir()
    (copies / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "b.jsonl").read_bytes())
    data = ChatData(path=tmp_path, tokenizer=str(words))
    assert len(data) == 2
    assert [learnt(data, number) for number in range(2)] == ["a<|im_end|>", "b<|im_end|>"]


# ---------------------------------------------------------------------------------------------- learnt tokens
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["spans", "marks"])
def test_the_chosen_turns_are_learnt_with_the_token_that_ends_them(chats: Build, tmp_path: Path, template: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    line = {"messages": CHAT}
    assert learnt(chats(line, template=file)) == "a dog<|im_end|>|the old cat<|im_end|>"
    assert learnt(chats(line, template=file, last_turn_only=True)) == "the old cat<|im_end|>"
    weighted = {"messages": [*CHAT[:4], CHAT[4] | {"weight": 0}]}
    assert learnt(chats(weighted, template=file)) == "a dog<|im_end|>"


def test_of_other_roles_the_text_and_its_end_token_are_learnt_without_the_header(chats: Build) -> None:
    data = chats({"messages": CHAT[:3]}, train_on=["user", "assistant"])
    assert learnt(data) == "What does the cat see?<|im_end|>|a dog<|im_end|>"


def test_tool_calls_are_learnt_and_tools_reach_the_template(chats: Build, tmp_path: Path) -> None:
    file = tmp_path / "tools.jinja"
    call = "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    file.write_text("{{ tools[0].name }}: " + CHATML.replace("{{ message.content }}", "{{ message.content }}" + call))
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    data = chats({"messages": [CHAT[1], called], "tools": [{"name": "look"}]}, template=file)
    assert whole(data).startswith("look: <|im_start|>user")
    assert learnt(data) == "<call>look</call><|im_end|>"


REASONS = (  # as Qwen3: only the last answer is printed with its reasoning
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_answers_are_found_in_a_template_that_prints_the_last_one_in_another_way(chats: Build, tmp_path: Path) -> None:
    file = tmp_path / "reasons.jinja"
    file.write_text(REASONS)
    data = chats({"messages": CHAT}, template=file)
    assert learnt(data) == "a dog<|im_end|>|<think>\n\n</think>\n\nthe old cat<|im_end|>"
    data = chats({"messages": CHAT}, template=file, last_turn_only=True)
    assert learnt(data) == "<think>\n\n</think>\n\nthe old cat<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{{ message.content }}", "{{ message.content | upper }}"), "does not print the content of message 2"),
        (("<|im_end|>\n{% endfor %}", "\n{% endfor %}"), "would not learn to end its answers"),
        (("assistant\n{% endif %}", "assistant:{% endif %}"), "after its prompt for an answer"),
        (("<|im_start|>", "{{ raise_exception('no thanks') }}"), "refuses the messages: no thanks"),
        (("{{ message.role }}", "{{ message.role + 1 }}"), "refuses the messages"),
        (("{% endfor %}", ""), "`template`, line .* is not valid Jinja: Unexpected end of template"),
    ],
)
def test_a_template_in_which_spans_cannot_be_found_is_refused_by_name(
    chats: Build, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    (file := tmp_path / "template.jinja").write_text(CHATML.replace(*change))
    with pytest.raises(ValueError, match=message):
        chats({"messages": CHAT}, template=file)


def test_a_token_over_the_border_of_learnt_text_is_refused_except_for_white_space(chats: Build, tmp_path: Path) -> None:
    (file := tmp_path / "template.jinja").write_text(CHATML.replace("assistant\n{%", "assistant th{%"))
    file.write_text(
        "{% for message in messages %}{{ message.content }}{% if message.role == 'user' %} t{% else %}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"chats.jsonl, line 1: the token ' the' is partly in learnt text"):
        chats({"messages": [CHAT[1], {"role": "assistant", "content": "he cat"}]}, template=file)
    file.write_text(file.read_text().replace(" t{%", " {%"))
    data = chats({"messages": [CHAT[1], {"role": "assistant", "content": "the cat"}]}, template=file)
    assert learnt(data) == " the cat<|im_end|>"


def trl_labels(tokenizer: Any, template: str, folder: Path) -> dict[str, Any]:
    """Returns the batch of CHAT that TRL's SFTTrainer trains on with `assistant_only_loss`."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer.chat_template = template
    trainer = trl.SFTTrainer(
        causal_lm(model_type="llama", options=TINY["llama"] | {"vocab_size": len(tokenizer)}),
        args=trl.SFTConfig(folder, assistant_only_loss=True, use_cpu=True, report_to=[], bf16=False),
        train_dataset=datasets.Dataset.from_list([{"messages": CHAT}]),
        processing_class=tokenizer,
    )
    batch: dict[str, Any] = next(iter(trainer.get_train_dataloader()))
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "cohere", "qwen2_5_vl", "qwen3_instruct_2507", "gemma3", "lfm2"])
def test_learnt_tokens_are_those_of_trl(words: Path, tmp_path: Path, family: str) -> None:
    """By generation marks the same; by spans of the model's own template without the white space at their ends."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    folder = Path(found.origin).parent / "chat_templates"
    tokenizer = AutoTokenizer.from_pretrained(words, bos_token="<|im_start|>")
    own, marked = ((folder / f"{family}{end}.jinja").read_text() for end in ("", "_training"))
    theirs = trl_labels(tokenizer, marked, tmp_path)
    tokens, mask = ChatRenderer(tokenizer, marked).encode(CHAT)
    assert tokens == theirs["input_ids"][0].tolist()
    assert mask == (theirs["labels"][0] != -100).tolist()
    assert 4 < sum(mask) < len(mask) - 10
    same, spans = ChatRenderer(tokenizer, own).encode(CHAT)
    assert same == tokens
    differs = [tokenizer.decode([token]) for token, one, two in zip(tokens, mask, spans, strict=True) if one != two]
    assert set(differs) <= {"\n"}


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["spans", "marks"])
def test_last_turn_only_with_weight_0_learns_nothing_of_the_chat(chats: Build, tmp_path: Path, template: str) -> None:
    (file := tmp_path / "template.jinja").write_text(template)
    weighted = {"messages": [*CHAT[:4], CHAT[4] | {"weight": 0}]}
    data = chats(TURN, weighted, template=file, last_turn_only=True)
    assert [learnt(data, number) for number in range(len(data))] == ["a dog<|im_end|>"]


def test_plain_texts_keep_the_tokens_that_the_tokenizer_adds(chats: Build, added: tuple[Path, str, str]) -> None:
    folder, begin, _ = added
    data = chats({"prompt": "the cat", "completion": " sees a dog"}, tokenizer=str(folder))
    assert whole(data) == f"{begin}the cat sees a dog<|im_end|>"
    assert learnt(data) == " sees a dog<|im_end|>"
    assert whole(chats(TURN, tokenizer=str(folder))) == ASKED  # a template prints all of its tokens itself


def test_a_chat_with_only_its_first_token_learnt_has_no_learnt_token(chats: Build) -> None:
    with pytest.raises(ValueError, match=r"of its 1 chats is learnt; .* 1 have no learnt token within it"):
        chats({"prompt": "", "completion": "a"}, max_length=1)


def test_truncation_left_keeps_the_last_tokens(chats: Build) -> None:
    uncut, cut = chats({"messages": CHAT}), chats({"messages": CHAT}, max_length=11, truncation="left")
    for key in ("input_ids", "labels"):
        assert cut[0][key].tolist() == uncut[0][key][-11:].tolist()


# ---------------------------------------------------------------------------------------------- length, batches
def test_long_chats_are_cut_left_out_or_refused_and_counted(chats: Build, caplog: pytest.LogCaptureFixture) -> None:
    lines = {"messages": CHAT}, TURN
    lengths = chats(*lines).lengths().tolist()
    most = lengths[1]
    with caplog.at_level(logging.WARNING, logger="ddpforge"):
        right = chats(*lines, max_length=most)
        assert right.lengths().tolist() == [most]  # the first answer is after the cut
        left = chats(*lines, max_length=most, truncation="left")
        assert left.lengths().tolist() == [most, most]
        assert learnt(left).endswith("the old cat<|im_end|>")
        assert len(chats(*lines, max_length=most, truncation="drop")) == 1
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == [
        f"1 of 2 chats were cut at the end, to max_length = {most}",
        "1 of 2 chats were left out: none of their tokens is learnt",
        f"1 of 2 chats were cut at the begin, to max_length = {most}",
        f"1 of 2 chats were left out: they are longer than max_length = {most}",
    ]
    with pytest.raises(ValueError, match=f"line 1 has {lengths[0]} tokens, more than max_length = {most}"):
        chats(*lines, max_length=most, truncation="error")


def test_batches_are_padded_and_lengths_are_those_of_the_samples(chats: Build) -> None:
    data = chats({"messages": CHAT}, TURN)
    batch = data.collate([data[0], data[1]])
    assert batch["attention_mask"].sum(1).tolist() == data.lengths().tolist() == [len(data[0]["labels"]), 20]
    assert (batch["input_ids"][1, 20:] == 0).all()
    assert (batch["labels"][1, 20:] == -100).all()
    taught = batch["labels"] != -100
    assert torch.equal(batch["labels"][taught], batch["input_ids"][taught])


def test_the_cache_has_the_same_samples_and_a_changed_option_does_not_use_it(chats: Build, tmp_path: Path) -> None:
    plain = chats({"messages": CHAT}, TURN)
    for options, files in (({}, 1), ({}, 1), ({"last_turn_only": True}, 2)):
        data = chats({"messages": CHAT}, TURN, index=str(tmp_path / "cache"), **options)
        assert len(list((tmp_path / "cache").iterdir())) == files
        assert learnt(data, 1) == learnt(plain, 1)
        assert (learnt(data) == learnt(plain)) == (not options)


def test_a_damaged_or_foreign_cache_of_tokens_is_made_again(chats: Build, tmp_path: Path) -> None:
    index = tmp_path / "cache"
    chats(TURN, {"messages": CHAT}, index=str(index))
    (other,) = index.iterdir()
    foreign = other.read_bytes()
    other.unlink()
    chats({"messages": CHAT}, TURN, index=str(index))
    plain = chats({"messages": CHAT}, TURN)
    (kept,) = index.iterdir()
    for _ in damaged(kept, foreign):
        again = chats({"messages": CHAT}, TURN, index=str(index))
        assert [learnt(again, n) + whole(again, n) for n in range(2)] == [
            learnt(plain, n) + whole(plain, n) for n in range(2)
        ]


# ---------------------------------------------------------------------------------------------- shown
def test_data_show_marks_learnt_and_special_parts(
    chats: Build, tmp_path: Path, words: Path, ddpforge: Callable[..., str]
) -> None:
    data = chats({"messages": CHAT[1:]}, TURN)
    shown = data.text_parts(data.collate([data[0], data[1]]))
    assert shown[1] == [
        ("special", "<|im_start|>"),
        ("given", "user\nWhat does the cat see?"),
        ("special", "<|im_end|>"),
        ("given", "\n"),
        ("special", "<|im_start|>"),
        ("given", "assistant\n"),
        ("learnt", "a dog<|im_end|>"),
        ("given", "\n"),
    ]
    (tmp_path / "chat.toml").write_text(
        f"""
recipe = 2
name = "chat"
model = {{ use = "causal_lm", model_type = "llama", options = {{ hidden_size = 16, intermediate_size = 24, \
num_hidden_layers = 1, num_attention_heads = 2, vocab_size = 400 }} }}
data.train = {{ use = "packed", block_size = 64, of = {{ use = "chat", path = "chats.jsonl", tokenizer = "{words}" }} }}
task.use = "causal_lm"
optimizer = {{ use = "sgd", lr = 0.1 }}
train = {{ length = "1st", global_batch = 1 }}
"""
    )
    output = ddpforge("data", "show", "chat.toml", "--batches", "2")
    assert "text of 1 sample: «learnt» given [special]" in output
    assert r"[<|im_start|>]assistant\n«a dog<|im_end|>»\n" in output
    assert "<|pad|>" not in output


# ---------------------------------------------------------------------------------------------- wrong inputs
USER, ANSWER = CHAT[1], CHAT[2]
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "broken-json": ('{"messages": [', {}, "line 2 is not JSON"),
    "no-object": ("[1]", {}, "line 2 is a list: expected one JSON object per line"),
    "wrong-keys": ({"message": []}, {}, 'line 2 has the keys "message": expected "messages"'),
    "preference": ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, "line 2 .* is a preference pair"),
    "mixed-forms": ({"prompt": "a", "completion": "b"}, {}, "line 2 has the form prompt_completion, but expected"),
    "two-forms": (
        TURN | {"conversations": []},
        {},
        "line 2 is ambiguous: its keys fit the forms messages and sharegpt",
    ),
    "other-form": (TURN, {"form": "alpaca"}, 'line 1 has the form messages, but expected alpaca.*"instruction" with'),
    "no-messages": ({"messages": []}, {}, 'line 2: "messages" is empty'),
    "messages-is-text": ({"messages": "hi"}, {}, 'line 2: "messages" is a text: expected a list'),
    "message-is-text": ({"messages": ["hi"]}, {}, r"line 2: messages\[0\] is a text: expected an object"),
    "no-role": ({"messages": [{"content": "hi"}]}, {}, r"line 2: messages\[0\].role is null or absent"),
    "unknown-role": ({"messages": [USER | {"role": "human"}]}, {}, r'messages\[0\].role is "human": expected one of'),
    "no-content": ({"messages": [{"role": "user"}, ANSWER]}, {}, r"messages\[0\].content is null or absent: expected"),
    "content-is-number": ({"messages": [USER | {"content": 3}]}, {}, r"line 2: messages\[0\].content is a number"),
    "empty-content": ({"messages": [USER, ANSWER | {"content": " "}]}, {}, r"line 2: messages\[1\].content is empty"),
    "image-beside-messages": (
        {"messages": [USER, ANSWER], "images": ["a.png"]},
        {},
        r'line 2 has "images": this dataset has only text',
    ),
    "image": (
        {"messages": [USER | {"content": [{"type": "image", "url": "x"}]}]},
        {},
        r"line 2: messages\[0\].content\[0\] is of the type image: this dataset has only text",
    ),
    "unknown-key": ({"messages": [USER | {"wieght": 0}]}, {}, r'the unknown key "wieght"; did you mean "weight"\?'),
    "weight": ({"messages": [USER, ANSWER | {"weight": 0.5}]}, {}, r"messages\[1\].weight is 0.5: expected 0"),
    "weight-is-bool": ({"messages": [USER, ANSWER | {"weight": True}]}, {}, r"messages\[1\].weight is true"),
    "calls-of-a-user": ({"messages": [USER | {"tool_calls": [{}]}]}, {}, r"tool_calls is a list of the role user"),
    "tools": (TURN | {"tools": "look"}, {}, 'line 2: "tools" is a text: expected a list of objects'),
    "no-answer": ({"messages": [USER]}, {}, r"line 2: no message has a role that is learnt \(assistant\)"),
    "sharegpt-role": ({"conversations": [{"from": "me", "value": "x"}]}, {"form": "sharegpt"}, "line 1 has the form"),
    "empty-folder": (None, {"path": "."}, "contains no .jsonl files"),
    "no-template": (None, {"tokenizer": "bare"}, "line 1: the tokenizer .*bare has no chat template; set `template`"),
    "no-padding": (None, {"tokenizer": "endless"}, "has neither a padding nor an end-of-text token"),
    "template-file": (None, {"template": Path("nowhere.jinja")}, "template: nowhere.jinja cannot be read"),
    "prompt-too-long": (None, {"max_length": 8}, "no token of its 1 chats is learnt; .* 1 have no learnt token"),
    "role-twice": (None, {"train_on": ["user", "user"]}, "names a role twice"),
}


@pytest.mark.parametrize(("line", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_an_error_with_file_and_line(
    chats: Build, tmp_path: Path, line: Any, options: dict[str, Any], message: str
) -> None:
    if "tokenizer" in options:
        lacks = {"pad_token": None, "eos_token": None} if options["tokenizer"] == "endless" else {}
        options = {"tokenizer": str(byte_tokenizer(tmp_path / options["tokenizer"], template=None, **lacks))}
    if "path" in options:
        (empty := tmp_path / "empty").mkdir()
        options = {"path": empty / options["path"]}
    with pytest.raises(ValueError, match=message) as caught:
        chats(*([TURN] if line is None else [TURN, line]), **options)
    if line is not None:
        assert "chats.jsonl, line " in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"conversations": [{"from": "me", "value": "x"}]}, r'conversations\[0\].from is "me": expected one of system'),
        ({"conversations": [{"from": "gpt", "value": None}]}, r"conversations\[0\].value is null or absent"),
        ({"conversations": [{"role": "user", "content": "x"}]}, r'conversations\[0\] has the unknown key "role"'),
        (
            {"system": "a", "conversations": [{"from": "system", "value": "x"}]},
            'the line has "system" and a first message of the role system',
        ),
        ({"instruction": "a", "output": ""}, "output is empty"),
        ({"instruction": 1, "output": "b"}, "instruction is a number: expected a text"),
        ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, '"history" is not supported'),
        ({"prompt": "a", "completion": ""}, '"completion" is empty'),
        ({"prompt": "a", "completion": CHAT[2:3]}, '"prompt" is a text and "completion" a list: expected two texts'),
    ],
)
def test_wrong_input_of_other_forms_is_an_error(chats: Build, line: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"chats.jsonl, line 1: {message}"):
        chats(line)


def test_an_empty_file_is_an_error(chats: Build) -> None:
    with pytest.raises(ValueError, match=r"chats.jsonl is empty: expected one JSON object per line"):
        chats()


def test_a_template_that_prints_the_date_is_a_warning(
    chats: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "dated.jinja").write_text("{{ date_string or strftime_now('%d') }}" + CHATML)
    with caplog.at_level(logging.WARNING, logger="ddpforge"):
        chats(TURN, template=file, template_options={"date_string": "26 Jul 2024"})
        assert not caplog.records
        chats(TURN, template=file)
    assert "may print today's date" in caplog.text


def test_the_recipe_of_the_guide_passes_check(tmp_path: Path, ddpforge: Callable[..., str]) -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "chat-data.md"
    if not guide.is_file():
        pytest.skip("the guide is only in the repository")
    (tmp_path / "sft.toml").write_text(guide.read_text().partition("```toml\n")[2].partition("```")[0])
    assert "sft.toml: ok" in ddpforge("check", "sft.toml")


def test_new_tokens_are_special_tokens_of_the_tokenizer(chats: Build, tmp_path: Path) -> None:
    (file := tmp_path / "new.jinja").write_text(CHATML.replace("<|im_start|>", "<|turn|>"))
    data = chats(TURN, template=file, new_tokens=["<|turn|>"])
    assert data.vocab_size == len(chats(TURN, template=file).tokenizer) + 1
    assert data[0]["input_ids"].tolist().count(data.vocab_size - 1) == 2
    assert learnt(data) == "a dog<|im_end|>"
    with pytest.raises(ValueError, match=r"new_tokens: the tokenizer has `<\|im_end\|>` already"):
        chats(TURN, new_tokens=["<|im_end|>"])
