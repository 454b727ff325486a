"""Losses that compare all samples of a step with each other: equal on any number of ranks, or refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Line, Plain
from support.stages import staged
from torch import Tensor, nn

from ddpforge.builtin.tasks.contrastive import Contrastive
from ddpforge.data import MicroBatch, RankShare
from ddpforge.data.batch_assignment import Even
from ddpforge.errors import UsageError
from ddpforge.interfaces import Ranks, World
from ddpforge.testing.doubles import in_threads
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.loaders import open_data
from ddpforge.training.step import Stepper

SAMPLES = 21
GENERATOR = torch.Generator().manual_seed(0)
VIEWS = torch.randn(SAMPLES, 2, 3, generator=GENERATOR)


class Pairs:
    random = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return VIEWS[index, 0], VIEWS[index, 1]


def world_of(one: Ranks) -> World:
    return World(global_ranks=one, dp_ranks=one, device=torch.device("cpu"), local_rank=one.rank)


def started(one: Ranks, model: nn.Module) -> Contrastive:
    task = Contrastive(temperature=0.5)
    task.start(model, world_of(one))
    return task


# ---------------------------------------------------------------------------------------------- results
def by_hand(weight: Tensor, views: Tensor) -> tuple[Tensor, int]:
    """Returns the loss of all samples together, and the number of first views nearest to their second view."""
    first, second = (nn.functional.normalize(views[:, i] @ weight.T, dim=-1) for i in (0, 1))
    similar = first @ second.T / 0.5
    places = torch.arange(len(views))
    there, back = (nn.functional.cross_entropy(x, places, reduction="sum") for x in (similar, similar.T))
    return (there + back) / 2, int((similar.argmax(1) == places).sum())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_and_gradient_over_ranks_equal_those_of_all_samples_together(ranks: int) -> None:
    """Seven samples: one rank has fewer samples than the others."""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected, hits = by_hand(weight, VIEWS[:7])
    (gradient,) = torch.autograd.grad(expected, weight)

    def run(one: Ranks) -> tuple[Tensor, Tensor, float]:
        model = nn.Linear(3, 4, bias=False)
        model.load_state_dict({"weight": weight.detach()})
        mine = VIEWS[7 * one.rank // ranks : 7 * (one.rank + 1) // ranks]
        task = started(one, model)
        batch = (mine[:, 0], mine[:, 1])
        loss, outputs = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert model.weight.grad is not None
        return loss.detach(), model.weight.grad, float(task.metrics(outputs, batch)["accuracy"].sum)

    found = in_threads(ranks, run)
    assert sum(float(loss) for loss, _, _ in found) == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(torch.stack([grad for _, grad, _ in found]).sum(0), gradient)
    assert sum(right for *_, right in found) == hits


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_evaluation_compares_the_same_samples_on_any_ranks(ranks: int) -> None:
    """21 samples in batches of at most 8: three batches of 7, on any number of ranks."""

    def run(one: Ranks) -> dict[str, float]:
        model = nn.Identity()
        order = Even(Pairs(), 8)
        share = RankShare(one.rank, ranks, -(-8 // ranks))
        fetching: dict[str, Any] = {"seed": 0, "workers": 0, "prefetch": 2, "pin": False, "drop_last": False}
        return Evaluator(
            world=world_of(one),
            replica=Plain().holding(model, None),  # type: ignore[arg-type]
            task=started(one, model),
            sets={"": open_data(Pairs(), order=order, global_batch=8, share=share, **fetching)},
            callbacks={},
            seed=0,
        ).evaluate(0)

    batches = [by_hand(torch.eye(3), VIEWS[first : first + 7]) for first in (0, 7, 14)]
    expected = {
        "eval/loss": sum(loss.item() for loss, _ in batches) / SAMPLES,
        "eval/accuracy": sum(hits for _, hits in batches) / SAMPLES,
    }
    assert all(found == pytest.approx(expected, rel=1e-6) for found in in_threads(ranks, run))


@pytest.mark.parametrize(("samples", "sizes"), [(21, [7, 7, 7]), (8, [8]), (9, [4, 5]), (3, [3]), (25, [6, 6, 6, 7])])
def test_evaluation_batches_have_nearly_equal_sizes(samples: int, sizes: list[int]) -> None:
    order = Even(range(samples), 8)
    assert [order.size(step) for step in range(order.steps_per_epoch)] == sizes
    assert [n for step in range(order.steps_per_epoch) for n in order(step)] == [*range(samples)]
    assert order.smallest == min(sizes)


# ---------------------------------------------------------------------------------------------- refusals
RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 64
outputs = 8
[data.train]
use = "two_views"
of = { use = "digits", split = "train" }
[data.eval]
use = "two_views"
of = { use = "digits", split = "test" }
[task]
use = "contrastive"
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "1ep"
global_batch = 64
"""


IN_STEPS = ["train.eval_every=9st", "checkpoint.every=9st"]


@pytest.fixture
def problems_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mapping[str, str]]:
    """Returns a function that returns the problems of the recipe under `sets` on `ranks` ranks, by key."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)

    def tell(*sets: str, ranks: int = 2) -> Mapping[str, str]:
        return staged("run.toml", *sets, ranks=ranks).errors()

    return tell


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        (["train.micro_batch=16"], "train.micro_batch", "would cut it into 2 forward passes of each rank"),
        (["train.virtual_ranks=4"], "train.virtual_ranks", "would compute each virtual rank separately"),
        (["train.eval_batch=16"], "train.eval_batch", "would compare others in evaluations"),
        (
            ["train.global_batch=2", "train.length=1ep"],
            "data.train",
            "a batch of [data.train] has 1 sample(s) for 2 ranks",
        ),
        (
            ["data.sampler={use='batch_size_warmup', start=1, until='9st'}", "train.length=20st", *IN_STEPS],
            "data.sampler",
            "step 0 of the sampler Growing has 1 sample(s) for 2 ranks",
        ),
    ],
)
def test_settings_that_split_a_step_are_refused(
    problems_of: Callable[..., Mapping[str, str]], sets: list[str], key: str, said: str
) -> None:
    found = problems_of(*sets)
    assert [*found] == [key]
    assert "Contrastive compares all samples of a" in found[key]
    assert said in found[key]


def test_settings_that_keep_a_step_whole_are_accepted(problems_of: Callable[..., Mapping[str, str]]) -> None:
    """1,437 samples: 29 are left at the end of an epoch, for 2 or 4 ranks."""
    assert problems_of() == problems_of(ranks=4) == {}
    assert problems_of("train.micro_batch=32") == problems_of("train.global_batch=2", "train.drop_last=true") == {}
    assert problems_of("train.global_batch=2", "train.length=5st") == {}
    assert problems_of("data.sampler={use='reuse_batches', times=2, steps=5}", "train.length=9st", *IN_STEPS) == {}


def test_an_evaluation_set_needs_a_sample_for_every_rank(problems_of: Callable[..., Mapping[str, str]]) -> None:
    Path("few.py").write_text("import torch\n\ndef few():\n    return [(torch.zeros(64), torch.zeros(64))] * 3\n")
    found = problems_of("data.eval={use='./few.py:few'}", ranks=4)
    said = (
        "Contrastive compares all samples of a batch with each other, but a batch of [data.eval] has 3 sample(s) for 4"
    )
    assert found == {"data.eval": f"{said} ranks"}


def test_an_evaluation_run_needs_a_sample_for_every_rank(problems_of: Callable[..., Mapping[str, str]]) -> None:
    Path("few.py").write_text("import torch\n\ndef few():\n    return [(torch.zeros(64), torch.zeros(64))] * 3\n")
    found = staged("run.toml", "data.eval={use='./few.py:few'}", ranks=4, trains=False).errors()
    assert "a batch of [data.eval] has 3 sample(s) for 4 ranks" in found["data.eval"]


@pytest.mark.parametrize("micro", [{"samples": 0}, {"last": False}, {"number": 1}])
def test_a_batch_that_turns_out_to_be_split_stops_training(micro: dict[str, Any]) -> None:
    """Examples: the end of a stream, or a step of a sampler that is larger than the others."""
    batch = MicroBatch((torch.ones(1, 2), torch.ones(1, 2)), 1, 3, True, 0, 0)._replace(**micro)
    replica = Plain().holding(Line(), torch.optim.SGD([torch.zeros(1)], lr=0.1))
    stepper = Stepper(replica.world, replica, started(replica.ranks, Line()), seed=0)
    with pytest.raises(UsageError, match="a batch of 3 samples is not one forward pass on every rank"):
        stepper.train_step(1, batch, [batch], measure=False)
