"""Weights by name: safetensors and `state_dict`s, in one file or as transformers splits them over several."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpforge.interop.foreign.foreign_state import ForeignState, inside, listed, load, refused, regular, tied

SINGLE = {"model.safetensors": "safetensors", "pytorch_model.bin": "state_dict"}
INDEXED = {f"{name}.index.json": kind for name, kind in SINGLE.items()}
_NESTED = ("model", "state_dict", "model_state_dict", "module")


def is_pickle(path: Path) -> bool:
    """True when a file begins as `torch.save` begins one: a zip archive, or a bare pickle of old."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or start[:1] == b"\x80"


def read_file(path: Path, *, trust: bool) -> ForeignState:
    """The weights in one file."""
    if is_pickle(path):
        named, left_out = _state_dict(path, trust=trust)
        kept, aliases = tied(named)
        return ForeignState(kind="state_dict", model={**kept}, aliases=aliases, left_out=left_out)
    named, aliases = _safetensors(path)
    return ForeignState(kind="safetensors", model={**named}, aliases=aliases)


def is_folder(folder: Path) -> bool:
    """True for a folder that `read_folder` reads."""
    return any(_is_there(folder / name) for name in (*SINGLE, *INDEXED))


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def read_folder(folder: Path, *, trust: bool) -> ForeignState:
    """The weights in a folder that `save_pretrained` of transformers, or `ckpt export`, made."""
    for name, kind in SINGLE.items():
        if _is_there(folder / name):
            found = read_file(regular(folder / name), trust=trust)
            if found.kind != kind:
                raise refused(folder / name, f"it is not the {kind} that its name says")
            break
    else:
        name, kind = next(each for each in INDEXED.items() if _is_there(folder / each[0]))
        found = _read_indexed(folder, name, kind, trust=trust)
    others = sorted(
        path.name for path in folder.iterdir() if re.match(r"(optimizer|scheduler|scaler|rng|random)", path.name)
    )
    found.left_out += [f"{other}: only weights are taken from a folder like this" for other in others]
    return found


def _read_indexed(folder: Path, index: str, kind: str, *, trust: bool) -> ForeignState:
    places = _weight_map(inside(folder, index))
    model: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    left_out: list[str] = []
    for file in dict.fromkeys(places.values()):
        path = inside(folder, file)
        if is_pickle(path) != (kind == "state_dict"):
            raise refused(path, f"it is not the {kind} that its name says")
        if kind == "state_dict":
            found, rest = _state_dict(path, trust=trust)
            left_out += rest
        else:
            found, ties = _safetensors(path)
            aliases |= ties
        wanted = {name for name, place in places.items() if place == file}
        if found.keys() != wanted:
            odd = sorted(found.keys() ^ wanted)
            raise refused(path, f"it and {index} do not name the same tensors: {listed(odd)}")
        model |= found
    if kind == "state_dict":
        model, aliases = tied(model)
    return ForeignState(kind=kind, model={**model}, aliases=aliases, left_out=left_out)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise refused(path, "it is not an index of weights") from error
    if not isinstance(places, dict) or not places:
        raise refused(path, "it is not an index of weights")
    return places


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors, mapped into memory and not yet read, and the names that metadata say are tied to others."""
    try:
        with safe_open(path, framework="pt") as file:
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata: Mapping[str, str] = file.metadata() or {}
    except (SafetensorError, OSError, ValueError, AttributeError, RuntimeError) as error:
        raise refused(path, f"it is no safetensors file ({error})") from error
    return named, {name: other for name, other in metadata.items() if other in named and name not in named}


def _state_dict(path: Path, *, trust: bool) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a `state_dict`, or of one in a dictionary beside other things, and what else was there."""
    loaded = load(path, trust=trust)
    left_out: list[str] = []
    if not isinstance(loaded, Mapping):
        raise refused(path, f"it holds a {type(loaded).__name__}, and not tensors by name")
    if not _some(loaded, Tensor):
        nested = [key for key in _NESTED if isinstance(loaded.get(key), Mapping) and _some(loaded[key], Tensor)]
        if len(nested) != 1:
            keys = listed([str(key) for key in loaded])
            raise refused(path, f"it has no tensors by name; it holds {keys or 'nothing'}")
        left_out = [f"{key}: {_what(value)}" for key, value in loaded.items() if key != nested[0]]
        loaded = loaded[nested[0]]
    left_out += [f"{name}: not a tensor" for name, value in loaded.items() if not isinstance(value, Tensor)]
    return {str(name): x.detach() for name, x in loaded.items() if isinstance(x, Tensor)}, left_out


def _some(values: Mapping[Any, Any], kind: type) -> bool:
    return any(isinstance(value, kind) for value in values.values())


def _what(value: object) -> str:
    if isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
        return "an optimizer's state by number; numbers do not say which parameters are meant"
    return "beside the weights"
