"""Imports a checkpoint of another program: detects its format, renames tensors, and writes a ddpforge checkpoint."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddpforge.api import RunFolder, WriterGroup, committed, format_of, is_checkpoint, named_format
from ddpforge.checkpoint import writer
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.checkpoint.untrusted import DTYPES
from ddpforge.errors import UsageError
from ddpforge.interfaces import ForeignState
from ddpforge.interfaces.regions import find_gap
from ddpforge.interop.foreign.foreign_state import Held, rejected

X = TypeVar("X")

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.")  # wrappers add these to all names


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Result of an import: the checkpoint that was written, and the entries of the source that were skipped."""

    path: Path
    kind: str
    step: int
    samples: int
    tensors: int
    bytes: int
    dtypes: Mapping[str, int]
    optimizer: int  # parameters that have state
    keys: Sequence[str]  # of the optimizer's state
    aliases: Mapping[str, str]
    left_out: Sequence[str]
    hints: Sequence[str] = field(default=())


def import_checkpoint(
    source: Path,
    out: str,
    *,
    trust: bool = False,
    maps: Sequence[str] = (),
    step: int | None = None,
    samples: int | None = None,
) -> Imported:
    """Writes the checkpoint `source` of another program into the run `out`, or into a folder of that name.

    Args:
        trust: allows pickles, which can run any code.
        maps: PATTERN=REPLACEMENT, regular expressions that are applied to every name, one after another.
        step: steps trained so far; by default the number in the source, or 0.
        samples: samples trained so far; by default the number in the source, or 0.

    Raises UsageError before anything is written if the source is not a checkpoint, not trusted or contradicts itself.
    """
    folder, run = _target(out)
    rules = [_rule(text) for text in maps]
    try:
        found = _read(source, trust=trust)
        found = _renamed(found, rules, source)
        _check(found, source)
    except ValueError as error:  # parts that do not fit their tensor
        raise rejected(source, error) from error

    facts = CheckpointMetadata(
        step=found.step or 0 if step is None else step,
        samples=found.samples or 0 if samples is None else samples,
        strategy=f"imported from {found.kind}",
        world_size=1,
        # The position of an untrained run, in the form that the trainer reads when it resumes.
        position={"seconds": 0.0, "skipped": 0, "left_out": []},
    )
    state = RankState(model=found.model, optimizer=found.optimizer, aliases=found.aliases)
    path = writer.write(_made(folder), facts, state, WriterGroup.alone())
    return _report(found, facts, path, run)


def _target(out: str) -> tuple[Path, RunFolder | None]:
    """Returns the folder for the checkpoint, and its run, if it belongs to one."""
    for path in (Path(out), Path("runs") / out):
        if (run := RunFolder(path)).exists():
            return run.checkpoints, run
    if is_checkpoint(Path(out)):
        raise UsageError(f"{out} is a checkpoint", hints=["name a run, or a folder for the new checkpoint"])
    if Path(out).exists() and not Path(out).is_dir():
        raise UsageError(f"{out} is a file", hints=["name a run, or a folder for the new checkpoint"])
    if _is_for_a_run(Path(out)):
        name = Path(out).name
        raise UsageError(
            f"{out} would be the folder of a run called {name}, but a run cannot start from checkpoints alone",
            hints=[
                f"import to -o imported/{name}, and set checkpoint.init_from to the checkpoint in that folder",
                "to continue from its optimizer state too, start the run, stop it, and import into it",
            ],
        )
    return Path(out), None


def _is_for_a_run(out: Path) -> bool:
    """True if `out` is in runs/ or next to a run, and contains no checkpoint."""
    parent = out.absolute().parent
    among = parent == Path("runs").absolute() or any(RunFolder(path).exists() for path in parent.glob("*"))
    return among and not any(out.glob("step-*"))


def _made(folder: Path) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror or error}") from error
    return folder


# ---------------------------------------------------------------------------------------------- reading
def _read(source: Path, *, trust: bool) -> ForeignState:
    """Detects the format of the source, and reads it."""
    if not source.exists():
        raise UsageError(f"{source} does not exist", hints=["name a file, or the folder of a checkpoint"])
    if is_checkpoint(source):
        raise rejected(source, "it is already a checkpoint of ddpforge")
    if form := format_of(source) or (named_format("safetensors") if source.is_file() else None):
        return form.read(source, trust=trust)
    raise rejected(
        source,
        "it contains no checkpoint of a known format",
        "known formats are a safetensors file, a state_dict (.pt, .bin), and folders of transformers "
        "(model.safetensors), torch.distributed.checkpoint (.metadata) and DeepSpeed (latest, *_model_states.pt)",
    )


def _check(found: ForeignState, source: Path) -> None:
    """Raises UsageError for tensors that a checkpoint cannot contain."""
    if not found.model:
        raise rejected(source, "it contains no tensor")
    for name, held in _each(found):
        for tensor in [part.tensor for part in held] if isinstance(held, list) else [held]:
            kind = str(tensor.dtype).removeprefix("torch.")
            if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
                what = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} ({tensor.layout})"
                raise rejected(source, f"{name} is {what}, not a dense tensor")
            if kind not in DTYPES:
                raise rejected(source, f"{name} has dtype {kind}", f"a checkpoint can contain {', '.join(DTYPES)}")
        if isinstance(held, list) and not held:
            raise rejected(source, f"it has no part of {name}")
        if isinstance(held, list) and (problem := find_gap(held[0].shape, [part.simple_region for part in held])):
            raise rejected(source, f"{name}: {problem}")
    if "" in found.model:
        raise rejected(source, "a tensor in it has no name")


def _each(found: ForeignState) -> list[tuple[str, Held]]:
    state = [(f"{key} of {name}", x) for name, values in found.optimizer.items() for key, x in values.items()]
    return [*found.model.items(), *((name, x) for name, x in state if isinstance(x, Tensor | list))]


# ---------------------------------------------------------------------------------------------- names
def _rule(text: str) -> tuple[re.Pattern[str], str]:
    pattern, equals, replacement = text.partition("=")
    if not equals or not pattern:
        raise UsageError(f"--map {text}: expected PATTERN=REPLACEMENT", hints=[r"e.g. --map '^module\.='"])
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"--map {text}: {error}", hints=["PATTERN is a Python regular expression"]) from error
    return compiled, replacement


def _renamed(found: ForeignState, rules: Sequence[tuple[re.Pattern[str], str]], source: Path) -> ForeignState:
    if not rules:
        return found

    def new(name: str) -> str:
        for pattern, replacement in rules:
            try:
                name = pattern.sub(replacement, name)
            except (re.error, IndexError) as error:
                raise UsageError(f"--map {pattern.pattern}={replacement}: {error}") from error
        return name

    model = _merged(found.model, new, source, found.left_out)
    return ForeignState(
        kind=found.kind,
        model=model,
        optimizer=_unique(found.optimizer, new, source),
        aliases={new(a): new(b) for a, b in found.aliases.items() if new(a) not in model},
        step=found.step,
        samples=found.samples,
        left_out=found.left_out,
    )


def _merged(model: Mapping[str, Held], new: Any, source: Path, left_out: list[str]) -> dict[str, Held]:
    """Returns the weights by their new names. Weights may get the same name only if they are equal (tied weights)."""
    merged: dict[str, Held] = {}
    for name, held in model.items():
        if (other := merged.get(new(name))) is None:
            merged[new(name)] = held
        elif _same(held, other):
            left_out.append(f"{name}: the same as {new(name)}")
        else:
            raise rejected(source, f"--map gives the name {new(name)} to several tensors that differ")
    return merged


def _same(one: Held, other: Held) -> bool:
    """True if both have the same values and dtype, and the same partition into parts."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor) or [p.region for p in one] != [p.region for p in other]:
        return False
    return all(a.shape == b.shape and _same(a.tensor, b.tensor) for a, b in zip(one, other, strict=True))


def _twice(model: Mapping[str, Held]) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of equal matrices: a tied weight in a format that does not record ties."""
    first: dict[tuple[Any, ...], str] = {}
    for name, held in model.items():
        shape = tuple(held.shape) if isinstance(held, Tensor) else held[0].shape
        begin = _first(held).reshape(-1)[:16].tolist()  # differs for nearly all, without reading whole tensors
        if len(shape) < 2 or len({*begin}) < 2:
            continue
        other = first.setdefault((shape, _first(held).dtype, *begin), name)
        if other != name and _same(model[other], held):
            yield name, other


def _unique(values: Mapping[str, X], new: Any, source: Path) -> dict[str, X]:
    found: dict[str, X] = {}
    for name, value in values.items():
        if new(name) in found:
            raise rejected(source, f"--map gives the name {new(name)} to the optimizer state of several parameters")
        found[new(name)] = value
    return found


# ---------------------------------------------------------------------------------------------- the report
def _report(found: ForeignState, facts: CheckpointMetadata, path: Path, run: RunFolder | None) -> Imported:
    dtypes: dict[str, int] = {}
    for held in found.model.values():
        kind = str(_first(held).dtype).removeprefix("torch.")
        dtypes[kind] = dtypes.get(kind, 0) + 1
    hints = []
    if prefix := _common_prefix([*found.model, *found.aliases]):
        hints.append(f"all names begin with {prefix!r}; to remove it: --map '^{re.escape(prefix)}='")
    for name, other in _twice(found.model):
        rule = f"^{re.escape(name)}$={other}"
        hints.append(f"{name} is the same as {other}; if the model ties them, merge them: --map '{rule}'")
    if run is not None and (newer := [each for each in committed(path.parent)[0] if each.manifest.step > facts.step]):
        hints.append(f"the run resumes from step {newer[0].manifest.step}, which is newer; see --step")
    return Imported(
        path=path,
        kind=found.kind,
        step=facts.step,
        samples=facts.samples,
        tensors=len(found.model),
        bytes=sum(_bytes(held) for held in found.model.values()),
        dtypes=dtypes,
        optimizer=len(found.optimizer),
        keys=sorted({key for values in found.optimizer.values() for key in values}),
        aliases=found.aliases,
        left_out=found.left_out,
        hints=hints,
    )


def _first(held: Held) -> Tensor:
    return held if isinstance(held, Tensor) else held[0].tensor


def _bytes(held: Held) -> int:
    return held.nbytes if isinstance(held, Tensor) else sum(part.tensor.nbytes for part in held)


def _common_prefix(names: Sequence[str]) -> str:
    """Returns the wrapper prefixes that all names share, one after another."""
    prefix = ""
    while more := next((p for p in _PREFIXES if all(name.startswith(prefix + p) for name in names)), ""):
        prefix += more
    return prefix
