"""Exports weights for other programs: plain safetensors from a checkpoint, in one file or several."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ddpforge import disk
from ddpforge.api import CheckpointReader, chosen_weights, write_weights
from ddpforge.checkpoint.safetensors_writer import LazyTensor, dtype_name
from ddpforge.checkpoint.schema import MODEL
from ddpforge.checkpoint.weights_file import OF_TASK, sources
from ddpforge.disk import appearing
from ddpforge.errors import CheckpointError, SetupError, UsageError
from ddpforge.interfaces import CheckpointFormat
from ddpforge.interop.adapters import adapter_config, adapter_tensors, merged

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
INDEX = f"{MODEL}.index.json"
ADAPTERS = "adapter_model.safetensors"
_PEFT_FILES = (ADAPTERS, "adapter_config.json")
_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # the files of an exported folder


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files that an export wrote.

    `file` is the file that a reader opens: the weights, or the index of several files. `sha256` is its digest. For an
    exported folder, `files` has the sha256 of each file except the index, by name. `bytes` is the size of all weights.
    """

    file: Path
    step: int
    tensors: int
    bytes: int
    sha256: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> dict[str, Path]:
        """Returns the path of each file, by name."""
        return {name: self.file.parent / name for name in (*self.files, self.file.name)}


def export(
    checkpoint: Path,
    out: Path,
    *,
    weights: str = "model",
    only: Sequence[str] = (),
    merge: bool = False,
    dtype: Precision | None = None,
    force: bool = False,
    base: Mapping[str, Tensor] | None = None,
) -> Exported:
    """Writes the model of a checkpoint to the file `out`, which appears complete or not at all.

    A tied parameter is written once and its other names become metadata, as in safetensors' own `save_model`:
    `safetensors.torch.load_model(model, out)` restores the tie.

    Args:
        weights: "model", an auxiliary module ("task.NAME"), or the name of a callback that keeps weights of its own
            (e.g. "ema"). Tensors that the callback does not keep (buffers, frozen parameters) come from the model.
        only: globs; tensors that match none of them are not written.
        merge: folds adapters into the weights that they adapt.
        dtype: converts the floating-point tensors.
        force: replaces `out` if it exists.
        base: tensors of the model, by name, for weights that the checkpoint omits.

    Raises:
        UsageError: `out` exists, the checkpoint has no such weights, or a value is too large for `dtype`.
        CheckpointError: the checkpoint is damaged, or `out` cannot be written.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists", hints=["choose another file with --out, or replace it with --force"])

    reader = CheckpointReader(checkpoint)
    chosen, aliases = _chosen(reader, weights, only, dtype, merge=merge, base=base)
    size, digest = _write(out, chosen, aliases)
    return Exported(file=out, step=reader.metadata.step, tensors=len(chosen), bytes=size, sha256=digest)


def export_folder(
    checkpoint: Path,
    out: Path,
    *,
    weights: str = "model",
    only: Sequence[str] = (),
    merge: bool = False,
    dtype: Precision | None = None,
    force: bool = False,
    most: int | None = None,
    base: Mapping[str, Tensor] | None = None,
) -> Exported:
    """Writes the model into the folder `out`, with the file names of transformers: all files or none appear.

    `most` is the maximum number of bytes of weights in a file; only a single tensor may exceed it. One file is called
    `model.safetensors`. Several files have an index, `model.safetensors.index.json`, that maps tensors to files.
    `force` replaces these files; other files in the folder are kept. For the other arguments see `export`.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hints=["name a folder with --out"])
    there = sorted(path for path in out.glob("model*") if _OURS.fullmatch(path.name))
    if there and not force:
        raise UsageError(f"{there[0]} exists", hints=["choose another folder with --out, or replace it with --force"])

    reader = CheckpointReader(checkpoint)
    chosen, aliases = _chosen(reader, weights, only, dtype, merge=merge, base=base)
    shards = _shards(chosen, most)
    with _staging(out, there) as stage:
        written: dict[str, tuple[int, str]] = {}
        for file, names in shards.items():
            ties = {alias: name for alias, name in aliases.items() if name in names}
            written[file] = write_weights(stage / file, {name: chosen[name] for name in names}, ties)
        if len(shards) > 1:
            disk.write_new(stage / INDEX, [_index(chosen, shards)])
    main = out / (INDEX if len(shards) > 1 else MODEL)
    return Exported(
        file=main,
        step=reader.metadata.step,
        tensors=len(chosen),
        bytes=sum(size for size, _ in written.values()),
        sha256=disk.sha256(main),
        files={name: digest for name, (_, digest) in written.items()},
    )


def export_adapters(
    checkpoint: Path,
    out: Path,
    model: nn.Module,
    *,
    weights: str = "model",
    dtype: Precision | None = None,
    force: bool = False,
    base: Mapping[str, Tensor] | None = None,
) -> Exported:
    """Writes the adapters into the folder `out` for peft: `adapter_config.json` and `adapter_model.safetensors`.

    `PeftModel.from_pretrained(base, out)` loads them into the base model. Modules that are trained without adapters are
    written too. `model` is the adapted model of the run's recipe. For the other arguments and errors see `export`.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hints=["name a folder with --out"])
    there = [path for name in _PEFT_FILES if (path := out / name).exists()]
    if there and not force:
        raise UsageError(f"{there[0]} exists", hints=["choose another folder with --out, or replace it with --force"])
    config = adapter_config(model)
    reader = CheckpointReader(checkpoint)
    chosen, _ = _chosen(reader, weights, (), dtype, merge=False, base=base)
    chosen = adapter_tensors(chosen, config)
    with _staging(out, there) as stage:
        config.save_pretrained(stage)
        size, _ = write_weights(stage / ADAPTERS, chosen, {})
    digests = {name: disk.sha256(out / name) for name in _PEFT_FILES}
    return Exported(
        file=out / ADAPTERS,
        step=reader.metadata.step,
        tensors=len(chosen),
        bytes=size,
        sha256=digests[ADAPTERS],
        files=digests,
    )


def export_as(
    checkpoint: Path,
    out: Path,
    form: CheckpointFormat,
    *,
    weights: str = "model",
    only: Sequence[str] = (),
    merge: bool = False,
    dtype: Precision | None = None,
    force: bool = False,
    base: Mapping[str, Tensor] | None = None,
) -> Exported:
    """Writes the model into a file of a plugin's format, which appears complete or not at all; see `export`."""
    disk.reject_existing(out, force=force)
    reader = CheckpointReader(checkpoint)
    chosen, aliases = _chosen(reader, weights, only, dtype, merge=merge, base=base)
    with appearing(out, CheckpointError) as temporary:
        form.write(temporary, _Fetching(chosen), aliases)
    return exported_file(out, reader.metadata.step, len(chosen))


class _Fetching(Mapping[str, Tensor]):
    """Tensors by name, each read when it is looked up."""

    def __init__(self, sources: Mapping[str, LazyTensor]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> Tensor:
        return self._sources[name].fetch()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def exported_file(out: Path, step: int, tensors: int) -> Exported:
    """Returns the description of a file that was written with `tensors` tensors."""
    return Exported(file=out, step=step, tensors=tensors, bytes=out.stat().st_size, sha256=disk.sha256(out))


def _chosen(
    reader: CheckpointReader,
    weights: str,
    only: Sequence[str],
    dtype: Precision | None,
    *,
    merge: bool,
    base: Mapping[str, Tensor] | None,
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Returns the weights to write, in the model's order, and the other names of tied tensors."""
    if weights.startswith(OF_TASK) and not _fits_model(own := sources(reader, "callbacks", weights), reader):
        chosen, aliases = own, {}  # an auxiliary module with tensor names of its own
    else:
        chosen, aliases = chosen_weights(reader, weights), dict(reader.aliases)
        if base is not None:
            others, ties = _unsaved(base)
            chosen, aliases = others | chosen, ties | aliases
    if merge:
        chosen, aliases = merged(chosen, aliases)
    if only:
        named = _named(only, chosen, aliases)
        chosen = {name: source for name, source in chosen.items() if name in named}
    if dtype is not None:
        chosen = {name: _converted(name, source, _DTYPES[dtype]) for name, source in chosen.items()}
    return chosen, {alias: name for alias, name in aliases.items() if name in chosen}


def _unsaved(base: Mapping[str, Tensor]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Returns the tensors of a model in memory, in its order, and the other names of tied tensors."""
    first: dict[tuple[int, torch.Size], str] = {}
    aliases = {}
    for name, tensor in base.items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if known != name:
            aliases[name] = known
    kept = {name: tensor for name, tensor in base.items() if name not in aliases}
    return {name: LazyTensor(dtype_name(x.dtype), tuple(x.shape), x.detach) for name, x in kept.items()}, aliases


def _named(globs: Sequence[str], names: Iterable[str], aliases: Mapping[str, str]) -> set[str]:
    """Returns the tensors that match a glob by any of their names; raises UsageError if a glob matches none."""
    known = {name: name for name in names} | dict(aliases)
    found: set[str] = set()
    for glob in globs:
        matched = {tensor for name, tensor in known.items() if fnmatchcase(name, glob)}
        if not matched:
            near = get_close_matches(glob, known, n=3, cutoff=0)
            raise UsageError(f"--include {glob} matches no tensor", hints=[f"near it are {', '.join(near)}"])
        found |= matched
    return found


def _shards(chosen: Mapping[str, LazyTensor], most: int | None) -> dict[str, list[str]]:
    """Assigns tensors to files in order; a tensor that does not fit begins the next file."""
    shards: list[list[str]] = [[]]
    room = most
    for name, source in chosen.items():
        if room is not None and most is not None:
            if shards[-1] and source.nbytes > room:
                shards.append([])
                room = most
            room -= source.nbytes
        shards[-1].append(name)
    if len(shards) == 1:
        return {MODEL: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def _index(chosen: Mapping[str, LazyTensor], shards: Mapping[str, Sequence[str]]) -> bytes:
    """Returns the index that maps tensors to files, in the format of transformers."""
    total = sum(source.nbytes for source in chosen.values())
    places = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


@contextmanager
def _staging(out: Path, replaced: Sequence[Path]) -> Iterator[Path]:
    """Yields a temporary folder to fill; then moves its files to `out`, the index last if `out` exists."""
    new = not out.exists()
    stage = (out.parent if new else out) / f".{out.resolve().name}.{os.getpid()}.tmp"
    try:
        stage.parent.mkdir(parents=True, exist_ok=True)
        disk.make_folder(stage)
        yield stage
        disk.sync_folder(stage)
        if new:
            disk.rename(stage, out)
        else:
            for path in sorted(replaced, key=lambda each: each.name != INDEX):
                disk.remove(path)
            for path in sorted(stage.iterdir(), key=lambda each: each.name == INDEX):
                disk.rename(path, out / path.name)
        disk.sync_folder(stage.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        disk.remove(stage)


def _fits_model(tensors: Mapping[str, LazyTensor], reader: CheckpointReader) -> bool:
    """True if every tensor has the name and shape of one in the model; also True if there are no tensors."""
    model = sources(reader, "model")
    return all(name in model and model[name].shape == kept.shape for name, kept in tensors.items())


def _converted(name: str, source: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    def fetch() -> Tensor:
        tensor = source.fetch()
        converted = tensor.to(dtype)
        if (converted.isinf() & tensor.isfinite()).any():
            raise UsageError(f"{name} has values too large for {dtype_name(dtype)}", hints=["use bf16"])
        return converted

    floating = getattr(torch, source.dtype).is_floating_point
    return LazyTensor(dtype_name(dtype), source.shape, fetch) if floating else source


def _write(out: Path, chosen: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> tuple[int, str]:
    """Writes the weights to a file that appears complete or not at all."""
    with appearing(out, CheckpointError) as temporary:
        return write_weights(temporary, chosen, aliases)


# ----------------------------------------------------------------------------------- a folder of transformers
@dataclass(frozen=True)
class FolderParts:
    """Parts of a transformers model except its weights: configurations and tokenizer.

    A model with a method `save_extra_files(folder, data, tensors)` writes further files; `tensors` reads exported
    weights.
    """

    config: Any
    generation: Any
    tokenizer: Any
    extra: Callable[[Path, Mapping[str, Tensor]], None] | None = None

    @classmethod
    def of(cls, model: nn.Module, data: Any, *, merged: bool) -> FolderParts:
        """Collects the configurations of a model, and the tokenizer of its data, if it has one.

        If the data has `end_tokens`, text that the exported model generates also ends there. Raises UsageError if the
        model is not from transformers, or has adapters and is not `merged`.
        """
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "save_pretrained"):
            raise UsageError(
                f"{type(model).__name__} is not a model of transformers",
                hints=["--format transformers is for runs of ddpforge-transformers; omit it to write only the weights"],
            )
        if not merged and any(".lora_" in name for name, _ in model.named_parameters()):
            raise UsageError(
                "the model has adapters, and transformers cannot load them under these names",
                hints=[
                    "--merge folds them into the weights",
                    "--format peft writes only the adapters, for peft",
                    "--format safetensors writes all weights, without config and tokenizer",
                ],
            )
        config = deepcopy(config)
        config.architectures = [type(model).__name__]
        generation = deepcopy(getattr(model, "generation_config", None))
        if generation is not None and (ends := getattr(data, "end_tokens", ())):
            known = generation.eos_token_id
            known = [] if known is None else known if isinstance(known, list) else [known]
            generation.eos_token_id = [*known, *(token for token in ends if token not in known)]
        save = getattr(model, "save_extra_files", None)
        extra = save and (lambda folder, tensors: save(folder, data, tensors))
        tokenizer = getattr(data, "processor", None) or getattr(data, "tokenizer", None)
        return cls(config, generation, tokenizer, extra)

    def save(self, weights: Exported) -> Exported:
        """Saves the parts in the folder of exported weights; returns `weights` with all files."""
        folder = weights.file.parent
        self.config.dtype = _main_dtype([folder / name for name in weights.files])
        stage = folder / f".beside.{os.getpid()}.tmp"
        try:
            disk.make_folder(stage)
            for part in (self.config, self.generation, self.tokenizer):
                if part is not None:
                    part.save_pretrained(stage)
            if self.extra:
                self.extra(stage, _Saved([folder / name for name in weights.files]))
            files = sorted(path for path in stage.rglob("*") if path.is_file())
            names = {path.relative_to(stage).as_posix(): disk.sha256(path) for path in files}
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                disk.rename(stage / name, folder / name)
            disk.sync_folder(folder)
        except OSError as error:
            raise SetupError(f"{folder} could not be written: {error.strerror or error}") from error
        finally:
            disk.remove(stage)
        return replace(weights, files={**weights.files, **names})


class _Saved(Mapping[str, Tensor]):
    """Tensors of weight files by name, each read when it is looked up."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._places: dict[str, Path] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                self._places |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._places[name], "pt") as opened:
            found: Tensor = opened.get_tensor(name)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _main_dtype(files: Sequence[Path]) -> torch.dtype:
    """Returns the dtype of most values in weight files; from_pretrained would convert the weights to another one."""
    sizes: Counter[str] = Counter()
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                part = opened.get_slice(name)
                sizes[part.get_dtype()] += prod(part.get_shape())
    names = {"F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
    return names.get(max(sizes, key=lambda one: sizes[one]), torch.float32)
