"""Losses of sources: from the outputs of the step, divided once, and only if they are those of the same loss."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.contrastive import Contrastive
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.loss_function import LossFunction
from ddpforge.builtin.tasks.masked_lm import MaskedLM
from ddpforge.builtin.tasks.multilabel import Multilabel
from ddpforge.builtin.tasks.regression import Regression
from ddpforge.builtin.tasks.segmentation import Segmentation
from ddpforge.builtin.tasks.sequence_classification import SequenceClassification
from ddpforge.data import MicroBatch
from ddpforge.data.pytree import select
from ddpforge.features.mixture import MixtureSampler
from ddpforge.features.source_losses import SourceLosses, source_losses
from ddpforge.interfaces import Contract, Task

SOURCES = [1, 0, 1, 1, 0, 1]
CLASSES = torch.tensor([0, 1, 2, 1, 0, 2])


def linear(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Pooled(nn.Module):
    """Classifies tokens by the mean of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 3)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.embedding(tokens).mean(dim=1)
        return found


TOKENS = torch.arange(24).view(6, 4) * 5 % 9
TARGETS = torch.where(torch.arange(24).view(6, 4) % 5 == 0, -100, TOKENS)
CASES: dict[str, tuple[Callable[[], Task], Callable[[], nn.Module], Any]] = {
    "classification": (Classification, lambda: linear(4, 3), (random(6, 4), CLASSES)),
    "weighted": (
        partial(Classification, class_weights=[1.0, 5.0, 0.5], label_smoothing=0.1, ignore_index=2),
        lambda: linear(4, 3),
        (random(6, 4), CLASSES),
    ),
    "sequence_classification": (SequenceClassification, Pooled, (TOKENS, CLASSES)),
    "language_modeling": (
        partial(LanguageModeling, label_smoothing=0.1),
        lambda: nn.Sequential(nn.Embedding(9, 4), linear(4, 9)),
        (TOKENS, TARGETS),
    ),
    "regression": (partial(Regression, loss="huber"), lambda: linear(4, 2), (random(6, 4), random(6, 2))),
    "multilabel": (Multilabel, lambda: linear(4, 2), (random(6, 4), CLASSES[:, None] == torch.tensor([1, 2]))),
    "segmentation": (
        partial(Segmentation, ignore_index=2),
        lambda: nn.Conv2d(1, 3, 1),
        (random(6, 1, 2, 2), TOKENS.view(6, 2, 2) % 3),
    ),
    "a function": (
        lambda: LossFunction(nn.functional.l1_loss, reduction="mean", metrics=()),
        lambda: linear(4, 2),
        (random(6, 4), random(6, 2)),
    ),
}


def parts(task: Task, *, compile: str = "off", splits: tuple[Any, ...] = (), mixes: bool = True) -> Any:
    """Returns a stub of `Dealt` for a task, and two sources if it `mixes`."""
    order = MixtureSampler([4, 8], (), seed=0, global_batch=6)
    order.names = ("a", "b")
    contract = Contract(clipping="never", accumulation="autograd", splits_forward=splits)
    recipe = SimpleNamespace(train=SimpleNamespace(compile=compile), strategy=SimpleNamespace(use="ddp"))
    return SimpleNamespace(
        task=task,
        trains=True,
        sampler=order if mixes else None,
        data={"train": SimpleNamespace(source_of=np.asarray)},
        recipe=recipe,
        strategy=SimpleNamespace(contract=contract),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_source_is_that_of_a_forward_pass_of_its_samples(name: str) -> None:
    make, build, batch = CASES[name]
    task, model = make(), build()
    loss, outputs = task.loss(model, batch)
    measure = source_losses(parts(task))
    assert measure is not None
    micro = MicroBatch(batch, 6, 6, True, 0, 0, places=np.array(SOURCES))
    totals = measure.totals_of(measure.samples(micro), loss, outputs, batch)
    assert list(totals) == ["a/loss", "b/loss"]
    for number, total in enumerate(totals.values()):
        alone = select(batch, [row for row, source in enumerate(SOURCES) if source == number], 6)
        counted = task.count(alone)
        assert total.sum.item() == pytest.approx(task.loss(model, alone)[0].item(), rel=1e-5)
        assert float(total.count) == (SOURCES.count(number) if counted is None else counted)
        assert not total.sum.requires_grad
    assert sum(total.sum.item() for total in totals.values()) == pytest.approx(loss.item(), rel=1e-5)


def test_a_batch_without_samples_of_a_source_reports_nothing_for_it() -> None:
    measure = SourceLosses(Classification(), ["a", "b"], np.asarray, compiled=False)
    batch = (random(2, 3), CLASSES[:2])
    micro = MicroBatch(batch, 2, 2, True, 0, 0, places=np.array([1, 1]))
    assert {name: list(one.rows) for name, one in measure.samples(micro).items()} == {"b": [0, 1]}
    assert measure.samples(micro._replace(samples=0)) == {}
    assert measure.samples(micro._replace(places=None)) == {}


class Packed(Classification):
    """Takes batches whose samples are joined to one row."""

    def loss_from_outputs(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns the loss of all samples, because it cannot cut the row."""
        return self.sum_of_losses(outputs[0], batch[1][0])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the loss."""
        return self.sum_of_losses(batch[0][0], batch[1][0]), batch[0]


def test_losses_that_do_not_add_up_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    task, batch = Packed(), (random(1, 6, 3), CLASSES[None])
    measure = SourceLosses(task, ["a", "b"], np.asarray, compiled=False)
    micro = MicroBatch(batch, 6, 6, True, 0, 0, places=np.array(SOURCES))
    loss, outputs = task.loss(nn.Identity(), batch)
    assert measure.totals_of(measure.samples(micro), loss, outputs, batch) == {}
    assert measure.samples(micro) == {}
    assert "reports no losses of single sources: they add up to" in caplog.text


class Graph:
    """A batch of graphs, which is moved as a whole."""

    def to(self, device: Any) -> Any:
        """Returns itself."""
        return self


def test_batches_that_cannot_be_cut_into_samples_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    measure = SourceLosses(Classification(), ["a", "b"], np.asarray, compiled=False)
    micro = MicroBatch((Graph(), CLASSES), 6, 6, True, 0, 0, places=np.array(SOURCES))
    assert measure.samples(micro) == measure.samples(micro) == {}
    assert caplog.text.count("a Graph cannot be cut into samples") == 1


class Other(Classification):
    """Overrides the loss only."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns twice the loss."""
        loss, outputs = super().loss(model, batch)
        return 2 * loss, outputs


class Both(Other):
    """Overrides both."""

    def loss_from_outputs(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns twice the loss."""
        return 2 * super().loss_from_outputs(outputs, batch)


@pytest.mark.parametrize(
    ("task", "more", "reason"),
    [
        (Both(), {}, ""),
        (Other(), {}, "Other has no `loss_from_outputs`"),
        (MaskedLM(mask_token=3), {}, "MaskedLM has no `loss_from_outputs`"),
        (LanguageModeling(loss_chunk=8), {}, "LanguageModeling has no `loss_from_outputs`"),
        (Contrastive(), {}, "the loss of Contrastive compares samples"),
        (Classification(), {"splits": ("positions",)}, "splits forward passes over ranks here"),
    ],
)
def test_losses_of_sources_that_are_not_known_are_named_in_the_log(
    task: Task, more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ddpforge")
    found = source_losses(parts(task, **more))
    assert (found is None) == bool(reason)
    assert reason in caplog.text
    assert source_losses(parts(task, mixes=False)) is None
