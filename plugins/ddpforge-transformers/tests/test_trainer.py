"""`compute_loss` of a subclass of transformers' Trainer as a task; data collators."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.errors import UsageError
from ddpforge.recipe import load_recipe
from ddpforge.recipe.training_arguments import read_arguments, recipe_of
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments, default_data_collator

from ddpforge_transformers.data import Collated
from ddpforge_transformers.trainer import adopted

CODE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer


class Samples(Dataset):
    def __init__(self, n: int = 96) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 60, (n, 12), generator=generator)
        self.labels = (self.ids[:, 0] > 40).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.labels[i]}


def net() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rest = {"vocab_size": 60, "max_position_embeddings": 16, "num_labels": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **rest, **none))


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights
        self.loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, torch.tensor(self.class_weights))
        self.log({"doubled": 2 * loss.detach()})
        return (loss, outputs) if return_outputs else loss
"""

RECIPE = """
recipe = 2
name = "weighted"
model = { use = "./train.py:net" }
data.train = { use = "./train.py:Samples" }
data.eval = { use = "./train.py:Samples", n = 40 }
data.sampler = { use = "sequential" }
task = { use = "./train.py:WeightedTrainer", class_weights = [1.0, 3.0], metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 1e-3, no_decay = ["bias", "norm"] }
schedule = { use = "hf_linear", warmup = "4st" }
[train]
length = "20st"
global_batch = 16
micro_batch = 8
clip_norm = 1.0
[track]
every = "1st"
"""


def parts() -> Any:
    """Returns the classes of the user's script."""
    found: dict[str, Any] = {"__name__": "train"}
    exec(CODE, found)
    return found


def losses_of_the_real_trainer(folder: Path) -> list[float]:
    """Trains with transformers' own loop: 20 steps, 2 micro-batches each, weights decay, a linear schedule."""
    mine = parts()

    class InOrder(mine["WeightedTrainer"]):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        warmup_steps=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(model=mine["net"](), args=arguments, train_dataset=mine["Samples"](), class_weights=[1.0, 3.0])
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_compute_loss_of_a_trainer_has_the_curve_of_the_trainer(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    """Trains an unchanged script: the recipe names its model, its dataset and its Trainer."""
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "r.toml").write_text(RECIPE)
    ddpforge("run", "r.toml")
    ddpforge("run", "r.toml", "--set", "name=two", "--set", "train.micro_batch=8", ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "runs/weighted/metrics.jsonl").read_text().splitlines()]
    ours = [row["train/loss"] for row in rows if "train/loss" in row]
    assert ours == pytest.approx(losses_of_the_real_trainer(tmp_path / "theirs"), rel=1e-6)
    assert [row["train/doubled"] for row in rows if "train/loss" in row] == pytest.approx([2 * x for x in ours])
    two = [json.loads(line) for line in (tmp_path / "runs/two/metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in two if "train/loss" in row] == pytest.approx(ours, rel=1e-6)
    assert rows[-1]["eval/accuracy"] == two[-1]["eval/accuracy"]


class _Net(nn.Module):
    """Two logits, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


BATCH = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), "labels": torch.tensor([0, 1, 1, 0])}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_label_smoothing_is_that_of_training_arguments(smoothing: float, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=smoothing, report_to=[], use_cpu=True)
    mine = parts()
    model, data = mine["net"](), mine["Samples"]()
    batch = default_data_collator([data[number] for number in range(4)])
    theirs = Trainer(model=model, args=arguments).compute_loss(model, dict(batch))
    task = adopted(Trainer)(label_smoothing=smoothing)
    loss, _ = task.loss(model, batch)
    torch.testing.assert_close(loss / 4, theirs)
    assert task.predict(model, batch)["output"].shape == (4, 2)


class ReadsState(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return outputs["loss"] * (self.state.global_step + 1), outputs


class ReadsArguments(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return outputs["loss"] * self.args.max_steps, outputs


class HasOwnStep(Trainer):  # type: ignore[misc]
    def training_step(self, *arguments: Any) -> Any:
        return super().training_step(*arguments)


class ReturnsLosses(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return outputs["logits"].sum(1), outputs


class ReturnsLossOnly(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs)["loss"]


class ReturnsNothing(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        model(**inputs)


class DividesByItems(Trainer):  # type: ignore[misc]
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
        return loss / num_items_in_batch, outputs


class HasOwnEvaluation(Trainer):  # type: ignore[misc]
    def evaluate(self, *arguments: Any) -> Any:
        return super().evaluate(*arguments)


@pytest.mark.parametrize(("trainer", "options"), [(ReturnsLossOnly, {}), (DividesByItems, {"over": "targets"})])
def test_other_forms_of_compute_loss_have_the_same_sum(trainer: type[Trainer], options: dict[str, Any]) -> None:
    model = _Net()
    loss, _ = adopted(trainer)(**options).loss(model, BATCH)
    torch.testing.assert_close(loss, 4 * model(**BATCH)["loss"])


def test_columns_that_the_model_does_not_take_are_named() -> None:
    with pytest.raises(UsageError, match=r"unexpected keyword argument 'text'; the batch has x, labels, text"):
        adopted(ReturnsLossOnly)().loss(_Net(), BATCH | {"text": ["a"] * 4})


@pytest.mark.parametrize(
    ("trainer", "complaint"),
    [
        (ReturnsNothing, r"ReturnsNothing\.compute_loss returns .*not one number"),
        (DividesByItems, "divides by num_items_in_batch, which is None for a loss over samples"),
        (HasOwnEvaluation, r"HasOwnEvaluation\.evaluate would not be called"),
        (ReadsState, r"compute_loss uses self\.state, which only a running Trainer has"),
        (ReadsArguments, r"compute_loss uses self\.args\.max_steps, which only a running Trainer has"),
        (HasOwnStep, r"HasOwnStep\.training_step would not be called: only compute_loss is"),
        (ReturnsLosses, r"ReturnsLosses\.compute_loss returns .*not one number"),
    ],
)
def test_what_needs_a_running_trainer_is_refused_by_name(trainer: type[Trainer], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        adopted(trainer)().loss(_Net(), BATCH)


def test_batch_that_is_not_a_dict_is_refused() -> None:
    with pytest.raises(UsageError, match="compute_loss takes a dict, but the data gives a list"):
        adopted(Trainer)().loss(_Net(), [BATCH["x"], BATCH["labels"]])


# ---------------------------------------------------------------------------------------------- collators
class Words(Dataset[dict[str, Any]]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [3] * (index + 2), "attention_mask": [1] * (index + 2), "label": index % 2}


def test_collator_pads_the_samples_of_a_batch(tokenizer: Path) -> None:
    data = Collated(of=Words(), collator="DataCollatorWithPadding", tokenizer=str(tokenizer))
    batch = data.collate([data[number] for number in range(4)])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (4, 5),
        "attention_mask": (4, 5),
        "labels": (4,),
    }
    assert batch["attention_mask"].sum().item() == 2 + 3 + 4 + 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"collator": "DataCollatorPadding"}, "did you mean `DataCollatorWithPadding`"),
        ({"collator": "DataCollatorWithPadding"}, "needs a tokenizer"),
        ({"collator": "DataCollatorForLanguageModeling", "tokenizer": "T"}, "masks tokens at random"),
        ({"collator": "DataCollatorWithPadding", "tokenizer": "T", "options": {"size": 3}}, "refuses its options"),
    ],
)
def test_collator_that_cannot_be_used_is_refused(options: dict[str, Any], complaint: str, tokenizer: Path) -> None:
    known = options | ({"tokenizer": str(tokenizer)} if "tokenizer" in options else {})
    with pytest.raises(ValueError, match=complaint):
        Collated(of=Words(), **known)


def test_trainer_and_collator_train_an_unchanged_script(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    recipe = RECIPE.replace(
        'data.train = { use = "./train.py:Samples" }',
        'data.train = { use = "collated", of = { use = "./train.py:Samples" }, collator = "default_data_collator" }',
    )
    (tmp_path / "r.toml").write_text(recipe)
    ddpforge("run", "r.toml", "--set", "train.length=6st")
    rows = [json.loads(line) for line in (tmp_path / "runs/weighted/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["train/loss"] == pytest.approx(0.693974, rel=1e-5)


def test_arguments_of_a_trainer_become_a_recipe(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path / "exp"), lr_scheduler_type="cosine", bf16=True, use_cpu=True, report_to=[], weight_decay=0.1
    )
    (tmp_path / "args.json").write_text(arguments.to_json_string())
    text = recipe_of(read_arguments(tmp_path / "args.json"), devices=2)
    (tmp_path / "r.toml").write_text(text.replace('pretrained = "…"', 'model_type = "llama"'))
    found = load_recipe(tmp_path / "r.toml").recipe
    assert (found.train.global_batch, found.train.precision, found.schedule.use) == (16, "bf16", "hf_cosine")
    assert "without a key" not in text
