"""Reward functions: plain functions with the signature of TRL's, called for the generations of one prompt at a time."""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpforge.errors import UsageError

__all__ = ["RewardFunction", "Rewards", "completion_lengths"]

_GIVEN = ("prompts", "completions", "completion_ids")


class RewardFunction:
    """Function `f(prompts, completions, completion_ids, **columns)` that returns one number per completion.

    It may also take only some of these arguments. `prompts` are those of the file, once for each completion.
    `completions` are texts; for messages as prompts, each is a list of one message of the assistant.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ValueError for a function that cannot be called with keywords, or that is asynchronous."""
        self._function = function
        self.name = str(getattr(function, "__name__", type(function).__name__))
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.place = f"{self.name} ({code.co_filename}:{code.co_firstlineno})" if code else self.name
        if inspect.isclass(function):
            raise ValueError(
                f"rewards: {self.name} is a class; name a function, e.g. its method by a function of its own"
            )
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"rewards: {self.place} is asynchronous; name a function without `async`")
        self._parameters = inspect.signature(function).parameters
        kinds = [one.kind for one in self._parameters.values()]
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        for name, one in self._parameters.items():
            if one.kind is one.POSITIONAL_ONLY:
                raise ValueError(f"rewards: {self.place} takes `{name}` by position only; it is called with keywords")
        if not self._takes_all and not set(_GIVEN) & set(self._parameters):
            raise ValueError(
                f"rewards: {self.place} takes no completions: expected f(prompts, completions, completion_ids,"
                " **columns), or some of these arguments"
            )

    def check(self, columns: Sequence[str]) -> None:
        """Raises ValueError for a required argument that the data does not have."""
        for name, one in self._parameters.items():
            given = name in (*_GIVEN, *columns) or one.default is not one.empty
            if not given and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                has = ", ".join(columns) or "none"
                raise ValueError(
                    f"rewards: {self.place} needs `{name}`, which is not a column of the data; its columns are: {has}"
                )

    def __call__(
        self, prompt: Any, completions: Sequence[Any], completion_ids: Sequence[list[int]], columns: Mapping[str, Any]
    ) -> list[float]:
        """Returns the rewards; raises UsageError, with the function's place, if they are not finite numbers."""
        count = len(completions)
        given: dict[str, Any] = {
            **{name: [value] * count for name, value in columns.items()},
            "prompts": [prompt] * count,
            "completions": list(completions),
            "completion_ids": list(completion_ids),
        }
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._parameters}
        try:
            found = self._function(**given)
        except (Exception, SystemExit) as error:
            raise self._fault(f"raised {type(error).__name__}: {error}{_line_of(error)}", given) from error
        return self._checked(found, count, given)

    def _checked(self, found: Any, count: int, given: Mapping[str, Any]) -> list[float]:
        tolist = getattr(found, "tolist", None)  # of tensors and arrays
        values = tolist() if tolist is not None else found
        if not isinstance(values, list | tuple):
            raise self._fault(f"returned {_described(found)}, not a list of {count} numbers", given)
        if len(values) != count:
            raise self._fault(f"returned {len(values)} values for {count} completions", given)
        for number, value in enumerate(values):
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise self._fault(f"returned {_described(value)} for completion {number}, not a finite number", given)
        return [float(value) for value in values]

    def _fault(self, what: str, given: Mapping[str, Any]) -> UsageError:
        shown = given.get("completions") or [""]
        return UsageError(
            f"the reward {self.place} {what}",
            hints=[
                "return a list with one finite number for each completion; a completion that cannot be judged gets 0.0",
                f"its first completion was {str(shown[0])[:200]!r}",
            ],
            key="task.rewards",
        )


class Rewards:
    """Weighted sum of reward functions."""

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None) -> None:
        """Raises ValueError for no function, for equal names, and for another number of weights."""
        self.functions = [RewardFunction(one) for one in functions]
        names = [one.name for one in self.functions]
        if not names:
            raise ValueError('rewards: name at least one function, e.g. rewards = ["./rewards.py:is_right"]')
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"rewards: two functions have the name {twice}; metrics need different names")
        if weights is not None and len(weights) != len(names):
            raise ValueError(f"reward_weights: {len(weights)} weights for {len(names)} rewards: {', '.join(names)}")
        self.names, self.weights = names, [1.0] * len(names) if weights is None else list(weights)

    def __call__(
        self, prompt: Any, completions: Sequence[Any], completion_ids: Sequence[list[int]], columns: Mapping[str, Any]
    ) -> list[list[float]]:
        """Returns the rewards of each function (not weighted) for the completions of one prompt."""
        return [one(prompt, completions, completion_ids, columns) for one in self.functions]

    def total(self, found: Sequence[Sequence[float]]) -> list[float]:
        """Returns the weighted sum for each completion."""
        return [
            sum(w * one for w, one in zip(self.weights, values, strict=True)) for values in zip(*found, strict=True)
        ]


def completion_lengths(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Returns the number of tokens of each completion, as a reward."""
    return [float(len(ids)) for ids in completion_ids]


def _described(value: Any) -> str:
    if value is None:
        return "None"
    return f"the {type(value).__name__} {str(value)[:80]!r}"


def _line_of(error: BaseException) -> str:
    """Returns the innermost line of the traceback, as " (FILE:LINE)"."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place, trace = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})", trace.tb_next
    return place
