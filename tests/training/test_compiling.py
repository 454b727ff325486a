"""Losses that are compiled with the model."""

from typing import Any

import pytest
import torch
from support.forked import Training, in_ranks, train
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.builtin.tasks.segmentation import Segmentation
from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import Task, Total
from ddpforge.strategies.single import Single
from ddpforge.training.assemble import compile_losses
from ddpforge.training.step import Stepper

TASKS = {
    "classification": (Classification(label_smoothing=0.1), (8, 10), (8,)),
    "language_modeling": (LanguageModeling(ignore_index=3), (2, 5, 10), (2, 5)),
    "segmentation": (Segmentation(ignore_index=3), (2, 10, 4, 4), (2, 4, 4)),
}


class Given(nn.Module):
    """Model whose outputs are its parameters."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(shape))

    def forward(self, _: Tensor) -> Tensor:
        return self.logits.to(torch.bfloat16)


def loss_and_gradient(task: Task, outputs: Given, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss, _ = task.loss(outputs, (targets, targets))
    (gradient,) = torch.autograd.grad(loss, outputs.logits)
    return loss.detach(), gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "language_modeling" else pytest.param(name, marks=pytest.mark.full) for name in TASKS]
)
def test_a_compiled_loss_is_the_same_and_saves_no_float32_logits(name: str) -> None:
    task, shape, places = TASKS[name]
    outputs, targets = Given(shape), torch.randint(10, places)
    eager = loss_and_gradient(task, outputs, targets)
    compile_losses(task, train(compile="default"))
    for ours, theirs in zip(loss_and_gradient(task, outputs, targets), eager, strict=True):
        torch.testing.assert_close(ours, theirs)

    def kept() -> set[torch.dtype]:
        found: set[torch.dtype] = set()

        def note(saved: Tensor) -> Tensor:
            found.add(saved.dtype) if saved.numel() >= outputs.logits.numel() else None
            return saved

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            task.loss(outputs, (targets, targets))
        return found

    assert torch.float32 not in kept()  # only the logits as the model returns them

    with pytest.raises(UsageError, match="do not fit together"):
        loss_and_gradient(task, outputs, torch.full(places, 99))


class Words(nn.Module):
    """Model of two layers for four tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(tokens))
        return found


class Judged(LanguageModeling):
    """Task that needs the logits."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Total]:
        return {"largest": Total(outputs.max(), 1)}


@pytest.mark.parametrize(
    ("task", "options", "graphs"),
    [
        (LanguageModeling(), {"compile": "default"}, 1),
        (Judged(), {"compile": "default"}, 2),
        (LanguageModeling(), {"compile": "default", "compile_blocks": True}, 1),  # no blocks here: the loss alone
        (LanguageModeling(), {}, 0),
    ],
)
def test_model_and_loss_are_one_graph_if_only_the_loss_is_used(
    task: Task, options: dict[str, Any], graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []
    compiler = torch.compile
    torch.compiler.reset()

    def capture(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, mode=None: compiler(function, backend=capture))
    tokens = torch.tensor([[0, 1, 2], [3, 2, 1]])
    micro = MicroBatch((tokens, tokens), samples=2, step_samples=2, number=0, last=True, shard=0)

    def in_one_process(rank: int) -> Any:
        training = Training(Single(), Words, **options)
        compile_losses(task, train(**options))
        steps = Stepper(training.world, training.replica, task, seed=0)
        totals, _ = steps.train_step(1, micro, [micro], measure=True)
        return float(totals["loss"].sum), len(captured)

    ((loss, found),) = in_ranks(1, in_one_process)
    assert loss == pytest.approx(LanguageModeling().loss(Words(), (tokens, tokens))[0].item())
    assert found == graphs


def test_graph_of_model_and_loss_names_targets_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: compiler(function, backend="eager"))
    tokens = torch.tensor([[0, 1, 2], [3, 2, 1]])
    targets = torch.tensor([[0, 1, 2], [3, 9, 1]])

    def in_one_process(rank: int) -> Any:
        training = Training(Single(), Words, compile="default")
        task = LanguageModeling()
        compile_losses(task, train(compile="default"))
        steps = Stepper(training.world, training.replica, task, seed=0)
        for number, labels in enumerate((tokens, targets)):
            micro = MicroBatch((tokens, labels), samples=2, step_samples=2, number=number, last=True, shard=0)
            try:
                steps.train_step(number + 1, micro, [micro], measure=True)
            except UsageError as error:
                return number, error.message
        return None

    ((number, message),) = in_ranks(1, in_one_process)
    assert number == 1
    assert "targets int64 [2, 3] from 0 to 9 do not fit together" in message


class Odd(Task):
    """Task that lists a missing method in `compiles`."""

    compiles = ("mean",)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        raise NotImplementedError


def test_compiles_with_an_unknown_method_is_refused() -> None:
    compile_losses(Odd(), train())  # nothing is compiled
    with pytest.raises(PluginError, match=r"Odd\.compiles names `mean`, which is not a method of the task"):
        compile_losses(Odd(), train(compile="default"))
