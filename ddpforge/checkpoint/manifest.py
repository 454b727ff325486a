"""What a checkpoint says it contains, and whether that is so: reading, trusting and verifying without torch.

    step-000001200-7f3a/
      COMMIT                   {"manifest_sha256": ...}
      manifest.json            this module's `Manifest`
      model.safetensors        and the other files that the manifest lists

COMMIT holds the manifest's hash and the manifest those of the files: one flipped bit anywhere is found.
"""

import hashlib
import json
import re
import stat
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from ddpforge.checkpoint import files
from ddpforge.errors import CheckpointError

FORMAT, VERSION = "ddpforge", 1
MANIFEST, COMMIT = "manifest.json", "COMMIT"
LATEST = "latest.json"  # beside the checkpoints: names the one written last
FOLDER = re.compile(r"step-(\d{9,})-[0-9a-f]{4}")

_LIMIT = 1 << 28  # bytes of JSON: more than a million tensors
_Model = TypeVar("_Model", bound=BaseModel)


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"the file name {name!r} would leave the folder or hide in it; expected a plain name")
    return name


class _Table(BaseModel):
    """A JSON object with exactly these members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Commit(_Table):
    """The contents of COMMIT."""

    manifest_sha256: str


class FileEntry(_Table):
    """A file of the checkpoint."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class TensorEntry(_Table):
    """A tensor, whole, in one file; its name there is its name in the manifest."""

    file: str
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]


class Number(_Table):
    """A number that JSON alone would not give back: a 0-d tensor, or ("float") a float that is not finite.

    `value` is text where the number is not finite.
    """

    dtype: str
    value: bool | int | float | str


Scalar = Number | bool | int | float | str | None
Section = Literal["model", "optimizer", "callbacks"]
FileName = Annotated[str, AfterValidator(_plain_name)]


class Manifest(_Table):
    """Everything about a checkpoint but the tensors' contents.

    `tensors` has the sections "model" (by parameter or buffer name), "optimizer" ("<parameter>/<key>") and
    "callbacks" ("<callback>/<key>"); `optimizer` and `callbacks` hold what those have besides tensors.
    """

    format: Literal["ddpforge"] = "ddpforge"
    version: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    samples: Annotated[int, Field(ge=0)]
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
    optimizer: dict[str, dict[str, Number | bool | int | float | None]]
    callbacks: dict[str, dict[str, Scalar]]
    files: dict[FileName, FileEntry]
    tensors: dict[Section, dict[str, TensorEntry]]

    def dumps(self) -> bytes:
        """The manifest as strict JSON; raises ValueError where a number is not finite."""
        return json.dumps(self.model_dump(), indent=1, allow_nan=False).encode()

    def metric(self, name: str) -> float:
        """The metric's value; NaN where there is none."""
        value = self.metrics.get(name)
        return float(value.value if isinstance(value, Number) else "nan" if value is None else value)


class _Header(BaseModel):
    format: str
    version: int


def read_manifest(path: Path, *, verify: bool = False) -> Manifest:
    """The manifest of the checkpoint `path`, after checking that it is committed and has all its files.

    Costs a look at each file's size, or, with `verify`, a read of every byte. Raises CheckpointError naming
    what is missing, damaged or too new.
    """
    commit = _parse(Commit, path / COMMIT, _read(path / COMMIT))
    content = _read(path / MANIFEST)
    if hashlib.sha256(content).hexdigest() != commit.manifest_sha256:
        raise damaged(path / MANIFEST, f"its sha256 is not the one that {COMMIT} names")

    header = _parse(_Header, path / MANIFEST, content)
    if header.format != FORMAT:
        raise CheckpointError(f"{path} is not a ddpforge checkpoint: its format is {header.format!r}")
    if header.version > VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {header.version}; this ddpforge reads formats up to {VERSION}",
            hints=["upgrade ddpforge"],
        )

    manifest = _parse(Manifest, path / MANIFEST, content)
    _check_files(path, manifest)
    if verify:
        _check_contents(path, manifest)
    return manifest


def damaged(path: Path, reason: str) -> CheckpointError:
    """The error for one file of a checkpoint."""
    return CheckpointError(
        f"the checkpoint file {path} is damaged: {reason}",
        hints=["resume without naming a checkpoint: the newest one that is intact is used"],
    )


def _check_files(path: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        if (size := _size(path / name)) != entry.bytes:
            raise damaged(path / name, f"it has {size} bytes, and the manifest says {entry.bytes}")

    for section in manifest.tensors.values():
        for name, tensor in section.items():
            if tensor.file not in manifest.files:
                raise damaged(path / MANIFEST, f"it puts {name} in the file {tensor.file!r}, which it does not list")


def _check_contents(path: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        try:
            digest = files.sha256(path / name)
        except OSError as error:
            raise damaged(path / name, f"it cannot be read ({error.strerror})") from error
        if digest != entry.sha256:
            raise damaged(path / name, "its sha256 is not the one in the manifest")


def _size(path: Path) -> int:
    """Bytes of a regular file. A link could lead out of the folder, a pipe could block for ever."""
    try:
        status = path.lstat()
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise damaged(path, "it is a link or a special file; a checkpoint consists of regular files only")
    return status.st_size


def _read(path: Path) -> bytes:
    if (size := _size(path)) > _LIMIT:
        raise damaged(path, f"it has {size} bytes, more than any file of its kind")
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error


def _parse(model: type[_Model], path: Path, content: bytes) -> _Model:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged(path, f"{where}: {first['msg']}" if where else first["msg"]) from error
