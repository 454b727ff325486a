"""A batch that a model cannot take is named: its part, its dtype or values, and the limits of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import UsageError
from ddpforge.guard.batch_checks import nonfinite_values, raise_if_batch_explains


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(50, 4), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tokens(x) + self.places(torch.arange(x.shape[1]))).mean(1)  # type: ignore[no-any-return]


def explained(model: nn.Module, batch: Any) -> str:
    """Returns the message for the error of a cross-entropy of the model."""
    try:
        nn.functional.cross_entropy(model(batch[0]), batch[1])
    except Exception as error:
        with pytest.raises(UsageError) as caught:
            raise_if_batch_explains(error, model, batch, "data.train")
        assert caught.value.key == "data.train"
        assert caught.value.hints[-1].startswith("torch raised: ")
        return caught.value.message
    raise AssertionError("no error")


CLASSES = torch.tensor([0, 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8])
def test_inputs_of_another_dtype_than_the_model_are_named(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    said = explained(nn.Linear(4, 3), (torch.ones(2, 4, dtype=dtype), CLASSES))
    assert said == f"part 0 of the batch is {name} [2, 4], but the parameters of the model are float32"


def test_images_of_uint8_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Flatten())
    said = explained(model, (torch.ones(2, 3, 3, 3, dtype=torch.uint8), CLASSES))
    assert said.startswith("part 0 of the batch is uint8 [2, 3, 3, 3], but the parameters")


@pytest.mark.parametrize(("token", "range_"), [(60, "0 to 60"), (-1, "-1 to 0")])
def test_tokens_beyond_the_vocabulary_are_named_with_the_embedding(token: int, range_: str) -> None:
    said = explained(Words(), (torch.tensor([[0, token], [0, 0]]), CLASSES))
    assert said == (f"part 0 of the batch (int64 [2, 2]) has values from {range_}, but `tokens` has rows for 0 to 49")


def test_sequences_longer_than_the_positions_are_named_and_not_as_tokens() -> None:
    said = explained(Words(), (torch.full((2, 7), 49), CLASSES))
    assert said == "part 0 of the batch (int64 [2, 7]) has sequences of 7, but `places` has 6 rows"


def test_classes_beyond_the_outputs_are_named() -> None:
    assert explained(nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 3]))).startswith("a target of the batch is 3")


def test_an_error_that_the_batch_does_not_explain_is_left_alone() -> None:
    raise_if_batch_explains(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), nn.Linear(4, 3), torch.ones(2))
    raise_if_batch_explains(IndexError("list index out of range"), Words(), torch.ones(2))


def test_classes_and_inputs_of_the_right_dtype_do_not_explain_an_error_of_dtypes() -> None:
    """Simulates a model that mixes dtypes itself."""
    error = RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double")
    raise_if_batch_explains(error, nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 1])))
    with pytest.raises(UsageError, match="part 0 of the batch is int64"):
        raise_if_batch_explains(error, nn.Linear(4, 3), (torch.ones(2, 4, dtype=torch.int64), torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.tensor([[1.0], [torch.nan]]), CLASSES), "part 0 (float32 [2, 1]) has NaN in row 1"),
        ({"x": torch.tensor([torch.inf, 1.0])}, "`x` (float32 [2]) has an infinite value in row 0"),
        ({"x": torch.tensor([[1.0], [torch.inf], [torch.nan]])}, "`x` (float32 [3, 1]) has an infinite value in row 1"),
        ((torch.ones(2, 2), CLASSES), ""),
    ],
)
def test_values_that_are_not_finite_are_named_with_their_row(batch: Any, said: str) -> None:
    assert nonfinite_values(batch) == said
