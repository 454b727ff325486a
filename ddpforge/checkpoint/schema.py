"""Schemas of a checkpoint's JSON files, for all formats.

    step-000001200-7f3a/
      COMMIT                   {"manifest_sha256": ...}
      manifest.json            this module's `Manifest`
      shard-00000-of-00008.safetensors …  and rank-00000.json …: one pair of files per rank
      model.safetensors        the whole model, for other tools; only with `checkpoint.layout = "full"`

The manifest lists the files. In format 1, and in early checkpoints of format 2, they are `model.safetensors`,
`optimizer.safetensors` and `callbacks.safetensors`.

COMMIT contains the manifest's hash, and the manifest the hashes of all other files, so that any flipped bit is found.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from ddpforge.interfaces.regions import Box, FlatRange, whole

FORMAT, VERSION = "ddpforge", 2
MANIFEST, COMMIT, MODEL = "manifest.json", "COMMIT", "model.safetensors"
LATEST = "latest.json"  # in the folder of checkpoints: has the name of the newest one
FOLDER = re.compile(r"step-(\d{9,})-[0-9a-f]{4}")

OMITTED = "left_out."  # prefix of the checksums of weights that a checkpoint omits, among its numbers
MOST_TEXT = 1 << 28  # bytes of JSON: about a million chunks


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"the file name {name!r} leaves the folder or is hidden; expected a plain name")
    return name


def _possible(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not 0 < prod(shape) < 1 << 63 and prod(filter(None, shape)) >= 1 << 63:
        raise ValueError("a tensor cannot have this many elements")
    return shape


class StrictModel(BaseModel):
    """JSON object with exactly the declared members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Commit(StrictModel):
    """Contents of COMMIT."""

    manifest_sha256: str


Natural = Annotated[int, Field(ge=0, lt=1 << 63)]
FileName = Annotated[str, AfterValidator(_plain_name)]
Shape = Annotated[tuple[Natural, ...], Field(max_length=64), AfterValidator(_possible)]
Section = Literal["model", "optimizer", "callbacks"]
SECTIONS: tuple[Section, ...] = get_args(Section)


class TensorFile(StrictModel):
    """Safetensors file of the checkpoint, with the XXH3-128 of its header; the chunks have the hashes of the data."""

    bytes: Natural
    header_xxh3: str


class OtherFile(StrictModel):
    """File that no tensor is read from, or any file of format 1."""

    bytes: Natural
    sha256: str


FileEntry = TensorFile | OtherFile


# Plain dataclasses, because a checkpoint may have 100,000 of them: a model takes three times as long to make.
@dataclass(frozen=True, slots=True)
class Chunk:
    """Region of a tensor, stored as an entry of a file. `hashes`: XXH3-128 of each block of 64 MiB; the last may be
    shorter.
    """

    file: str
    entry: str
    region: Annotated[FlatRange | Box, Field(union_mode="left_to_right")]
    hashes: tuple[str, ...]

    __pydantic_config__ = StrictModel.model_config


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Tensor in chunks; each element is in exactly one chunk."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    __pydantic_config__ = StrictModel.model_config


class Number(StrictModel):
    """Number that JSON cannot represent: a 0-d tensor, or a float that is not finite (its dtype is "float").

    `value` is text if the number is not finite.
    """

    dtype: str
    value: bool | int | float | str


Scalar = Number | bool | int | float | str | None
OptimizerScalars = dict[str, dict[str, Number | bool | int | float | None]]
CallbackScalars = dict[str, dict[str, Scalar]]
Tensors = dict[Section, dict[str, TensorEntry]]


class _Facts(StrictModel):
    """Fields of manifests of all formats."""

    format: Literal["ddpforge"] = "ddpforge"
    version: int
    step: Natural
    samples: Natural
    created: str  # UTC, ISO 8601 with microseconds: sorts as text
    strategy: str
    world_size: Annotated[int, Field(ge=1)]
    versions: dict[str, str]
    metrics: dict[str, Scalar]
    position: dict[str, JsonValue]
    loop: dict[str, JsonValue]
    lineage: list[JsonValue]
    recipe: str
    aliases: dict[str, str]
    optimizer: OptimizerScalars
    callbacks: CallbackScalars


class Manifest(_Facts):
    """Contents of a checkpoint except the data of tensors.

    `tensors` has the sections "model" (by parameter or buffer name), "optimizer" ("<parameter>/<key>") and
    "callbacks" ("<callback>/<key>"). `optimizer` and `callbacks` hold their values that are not stored as tensors.
    """

    version: Literal[2] = 2
    files: dict[FileName, FileEntry]
    tensors: Tensors
    run: str = ""
    data: dict[str, JsonValue] = {}
    rows: Natural | None = None

    def dumps(self) -> bytes:
        """Returns the manifest as JSON."""
        return self.model_dump_json(indent=1).encode()

    def metric(self, name: str) -> float:
        """Returns the metric's value; NaN if there is none."""
        value = self.metrics.get(name)
        return float(value.value if isinstance(value, Number) else "nan" if value is None else value)


class RankManifest(StrictModel):
    """One rank's part of a manifest: the shard that it wrote, and its values that are not tensors."""

    format: Literal["ddpforge"] = "ddpforge"
    version: Literal[2] = 2
    rank: Natural
    file: FileName
    entry: TensorFile
    tensors: Tensors
    optimizer: OptimizerScalars
    callbacks: CallbackScalars


class _FirstTensor(StrictModel):
    file: str
    dtype: str
    shape: Shape


class FirstManifest(_Facts):
    """Manifest of format 1: each tensor is whole in one file, under its own name, and each file has one hash."""

    version: Literal[1]
    files: dict[FileName, OtherFile]
    tensors: dict[Section, dict[str, _FirstTensor]]

    def upgraded(self) -> Manifest:
        """Returns the same manifest in the current format."""
        tensors: Tensors = {
            section: {
                name: TensorEntry(
                    dtype=entry.dtype,
                    shape=entry.shape,
                    chunks=(Chunk(file=entry.file, entry=name, region=whole(entry.shape), hashes=()),),
                )
                for name, entry in entries.items()
            }
            for section, entries in self.tensors.items()
        }
        facts = {name: getattr(self, name) for name in _Facts.model_fields if name != "version"}
        return Manifest(**facts, files=dict(self.files), tensors=tensors)


def position_flaw(position: Mapping[str, object]) -> str | None:
    """Describes the flaw in a checkpoint's position in the data; None if it has none."""
    kinds: dict[str, tuple[type, ...]] = {"seconds": (int, float), "skipped": (int,), "left_out": (list,)}
    for key, value in position.items():
        if type(value) not in kinds.get(key, (type(value),)):
            return f"position.{key} cannot be a {type(value).__name__}"
        numbers = value if isinstance(value, list) and key in kinds else [value] if key in kinds else []
        wanted = (int,) if key == "left_out" else (int, float)
        if not all(isinstance(x, wanted) and type(x) is not bool and 0 <= x < 1 << 63 for x in numbers):
            return f"position.{key} holds a value that no run writes"
    return None


def omits_weights(numbers: Iterable[str]) -> bool:
    """True if a checkpoint with these numbers omits the frozen weights, because every start loads them anew."""
    return any(name.startswith(OMITTED) for name in numbers)
