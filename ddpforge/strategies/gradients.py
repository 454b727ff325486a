"""Collects gradients; checks that all trained parameters have one and that frozen parameters have none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from torch import Tensor, nn

from ddpforge import compat
from ddpforge.errors import StrategyError, UsageError
from ddpforge.interfaces import Ranks

__all__ = ["EVERY_PASS", "Gradients"]

EVERY_PASS = (  # for strategies in which every rank must use every parameter in every micro-batch
    "if other samples use it (an image encoder, an expert): call that part in every forward pass, also with an empty "
    "input of 0 rows, instead of behind an `if`: it then gets a gradient of zeros",
    'or set strategy.use = "ddp" and strategy.find_unused_parameters = true',
)


class Gradients:
    """Gradients of the bare `model` on this rank.

    Args:
        model: Has its gradients in `.grad`.
        ranks: Names this rank in error messages.
        may_be_unused: If False, a trained parameter without a gradient is an error.
        hints: Further hints for that error.
        some: Trained parameters; all others count as frozen. By default all that require gradients.
        missing: Returns the indices, in `trained`, of parameters that got no gradient. If given, gradients are set to
            zero instead of dropped, so that they keep their memory.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        *,
        may_be_unused: bool = False,
        hints: Sequence[str] = (),
        some: Collection[Tensor] | None = None,
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = list(model.parameters())
        trained = {id(p) for p in (self.parameters if some is None else some) if p.requires_grad}
        self.trained = [parameter for parameter in self.parameters if id(parameter) in trained]
        self.frozen = [parameter for parameter in self.parameters if id(parameter) not in trained]
        self._ranks, self._may_be_unused, self._hints, self._missing = ranks, may_be_unused, hints, missing

    @property
    def complete(self) -> bool:
        """True if every trained parameter gets a gradient in every step."""
        return not self._may_be_unused

    @property
    def stay(self) -> bool:
        """True if gradients keep their memory from step to step."""
        return self._missing is not None

    def collect(self) -> list[Tensor]:
        """Returns all gradients after a backward pass.

        Raises StrategyError if a gradient is missing or a frozen parameter has one; UsageError if there are none.
        """
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(found) != len(self.trained):  # counting is free, so every step is checked
            self._explain()
        if self._missing and (places := self._missing()):
            self.check_unused([self.trained[place] for place in places])
        return found

    def clear(self) -> None:
        """Drops all gradients, or sets them to zero."""
        kept: list[Tensor] = []
        for parameter in self.trained:  # like zero_grad, without its 20 µs of bookkeeping
            if self._missing and parameter.grad is not None and not parameter.grad.is_sparse:
                kept.append(parameter.grad)
            else:
                parameter.grad = None
        if kept:
            compat.foreach("zero_", kept)

    def check_unused(self, parameters: Sequence[nn.Parameter], during: str = "") -> NoReturn:
        """Raises StrategyError for parameters that forward did not use on this rank, `during` some part of a step."""
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        raise StrategyError(
            f"parameter `{self.names[id(parameters[0])]}`{more} got no gradient on rank {self._ranks.rank}: "
            f"forward did not use it{during}",
            hints=[
                f"{'if no sample uses it: ' if during else ''}remove it from the model, or set requires_grad = False",
                *self._hints,
            ],
        )

    def check_thawed(self, parameter: nn.Parameter) -> NoReturn:
        """Raises StrategyError for a parameter that was frozen at construction and gets gradients now."""
        raise StrategyError(
            f"parameter `{self.names[id(parameter)]}` was frozen when the model was wrapped and gets gradients now; "
            "they are not synchronised over ranks, and the optimizer does not have the parameter",
            hints=["do not change requires_grad during a run; freeze and unfreeze between runs"],
        )

    def _explain(self) -> None:
        for parameter in self.frozen:
            if parameter.grad is not None:
                self.check_thawed(parameter)
        unused = [parameter for parameter in self.trained if parameter.grad is None]
        if len(unused) == len(self.trained):
            raise UsageError(
                "the loss depends on no trained parameter: backward gave none of them a gradient",
                hints=["look for `.detach()`, `.item()` or `torch.no_grad()` on the way to the loss"],
            )
        if unused and not self._may_be_unused:
            self.check_unused(unused)
