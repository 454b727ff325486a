"""Preference training: losses by hand and by TRL, ranks, references, metrics, and errors with file and line."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chats import byte_tokenizer
from ddpforge.app.api import load
from ddpforge.builtin.models.lora import Adapters
from ddpforge.errors import UsageError
from ddpforge.interfaces import Total
from ddpforge.ranks.collectives import SingleRank
from peft import PeftModel
from tiny import TINY
from transformers import AutoModelForSequenceClassification

from ddpforge_transformers.models import causal_lm, sequence_classification
from ddpforge_transformers.preference_data import FeedbackData, PreferenceData, reference_lines
from ddpforge_transformers.preferences import DPO, KTO, ORPO, Reward
from ddpforge_transformers.reference import write_reference
from ddpforge_transformers.tasks import CausalLM

OPTIONS = TINY["llama"] | {"vocab_size": 400}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PAIRS = [
    {
        "prompt": f"The cat number {number} sees",
        "chosen": " a dog" + " and a bird" * (number % 3),
        "rejected": " nothing" * (1 + number % 2),
    }
    for number in range(24)
]
ANSWERS = [
    {"prompt": pair["prompt"], "completion": pair[key], "label": key == "chosen"}
    for number, pair in enumerate(PAIRS)
    for key in (("chosen", "rejected"), ("chosen",))[number % 2]
]


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def pairs(tmp_path: Path, words: Path) -> Callable[..., PreferenceData]:
    def build(*rows: Any, **options: Any) -> PreferenceData:
        return PreferenceData(
            **{"path": write(tmp_path / "pairs.jsonl", list(rows)), "tokenizer": str(words), **options}
        )

    return build


@pytest.fixture
def answers(tmp_path: Path, words: Path) -> Callable[..., FeedbackData]:
    def build(*rows: Any, **options: Any) -> FeedbackData:
        file = write(tmp_path / "answers.jsonl", list(rows))
        return FeedbackData(**{"path": file, "tokenizer": str(words), **options})

    return build


def batch_of(data: Any, *numbers: int) -> dict[str, torch.Tensor]:
    return data.collate([data[number] for number in numbers or range(len(data))])


# ---------------------------------------------------------------------------------------------- data
def test_texts_and_messages_give_prompt_and_answers(pairs: Callable[..., PreferenceData]) -> None:
    data = pairs({"prompt": "The cat", "chosen": " sees", "rejected": " sleeps well"})
    batch = batch_of(data)
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 2, max(map(int, data.lengths())))
    decode = data.tokenizer.decode
    for place, answer in enumerate((" sees<|im_end|>", " sleeps well<|im_end|>")):
        labels, mask = batch["labels"][0, place], batch["attention_mask"][0, place].bool()
        assert decode(batch["input_ids"][0, place][mask]) == "The cat" + answer
        assert decode(labels[labels != -100]) == answer

    given = [user("What does the cat see?")]
    explicit = pairs({"prompt": given, "chosen": [assistant("a dog")], "rejected": [assistant("the old cat")]})
    implicit = pairs({"chosen": [*given, assistant("a dog")], "rejected": [*given, assistant("the old cat")]})
    one, other = batch_of(explicit), batch_of(implicit)
    assert all(torch.equal(one[name], other[name]) for name in one)
    labels = one["labels"][0, 0]
    assert decode(labels[labels != -100]) == "a dog<|im_end|>"


def test_long_samples_are_left_out_or_cut_at_the_end_of_the_answer(
    pairs: Callable[..., PreferenceData], caplog: pytest.LogCaptureFixture
) -> None:
    short, long = PAIRS[0], {"prompt": "The cat", "chosen": " sees" * 30, "rejected": " no"}
    data = pairs(short, long, max_length=40)
    assert len(data) == 1
    assert "1 of 2 samples are longer than max_length = 40" in caplog.text
    cut = pairs(short, long, max_length=40, truncation="right")
    assert len(cut) == 2
    assert cut.lengths().tolist()[1] == 40
    with pytest.raises(ValueError, match=r"pairs.jsonl, line 2 has \d+ tokens, more than max_length = 40"):
        pairs(short, long, max_length=40, truncation="error")


def test_unrelated_answers_of_feedback_are_those_of_the_sample_before(answers: Callable[..., FeedbackData]) -> None:
    data = answers(*ANSWERS[:3])
    batch, decode = batch_of(data), data.tokenizer.decode
    for number in range(3):
        labels = batch["labels"][number, 1]
        assert decode(labels[labels != -100]) == ANSWERS[:3][number - 1]["completion"] + "<|im_end|>"
    assert batch["desirable"].tolist() == [row["label"] for row in ANSWERS[:3]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is a list: expected one JSON object per line"),
        ({"prompt": "a", "chosen": "b"}, 'line 1 lacks "rejected"; it has the keys "prompt", "chosen"'),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, 'line 1: "chosen" is empty'),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, 'line 1: "prompt" is a str, "chosen" is a int'),
        ({"prompt": "a", "chosen": [assistant("b")], "rejected": "c"}, "expected three texts, or lists of messages"),
        ({"chosen": "b", "rejected": "c"}, "expected three texts, or lists of messages"),
        ({"chosen": [user("a")], "rejected": [user("b")]}, "begin with different messages, and there is no"),
        ({"prompt": [user("a")], "chosen": [user("b")], "rejected": [assistant("c")]}, '"chosen" has no message'),
        ({"prompt": [user("a")], "chosen": [], "rejected": [assistant("c")]}, '"chosen" is empty'),
        (
            {"prompt": [{"role": "usr", "content": "a"}], "chosen": [assistant("b")], "rejected": [assistant("c")]},
            "prompt[0].role",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, 'expected a finite number "margin"'),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}', 'expected a finite number "margin"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]}, 'line 1 has "images"'),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "there is no token before the answer"),
    ],
)
def test_invalid_pairs_are_errors_with_file_and_line(pairs: Callable[..., PreferenceData], row: Any, said: str) -> None:
    with pytest.raises(ValueError) as found:
        pairs(row)
    assert "pairs.jsonl, line 1" in str(found.value)
    assert said in str(found.value)


def test_a_missing_template_is_an_error(pairs: Callable[..., PreferenceData], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"template: .*none.jinja cannot be read"):
        pairs(*PAIRS[:2], template=tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ANSWERS[0]], "expected at least two samples"),
        ([PAIRS[0], PAIRS[1]], "are for the dataset preferences"),
        ([ANSWERS[0], ANSWERS[1] | {"label": "good"}], "line 2: \"label\" is 'good': expected true or false"),
        ([ANSWERS[0], {"prompt": [user("a")], "completion": [assistant("b")], "label": True}], "expected one form"),
    ],
)
def test_invalid_feedback_is_an_error(answers: Callable[..., FeedbackData], rows: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as found:
        answers(*rows)
    assert said in str(found.value)


# ---------------------------------------------------------------------------------------------- losses
def log_p(model: Any, data: Any, number: int, place: int) -> tuple[float, int]:
    """Returns the log-probability of an answer without padding, and its tokens."""
    answer = data._samples[number][place]
    tokens = torch.tensor([answer.tokens])
    logits = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    rows = logits.gather(1, tokens[0, 1:, None])[torch.tensor(answer.labels[1:]) != -100]
    return float(rows.sum().detach()), len(rows)


def changed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, lambda c, r, nc, nr: -math.log(1 / (1 + math.exp(-0.1 * (c - r))))),
        (
            {"label_smoothing": 0.2},
            lambda c, r, nc, nr: 0.8 * math.log1p(math.exp(-0.1 * (c - r))) + 0.2 * math.log1p(math.exp(0.1 * (c - r))),
        ),
        ({"loss": "hinge"}, lambda c, r, nc, nr: max(0, 1 - 0.1 * (c - r))),
        ({"loss": "ipo"}, lambda c, r, nc, nr: (c / nc - r / nr - 5) ** 2),
        ({"length_normalized": True}, lambda c, r, nc, nr: math.log1p(math.exp(-0.1 * (c / nc - r / nr)))),
    ],
    ids=["sigmoid", "smoothed", "hinge", "ipo", "normalized"],
)
def test_dpo_is_the_sum_of_its_formula_over_pairs(
    pairs: Callable[..., PreferenceData], options: dict[str, Any], form: Callable[..., float]
) -> None:
    data, model = pairs(*PAIRS[:5]), causal_lm(model_type="llama", options=OPTIONS).eval()
    task = DPO(**options)
    task.check(model, data)
    (copy,) = task.auxiliary_modules(model).values()
    changed(model)
    loss, outputs = task.loss(model, batch_of(data))
    expected, right = 0.0, 0
    for number in range(5):
        (c, nc), (r, nr) = (log_p(model, data, number, place) for place in (0, 1))
        (cr, _), (rr, _) = (log_p(copy.module, data, number, place) for place in (0, 1))
        expected += form(c - cr, r - rr, nc, nr)
        right += c - cr > r - rr
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    found = task.metrics(outputs, {})
    assert float(found["rewards/accuracies"].sum) == right
    assert float(found["rewards/margins"].sum) == pytest.approx(
        float(found["rewards/chosen"].sum - found["rewards/rejected"].sum), rel=1e-5
    )
    assert all(isinstance(one, Total) and one.count == 5 for one in found.values())


@pytest.mark.parametrize("task", [DPO, ORPO, KTO])
def test_losses_and_gradients_in_chunks_are_those_of_all_logits(
    pairs: Callable[..., PreferenceData], answers: Callable[..., FeedbackData], task: Any
) -> None:
    data = answers(*ANSWERS[:5]) if task is KTO else pairs(*PAIRS[:5])
    found = []
    for options in ({}, {"loss_chunk": 7}):
        torch.manual_seed(0)
        model, one = causal_lm(model_type="llama", options=OPTIONS), task(**options)
        one.check(model, data)
        one.auxiliary_modules(model)
        world: Any = SimpleNamespace(device=torch.device("cpu"), dp_ranks=SingleRank(torch.device("cpu")))
        one.start(model, world)
        loss, _ = one.loss(changed(model), batch_of(data))
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_orpo_is_the_sum_of_its_formula_over_pairs(pairs: Callable[..., PreferenceData]) -> None:
    data, model = pairs(*PAIRS[:5]), causal_lm(model_type="llama", options=OPTIONS).eval()
    task = ORPO(beta=0.3)
    expected = 0.0
    for number in range(5):
        c, r = (log_p(model, data, number, place) for place in (0, 1))
        c, r = c[0] / c[1], r[0] / r[1]
        odds = (c - math.log1p(-math.exp(c))) - (r - math.log1p(-math.exp(r)))
        expected += -c + 0.3 * math.log1p(math.exp(-odds))
    assert float(task.loss(model, batch_of(data))[0]) == pytest.approx(expected, rel=1e-5)


def test_reward_of_a_pair_and_its_margin(pairs: Callable[..., PreferenceData]) -> None:
    rows = [pair | {"margin": 0.1 * number} for number, pair in enumerate(PAIRS[:4])]
    data = pairs(*rows)
    model = sequence_classification(model_type="llama", classes=1, options=OPTIONS).eval()
    task = Reward(center=0.01)
    task.check(model, data)
    expected = 0.0
    for number in range(4):
        c, r = (float(model(input_ids=torch.tensor([data._samples[number][place].tokens])).logits) for place in (0, 1))
        expected += math.log1p(math.exp(-(c - r - 0.1 * number))) + 0.01 * (c + r) ** 2
    assert float(task.loss(model, batch_of(data))[0]) == pytest.approx(expected, rel=1e-5)


def test_distance_of_kto_is_never_negative(answers: Callable[..., FeedbackData]) -> None:
    task = KTO(beta=0.5)
    task.start(
        causal_lm(model_type="llama", options=OPTIONS),
        SimpleNamespace(dp_ranks=SingleRank(torch.device("cpu")), device=torch.device("cpu")),
    )
    for unrelated, distance in ((-6.0, 0.0), (6.0, 3.0)):
        outputs = {
            "logps": torch.tensor([[-1.0, unrelated], [-3.0, unrelated]]),
            "reference": torch.tensor([[-2.0, 0.0], [-2.0, 0.0]]),
            "desirable": torch.tensor([True, False]),
        }
        signed = 0.5 - distance, distance + 0.5
        expected = sum(1 - 1 / (1 + math.exp(-one)) for one in signed)
        assert float(task.sum_of_losses(outputs)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("task", [DPO(), ORPO(), Reward()])
def test_pairs_with_equal_rewards_have_an_accuracy_of_0(task: Any) -> None:
    equal = torch.tensor([[-2.0, -2.0], [-1.0, -3.0], [-3.0, -1.0], [-5.0, -5.0]])
    outputs = {"logps": equal, "reference": torch.zeros(4, 2), "tokens": torch.ones(4, 2), "rewards": equal}
    found = task.metrics(outputs, {})["rewards/accuracies"]
    assert (float(found.sum), float(found.count)) == (1, 4)


def test_equal_answers_and_answers_with_an_equal_begin_keep_their_last_message(
    pairs: Callable[..., PreferenceData],
) -> None:
    given = [user("What does the cat see?")]
    more = [*given, assistant("a dog"), user("and?")]
    end = "<|im_end|>"
    for chosen, rejected, learnt in (
        ([*given, assistant("a dog")], [*given, assistant("a dog")], ("a dog<|im_end|>", "a dog<|im_end|>")),
        (
            [*given, assistant("a dog")],
            [*more, assistant("a bird")],
            (f"a dog{end}", f"a dog{end}a bird{end}"),
        ),
        ([*more, assistant("no")], [*more, assistant("no")], ("no<|im_end|>", "no<|im_end|>")),
    ):
        data = pairs({"chosen": chosen, "rejected": rejected})
        labels = batch_of(data)["labels"][0]
        assert tuple(data.tokenizer.decode(one[one != -100]) for one in labels) == learnt


def test_the_prompt_of_each_answer_is_shown_as_given(pairs: Callable[..., PreferenceData]) -> None:
    data = pairs({"prompt": "ab", "chosen": "c", "rejected": "de"})
    shown = data.text_parts(batch_of(data))
    assert [[kind for kind, _ in one] for one in shown] == [["given", "learnt"]] * 2
    assert [one[1][1][: len(answer)] for one, answer in zip(shown, ("c", "de"), strict=True)] == ["c", "de"]


def test_pairs_without_a_difference_are_counted_in_a_warning(
    pairs: Callable[..., PreferenceData], caplog: pytest.LogCaptureFixture
) -> None:
    pairs({"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert "1 answers are both the chosen and the rejected one of their pair, which teaches nothing" in caplog.text


@pytest.mark.parametrize(
    ("row", "dataset"), [({"prompt": "a", "completion": "b", "label": True}, "feedback"), ({"messages": []}, "chat")]
)
def test_lines_of_another_dataset_name_it(pairs: Callable[..., PreferenceData], row: Any, dataset: str) -> None:
    with pytest.raises(ValueError, match=f"such lines are for the dataset {dataset}"):
        pairs(row)


# ---------------------------------------------------------------------------------------------- references
LORA = {"targets": ["q_proj", "v_proj"], "r": 4}


def test_model_without_its_adapters_is_the_reference(pairs: Callable[..., PreferenceData]) -> None:
    data = pairs(*PAIRS[:3])
    model = causal_lm(model_type="llama", options=OPTIONS, lora=Adapters(**LORA)).train()
    batch = batch_of(data)
    copied, switched = DPO(reference="copy"), DPO()
    assert switched.auxiliary_modules(model) == {}
    switched.check(model, data)
    copied.auxiliary_modules(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.full_like(parameter, 0.05), alpha=1 + len(name) % 3)
    one, other = copied.loss(model, batch), switched.loss(model, batch)
    assert torch.equal(one[1]["reference"], other[1]["reference"])
    assert not torch.allclose(one[1]["logps"], one[1]["reference"])
    torch.testing.assert_close(one[0], other[0])
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("task", "model", "data", "said"),
    [
        (DPO(reference="adapters"), {}, {}, "needs a model with adapters"),
        (DPO(reference="data"), {}, {}, "needs log-probabilities: set `reference` of the dataset"),
        (DPO(), {"lora": LORA | {"train": ["model.norm.*"]}}, {}, "is trained without adapters"),
        (DPO(), {"options": OPTIONS | {"vocab_size": 32}}, {}, "the model takes 32; set model.options.vocab_size"),
        (KTO(), {}, {}, "needs the dataset `feedback`, not PreferenceData"),
        (Reward(), {}, {}, 'set model.use = "sequence_classification", classes = 1'),
        (CausalLM(), {}, {}, 'two answers, which this task cannot compare; set task.use = "dpo", "orpo" or "reward"'),
    ],
)
def test_tasks_that_do_not_fit_are_refused(
    pairs: Callable[..., PreferenceData], task: Any, model: dict[str, Any], data: dict[str, Any], said: str
) -> None:
    from ddpforge.builtin.models.lora import Adapters

    built = causal_lm(
        model_type="llama",
        options=model.get("options", OPTIONS),
        lora=Adapters(**model["lora"]) if "lora" in model else None,
    )
    with pytest.raises(ValueError) as found:
        task.check(built, pairs(*PAIRS[:2], **data))
    assert said in str(found.value)


@pytest.mark.parametrize("padding", [3, None])
def test_reward_needs_the_padding_token_of_the_data(pairs: Callable[..., PreferenceData], padding: int | None) -> None:
    """With another one the model would read the reward at a padding token, and it would depend on the batch."""
    model = sequence_classification(model_type="llama", classes=1, options=OPTIONS | {"pad_token_id": padding})
    with pytest.raises(ValueError, match=r"set model.options.pad_token_id = 0"):
        Reward().check(model, pairs(*PAIRS[:2]))


# ---------------------------------------------------------------------------------------------- whole runs
RECIPE = """
recipe = 2
name = "tiny"
[model]
use = "{model}"
model_type = "llama"
options = {{ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4, \
num_key_value_heads = 2, vocab_size = 400, max_position_embeddings = 64, pad_token_id = 0 }}
{more}
[data.train]
use = "{data}"
path = "train.jsonl"
tokenizer = "{tokenizer}"
max_length = 64
[data.eval]
use = "{data}"
path = "train.jsonl"
tokenizer = "{tokenizer}"
max_length = 64
[task]
use = "{task}"
[optimizer]
use = "sgd"
lr = 0.5
[train]
length = "6st"
global_batch = 8
[strategy]
use = "{strategy}"
[checkpoint]
every = "3st"
[track]
every = "1st"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("dpo", ""),
        ("dpo", "lora = { targets = ['q_proj', 'v_proj'], r = 4 }"),
        ("orpo", ""),
        ("kto", ""),
        ("reward", ""),
    ],
    ids=["dpo-copy", "dpo-adapters", "orpo", "kto", "reward"],
)
def test_losses_are_the_same_on_any_ranks_strategy_and_accumulation(
    ddpforge: Callable[..., str], tmp_path: Path, words: Path, task: str, more: str
) -> None:
    data = "feedback" if task == "kto" else "preferences"
    write(tmp_path / "train.jsonl", ANSWERS if task == "kto" else PAIRS)
    found: dict[str, list[dict[str, float]]] = {}
    micro = "" if task == "kto" else "train.micro_batch=2"
    for name, strategy, ranks, sets in (
        ("one", "ddp", 1, ()),
        ("accumulated", "ddp", 1, (micro,)),
        ("two", "ddp", 2, ()),
        ("sharded", "fsdp", 2, () if task == "reward" else ("task.loss_chunk=32",)),
        ("zero2", "deepspeed", 2, ("strategy.stage=2",)),
        ("zero3", "deepspeed", 2, ("strategy.stage=3",)),
    ):
        model = "sequence_classification" if task == "reward" else "causal_lm"
        extra = more + ("\nclasses = 1" if task == "reward" else "")
        text = RECIPE.format(model=model, data=data, tokenizer=words, task=task, strategy=strategy, more=extra)
        text = text.replace("lr = 0.5", "lr = 0.1") if task == "reward" else text  # larger steps enlarge rounding
        (tmp_path / "tiny.toml").write_text(text.replace('name = "tiny"', f'name = "{name}"'))
        sets = tuple(word for one in sets if one for word in ("--set", one))
        ddpforge("run", "tiny.toml", *sets, ranks=ranks)
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [json.loads(line) for line in lines]
    keys = ["train/loss", "train/grad_norm", "eval/loss", "eval/rewards/chosen"]
    keys += [] if task == "kto" else ["eval/rewards/accuracies", "eval/rewards/margins"]
    for key in keys:
        first = [row[key] for row in found["one"] if key in row]
        assert first
        for name in found:
            assert [row[key] for row in found[name] if key in row] == pytest.approx(first, rel=1e-5, abs=1e-6), (
                key,
                name,
            )
    losses = [row["train/loss"] for row in found["one"] if "train/loss" in row]
    assert losses[-1] < losses[0]


def test_a_reward_model_trains_with_activation_checkpointing(
    ddpforge: Callable[..., str], tmp_path: Path, words: Path
) -> None:
    write(tmp_path / "train.jsonl", PAIRS)
    options = {"model": "sequence_classification", "data": "preferences", "task": "reward", "strategy": "ddp"}
    text = RECIPE.format(**options, tokenizer=words, more="classes = 1").replace("lr = 0.5", "lr = 0.1")
    (tmp_path / "tiny.toml").write_text(text)
    losses = []
    for name in ("off", "on"):
        sets = [f"name={name}", "train.length=2st", f"train.activation_checkpointing={str(name == 'on').lower()}"]
        ddpforge("run", "tiny.toml", *(f"--set={one}" for one in sets))
        rows = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


# ---------------------------------------------------------------------------------------------- TRL
def by_trl(kind: str, folder: Path, words: Path, rows: list[Any], **options: Any) -> list[dict[str, float]]:
    """Trains the model in `folder`/model by TRL for 3 steps of 8 samples; returns its rows."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    def built() -> Any:
        auto = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
        return auto.from_pretrained(folder / "model", dtype=torch.float32)

    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=8,
        max_steps=3,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        report_to=[],
        max_length=64,
        max_grad_norm=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        **options,
    )
    reference = {} if kind == "Reward" else {"ref_model": built()}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=built(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(words),
        **reference,
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "theirs"),
    [
        ("dpo", "", {"loss_type": ["sigmoid"]}),
        ("dpo", 'loss = "hinge"', {"loss_type": ["hinge"]}),
        ("dpo", 'loss = "ipo"\nbeta = 0.5', {"loss_type": ["ipo"], "beta": 0.5}),
        ("dpo", "length_normalized = true\nbeta = 2.0", {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
        ("reward", "", {}),
        ("kto", "undesirable_weight = 1.5", {"undesirable_weight": 1.5}),
    ],
    ids=["sigmoid", "hinge", "ipo", "normalized", "reward", "kto"],
)
def test_each_step_is_that_of_trl(
    ddpforge: Callable[..., str], tmp_path: Path, words: Path, kind: str, options: str, theirs: dict[str, Any]
) -> None:
    """Compares losses and gradient norms in fp32 with the same order.

    TRL's KTO takes unrelated answers from within a batch, so all its samples are in one.
    """
    pytest.importorskip("trl", reason="TRL is not installed")
    rows = (ANSWERS[:8] if kind == "kto" else PAIRS)[:24]
    write(tmp_path / "train.jsonl", rows)
    if kind == "reward":
        built = sequence_classification(model_type="llama", classes=1, options=OPTIONS)
        made = 'use = "sequence_classification"\nclasses = 1\npretrained = "model"'
    else:
        built, made = causal_lm(model_type="llama", options=OPTIONS), 'use = "causal_lm"\npretrained = "model"'
    built.save_pretrained(tmp_path / "model")

    data = "feedback" if kind == "kto" else "preferences"
    text = RECIPE.format(model="", data=data, tokenizer=words, task=kind, strategy="ddp", more="")
    text = text[: text.index("[model]")] + f"[model]\n{made}\n" + text[text.index("[data.train]") :]
    text = text.replace("[task]\n", '[data.sampler]\nuse = "sequential"\n[task]\n')
    text = text.replace("[optimizer]\n", f"{options}\n[optimizer]\n").replace("6st", "3st")
    (tmp_path / "tiny.toml").write_text(text)
    ddpforge("run", "tiny.toml")
    lines = (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()
    mine = [row for row in map(json.loads, lines) if "train/loss" in row]

    kinds = {"dpo": "DPO", "reward": "Reward", "kto": "KTO"}
    found = by_trl(kinds[kind], tmp_path, words, rows, **theirs)
    assert len(mine) == len(found) == 3
    for key, name in (("train/loss", "loss"), ("train/grad_norm", "grad_norm")):
        assert [row[key] for row in mine] == pytest.approx([row[name] for row in found], rel=1e-5, abs=1e-6), key
    for name in () if kind == "reward" else ("rewards/chosen", "rewards/rejected", "logps/chosen"):
        assert [row[f"train/{name}"] for row in mine] == pytest.approx(
            [row[name] for row in found], rel=1e-4, abs=1e-5
        ), name
    assert len({row["train/loss"] for row in mine}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "lora = { targets = ['q_proj'], r = 4 }"], ids=["whole", "adapters"])
def test_reference_of_a_file_gives_the_losses_of_a_reference_model(
    ddpforge: Callable[..., str], tmp_path: Path, words: Path, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train.jsonl", PAIRS)
    text = RECIPE.format(model="causal_lm", data="preferences", tokenizer=words, task="dpo", strategy="ddp", more=more)
    (tmp_path / "tiny.toml").write_text(text)
    ddpforge("run", "tiny.toml")
    reads = ("data.train.reference=ref.jsonl", "data.eval.reference=ref.jsonl", "task.reference=data", "name=read")
    sets = [word for one in reads for word in ("--set", one)]
    monkeypatch.chdir(tmp_path)
    assert write_reference("tiny.toml", Path("ref.jsonl"), batch=5) == len(PAIRS)
    ddpforge("run", "tiny.toml", *sets, ranks=2)
    losses = [
        [
            json.loads(line).get("train/loss")
            for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().split("\n")[:-1]
        ]
        for name in ("tiny", "read")
    ]
    assert [one for one in losses[1] if one] == pytest.approx([one for one in losses[0] if one], rel=1e-5)

    write(tmp_path / "train.jsonl", [*PAIRS[:2], PAIRS[3], PAIRS[2], *PAIRS[4:]])
    said = ddpforge("run", "tiny.toml", *sets, "--set", "name=moved", code=2)
    assert "ref.jsonl, line 4 is of another sample" in " ".join(said.split())

    write(tmp_path / "train.jsonl", PAIRS[1:])
    said = ddpforge("run", "tiny.toml", *sets, "--set", "name=other", code=2)
    assert "ref.jsonl has 24 rows, but the data has 23 samples" in " ".join(said.split())


def test_a_damaged_reference_file_is_refused_by_name(pairs: Callable[..., PreferenceData], tmp_path: Path) -> None:
    file = tmp_path / "ref.jsonl"
    marks = pairs(*PAIRS[:3]).marks()
    logps = [[-1.5, -2.25], [-3.0, -4.0], [-0.5, -0.25]]

    def read(content: bytes) -> list[list[float]] | None:
        file.write_bytes(content)
        return pairs(*PAIRS[:3], reference=file)._reference

    right = "".join(reference_lines(logps, marks)).encode()
    assert read(right) == logps
    for place in (*range(0, len(right), 7), len(right) - 2):
        for bit in (0, 2, 5):
            data = bytearray(right)
            data[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"ref.jsonl.*; write it again with `python -m"):
                read(bytes(data))
    lines = right.splitlines(keepends=True)
    for content, fault in (
        (b"", "no reference file of this version, or damaged"),
        (right[: len(right) // 2], "is damaged"),
        (b"".join(lines[:-1]), "is damaged"),
        (b"".join([lines[0], lines[2], lines[1], lines[3]]), "is damaged"),
        (b"".join(lines[1:]), "is of an older version, without a checksum"),
        (lines[0].replace(b'"reference": 2', b'"reference": 9') + b"".join(lines[1:]), "no reference file of this"),
        ("".join(reference_lines(logps[:2], marks[:2])).encode(), "has 2 rows, but the data has 3 samples"),
        ("".join(reference_lines(logps, [*marks[:2], 7])).encode(), "line 4 is of another sample"),
    ):
        with pytest.raises(ValueError, match=fault):
            read(content)


def test_the_reference_without_adapters_has_no_dropout(pairs: Callable[..., PreferenceData]) -> None:
    torch.manual_seed(0)
    options = OPTIONS | {"attention_dropout": 0.5}
    model = causal_lm(model_type="llama", options=options, lora=Adapters(**LORA, dropout=0.5)).train()
    model.get_submodule("model.layers.0.mlp").eval()
    modes = [one.training for one in model.modules()]
    data, task = pairs(*PAIRS[:3]), DPO()
    with torch.no_grad():
        found = task.loss(model, batch_of(data))[1]["reference"]
        assert [one.training for one in model.modules()] == modes
        assert torch.equal(found, task.log_probabilities(model.eval(), batch_of(data))[0])


@pytest.fixture
def base(tmp_path: Path, words: Path) -> Path:
    """Writes a saved causal model and recipes that train adapters of it: `sft.toml` and `dpo.toml`."""
    torch.manual_seed(0)
    causal_lm(model_type="llama", options=OPTIONS | {"pad_token_id": 0}).save_pretrained(tmp_path / "base")
    write(tmp_path / "train.jsonl", PAIRS)
    chats = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in PAIRS]
    write(tmp_path / "chats.jsonl", chats)
    lora = "lora = { targets = ['q_proj', 'v_proj'], r = 4 }"
    text = RECIPE.format(model="causal_lm", data="preferences", tokenizer=words, task="dpo", strategy="ddp", more=lora)
    start, _, rest = text.partition("model_type")
    text = f"{start}pretrained = 'base'\n{rest[rest.index('lora') :]}"
    (tmp_path / "dpo.toml").write_text(text)
    sft = text.replace('use = "preferences"\npath = "train.jsonl"', 'use = "chat"\npath = "chats.jsonl"')
    sft = sft.replace('use = "dpo"', 'use = "causal_lm"').replace("lr = 0.5", "lr = 2.0")
    (tmp_path / "sft.toml").write_text(sft)
    return tmp_path


def first_row(run: Path) -> dict[str, float]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_trained_adapters_of_another_run_are_not_references_by_being_switched_off(
    ddpforge: Callable[..., str], base: Path, task: str
) -> None:
    ddpforge("run", "sft.toml", "--set=name=sft")
    sets = ["--set=name=tuned", "--set=checkpoint.init_from=runs/sft", f"--set=task.use={task}"]
    if task == "kto":
        write(base / "train.jsonl", ANSWERS)
        text = (base / "dpo.toml").read_text()
        (base / "dpo.toml").write_text(text.replace('"preferences"', '"feedback"'))
    said = " ".join(ddpforge("run", "dpo.toml", *sets, code=2).split())
    assert "training starts with trained ones: checkpoint.init_from loads `model.layers.0" in said
    assert 'set task.reference = "copy"' in said
    assert not (base / "runs/tuned/metrics.jsonl").exists()
    ddpforge("run", "dpo.toml", *sets, "--set=task.reference=copy", "--set=train.length=3st")
    row = first_row(base / "runs/tuned")
    if task == "dpo":
        assert row["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert row["train/rewards/margins"] == 0
    else:
        assert row["train/kl"] == 0
    ddpforge("run", "dpo.toml", *sets, "--set=task.reference=copy")  # resumes


@pytest.mark.parametrize("lora", [True, False])
def test_a_reference_file_of_another_model_is_refused_at_the_first_batch_only(
    ddpforge: Callable[..., str], base: Path, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    if not lora:
        recipe = (base / "dpo.toml").read_text()
        (base / "dpo.toml").write_text("".join(x + "\n" for x in recipe.splitlines() if not x.startswith("lora")))
    assert write_reference("dpo.toml", Path("right.jsonl")) == len(PAIRS)
    torch.manual_seed(1)
    causal_lm(model_type="llama", options=OPTIONS | {"pad_token_id": 0}).save_pretrained(base / "other")
    assert write_reference("dpo.toml", Path("other.jsonl"), ["model.pretrained=other"]) == len(PAIRS)
    for name, code in (("other", 2), ("right", 0)):
        sets = [f"--set=name={name}", "--set=task.reference=data", f"--set=data.train.reference={name}.jsonl"]
        sets += [f"--set=data.eval.reference={name}.jsonl", "--set=train.length=3st"]
        said = " ".join(ddpforge("run", "dpo.toml", *sets, code=code).split())
        if code:
            assert "the reference file is of another model: for an answer of the first batch (" in said
            assert "the model that training starts from gives -" in said
            assert "train/loss" not in (base / "runs" / name / "metrics.jsonl").read_text()
    assert first_row(base / "runs/right")["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    sets[-1] = "--set=train.length=6st"
    ddpforge("run", "dpo.toml", *sets)  # resumes: the weights differ from those of the file


def test_a_new_head_under_adapters_is_trained_and_exported(
    ddpforge: Callable[..., str], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    head = "use = 'sequence_classification'\nclasses = 1\noptions = { pad_token_id = 0 }"
    text = (base / "dpo.toml").read_text().replace('use = "causal_lm"', head).replace('use = "dpo"', 'use = "reward"')
    (base / "reward.toml").write_text(text)
    ddpforge("run", "reward.toml", "--set=name=reward")
    model = load(base / "runs/reward").model()
    tokens = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine = model(input_ids=tokens).logits
    ddpforge("export", "reward", "--format", "peft", "-o", "adapters/")
    ddpforge("export", "reward", "--merge", "-o", "merged/")
    plain = AutoModelForSequenceClassification.from_pretrained(base / "base", num_labels=1, pad_token_id=0)
    assert not torch.allclose(plain.score.weight, model.score.weight)
    for theirs in (
        PeftModel.from_pretrained(plain, base / "adapters"),
        AutoModelForSequenceClassification.from_pretrained(base / "merged"),
    ):
        with torch.no_grad():
            torch.testing.assert_close(theirs.eval()(input_ids=tokens).logits, mine, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_reference_values_that_are_not_finite_are_refused(
    pairs: Callable[..., PreferenceData], tmp_path: Path, value: float
) -> None:
    data, file = pairs(*PAIRS[:2]), tmp_path / "ref.jsonl"
    file.write_text("".join(reference_lines([[-1.0, -2.0], [-1.0, value]], data.marks())))
    with pytest.raises(ValueError, match=r"ref.jsonl, line 3: the log-probabilities \[-1.0, .*\] are not finite"):
        pairs(*PAIRS[:2], reference=file)


def test_the_writer_of_reference_files_replaces_a_link_and_not_its_target(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train.jsonl", PAIRS)
    text = RECIPE.format(model="causal_lm", data="preferences", tokenizer=words, task="dpo", strategy="ddp", more="")
    (tmp_path / "tiny.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("ref.jsonl", ".ref.jsonl.part"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("the user's own")
    assert write_reference("tiny.toml", Path("ref.jsonl")) == len(PAIRS)
    assert (tmp_path / "target").read_text() == "the user's own"
    assert not (tmp_path / "ref.jsonl").is_symlink()
    assert len((tmp_path / "ref.jsonl").read_text().splitlines()) == len(PAIRS) + 1


SOURCES = """
[data.train.a]
use = "preferences"
path = "train.jsonl"
tokenizer = "{tokenizer}"
"""


@pytest.mark.parametrize(
    ("change", "out", "said"),
    [
        ({}, "none/ref.jsonl", "there is no folder none"),
        ({}, ".", "is a folder"),
        ({"[data.train]": SOURCES + "[data.train.b]"}, "ref.jsonl", r"\[data.train\] has several"),
        (
            {'use = "dpo"': 'use = "reward"', 'use = "causal_lm"': 'use = "sequence_classification"\nclasses = 1'},
            "ref.jsonl",
            "the task compares nothing with a reference",
        ),
    ],
)
def test_what_has_no_reference_is_refused_and_nothing_is_written(
    tmp_path: Path, words: Path, change: dict[str, str], out: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train.jsonl", PAIRS)
    text = RECIPE.replace("{{", "{").replace("}}", "}").replace("{more}", "").replace("{strategy}", "ddp")
    text = text.replace("{model}", "causal_lm").replace("{data}", "preferences").replace("{task}", "dpo")
    for old, new in change.items():
        text = text.replace(old, new)
    (tmp_path / "tiny.toml").write_text(text.replace("{tokenizer}", str(words)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        write_reference("tiny.toml", Path(out))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.toml", "train.jsonl"]
