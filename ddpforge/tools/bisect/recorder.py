"""Callback that `ddpforge bisect` adds to its runs: it writes the values of each module in one step.

A value is reduced to sums over all of its dimensions but one: of its elements, and of their squares, with the number of
elements. Sums of micro-batches and of ranks add up, so that a step has the same sums under every layout of ranks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from ddpforge import compat
from ddpforge.interfaces import Callback, RunContext, StepInfo, TensorShard

__all__ = ["BACKWARD", "FORWARD", "GRADIENT", "INPUT", "OPERATION", "recorder"]

INPUT, FORWARD, BACKWARD, OPERATION = "input", "forward", "backward", "operation"
GRADIENT = "gradient of "  # begins the names of gradients in the state
_MOST = 8  # tensors of one input or output that are recorded


def recorder(
    *,
    folder: Annotated[str, Field(description="Folder for the files of all ranks.")],
    passes: Annotated[int, Field(ge=1, description="Forward passes of the step on each rank.")],
    gradients: Annotated[bool, Field(description="Also save the gradients of the parameters.")],
    operations: Annotated[str, Field(description="Also record the operations of this module.")] = "",
) -> Callback:
    """Returns the callback of a recorded run."""
    return (GradientRecorder if gradients else CallRecorder)(Path(folder), passes, operations)


class CallRecorder(Callback):
    """Records the first step after the start, and writes `calls-RANK.safetensors` and `.json`.

    Earlier passes, of the checks before the first step of a run, are dropped: only the last `passes` count.
    """

    def __init__(self, folder: Path, passes: int, operations: str) -> None:
        self._folder, self._most, self._operations = folder, passes, operations
        self._passes: dict[str, deque[dict[str, Tensor]]] = {}  # by the outermost module
        self._values: dict[str, Tensor] = {}  # of the running pass
        self._calls: dict[str, int] = {}  # number of calls of each module in the pass
        self._depth, self._done, self._busy = 0, False, False
        self.gradients: dict[str, TensorShard] = {}

    def on_start(self, run: RunContext) -> None:
        """Observes the calls of all modules."""
        self.run = run
        for name, module in run.model.named_modules():
            module.register_forward_pre_hook(self._hook(self._enter, name), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._hook(self._leave, name), with_kwargs=True, always_call=True)

    def _hook(self, action: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            # A checkpointed block runs again in the backward pass.
            if not self._done and torch.is_grad_enabled() and not compat.in_backward():
                return action(name or "model", *args)
            return None

        return cast(Callable[..., Any], torch.compiler.disable(called))  # type: ignore[no-untyped-call]

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Records the inputs of a call; returns aliases of them, so that each module has gradients of its own."""
        if not self._depth:
            self._values, self._calls = {}, {}
            self._passes.setdefault(name, deque(maxlen=self._most)).append(self._values)
        self._depth += 1
        self._calls[name] = call = self._calls.get(name, 0) + 1
        args = tuple(map(_alias, args))
        kwargs = {key: _alias(one) for key, one in kwargs.items()}
        self._record(INPUT, name, call, (args, kwargs))
        if name == self._operations:

            def record(number: int, operation: str, value: Any) -> None:
                self._record(OPERATION, f"{number} {operation}", call, value)

            self._mode = _Operations(record, lambda: self._busy)
            self._mode.__enter__()
        return args, kwargs

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if name == self._operations:
            self._mode.__exit__(None, None, None)
        self._depth -= 1
        self._record(FORWARD, name, self._calls[name], outputs)

    def _record(self, kind: str, name: str, call: int, values: Any) -> None:
        """Records the tensors in `values`, and later their gradients, into the running pass."""
        self._busy = True  # with operations of its own
        for place, one in enumerate(_tensors(values)):
            key = f"{name}|{call}|{place}"
            self._values[f"{kind}|{key}"] = _sums(one)
            if one.requires_grad and kind in (INPUT, FORWARD):
                self._watch(one, f"{BACKWARD}|{kind} of {key}")
        self._busy = False

    def _watch(self, tensor: Tensor, name: str) -> None:
        """Records the gradient of a tensor."""
        values = self._values

        def record(gradient: Tensor) -> None:
            values[name] = _sums(gradient)

        tensor.register_hook(record)  # type: ignore[no-untyped-call]

    def on_step(self, info: StepInfo) -> bool:
        """Writes the files, and ends the run."""
        self._done = True
        totals: dict[str, Tensor] = {}
        for passes in self._passes.values():
            for values in passes:
                for name, sums in values.items():
                    known = totals.get(name)
                    totals[name] = sums if known is None or known.shape != sums.shape else known + sums
        ranks = self.run.world.global_ranks
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(totals, self._folder / f"calls-{ranks.rank}.safetensors")
        about = {"names": list(totals), "data_rank": self.run.world.dp_ranks.rank}
        (self._folder / f"calls-{ranks.rank}.json").write_text(json.dumps(about), encoding="utf-8")
        return True

    def state(self) -> Mapping[str, TensorShard]:
        """Returns the gradients, if they are recorded."""
        return {GRADIENT + name: one for name, one in self.gradients.items()}


class GradientRecorder(CallRecorder):
    """Also records the gradients of the step, under strategies whose gradients callbacks can read."""

    def on_gradient(self, step: int, norm: Tensor) -> None:
        """Copies the gradients of the step."""
        self.gradients = {name: part.of(part.tensor.clone()) for name, part in self.run.gradients().items()}


class _Operations(compat.DispatchMode):
    """Passes the number, the name and the result of each operation to a function, unless that is `busy`."""

    def __init__(self, record: Callable[[int, str, Any], None], busy: Callable[[], bool]) -> None:
        super().__init__()
        self._record, self._busy, self._count = record, busy, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._busy():
            self._count += 1
            with torch.no_grad():
                self._record(self._count, str(func), found)
        return found


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def _tensors(values: Any) -> list[Tensor]:
    found = [one for one in compat.tree_leaves(values) if isinstance(one, Tensor) and one.layout == torch.strided]
    return found[:_MOST]


def _sums(tensor: Tensor) -> Tensor:
    """Returns sums of elements and of squares, and their number (3 × size, float64), for each channel or feature."""
    whole = tensor.detach()
    whole = (whole.to_local() if hasattr(whole, "to_local") else whole).cpu().double()
    kept = 1 if whole.dim() >= 4 else whole.dim() - 1
    rows = whole.movedim(kept, -1).reshape(-1, whole.shape[kept]) if whole.dim() > 1 else whole.reshape(-1, 1)
    return torch.stack([rows.sum(0), rows.square().sum(0), torch.full_like(rows[0], len(rows))])
