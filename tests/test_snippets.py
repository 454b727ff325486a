"""Snippets of TOML and Python in the documentation: each runs in a recipe, as a script, or in a named test."""

import ast
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.launched import Zygote
from test_docs import PAGES, ROOT, blocks, write_files
from test_docs_commands import GPT, PROSE, SHORT, TRAINED
from test_tutorial import shell

ARTEFACTS = """
import io
import tarfile
from pathlib import Path

from PIL import Image

picture = io.BytesIO()
Image.new("RGB", (64, 64), (200, 0, 0)).save(picture, "JPEG")
for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
    Path("pets", name).mkdir(parents=True)
    for number in range(8):
        Path("pets", name, f"{number}.jpg").write_bytes(picture.getvalue())
for shard in range(100):
    with tarfile.open(f"train-{shard:03}.tar", "w") as tar:
        for name, content in {"a.jpg": picture.getvalue(), "a.cls": b"7"}.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
"""
FILES = {
    "gpt.toml": GPT,
    "recipe.toml": SHORT,
    "base.toml": 'recipe = 2\nname = "base"\nextends = ["digits"]\n',
    "letters.txt": "abcdefghijklmno\n" * 200,
    "lines/a.txt": "abcdefg\n" * 16,
    "notes/a.txt": "A note of some words. " * 100,
    "notes/b.txt": "Another note of some words. " * 100,
    **{f"{name}/{file}.txt": PROSE for name in ("code", "prose") for file in "ab"},
    "houses.csv": "area,rooms,price\n" + "".join(f"{number},{number % 5},{2 * number}\n" for number in range(80)),
    "measured.jsonl": "".join(f'{{"x": [{number}.5, 1.0], "label": {number % 2}}}\n' for number in range(80)),
}
"""Files that the snippets require, in addition to the files on the pages."""

RUNS = [
    [*TRAINED["digits"], "track.csv={}"],
    TRAINED["gan"],
    TRAINED["diffusion"],
    ["gpt.toml", "name=base-model", "train.length=1st"],
    ["gpt.toml", "name=pretrained", "train.length=1st"],
]


@dataclass(frozen=True)
class Recipe:
    """Snippet on top of another recipe: trained for a step and evaluated on a batch, or trained to its end."""

    base: str = "digits"
    sets: tuple[str, ...] = ()
    ranks: int = 1
    text: str = ""  # a recipe for a component of the page, if the page shows none
    then: tuple[str, ...] = ()  # a command that uses the trained run


WHOLE = Recipe(sets=("train.length=2ep",), then=("status", "snippet"))
PACKAGE = "a package to install: tests/testing/test_plugin_docs.py, tests/components"
TUTORIAL, CUSTOM_LOSS, MIGRATE = "tests/test_tutorial.py", "tests/testing/test_plugin_docs.py", "tests/test_migrate.py"

SMOLLM = "a model to fetch: plugins/ddpforge-transformers/tests/test_smollm.py"
DIFFUSERS = "components of a package: plugins/ddpforge-diffusers/tests/test_flow_training.py"
MINI_TP = "tests/strategies/test_mini_tp.py"

DETECTION = "tests/builtin/tasks/test_detection.py"
OWN_LOSS = "tests/builtin/tasks/test_model_loss.py"

TOML: dict[str, dict[str, Recipe | str]] = {
    "README": {'name = "my-digits"': Recipe()},
    "augmentation": {
        "CIFAR10": "data to download: tests/builtin/datasets/test_vision.py",
        "scans.py": Recipe(sets=("data.eval.split=test",)),
        "cutmix_alpha": Recipe(),
        "mixup.py": Recipe(sets=("~checkpoint.keep",)),
    },
    "batch-size": {
        "samples per forward pass": Recipe(),
        "batch_size_warmup": Recipe(sets=("schedule.warmup=10st",)),
        "max_tokens": "tests/distributed/test_max_tokens.py",
    },
    "callbacks": {
        "callbacks.ema": Recipe(),
        'metric = "eval/accuracy"': Recipe(),
        "peak_flops": Recipe(),
    },
    "chat-data": {
        'name = "sft"': "a model to fetch: plugins/ddpforge-transformers/tests/test_chat.py",
        "qwen3_next": "a part of a recipe: plugins/ddpforge-transformers/tests/test_token_mixers.py",
    },
    "pairs-and-tags": {
        'name = "pairs"': "a model to fetch: plugins/ddpforge-transformers/tests/test_encoder_decoder.py",
        'name = "entities"': "a model to fetch: plugins/ddpforge-transformers/tests/test_token_classes.py",
    },
    "image-chats": {'name = "images"': "a model to fetch: plugins/ddpforge-transformers/tests/test_image_training.py"},
    "checkpoints": {
        "mirror": "needs S3: tests/runs/test_mirror.py, against a local server",
        "keep = {": Recipe(),
    },
    "components": {"AUROC": Recipe(sets=("~checkpoint.keep",))},
    "custom-loss": {'name = "focal"': CUSTOM_LOSS, "entry-points": CUSTOM_LOSS, "model_loss": OWN_LOSS},
    "data-loading": {"prefetch": Recipe()},
    "detection": {"coco_detection": DETECTION},
    "embeddings": {'name = "search"': "a model to fetch: plugins/ddpforge-embeddings/tests/test_runs.py"},
    "evaluate": {
        "eval_batch": Recipe(),
        "eval_by": Recipe(sets=("~train.eval_every",)),
        "early_stopping": Recipe(sets=("~data.eval.use", "~data.eval.split")),
    },
    "language-models": {"# sft.toml": SMOLLM, "# dpo.toml": SMOLLM},
    "rewards": {"# grpo.toml": "a model to fetch: plugins/ddpforge-transformers/tests/test_policy_optimization.py"},
    "fine-tuning": {
        "runs/digits": Recipe("finetune-digits"),
        "blocks.0": Recipe("gpt.toml"),
        "layer_decay": Recipe("gpt.toml"),
        'start = "2ep"': Recipe(),
        "frozen_dtype": Recipe("gpt.toml"),
        'use = "lora"': Recipe("gpt.toml"),
        "save": Recipe("finetune-digits"),
    },
    "flow-matching": {
        'name = "digits-flow"': DIFFUSERS,
        "latents.safetensors": DIFFUSERS,
        'subfolder = "transformer"': DIFFUSERS,
    },
    "hangs": {"hang_timeout": Recipe()},
    "loggers": {
        "tensorboard": WHOLE,
        "mlflow": "needs a server, or all of mlflow: tests/builtin/trackers/test_mlflow.py",
        "csv": WHOLE,
    },
    "migrate": {'name = "rings"': MIGRATE},
    "mixtures": {'name = "mixture"': Recipe()},
    "mixed-precision": {
        "from Ampere on": Recipe(),
        "fp8": "needs a GPU: tests/gpu/test_cuda.py",
        "tf32": "needs a GPU: tests/gpu/test_cuda.py",
        "deterministic": Recipe(),
    },
    "out-of-memory": {"micro_batch": Recipe(), "loss_chunk": Recipe("gpt.toml")},
    "own-dataset": {
        'name = "houses"': Recipe(),
        'name = "pets"': Recipe(sets=("train.length=1ep",)),
        "measured.jsonl": Recipe(sets=('model={ use="mlp", inputs=2, outputs=2 }', "~checkpoint.keep")),
        "notes": Recipe("gpt.toml"),
        'inputs = ["image"]': OWN_LOSS,
        'use = "csv"': "tests/builtin/datasets/test_folders.py",
        "rest = true": "tests/builtin/datasets/test_folders.py",
        "image_folder": "tests/builtin/datasets/test_folders.py",
    },
    "recipes/README": {"digits-wide": Recipe()},
    "resume": {"init_from": Recipe("gpt.toml", ("model.tie_embeddings=false",))},
    "sampling": {'name = "balanced"': Recipe(), "weighted.py": Recipe(sets=("~checkpoint.keep",))},
    "schedules": {
        "min_lr_ratio": Recipe(),
        "reduce_on_plateau": Recipe(),
        "optimizer.groups.head": Recipe(),
        "fading": Recipe(),
        "onecycle_momentum": Recipe(),
    },
    "streaming": {
        "tar": Recipe(
            sets=(
                'model={ use="torchvision", arch="resnet18", classes=10 }',
                "train.global_batch=2",
                "~data.eval",
                "~checkpoint.keep",
            )
        ),
    },
    "callback": {"StopAt": Recipe()},
    "dataset": {
        "Sums": Recipe(sets=('model={ use="mlp", inputs=2, outputs=2, hidden=[4] }', "~data.eval", "~checkpoint.keep"))
    },
    "logger": {"Evaluations": Recipe()},
    "loss": {"Smoothed": Recipe(sets=("~checkpoint.keep",))},
    "metric": {"NearMiss": Recipe()},
    "model": {"Autoencoder": Recipe(sets=('task={ use="./denoising.py:Denoising" }', "~checkpoint.keep"))},
    "optimizer": {"NAdam": Recipe(), "SignSGD": Recipe()},
    "sampler": {"Pairs": Recipe()},
    "schedule": {"inverse_sqrt": Recipe()},
    "nan": {"on_nonfinite": Recipe(), "anomaly": Recipe()},
    "memory": {"memory_check": Recipe()},
    "reproducibility": {"deterministic": Recipe()},
    "silent-corruption": {"corruption_check": Recipe(ranks=2)},
    "troubleshooting": {"find_unused_parameters": Recipe(ranks=2)},
    "pipeline-parallel": {
        "schedule": Recipe("gpt.toml", ranks=4),
        "split_points": Recipe("gpt.toml", ("model.layers=24",), ranks=4),
        "sequence": Recipe("gpt.toml", ranks=8),
        'data = "fsdp"': Recipe("gpt.toml", ranks=8),
    },
    "recipe": {
        "digits-cnn": Recipe(),
        "muon": Recipe("gpt.toml", ("model.tie_embeddings=false",)),
        "updates": Recipe("gan"),
    },
    "teachers": {"temperature": Recipe(sets=("model.width=8",)), "byol": Recipe()},
    "tensor-parallel": {
        "sequence": Recipe("gpt.toml", ranks=2),
        "plan": Recipe(sets=('model={ use="./tower.py:Tower" }', "strategy.use=fsdp", "strategy.tensor=2"), ranks=2),
    },
    "tutorial": {"spirals": TUTORIAL},
    "wandb": {
        "baseline": "needs an account: tests/builtin/trackers/test_wandb.py, against a stub",
        "offline": WHOLE,
    },
    "why-toml": {"extends": Recipe()},
    "strategy": {"replicas": Recipe(ranks=2), "mini_tp": MINI_TP},
    "plugin": {'name = "denoising"': "tests/test_docs.py", "my-forge-parts": PACKAGE},
    "check": {"house-rules": PACKAGE},
    "command": {"house-tools": PACKAGE},
    "feature": {"logit-penalty": PACKAGE},
    "observer": {"step-times": PACKAGE},
    "format": {"npz-format": PACKAGE},
    "environment": {"my-cluster": PACKAGE},
    "device": {"my-npu": PACKAGE, 'device = "npu"': "needs an NPU: tests/app/test_device_plugin.py, on another device"},
}
"""Snippets of TOML, by their page and by words that are unique on the page."""

COMPONENTS = {
    "sampling": [
        Recipe(
            "gpt.toml", text='model.block_size = 256\ndata.train = { use = "./growing.py:Growing", split = "train" }'
        ),
    ],
    "pipeline-parallel": [
        Recipe("gpt.toml", text='model = { use = "./tagger.py:Tagger" }\nstrategy.use = "pipeline"', ranks=2)
    ],
    "predict": [
        Recipe(
            sets=("train.length=2ep",),
            text='task = { use = "./task.py:Ranking", metrics = ["accuracy"] }',
            then=("predict", "snippet", "-o", "ranked.jsonl"),
        )
    ],
    "callback": [
        Recipe(
            sets=("~checkpoint.keep",),
            text='model = { use = "./autoencoder.py:Autoencoder" }\ntask = { use = "./denoising.py:Denoising" }\n'
            'callbacks.plateau = { use = "./plateau.py:Plateau" }\n'
            'callbacks.pictures = { use = "./pictures.py:Pictures", every = 1 }\n'
            'callbacks.shrink = { use = "./shrink.py:Shrink", every = 1 }',
        ),
    ],
    "dataset": [
        Recipe(
            "gpt.toml",
            ("model.causal=false", "model.vocab_size=257", 'task={ use="masked_lm", mask_token=256 }'),
            text='data.train = { use = "./lines.py:Lines", folder = "lines", width = 7 }',
        )
    ],
    "loss": [
        Recipe(text='[task]\nuse = "./apart.py:Apart"'),
        Recipe(text='[task]\nuse = "./centred.py:Centred"'),
        Recipe(
            sets=('model={ use="./autoencoder.py:Autoencoder" }', "~checkpoint.keep"),
            text='[task]\nuse = "./denoising.py:Denoising"\nnoise = 0.2',
        ),
    ],
    "device": [Recipe(text='callbacks.free = { use = "./memory.py:FreeMemory" }')],
    "metric": [Recipe(sets=("~checkpoint.keep",), text='[task]\nmetrics = [{ use = "./recalls.py:Recalls" }]')],
    "model": [
        Recipe(
            "gpt.toml",
            text='model = { use = "./attending.py:Attending" }\n'
            'data.train = { use = "text", path = "letters.txt", split = "train", level = "characters", block_size = 8 }',  # noqa: E501,
        )
    ],
}
"""Recipes for Python components on pages without a recipe for them."""

PYTHON: dict[str, dict[str, str]] = {
    "certify": {"class Mine(Strategy)": "tests/tools/certify/test_certify.py"},
    "clusters": {"TorchTrainer": "needs GPUs: tests/launchers/test_ray.py, without"},
    "detection": {"# detector.py": DETECTION, "def collate": DETECTION},
    "dataset": {"owl-1.pt": "tests/app/test_class_names.py, with a dataset of this kind"},
    "nan": {"Shuffled": ""},
    "interfaces": {"from ddpforge.interfaces": ""},
    "reference/python": {"ddpforge.load": ""},
    "mixtures": {"two-sources": ""},
    "debugger": {"breakpoint": "tests/test_docs.py"},
    "python": {"print(outcome": "", "trained": "", "objective": "", "in-a-cell": "", "objects": ""},
    "scripts": {"status": "", "losses": "", "read_metrics": ""},
    "test-a-plugin": {"run_ddpforge": "", "in_threads": ""},
    "loggers": {"pandas": ""},
    "tutorial": {"load_model": TUTORIAL, "# use.py": TUTORIAL, "# spirals.py": TUTORIAL},
    "custom-loss": {
        "# losses.py": "tests/builtin/tasks/test_loss_function.py",
        "# focal.py": CUSTOM_LOSS,
        "# test_focal.py": CUSTOM_LOSS,
    },
    "export": {"onnxruntime": "", "load_model": ""},
    "migrate": {f"# train_{name}.py": MIGRATE for name in ("hf", "lightning", "accelerate", "ddp")},
    "strategy": {"# mini_tp.py": MINI_TP},
    "api": {"check_chosen": "tests/test_api.py"},
    "check": {"# house_rules.py": "tests/training/test_checks.py"},
    "format": {"# npz_format.py": "tests/checkpoint/test_formats.py"},
    "command": {"# house_tools.py": "tests/cli/test_plugin_commands.py"},
    "device": {"# npu.py": "tests/app/test_device_plugin.py"},
    "environment": {"# openmpi.py": "tests/ranks/test_environment.py"},
    "feature": {"# logit_penalty.py": "tests/training/test_features.py"},
    "observer": {"# step_times.py": "tests/runs/test_observers.py"},
    "predict": {"denoised": ""},
    "language-models": {"sft-merged": SMOLLM},
    "flow-matching": {"AutoencoderKL": DIFFUSERS, "DiTTransformer2DModel": DIFFUSERS},
}
"""Snippets of Python outside of recipes, as above: empty for scripts, or the test that runs them."""


def name_of(page: Path) -> str:
    if page.name == "python.md" and page.parent.name == "reference":
        return "reference/python"
    return "recipes/README" if page == ROOT / "recipes/README.md" else page.stem


def keys_of(text: str, table: Mapping[str, Mapping[str, object]], page: Path) -> list[str]:
    return [words for words in table.get(name_of(page), {}) if words in text]


def find(page: str, words: str, language: str) -> str:
    (text,) = (one for each in PAGES if name_of(each) == page for one in blocks(each, language) if words in one)
    return text


def in_recipes(page: Path) -> set[str]:
    """Returns the components `./file.py:Name` of recipes that are trained for a page."""
    tried = [*TOML.get(name_of(page), {}).values(), *COMPONENTS.get(name_of(page), ())]
    texts = [
        *blocks(page, "toml"),
        *(part for one in tried if isinstance(one, Recipe) for part in (one.text, *one.sets)),
    ]
    return {name for text in texts for name in re.findall(r'"\./(\w+\.py:\w+)"', text)}


def defined(text: str) -> set[str]:
    """Returns the components of a file's snippet, as recipes name them."""
    file = re.match(r"# (\w+\.py)", text)
    parts = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {f"{file[1]}:{part}" for part in parts} if file else set()


# ---------------------------------------------------------------------------------------------- coverage of snippets
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_snippet_is_run_or_a_reason_is_given(page: Path) -> None:
    assert [text for text in blocks(page, "toml") if len(keys_of(text, TOML, page)) != 1] == []
    for text in blocks(page, "python"):
        assert defined(text) & in_recipes(page) or len(keys_of(text, PYTHON, page)) == 1, text


def test_every_entry_matches_a_snippet() -> None:
    tables: dict[str, Mapping[str, Mapping[str, object]]] = {"toml": TOML, "python": PYTHON}
    for language, table in tables.items():
        for page, entries in table.items():
            for words in entries:
                find(page, words, language)


# ---------------------------------------------------------------------------------------------- snippets run
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """Writes the files that pages show, and the runs and files that they require."""
    folder = tmp_path_factory.mktemp("snippets")
    for name in ("lines", "notes", "code", "prose"):
        (folder / name).mkdir()
    for page in PAGES:
        write_files(page, folder)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "recipes/digits.toml", folder)
    shell(f"python - <<'.'\n{ARTEFACTS}\n.", folder)
    for words in RUNS:
        zygote.run(["run", *words], nproc=1, cwd=folder).check()
    return folder


def recipes() -> Iterator[tuple[str, str, Recipe]]:
    for page, entries in TOML.items():
        for words, recipe in entries.items():
            if isinstance(recipe, Recipe):
                yield f"{page}: {words}", find(page, words, "toml"), recipe
    for page, tried in COMPONENTS.items():
        for recipe in tried:
            yield f"{page}: {recipe.text}", recipe.text, recipe


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "recipe"), [pytest.param(text, recipe, id=name.split("\n")[0]) for name, text, recipe in recipes()]
)
def test_a_recipe_trains(folder: Path, zygote: Zygote, text: str, recipe: Recipe) -> None:
    table = tomllib.loads(text)
    head = {"recipe": "2", "name": '"snippet"', "extends": f'["{recipe.base}"]'} if "recipe" not in table else {}
    lines = [f"{key} = {value}" for key, value in head.items() if key not in table]
    (folder / "snippet.toml").write_text("\n".join([*lines, text]), encoding="utf-8")
    options = ["--fresh"] if recipe.then else ["--dry-run", "1"]
    zygote.run(["run", "snippet.toml", *recipe.sets, *options], nproc=recipe.ranks, cwd=folder).check()
    if recipe.then:
        zygote.run(recipe.then, nproc=1, cwd=folder).check()


SCRIPTS = [(page, words) for page, entries in PYTHON.items() for words, elsewhere in entries.items() if not elsewhere]


@pytest.mark.full
@pytest.mark.parametrize(("page", "words"), SCRIPTS, ids=map(" ".join, SCRIPTS))
def test_a_script_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, page: str, words: str) -> None:
    monkeypatch.chdir(folder)
    text = find(page, words, "python")
    if "def test_" in text:
        (folder / "test_it.py").write_text(text)
        shell("python -m pytest -q test_it.py", folder)
        return
    if page == "export":
        shell(
            "\n".join(f"ddpforge export digits --force -o digits.{one}" for one in ("pt2", "onnx", "safetensors")),
            folder,
        )
    if "__main__:" in text:
        shell(f"python - <<'.'\n{text}\n.", folder)
        return
    given: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text, f"{page}.md", "exec"), given)
    if words == "denoised":
        assert [tuple(getattr(given[name], "shape")) for name in ("drawn", "denoised")] == [(16, 1, 8, 8)] * 2  # noqa: B009
