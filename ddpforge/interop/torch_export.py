"""Exports a trained model as a program that runs without the model's code: torch.export or ONNX."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge import disk
from ddpforge.compat import tree_leaves, tree_map
from ddpforge.disk import appearing
from ddpforge.errors import ForgeError, PluginError, UsageError, library
from ddpforge.interfaces import Task

__all__ = ["SAMPLES", "ExampleInputs", "inputs_of", "require_onnx", "write_onnx", "write_pt2"]

# Samples in the example batch: torch.export treats a size of 1, or one equal to another dimension, as a constant.
SAMPLES = 3
_LARGEST = 2**31 - 2**20  # bytes: an ONNX file is a protocol buffer, which is limited to 2 GiB


class _Called(Exception):
    """Raised by the hook: the task called the model."""


@dataclass(frozen=True)
class ExampleInputs:
    """Arguments of a model for a batch of `samples` samples; `names` has them by parameter name of `forward`."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    names: Mapping[str, Any]
    samples: int

    @property
    def shapes(self) -> dict[str, Any]:
        """Returns the dynamic shapes for torch.export: tensors with one row per sample may have any number of rows."""
        batch = {0: torch.export.Dim("batch")}
        return {name: tree_map(lambda x: batch if self._has_rows(x) else None, x) for name, x in self.names.items()}

    def first(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments for the first sample alone."""
        found: Any = tree_map(lambda x: x[:1] if self._has_rows(x) else x, (self.args, self.named))
        return tuple(found[0]), found[1]

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == self.samples


def inputs_of(model: nn.Module, task: Task, batch: Any, samples: int) -> ExampleInputs:
    """Returns the arguments with which the task calls the model; raises UsageError if it does not call it."""
    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        called.append((args, named))
        raise _Called

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        for ask in (task.predict, task.loss):
            with suppress(_Called, UsageError), torch.no_grad():
                ask(model, batch)
            if called:
                args, named = called[0]
                names = inspect.signature(model.forward).bind(*args, **named).arguments
                return _checked(ExampleInputs(args, named, names, samples), model)
    finally:
        hook.remove()
    raise UsageError(
        f"{type(task).__name__} does not call the model itself, so the inputs of the exported program are unknown",
        hints=["-o FILE.safetensors writes only the weights"],
    )


def _checked(inputs: ExampleInputs, model: nn.Module) -> ExampleInputs:
    if not any(map(inputs._has_rows, tree_leaves((inputs.args, inputs.named)))):
        raise UsageError(
            f"no argument of {type(model).__name__} is a tensor with one row for each of {inputs.samples} samples",
            hints=[f"the first evaluation set must have at least {inputs.samples} samples"],
        )
    return inputs


def write_pt2(model: nn.Module, inputs: ExampleInputs, out: Path) -> None:
    """Writes the model in the format of `torch.export.load`, for batches of any size.

    The file appears only if its outputs agree with those of the model, for one sample and for several. Raises
    UsageError if torch cannot export the model, and PluginError if the outputs differ.
    """
    program = _exported(model, inputs)
    with appearing(out) as temporary:
        with disk.create(temporary) as file:
            torch.export.save(program, file)
            disk.sync(file)
        with _explaining_errors("torch.export", model):
            _compare(model, inputs, torch.export.load(temporary).module())


def require_onnx() -> None:
    """Raises SetupError if a library for ONNX is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name, "onnx")


def write_onnx(model: nn.Module, inputs: ExampleInputs, out: Path) -> None:
    """Writes the model as an ONNX file. Its inputs have the names of the arguments of `forward`.

    onnxruntime checks the outputs; the file appears under the same conditions as in `write_pt2`.
    """
    require_onnx()
    if (size := sum(tensor.nbytes for tensor in model.state_dict().values())) > _LARGEST:
        raise UsageError(
            f"the model has {size:,} bytes, but an ONNX file is limited to 2 GiB", hints=["write it with -o FILE.pt2"]
        )
    program = _exported(model, inputs)
    with _explaining_errors("ONNX", model):
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
        data: bytes = made.model_proto.SerializeToString()
    with appearing(out) as temporary:
        disk.write_new(temporary, [data])
        with _explaining_errors("onnxruntime", model):
            session = library("onnxruntime", "onnx").InferenceSession(data, providers=["CPUExecutionProvider"])
            _compare(model, inputs, partial(_run_onnx, session))


def _run_onnx(session: Any, *args: Any, **named: Any) -> list[Tensor]:
    tensors = [x.numpy() for x in _tensors((args, named))]
    given = {each.name: x for each, x in zip(session.get_inputs(), tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, given)]


def _exported(model: nn.Module, inputs: ExampleInputs) -> Any:
    with _explaining_errors("torch.export", model), torch.no_grad():
        return torch.export.export(model, inputs.args, inputs.named, dynamic_shapes=inputs.shapes)


@contextmanager
def _explaining_errors(by: str, model: nn.Module) -> Iterator[None]:
    """Raises a library's error about a model as a UsageError of one line; suppresses the library's warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ForgeError:
        raise
    except Exception as error:  # the libraries raise many types without a common base
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise UsageError(
            f"{by} cannot process the model {type(model).__name__}: {type(error).__name__}: {first}",
            hints=["its forward must not branch on values in tensors or on the size of the batch"],
        ) from error


@torch.no_grad()
def _compare(model: nn.Module, inputs: ExampleInputs, program: Any) -> None:
    """Raises PluginError unless program and model compute the same outputs, for one sample and for several."""
    for args, named in (inputs.first(), (inputs.args, inputs.named)):
        for one, other in zip(_tensors(program(*args, **named)), _tensors(model(*args, **named)), strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True):
                raise PluginError(
                    f"the exported program computes other outputs than the model {type(model).__name__}",
                    hints=["its forward depends on more than its arguments, or branches on the size of the batch"],
                )


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]
