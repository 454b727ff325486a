"""Writes the tables of `docs/guides/choose-method.md`: memory by `ddpforge plan`, and features by type of model.

`python docs/methods.py` writes them from `docs/methods.json`. `python docs/methods.py --plan` first plans each cell
that is missing, or whose recipe has changed: half an hour of a core for all. `python docs/methods.py --probe` first
builds a tiny model of each type and tries each feature, in some minutes. Both need ddpforge-transformers.

A plan of a frozen base needs saved weights, of up to 65 GB. `saved` makes others: tensors of the same shapes and
dtypes in memory that is never touched. Everything else is the code of the plugin.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import Dataset

ROOT = Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs/guides/choose-method.md", ROOT / "docs/methods.json"

TOKENS = 2048  # of a sample
DEVICES = (1, 8)
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8}
SIZES: dict[str, dict[str, Any]] = {  # configs of Qwen 3 and 2.5
    "0.6 B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "1.5 B": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "8 B": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32 B": QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
LORA = 'lora = { targets = "all-linear", r = 16, alpha = 32 }'
PAIRS = '[data.train]\nuse = "{data}"\npath = "samples.jsonl"\ntokenizer = "words"\nmax_length = 4096'
METHODS: dict[str, dict[str, str]] = {  # lines of the model, the data and the task, by the title of a row
    "all weights": {"model": "weights = false", "task": 'use = "causal_lm"\nloss_chunk = 1024'},
    "LoRA": {"model": LORA, "task": 'use = "causal_lm"\nloss_chunk = 1024'},
    "QLoRA": {
        "model": f'{LORA}\nquantize = "nf4"\ndouble_quant = true',
        "task": 'use = "causal_lm"\nloss_chunk = 1024',
    },
    "DPO, LoRA": {"model": LORA, "data": "preferences", "task": 'use = "dpo"\nloss_chunk = 1024'},
    "ORPO, LoRA": {"model": LORA, "data": "preferences", "task": 'use = "orpo"\nloss_chunk = 1024'},
    "KTO, LoRA": {"model": LORA, "data": "feedback", "task": 'use = "kto"\nloss_chunk = 1024'},
    "reward, LoRA": {"model": f"{LORA}\nclasses = 1", "data": "preferences", "task": 'use = "reward"'},
}
RECIPE = """recipe = 2
name = "planned"
[model]
use = "{model}"
pretrained = "base"
{options}
{data}
[task]
{task}
[optimizer]
use = "adamw"
lr = 1e-5
[strategy]
use = "{strategy}"
[train]
length = "2st"
global_batch = {batch}
micro_batch = {micro}
precision = "bf16"
activation_checkpointing = true
"""


class Blocks(Dataset[dict[str, Tensor]]):
    """Full blocks of tokens."""

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Returns {input_ids, labels}, int64 [T]."""
        ids = torch.arange(TOKENS)
        return {"input_ids": ids, "labels": ids}


# ---------------------------------------------------------------------------------------------- plans
def recipe(method: str, devices: int) -> str:
    """Returns the recipe of a cell; the size of the model is in the folder `base`."""
    parts = METHODS[method]
    micro = 2 if parts.get("data") == "feedback" else 1  # of KTO: an answer, and an unrelated one
    return RECIPE.format(
        model="causal_lm" if method == "all weights" else "./methods.py:saved",
        options=parts["model"],
        data=PAIRS.format(data=parts["data"]) if "data" in parts else '[data.train]\nuse = "./methods.py:Blocks"',
        task=parts["task"],
        strategy="fsdp" if devices > 1 else "ddp",
        batch=micro * devices,
        micro=micro,
    )


def cell(method: str, size: Mapping[str, Any], devices: int, folder: Path) -> dict[str, Any]:
    """Returns the plan of a cell: bytes of a device at the peak, with the allowance for a GPU, and parameters."""
    from ddpforge.components.registry import Registry
    from ddpforge.tools.simulation.devices import DEVICES as KNOWN
    from ddpforge.tools.simulation.forecast import forecast

    (folder / "base").mkdir(exist_ok=True)
    (folder / "methods.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    config = {"vocab_size": 151936, "pad_token_id": 0} | size
    (folder / "base/config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "planned.toml").write_text(recipe(method, devices), encoding="utf-8")
    write_samples(folder)
    with chdir(folder), _unread():
        found = forecast("planned.toml", None, ranks=devices, registry=Registry.installed(), device=KNOWN["h100"])
    if found.unsimulated:
        raise RuntimeError(f"{method}, {devices} devices: {found.unsimulated}")
    return {"needs": found.needs, "peak": found.peak, "phase": found.phase, "parameters": found.parameters}


def write_samples(folder: Path) -> None:
    """Writes a tokenizer of whole words, and pairs and answers of `TOKENS` tokens each."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(folder / "words")
    prompt, good, bad = "a " * (TOKENS // 2), "b " * (TOKENS // 2 - 1), "a " * (TOKENS // 2 - 1)
    keys = "feedback" in (folder / "planned.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "completion": good if number % 2 else bad, "label": bool(number % 2)}
        if keys
        else {"prompt": prompt, "chosen": good, "rejected": bad}
        for number in range(32)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def digest(method: str, size: Mapping[str, Any], devices: int) -> str:
    """Returns a hash of the inputs of a cell."""
    text = json.dumps([recipe(method, devices), size, TOKENS], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cells() -> Iterator[tuple[str, str, int]]:
    """Yields method, size and number of devices of all cells, small models first."""
    for size in SIZES:
        for method in METHODS:
            for devices in DEVICES:
                yield method, size, devices


def stale(known: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Returns the cells that were not planned with these recipes."""
    plans = known.get("plans", {})
    return [
        one
        for one in cells()
        if plans.get("/".join(map(str, one)), {}).get("hash") != digest(one[0], SIZES[one[1]], one[2])
    ]


# ---------------------------------------------------------------------------------------------- weights without memory
def saved(
    *,
    pretrained: str,
    lora: Any = None,
    quantize: str | None = None,
    double_quant: bool | None = None,
    classes: int | None = None,
) -> nn.Module:
    """Builds the plugin's model of a folder that has only a config, in bfloat16, without touching its memory."""
    from ddpforge_transformers import models

    from ddpforge.builtin.models.lora import Adapters

    adapters = None if lora is None else Adapters(**lora)
    with torch.device("cpu"), _untouched():
        if classes is not None:
            return models.sequence_classification(pretrained=pretrained, classes=classes, lora=adapters)
        form: Any = quantize
        return models.causal_lm(pretrained=pretrained, lora=adapters, quantize=form, double_quant=double_quant)


@contextmanager
def _untouched() -> Iterator[None]:
    from ddpforge_transformers import models, probe
    from transformers import AutoConfig

    from ddpforge.builtin.models import quantized

    load = models._saved

    def weights(auto: Any, name: str, **options: Any) -> Any:
        if auto is AutoConfig:
            return load(auto, name, **options)
        with torch.device("meta"):
            model = auto.from_config(options["config"], dtype=torch.bfloat16)
        model.to_empty(device="cpu")
        model.tie_weights()
        probe._found[model] = {"causal": "", "packing": ""}  # it has no values to probe
        return model, {"missing_keys": [], "mismatched_keys": []}

    def pack(weight: Tensor, form: str, double: bool) -> dict[str, Tensor]:
        assert (form, double) == ("nf4", True)
        rows, columns = weight.shape
        blocks = rows * columns // 64
        return {
            quantized.PACKED: torch.empty(rows, columns // 2, dtype=torch.uint8),
            "absmax": torch.empty(blocks, dtype=torch.uint8),
            "absmax_scale": torch.empty(-(-blocks // 256)),
            "absmax_offset": torch.empty(1),
        }

    with (
        patch.object(models, "_saved", weights),
        patch.object(quantized, "_pack", pack),
        patch.object(
            Tensor, "clone", lambda tensor: torch.empty_like(tensor)
        ),  # the plugin releases the mapped file by copies
    ):
        yield


@contextmanager
def _unread() -> Iterator[None]:
    """Unpacks quantized weights to memory that is never touched; those of a simulation have no values anyway."""
    from ddpforge.builtin.models import quantized

    unpack = quantized._unpack

    def shapes(dtype: torch.dtype, packed: Tensor, *scales: Tensor) -> Tensor:
        if isinstance(packed, FakeTensor):
            return unpack(dtype, packed, *scales)
        return torch.empty(len(packed), 2 * packed.shape[1], dtype=dtype)

    with patch.object(quantized, "_unpack", shapes):
        yield


# ---------------------------------------------------------------------------------------------- tables
def memory(known: Mapping[str, Any]) -> str:
    """Returns the table of memory in GB."""
    plans = known["plans"]
    heads = [f"{size}, {devices}" for size in SIZES for devices in DEVICES]
    lines = [f"| Method | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for method in METHODS:
        found = [plans[f"{method}/{size}/{devices}"]["needs"] / 1e9 for size in SIZES for devices in DEVICES]
        lines.append(f"| {method} | {' | '.join(f'{one:.0f}' if one >= 10 else f'{one:.1f}' for one in found)} |")
    return "\n".join(lines)


def features(known: Mapping[str, Any]) -> str:
    """Returns the table of features by type of model; an empty cell is a refusal."""
    rows = known["features"]
    heads = list(next(iter(rows.values())))
    lines = [f"| Type | {' | '.join(heads)} |", "| --- |" + " :---: |" * len(heads)]
    return "\n".join(
        [
            *lines,
            *(f"| {kind} | {' | '.join('✓' * (row[head] == 'yes') for head in heads)} |" for kind, row in rows.items()),
        ]
    )


def probe() -> dict[str, Any]:
    """Returns the features of each type of model, and the families of chat templates, by the plugin's tests."""
    sys.path.insert(0, str(ROOT / "plugins/ddpforge-transformers/tests"))
    from features import all_probed, templates

    with tempfile.TemporaryDirectory() as folder:
        return {"features": dict(all_probed(Path(folder))), "templates": templates()}


def written(text: str, known: Mapping[str, Any]) -> str:
    """Returns the text of the page with its tables."""
    names = fill(", ".join(f"`{name}`" for name in known["templates"]), 120, break_on_hyphens=False)
    blocks = {"memory": memory(known), "features": features(known), "templates": names}
    block = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[3]}", text)


def main(arguments: Sequence[str]) -> None:
    """Plans and probes if the arguments request it, then writes the page."""
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {"plans": {}}
    if "--plan" in arguments:
        for method, size, devices in stale(known):
            with tempfile.TemporaryDirectory() as folder:
                plan = cell(method, SIZES[size], devices, Path(folder))
            print(method, size, devices, plan, flush=True)
            known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else known
            known["plans"][f"{method}/{size}/{devices}"] = {"hash": digest(method, SIZES[size], devices), **plan}
            MEASURED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if "--probe" in arguments:
        known |= probe()
        MEASURED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if PAGE.exists():
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
