"""Proves fifty correct configurations of scripts of all trainers: each relation that is broken is a false alarm.

    .venv/bin/python benchmarks/prove.py [NAME...]

Scripts of docs/migrate.md, fine-tuning and DPO with TRL, two loops by hand, and recipes, over batch sizes,
accumulation, dtypes and ranks. It prints a row for each configuration as it ends, and the counts.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory

from ddpforge.errors import ForgeError
from ddpforge.tools.prove.of_recipe import prove_recipe
from ddpforge.tools.prove.relations import prove
from ddpforge.tools.prove.runs import Options

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs/migrate.md"

LOOP = """
import argparse
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--clip", type=float, default=1.0)
given = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.GELU())
model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 2))
replica = nn.parallel.DistributedDataParallel(model)
options = {"lr": 1e-2, "momentum": 0.9} if given.optimizer == "SGD" else {"lr": 1e-2}
optimizer = getattr(torch.optim, given.optimizer)(model.parameters(), **options)
loader = DataLoader(data, given.bs, sampler=DistributedSampler(data, seed=3))
dtype, passes = getattr(torch, given.dtype), 0
for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = replica(inputs)
        (F.cross_entropy(scores.float(), targets) / given.ga).backward()
        passes += 1
        if passes % given.ga == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip)
            optimizer.step()
            optimizer.zero_grad()
"""
GPT = """
import argparse
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--out", default="")
parser.add_argument("--resume", default="")
given = parser.parse_args()
torch.manual_seed(0)
text = torch.randint(0, 40, (4000,), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 32), nn.Embedding(24, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.body(self.tokens(x) + places, mask, is_causal=True))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
pieces = [text[start : start + 25] for start in range(0, 3900, 25)]
dtype, passes, steps = getattr(torch, given.dtype), 0, 0
order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(2)).tolist()
if given.resume:
    kept = torch.load(given.resume)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    steps = kept["steps"]
for batch in DataLoader([pieces[place] for place in order[steps * given.bs * given.ga :]], given.bs):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        scores = model(batch[:, :-1])
    (F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten()) / given.ga).backward()
    passes += 1
    if passes % given.ga == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
        if steps == given.steps:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
            torch.save(kept | {"schedule": schedule.state_dict()}, given.out)
            break
"""
_TINY = """
import sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

set_seed(0)
given = dict(word.split("=") for word in sys.argv[1:])
words = [f"w{n}" for n in range(60)]
vocabulary = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
base = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
draw = torch.Generator().manual_seed(1)
config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
)
options = dict(
    per_device_train_batch_size=int(given.get("bs", 8)), gradient_accumulation_steps=int(given.get("ga", 1)),
    bf16=given.get("dtype") == "bf16", learning_rate=1e-3, max_steps=10, report_to="none", save_strategy="no", seed=0,
    max_grad_norm=float(given.get("clip", 1.0)), optim=given.get("optim", "adamw_torch"), use_cpu=True,
    output_dir="out",
)


def text(length):
    return " ".join(words[int(n)] for n in torch.randint(0, 60, (length,), generator=draw))


"""
SFT = (
    _TINY
    + """
from trl import SFTConfig, SFTTrainer

rows = Dataset.from_dict({"text": [text(4 + place % 9) for place in range(64)]})
test = Dataset.from_dict({"text": [text(5) for place in range(8)]})
trainer = SFTTrainer(
    LlamaForCausalLM(config), SFTConfig(**options), train_dataset=rows, eval_dataset=test, processing_class=tokenizer
)
trainer.train()
"""
)
DPO = (
    _TINY
    + """
from trl import DPOConfig, DPOTrainer

rows = {
    "prompt": [text(3 + place % 4) for place in range(64)],
    "chosen": [" " + text(2 + place % 5) for place in range(64)],
    "rejected": [" " + text(2 + place % 7) for place in range(64)],
}
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
DPOTrainer(
    model, reference, DPOConfig(**options), train_dataset=Dataset.from_dict(rows), processing_class=tokenizer
).train()
"""
)


@dataclass(frozen=True)
class Configuration:
    """One correct configuration of a script; `recipe` is proved in place of a script if it is given."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    options: Options = field(default_factory=Options)
    skip: tuple[str, ...] = ()
    replace: tuple[str, str] = ("", "")
    recipe: str = ""


def configurations() -> Iterator[Configuration]:
    """Yields all configurations."""
    sizes = {"batch": "--bs {}", "accumulate": "--ga {}"}
    for dtype in ("float32", "bfloat16", "float16"):
        for samples, ranks, optimizer in ((8, 2, "AdamW"), (16, 4, "SGD"), (4, 2, "RMSprop"), (8, 2, "SGD")):
            words = ("--dtype", dtype, "--optimizer", optimizer, "--clip", "0.1" if samples == 8 else "1e9")
            name = f"loop {dtype} {samples} {optimizer}"
            yield Configuration(name, "loop", words, ranks, Options(**sizes, samples=samples))  # type: ignore[arg-type]
        for samples, more in ((8, True), (16, False), (4, True)):
            saves = {"save": "--steps {steps} --out {path}", "resume": "--resume {path}"} if more else {}
            given = Options(**sizes, **saves, samples=samples)  # type: ignore[arg-type]
            yield Configuration(f"gpt {dtype} {samples}", "gpt", ("--dtype", dtype), 1, given)
    for size in (64, 32, 16):
        change = ("64 //", f"{size} //")
        yield Configuration(f"ddp {size}", "train_ddp", replace=change, ranks=4 if size == 64 else 2)
        yield Configuration(f"accelerate {size}", "train_accelerate", replace=change)
        # The trainer begins an epoch anew after a resume within it.
        yield Configuration(f"lightning {size}", "train_lightning", replace=change, skip=("resume",))
        yield Configuration(f"hf {size}", "train_hf", replace=("train_batch_size=64", f"train_batch_size={size}"))
    mixed = {"train_accelerate": ("Accelerator(", 'Accelerator(mixed_precision="bf16"')}
    mixed["train_lightning"] = ("L.Trainer(", 'L.Trainer(precision="bf16-mixed", ')
    mixed["train_hf"] = ("seed=0,", "seed=0, bf16=True, use_cpu=True, gradient_accumulation_steps=2,")
    for name, change in mixed.items():
        skip = ("resume",) if name == "train_lightning" else ()
        yield Configuration(f"{name[6:]} bf16", name, replace=change, skip=skip)
    for kind in ("sft", "dpo"):
        for words in (
            ("bs=8",),
            ("bs=4", "ga=2"),
            ("bs=8", "dtype=bf16"),
            ("bs=2",),
            ("bs=8", "clip=0.1", "optim=sgd"),
        ):
            yield Configuration(f"{kind} {' '.join(words)}", kind, words)
    for recipe in ("digits", "muon-digits", "multilabel-digits", "text-classes"):
        yield Configuration(f"recipe {recipe}", "", recipe=recipe)


def written(folder: Path) -> None:
    """Writes all scripts into a folder."""
    for name, text in {"loop": LOOP, "gpt": GPT, "sft": SFT, "dpo": DPO}.items():
        (folder / f"{name}.py").write_text(text)
    for block in re.findall(r"```python\n(# (?:rings|train_\w+)\.py\n.*?)```", DOCS.read_text(), re.DOTALL):
        name = re.match(r"# (\w+)\.py", block)[1]  # type: ignore[index]
        (folder / f"{name}.py").write_text(block)


def main(*wanted: str) -> int:
    """Proves the configurations whose name contains one of the words; returns the number of false alarms."""
    alarms, times, tried = 0, [], 0
    with TemporaryDirectory(prefix="prove-") as kept:
        folder = Path(kept)
        written(folder)
        for one in configurations():
            if wanted and not any(word in one.name for word in wanted):
                continue
            began, spent = time.monotonic(), getrusage(RUSAGE_CHILDREN)
            try:
                if one.recipe:
                    found = prove_recipe(one.recipe, ranks=one.ranks)
                else:
                    script = folder / f"{one.script}.py"
                    if one.replace[0]:
                        changed = folder / f"{one.script}_{abs(hash(one.replace))}.py"
                        changed.write_text(script.read_text().replace(*one.replace))
                        script = changed
                    options = {"ranks": one.ranks, "skip": one.skip, "options": one.options}
                    found = prove(script, one.arguments, **options)  # type: ignore[arg-type]
            except ForgeError as error:
                print(f"{one.name:<32} failed: {str(error).splitlines()[-1]}", flush=True)
                alarms += 1
                continue
            now = getrusage(RUSAGE_CHILDREN)
            cpu = now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime
            times.append(time.monotonic() - began)
            held = [each.name for each in found.relations if each.result == "holds"]
            tried += len(held) + len(found.broken)
            alarms += bool(found.broken)
            most = max(each.difference / each.allowed for each in found.relations if each.allowed)
            print(
                f"{one.name:<32} {len(held)} hold, {times[-1]:4.0f} s, {cpu:4.0f} s of a core, {most:.2f} of allowed",
                flush=True,
            )
            for each in found.broken:
                assert each.broken is not None
                print("    " + "; ".join([each.name, *each.broken.lines()]), flush=True)
    print(f"{len(times)} configurations, {tried} relations tried, {alarms} false alarms, longest {max(times):.0f} s")
    return alarms


if __name__ == "__main__":
    raise SystemExit(min(1, main(*sys.argv[1:])))
