"""Folders of sentence-transformers: read by the model `text_encoder`, and written next to exported weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddpforge_transformers.data import saved_folder
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "Activation", "EncoderFolder", "SavedDense", "SavedEncoder", "read_folder"]

Activation = Literal["identity", "tanh", "gelu", "relu"]
ACTIVATIONS: Mapping[str, tuple[str, type[nn.Module]]] = {
    "identity": ("torch.nn.modules.linear.Identity", nn.Identity),
    "tanh": ("torch.nn.modules.activation.Tanh", nn.Tanh),
    "gelu": ("torch.nn.modules.activation.GELU", nn.GELU),
    "relu": ("torch.nn.modules.activation.ReLU", nn.ReLU),
}
_MODES = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "last": "lasttoken"}
_NEW_MODES = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]


@dataclass(frozen=True)
class SavedDense:
    """Dense layer of a folder: options of the model's `dense`, and the file of its weights."""

    options: dict[str, Any]
    folder: Path

    def tensors(self) -> dict[str, Tensor]:
        """Reads the weights; raises ValueError if they are not in a file of safetensors."""
        file = self.folder / "model.safetensors"
        if not file.is_file():
            raise ValueError(f"pretrained: {self.folder} has no model.safetensors; pickles are not read")
        return dict(load_file(file))


@dataclass(frozen=True)
class SavedEncoder:
    """Parts of a folder of sentence-transformers."""

    transformer: Path
    pooling: Any
    include_prompt: bool
    normalize: bool
    dense: SavedDense | None
    prompts: Mapping[str, str]


def read_folder(name: str) -> SavedEncoder | None:
    """Reads a folder of sentence-transformers, or downloads it from the hub; None for a folder without modules.json.

    Raises ValueError for modules that the model `text_encoder` does not have.
    """
    place = Path(saved_folder(name, "pretrained"))
    if not place.is_dir():
        try:
            place = Path(snapshot_download(name, allow_patterns=_FILES))
        except (OSError, ValueError) as error:
            raise ValueError(f"pretrained: `{name}` cannot be downloaded: {str(error).splitlines()[0]}") from error
    if not (place / "modules.json").is_file():
        return None
    found: dict[str, Path] = {}
    modules = _json(place / "modules.json")
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize") or kind in found:
            raise ValueError(
                f"pretrained: {place / 'modules.json'} has a module {kind or module!r}"
                f"{' twice' if kind in found else ''}; text_encoder has one Transformer, Pooling, Dense and Normalize"
            )
        found[kind] = place / str(module.get("path", ""))
    kinds = [one for one in found if one != "Dense"]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or (
        "Normalize" in found and "Dense" in found and list(found)[-1] != "Normalize"
    ):
        raise ValueError(
            f"pretrained: {place / 'modules.json'} has the modules {', '.join(found) or 'none'}; expected Transformer,"
            " Pooling, and perhaps Dense and Normalize, in this order"
        )
    pooling, include_prompt = _pooling(found["Pooling"] / "config.json")
    about = place / "config_sentence_transformers.json"
    prompts = _json(about).get("prompts") or {} if about.is_file() else {}
    return SavedEncoder(
        transformer=found["Transformer"],
        pooling=pooling,
        include_prompt=include_prompt,
        normalize="Normalize" in found,
        dense=_dense(found["Dense"]) if "Dense" in found else None,
        prompts={key: text for key, text in prompts.items() if text},
    )


def _pooling(file: Path) -> tuple[str, bool]:
    config = _json(file)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes = [_NEW_MODES.get(one, one) for one in modes]
    known = {f"pooling_mode_{key}": name for name, key in _MODES.items()}
    modes += [known.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(
            f"pretrained: {file} has the pooling {', '.join(modes) or 'none'}; expected one of {list(_MODES)}"
        )
    return modes[0], bool(config.get("include_prompt", True))


def _dense(folder: Path) -> SavedDense:
    config = _json(folder / "config.json")
    name = str(config.get("activation_function", "")).rsplit(".", 1)[-1]
    names = {path.rsplit(".", 1)[-1]: key for key, (path, _) in ACTIVATIONS.items()}
    if name not in names or config.get("use_residual"):
        raise ValueError(
            f"pretrained: {folder / 'config.json'} has the activation {name!r}"
            f"{' and a residual' if config.get('use_residual') else ''}; expected {', '.join(names)}"
        )
    options = {"features": config["out_features"], "bias": config.get("bias", True), "activation": names[name]}
    return SavedDense(options, folder)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"pretrained: {file} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class EncoderFolder:
    """Files that make a folder of transformers one of sentence-transformers."""

    pooling: str
    include_prompt: bool
    size: int
    dense: Any
    normalize: bool
    prompts: Mapping[str, str]
    max_length: int | None

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes modules.json and a folder for each module; `tensors` has the weights of the Dense layer."""
        modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
        _write(folder / "sentence_bert_config.json", {"max_seq_length": self.max_length, "do_lower_case": False})
        modes = {f"pooling_mode_{key}": name == self.pooling for name, key in _MODES.items()}
        config = {"word_embedding_dimension": self.size, **modes, "include_prompt": self.include_prompt}
        _write(folder / "1_Pooling" / "config.json", config)
        if self.dense is not None:
            modules.append((f"{len(modules)}_Dense", "Dense"))
            self._write_dense(folder / modules[-1][0], tensors)
        if self.normalize:
            modules.append((f"{len(modules)}_Normalize", "Normalize"))
        rows = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ]
        _write(folder / "modules.json", rows)
        about = {"prompts": dict(self.prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"}
        _write(folder / "config_sentence_transformers.json", about)

    def _write_dense(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        linear = self.dense.linear
        config = {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
            "activation_function": ACTIVATIONS[self.dense.activation_name][0],
        }
        _write(folder / "config.json", config)
        names = ["linear.weight", *(["linear.bias"] if linear.bias is not None else [])]
        save_file({name: tensors[f"head.{name}"].contiguous() for name in names}, folder / "model.safetensors")


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
