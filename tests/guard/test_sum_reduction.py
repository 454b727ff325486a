"""Detection of a mean loss from one batch; other losses are accepted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import UsageError
from ddpforge.guard.sum_reduction import check_sum_reduction
from ddpforge.interfaces import Task

FOUR = torch.tensor([1.0, 2.0, 3.0, 6.0])


class Given(Task):
    """Task whose loss is `reduce` of the model's outputs, and whose count is `items` of a batch."""

    def __init__(self, reduce: Callable[[Tensor], Tensor], items: Callable[[Any], Any] = lambda batch: None) -> None:
        self.reduce, self.items = reduce, items

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch)
        return self.reduce(outputs), outputs

    def count(self, batch: Any) -> Any:
        return self.items(batch)


def refused(
    reduce: Callable[[Tensor], Tensor], batch: Tensor = FOUR, model: nn.Module | None = None, **more: Any
) -> bool:
    try:
        check_sum_reduction(model or nn.Identity(), Given(reduce, **more), batch, len(batch))
    except UsageError:
        return True
    return False


def test_a_mean_is_refused_with_its_values_and_a_hint() -> None:
    with pytest.raises(
        UsageError,
        match=r"(?m)^Given\.loss returns a mean over the batch: 3 for 4 samples, and 1\.5 and 4\.5 for its halves$",
    ) as caught:
        check_sum_reduction(nn.Identity(), Given(torch.mean), FOUR, 4)
    assert 'reduction="sum"' in caught.value.hints[0]


def test_a_declared_mean_with_weights_of_its_own_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Weighs samples as class weights do: the mean of a batch is not the mean of its halves."""
    task = Given(lambda outputs: len(outputs) * (outputs * outputs.exp()).sum() / outputs.exp().sum())
    check_sum_reduction(nn.Identity(), task, FOUR, 4)
    assert not caplog.records, "tasks that declare nothing may compare their samples"
    task.reduction = "mean"  # type: ignore[attr-defined]
    check_sum_reduction(nn.Identity(), task, FOUR, 4)
    assert "the curve depends on train.micro_batch and the number of ranks" in caplog.text


@pytest.mark.parametrize("batch", [FOUR, -FOUR, FOUR[:2], FOUR[:3], torch.ones(7)])
def test_means_of_any_sign_and_of_odd_numbers_of_samples_are_refused(batch: Tensor) -> None:
    assert refused(torch.mean, batch)
    assert not refused(torch.sum, batch)


def test_the_last_of_an_odd_number_of_samples_is_skipped() -> None:
    with pytest.raises(UsageError, match=r"1\.5 for 2 samples, and 1 and 2 for its halves"):
        check_sum_reduction(nn.Identity(), Given(torch.mean), torch.tensor([1.0, 2.0, 100.0]), 3)


def test_a_single_sample_is_not_checked() -> None:
    assert not refused(torch.mean, torch.tensor([5.0]))
    assert not refused(torch.mean, torch.zeros(0))


def test_a_loss_of_zero_is_accepted() -> None:
    assert not refused(lambda outputs: 0 * outputs.mean())


@pytest.mark.parametrize(
    "reduce",
    [
        lambda outputs: outputs.sum().square(),
        lambda outputs: torch.cdist(outputs[:, None], outputs[:, None]).sum(),
        lambda outputs: outputs.max(),
        lambda outputs: outputs.norm(),
        lambda outputs: outputs.sum() + 1,
    ],
    ids=["square", "pairs", "max", "norm", "a sum and a constant"],
)
def test_losses_that_are_neither_sums_nor_means_are_accepted(reduce: Callable[[Tensor], Tensor]) -> None:
    assert not refused(reduce)


@pytest.mark.parametrize("batch", [FOUR, -FOUR])
@pytest.mark.parametrize(("off", "expected"), [(0.0, True), (0.0009, True), (0.0011, False), (0.1, False)])
def test_a_mean_is_detected_within_a_tolerance_of_a_thousandth(batch: Tensor, off: float, expected: bool) -> None:
    """`off`: relative difference between the loss of all four samples and the mean of its halves."""
    assert refused(lambda outputs: outputs.mean() * (1 - off * (len(outputs) == 4)), batch) is expected
    assert refused(lambda outputs: outputs.mean() * (1 - off * (len(outputs) == 2)), batch) is expected


def test_a_random_loss_is_accepted() -> None:
    """With the same random numbers for both halves it would be a mean."""
    assert not refused(lambda outputs: outputs.mean() * (1 + torch.rand(())))


def test_the_check_does_not_change_the_random_state() -> None:
    state = torch.get_rng_state()
    refused(lambda outputs: outputs.sum() * torch.rand(()))
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------- counted items
@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (len, True),
        (lambda batch: torch.tensor(0.25 * len(batch)), True),
        (lambda batch: None, True),
        (lambda batch: int((batch < 3).sum()), True),
        (lambda batch: 1, False),
        (lambda batch: torch.tensor(1.0), False),
    ],
    ids=["samples", "weights", "nothing", "some samples", "batches", "batches as a tensor"],
)
def test_a_mean_is_accepted_if_the_task_counts_batches(items: Callable[[Any], Any], expected: bool) -> None:
    assert refused(torch.mean, items=items) is expected


# ---------------------------------------------------------------------------------------------- no side effects
def test_the_check_disables_dropout_and_batch_statistics() -> None:
    """In training mode, losses of the halves would not match the loss of the batch; a mean is refused nevertheless."""
    model = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.BatchNorm1d(1), nn.Dropout(0.9))
    assert refused(torch.mean, model=model)
    assert all(module.training for module in model.modules())
    assert model[1].num_batches_tracked == 0


def test_the_check_uses_copies_of_model_and_task_without_gradients() -> None:
    """Side effects of a task or a model on itself must not reach the originals."""

    class Keeps(Given):
        def __init__(self) -> None:
            super().__init__(torch.mean)
            self.seen: list[bool] = []

        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            modes.append(torch.is_grad_enabled())
            self.seen.append(True)
            with torch.no_grad():
                model.weight.add_(1)
            return super().loss(lambda x: x, batch)  # type: ignore[arg-type]

    modes: list[bool] = []
    model, task = nn.Linear(1, 1), Keeps()
    before = model.weight.clone()
    with pytest.raises(UsageError):
        check_sum_reduction(model, task, FOUR, 4)
    assert (modes, task.seen) == ([False] * 4, [])
    assert torch.equal(model.weight, before)


# ---------------------------------------------------------------------------------------------- unsupported cases
class Uncopied(nn.Identity):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def test_tasks_that_cannot_be_copied_split_or_evaluated_in_parts_are_accepted() -> None:
    def picky(outputs: Tensor) -> Tensor:
        if len(outputs) != 4:
            raise ValueError("four, please")
        return outputs.mean()

    assert not refused(torch.mean, model=Uncopied())
    assert not refused(picky)
    assert not refused(torch.mean, batch="text")  # type: ignore[arg-type]
    assert not refused(torch.mean, items=lambda batch: 1 / (len(batch) - 2))
