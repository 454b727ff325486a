"""Every option of every built-in component changes a result: with two of its values the component gives two results.

An option whose effect takes ranks, files of another library or a server is listed with the test that asserts it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ddpforge.builtin.metrics.classification import Accuracy
from ddpforge.builtin.metrics.regression import MeanAbsoluteError
from ddpforge.builtin.models.mlp import MLP
from ddpforge.builtin.tasks.gan import Adversarial
from ddpforge.components.registry import Registry
from ddpforge.data.rng import seed_all
from ddpforge.interfaces import Duration, Horizon, Sequential
from ddpforge.ranks.collectives import SingleRank

REGISTRY = Registry.installed()
KINDS = ("model", "task", "metric", "sampler", "optimizer", "schedule", "callback", "data", "strategy")
TESTS = Path(__file__).parents[1]

Options = Mapping[str, Any]
Observe = Callable[[Any], Any]


def st(steps: int) -> Duration:
    return Duration(steps, "st")


def plain(value: Any) -> Any:
    """Returns a result as lists and numbers, which can be compared."""
    if isinstance(value, Tensor):
        return [str(value.dtype), plain(value.detach().flatten().tolist())]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return repr(value)


# ---------------------------------------------------------------------------------------------- observed results
def outputs(*inputs: Any) -> Observe:
    """Returns the observation of a model: shapes of its weights, and its outputs for these inputs in training mode."""

    def observe(model: nn.Module) -> Any:
        torch.manual_seed(1)
        shapes = [(name, tuple(one.shape), one.requires_grad) for name, one in model.named_parameters()]
        return shapes, model.train()(*inputs)

    return observe


def of_gan(model: nn.Module) -> Any:
    torch.manual_seed(1)
    noise = torch.randn(2, model.generator[0].in_features)
    images = model.train()("generator", noise)
    return images, model("discriminator", images)


def of_gpt(model: Any) -> Any:
    torch.manual_seed(1)
    tokens = torch.randint(8, (2, 8))
    refused = ""
    try:
        model(torch.zeros(1, 12, dtype=torch.int64))
    except Exception as error:
        refused = str(error)
    weights = [(name, tuple(one.shape)) for name, one in model.named_parameters()]
    return weights, refused, model.train()(tokens)


class Fixed(nn.Module):
    """Model that returns the same outputs for any batch."""

    def __init__(self, *outputs: Any, **named: Any) -> None:
        super().__init__()
        self.outputs = named or (outputs[0] if len(outputs) == 1 else outputs)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.outputs


def loss(model: Any, batch: Any, *, trains: bool = True) -> Observe:
    """Returns the observation of a task: count, loss and metrics of a batch."""

    def observe(task: Any) -> Any:
        torch.manual_seed(2)
        world = SimpleNamespace(dp_ranks=SingleRank(torch.device("cpu")))
        task.start(model, world)
        task.rng = torch_numbers()
        found, outputs = task.loss(model.train(trains), batch)
        return task.count(batch), found, measured(task.metrics(outputs, batch))

    return observe


def torch_numbers() -> Any:
    return SimpleNamespace(rand=torch.rand, randn=torch.randn)


def measured(found: Mapping[str, Any]) -> Any:
    return {name: [getattr(one, "sum", one), getattr(one, "count", 0)] for name, one in found.items()}


def of_adapters(model: nn.Module) -> Any:
    """Returns structure, trained weights and scaling of adapters, and which of them are zero."""
    trained = {name: (tuple(one.shape), one.requires_grad, bool(one.any())) for name, one in model.named_parameters()}
    return str(model), trained, {name: one for name, one in model.named_buffers() if "scaling" in name}


class Routed(nn.Module):
    """Model with the outputs of one with experts."""

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=SEQUENCES[:, :2], balance=torch.ones(3) * 2, dropped=torch.zeros(3))


def finished(outputs: Tensor, targets: Tensor) -> Observe:
    """Returns the observation of a metric: its name and its value."""

    def observe(metric: Any) -> Any:
        total = metric(outputs, targets)
        return metric.name, total.sum, total.count, metric.finish(total.sum, torch.as_tensor(total.count))

    return observe


class Samples:
    """Dataset for samplers."""

    labels = np.arange(60) % 5 // 3
    others = np.arange(60) % 2
    lengths = np.arange(60) * 37 % 101
    reverse = lengths[::-1].copy()
    weights = np.arange(60) + 1.0
    difficulty = np.arange(60) * 7 % 60

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index


def order(sampler: Any) -> Any:
    """Returns the samples of the first steps, and the length of an epoch."""
    return sampler.steps_per_epoch, [list(map(int, sampler(step))) for step in range(24)]


def updates(optimizer: Any) -> Any:
    """Returns the weights after updates with fixed gradients."""
    (group,) = optimizer.param_groups
    found = []
    for step in range(4):
        for number, parameter in enumerate(group["params"]):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**-step
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in group["params"]])
    return found


def fused(optimizer: Any) -> Any:
    return optimizer.param_groups[0]["fused"]


def ascents(optimizer: Any) -> Any:
    """Returns the weight of a quadratic function after steps of L-BFGS."""
    (weight,) = optimizer.param_groups[0]["params"]
    curve = torch.tensor([1.0, 30.0, 900.0, 7.0])
    for _ in range(12):
        weight.grad = curve * weight.detach()
        optimizer.step()
    return weight


def factors(schedule: Any) -> Any:
    return [round(schedule(step), 9) for step in range(20)]


def item(index: int = 1, *, epoch: int = 0, seed: int = 3) -> Observe:
    """Returns the observation of a dataset: length, classes, and one sample."""

    def observe(data: Any) -> Any:
        torch.manual_seed(seed)
        return len(data), getattr(data, "classes", None), getattr(data, "class_names", None), data[index]

    return observe


def every_item(data: Any) -> Any:
    seed_all(3, torch.device("cpu"))
    return [data[index] for index in range(len(data))]


class Blocks:
    """Dataset of images 1 x 6 x 6 with classes."""

    classes = 3
    random = False

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.arange(36.0).reshape(1, 6, 6) / 36 + index, index % 3


class Pictures(Blocks):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


# ---------------------------------------------------------------------------------------------- one line per option
IMAGES, TOKENS = torch.linspace(0, 1, 2 * 64).reshape(2, 1, 8, 8), torch.arange(16).reshape(2, 8) % 8
LOGITS = torch.tensor([[2.0, 1.0, -1.0], [0.3, 0.1, 0.2], [0.0, 3.0, 1.0], [1.0, 1.5, 1.2]])
CLASSES = torch.tensor([0, 1, 2, 1])
SEQUENCES, NEXT = LOGITS.repeat(3, 2, 1), torch.tensor([[0, 1], [2, 1], [1, 2]])
HORIZON = {"horizon": Horizon(20, 5)}
DATA = {"data": Samples(), "seed": 3, "global_batch": 6, "drop_last": False}


def weights() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [{"params": [nn.Parameter(torch.randn(3, 5))]}]


def vector() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(4))]}]


def base() -> nn.Module:
    torch.manual_seed(0)
    return MLP(inputs=8, outputs=4, hidden=(8,))


def wide() -> nn.Module:
    return MLP(inputs=8, outputs=4, hidden=(16,))


GPT = {"vocab_size": 8, "block_size": 12, "layers": 1, "heads": 1, "width": 8}

FILES_HERE = Path("files")  # see the fixture
TEXTS = ("one.txt", "two.md")

# (kind, component): options that all share, observation, and for each option its two values. A value may be a dict with
# further options: {"": value, "other": …}. A function is called for each build.
CASES: dict[tuple[str, str], tuple[Options, Observe, dict[str, tuple[Any, Any]]]] = {
    ("model", "cnn"): (
        {},
        outputs(IMAGES),
        {"classes": (10, 3), "width": (8, 16), "dropout": (0.0, 0.5), "channels_in": (1, 3)},
    ),
    ("model", "denoiser"): (
        {"width": 8, "layers": 1},
        lambda model: [tuple(one.shape) for one in model.parameters()],
        {"channels": (1, 2), "width": (8, 16), "layers": (1, 2)},
    ),
    ("model", "gan"): (
        {"shape": (1, 4, 4), "width": 8, "latent": 4},
        of_gan,
        {"shape": ((1, 4, 4), (1, 2, 2)), "latent": (4, 8), "width": (8, 16), "dropout": (0.0, 0.5)},
    ),
    ("model", "gpt"): (
        GPT,
        of_gpt,
        {
            **{"vocab_size": (8, 9), "block_size": (12, 8), "layers": (1, 2), "heads": (1, 2), "width": (8, 16)},
            **{"dropout": (0.0, 0.5), "tie_embeddings": (True, False), "bias": (True, False)},
            **{"causal": (True, False), "classes": (None, 3)},
        },
    ),
    ("model", "lora"): (
        {"base": base, "targets": "all-linear", "r": 2},
        of_adapters,
        {
            **{"r": (2, 4), "alpha": (16, 8), "dropout": (0.0, 0.5), "targets": ("all-linear", ["*.0"])},
            **{"train": ((), ("*bias",)), "dora": (None, True), "rslora": (None, True), "base": (base, wide)},
            **{"rank_pattern": (None, {"*.0": 3}), "alpha_pattern": (None, {"*.0": 3}), "init": (None, "pissa")},
        },
    ),
    ("model", "mlp"): (
        {"inputs": 8, "outputs": 4},
        lambda model: outputs(torch.linspace(-2, 2, 3 * model.inputs).reshape(3, model.inputs))(model),
        {
            **{"inputs": (8, 6), "outputs": (4, 3), "hidden": ((8,), (8, 8)), "activation": ("relu", "gelu")},
            "dropout": (0.0, 0.5),
        },
    ),
    ("model", "moe_gpt"): (
        GPT | {"experts": 4, "top_k": 1, "capacity_factor": 4.0},
        of_gpt,
        {
            **{"vocab_size": (8, 9), "block_size": (12, 8), "layers": (1, 2), "heads": (1, 2), "width": (8, 16)},
            **{"dropout": (0.0, 0.5), "experts": (4, 3), "top_k": (1, 2), "capacity_factor": (4.0, 0.3)},
        },
    ),
    ("model", "unet"): (
        {"classes": 3, "width": 4, "depth": 1},
        lambda model: [tuple(one.shape) for one in model.parameters()],
        {"classes": (3, 4), "channels_in": (1, 3), "width": (4, 8), "depth": (1, 2)},
    ),
    ("task", "classification"): (
        {},
        loss(Fixed(LOGITS), (IMAGES, CLASSES)),
        {
            **{"label_smoothing": (0.0, 0.1), "ignore_index": (None, 2), "class_weights": (None, [1.0, 2.0, 3.0])},
            "metrics": ((), (Accuracy(),)),
        },
    ),
    ("task", "contrastive"): (
        {},
        loss(nn.Flatten(), (IMAGES.repeat(2, 1, 1, 1).sin(), IMAGES.repeat(2, 1, 1, 1).cos())),
        {"temperature": (0.1, 0.5)},
    ),
    ("task", "distillation"): (
        {"teacher": Fixed(-LOGITS)},
        loss(Fixed(LOGITS), (IMAGES, CLASSES)),
        {
            **{"temperature": (4.0, 1.0), "alpha": (0.9, 0.1), "ignore_index": (None, 2)},
            **{"metrics": ((), (Accuracy(),)), "teacher": (Fixed(-LOGITS), Fixed(LOGITS.sin()))},
        },
    ),
    ("task", "moe_language_modeling"): (
        {},
        loss(Routed(), (TOKENS, NEXT)),
        {"ignore_index": (-100, 1), "aux_loss_weight": (0.01, 0.5)},
    ),
    ("task", "sequence_classification"): (
        {},
        loss(Fixed(LOGITS), (TOKENS, CLASSES)),
        {
            **{"label_smoothing": (0.0, 0.1), "ignore_index": (None, 2), "class_weights": (None, [1.0, 2.0, 3.0])},
            "metrics": ((), (Accuracy(),)),
        },
    ),
    ("task", "language_modeling"): (
        {},
        loss(Fixed(SEQUENCES[:, :2]), (TOKENS, NEXT)),
        {"ignore_index": (-100, 1), "label_smoothing": (0.0, 0.1), "z_loss": (None, 0.1)},
    ),
    ("task", "masked_lm"): (
        {"mask_token": 7, "mlm_probability": 0.5},
        loss(nn.Sequential(nn.Embedding.from_pretrained(torch.arange(64.0).reshape(8, 8).sin())), TOKENS),
        {
            **{"mask_token": (7, 6), "mlm_probability": (0.5, 0.9), "keep": (0.0, 0.9)},
            **{"label_smoothing": (0.0, 0.1), "metrics": ((), (Accuracy(),))},
        },
    ),
    ("task", "model_loss"): (
        {},
        loss(
            Fixed(loss=torch.tensor(2.0, requires_grad=True), logits=LOGITS, first=-LOGITS),
            {"labels": CLASSES, "others": torch.tensor([0, -100, -100, -100])},
        ),
        {
            "reduction": ("mean", "sum"),
            "over": ("samples", "targets"),
            "target": ({"": "labels", "over": "targets"}, {"": "others", "over": "targets"}),
            "ignore_index": ({"": -100, "over": "targets"}, {"": 1, "over": "targets"}),
            "output": ({"": None, "metrics": (Accuracy(),)}, {"": "first", "metrics": (Accuracy(),)}),
            "metrics": ((), (Accuracy(),)),
        },
    ),
    ("task", "multilabel"): (
        {},
        loss(Fixed(LOGITS), (IMAGES, (LOGITS > 1).float())),
        {"metrics": ((), (MeanAbsoluteError(),))},
    ),
    ("task", "regression"): (
        {},
        loss(Fixed(LOGITS), (IMAGES, LOGITS.flip(0) * 3)),
        {
            **{"loss": ("mse", "huber"), "metrics": ((), (MeanAbsoluteError(),))},
            "delta": ({"": 0.5, "loss": "huber"}, {"": 2.0, "loss": "huber"}),
        },
    ),
    ("task", "segmentation"): (
        {},
        loss(Fixed(LOGITS[:, :, None, None]), (IMAGES, CLASSES[:, None, None])),
        {"ignore_index": (255, 2), "label_smoothing": (0.0, 0.1), "metrics": ((), (Accuracy(),))},
    ),
    ("metric", "calibration_error"): ({}, finished(LOGITS, CLASSES), {"bins": (15, 2)}),
    ("metric", "f1"): ({}, finished(LOGITS, CLASSES), {"average": ("macro", "weighted"), "ignore_index": (None, 2)}),
    ("metric", "iou"): ({}, finished(LOGITS, CLASSES), {"ignore_index": (None, 2)}),
    ("metric", "topk"): ({}, finished(LOGITS, CLASSES), {"k": (1, 2)}),
    ("sampler", "balanced"): (
        DATA,
        order,
        {"by": ("labels", "others"), "replacement": (False, True), "epoch": ("all", "smallest")},
    ),
    ("sampler", "batch_size_warmup"): (
        DATA | {"start": 1, "until": st(6)},
        order,
        {"start": (1, 2), "until": (st(6), st(12))},
    ),
    ("sampler", "bucketed"): (DATA, order, {"by": ("lengths", "reverse"), "window": (3, 5)}),
    ("sampler", "curriculum"): (
        DATA | {"until": st(8)},
        order,
        {"by": ("difficulty", "lengths"), "until": (st(8), st(16)), "start": (0.1, 0.5)},
    ),
    ("sampler", "reuse_batches"): (
        DATA | {"times": 2},
        order,
        {"times": (2, 3), "steps": (1, 2), "sampler": (None, Sequential(Samples(), 6, False))},
    ),
    ("sampler", "weighted"): (DATA, order, {"by": ("weights", "lengths"), "samples": (None, 30)}),
    ("optimizer", "adamw"): (
        {"params": weights, "lr": 0.1},
        updates,
        {
            **{"lr": (0.1, 0.2), "betas": ((0.9, 0.999), (0.5, 0.999)), "eps": (1e-8, 0.5)},
            **{"weight_decay": (0.0, 0.1), "amsgrad": (False, True)},
        },
    ),
    ("optimizer", "lbfgs"): ({"params": vector, "lr": 0.1}, ascents, {"lr": (0.1, 0.2), "history_size": (10, 1)}),
    ("optimizer", "muon"): (
        {"params": weights, "lr": 0.1},
        updates,
        {
            **{"lr": (0.1, 0.2), "momentum": (0.95, 0.5), "nesterov": (True, False), "weight_decay": (0.0, 0.1)},
            **{"ns_steps": (5, 1), "adjust_lr": ("original", "match_rms_adamw")},
        },
    ),
    ("optimizer", "sgd"): (
        {"params": weights, "lr": 0.1},
        updates,
        {
            **{"lr": (0.1, 0.2), "momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)},
            "nesterov": ({"": False, "momentum": 0.9}, {"": True, "momentum": 0.9}),
        },
    ),
    ("schedule", "constant"): (HORIZON, factors, {"warmup": (st(0), st(4))}),
    ("schedule", "cosine"): (HORIZON, factors, {"warmup": (st(0), st(4)), "min_lr_ratio": (0.0, 0.1)}),
    ("schedule", "cosine_restarts"): (
        HORIZON | {"period": st(4)},
        factors,
        {
            **{"period": (st(4), st(6)), "period_factor": (1, 2), "warmup": (st(0), st(4))},
            "min_lr_ratio": (0.0, 0.1),
        },
    ),
    ("schedule", "exponential"): (
        HORIZON | {"gamma": 0.9},
        factors,
        {"gamma": (0.9, 0.8), "period": (st(1), st(2)), "warmup": (st(0), st(4))},
    ),
    ("schedule", "hf_cosine"): (HORIZON, factors, {"warmup": (st(0), st(4)), "num_cycles": (0.5, 1.0)}),
    ("schedule", "hf_linear"): (HORIZON, factors, {"warmup": (st(0), st(4))}),
    ("schedule", "inverse_sqrt"): (
        HORIZON | {"timescale": st(3)},
        factors,
        {"warmup": (st(0), st(4)), "timescale": (st(3), st(6))},
    ),
    ("schedule", "linear"): (HORIZON, factors, {"warmup": (st(0), st(4)), "min_lr_ratio": (0.0, 0.1)}),
    ("schedule", "onecycle"): (
        HORIZON,
        factors,
        {
            "rise": (0.3, 0.5),
            "div_factor": (25.0, 5.0),
            "final_div_factor": (1e4, 10.0),
            "anneal": ("cosine", "linear"),
        },
    ),
    ("schedule", "onecycle_momentum"): (
        HORIZON,
        factors,
        {"rise": (0.3, 0.5), "lowest": (0.9, 0.5), "anneal": ("cosine", "linear")},
    ),
    ("schedule", "polynomial"): (
        HORIZON,
        factors,
        {"power": (1.0, 2.0), "warmup": (st(0), st(4)), "min_lr_ratio": (0.0, 0.1)},
    ),
    ("schedule", "ramp"): (
        HORIZON | {"start": 0.5},
        factors,
        {"start": (0.5, 0.1), "end": (1.0, 2.0), "shape": ("cosine", "linear")},
    ),
    ("schedule", "step"): (
        HORIZON,
        factors,
        {
            "milestones": ([st(5)], [st(5), st(9)]),
            "step_size": (st(3), st(5)),
            "gamma": ({"": 0.1, "step_size": st(3)}, {"": 0.5, "step_size": st(3)}),
            "warmup": ({"": st(0), "step_size": st(8)}, {"": st(4), "step_size": st(8)}),
        },
    ),
    ("schedule", "wsd"): (
        HORIZON | {"decay": st(5)},
        factors,
        {
            **{"decay": (st(5), st(8)), "shape": ("linear", "1-sqrt"), "min_lr_ratio": (0.0, 0.1)},
            "warmup": (st(0), st(4)),
        },
    ),
    ("data", "digits"): (
        {"split": "train"},
        item(),
        {"split": ("train", "test"), "targets": ("digit", "traits"), "samples": (None, 20)},
    ),
    ("data", "mixup"): (
        {"of": Blocks()},
        every_item,
        {
            **{"mixup_alpha": (0.2, 0.9), "cutmix_alpha": (0.0, 1.0), "prob": (1.0, 0.3), "classes": (None, 5)},
            "switch_prob": ({"": 0.0, "cutmix_alpha": 1.0}, {"": 1.0, "cutmix_alpha": 1.0}),
            "of": (Blocks(), type("Larger", (Blocks,), {"__len__": lambda _: 12})()),
        },
    ),
    ("data", "part"): (
        {"of": Samples(), "share": "50%"},
        every_item,
        {
            **{"share": ("50%", "20%"), "rest": (False, True), "shuffle": (True, False), "seed": (0, 1)},
            "of": (Samples(), Blocks()),
        },
    ),
    ("data", "text"): (
        {"split": "train", "path": FILES_HERE / "one.txt", "block_size": 4, "seed": 0},
        every_item,
        {
            "split": ("train", "eval"),
            "path": (FILES_HERE / "one.txt", FILES_HERE / "two.md"),
            "block_size": (4, 6),
            "level": ("bytes", "characters"),
            "eval_fraction": (0.1, 0.4),
            "suffixes": ({"": (), "path": FILES_HERE}, {"": (".md",), "path": FILES_HERE}),
        },
    ),
    ("data", "text_classes"): (
        {"split": "train", "paths": [FILES_HERE / "one.txt", FILES_HERE / "two.md"], "block_size": 4},
        lambda data: (data.class_names, plain(every_item(data))),
        {
            **{"split": ("train", "eval"), "block_size": (4, 6), "eval_fraction": (0.2, 0.4)},
            "paths": ([FILES_HERE / name for name in TEXTS], [FILES_HERE / name for name in reversed(TEXTS)]),
            "class_names": (None, ["zero", "one", "two"]),
            "suffixes": (
                {"": (), "paths": [FILES_HERE, FILES_HERE / "two.md"]},
                {"": (".txt",), "paths": [FILES_HERE, FILES_HERE / "two.md"]},
            ),
        },
    ),
    ("data", "text_stream"): (
        {"path": FILES_HERE, "block_size": 4},
        lambda data: [plain(one) for one in (seed_all(3, torch.device("cpu")), *data)],
        {
            **{"path": (FILES_HERE, FILES_HERE / "two.md"), "block_size": (4, 6), "suffixes": ((), (".md",))},
            "shuffle_files": (False, True),
        },
    ),
    ("data", "csv"): (
        {"path": FILES_HERE / "rows.csv", "target": "y"},
        item(),
        {
            **{"path": (FILES_HERE / "rows.csv", FILES_HERE / "more.csv"), "target": ("y", "b")},
            **{"inputs": (None, ["b"]), "target_kind": ("number", "class"), "labeled": (True, False)},
            "class_names": ({"": ["5", "7"], "target_kind": "class"}, {"": ["7", "5"], "target_kind": "class"}),
            "delimiter": (
                {"": ",", "path": FILES_HERE / "odd.csv", "inputs": ["a"], "target": "b;c"},
                {"": ";", "path": FILES_HERE / "odd.csv", "inputs": ["c"], "target": "a,b"},
            ),
        },
    ),
    ("data", "image_folder"): (
        {"path": FILES_HERE / "pictures", "size": 4},
        every_item,
        {
            **{"path": (FILES_HERE / "pictures", FILES_HERE / "others"), "size": (4, 2), "flip": (False, True)},
            **{"mean": (None, (0.1, 0.2, 0.3)), "std": (None, (0.5, 0.5, 0.5)), "labeled": (True, False)},
            "class_names": (None, ["dogs", "cats"]),
        },
    ),
    ("data", "two_views"): (
        {"of": Pictures()},
        every_item,
        {
            "shift": (0, 2),
            "noise": (0.0, 0.1),
            "of": (Pictures(), type("Larger", (Pictures,), {"__len__": lambda _: 12})()),
        },
    ),
}

# (kind, component): the test that asserts an option, by option.
TEXT, TABLES, FOLDERS = (f"builtin/datasets/test_{name}.py::test_" for name in ("text", "file_datasets", "folders"))
BOXES, RATES = "builtin/tasks/test_detection.py::test_", "builtin/callbacks/test_learning_rate_callbacks.py::test_"
PICTURES, SHARDS = "builtin/datasets/test_image_datasets.py::test_", "features/test_shard_reader.py::test_"
DDP, SHARDED, STAGES = (f"strategies/test_{name}.py::test_" for name in ("ddp", "fsdp", "pipeline"))
TENSOR, ZERO = "strategies/test_tensor_parallel.py::test_", "strategies/test_deepspeed.py::test_"
LARGE_MODELS = "builtin/models/test_torchvision_model.py::test_"
TEACHER = "builtin/tasks/test_distillation_task.py::test_"
OWN_LOSS = "builtin/tasks/test_model_loss.py::test_"
FUSED = "builtin/optim/test_optimizers.py::test_fused_updates_equal_those_of_torchs_loop"
ELSEWHERE: dict[tuple[str, str], dict[str, str]] = {
    ("model", "torchvision"): {
        "arch": LARGE_MODELS + "error_for_an_unknown_architecture_names_similar_ones",
        "classes": LARGE_MODELS + "head_has_the_number_of_classes",
        "options": LARGE_MODELS + "options_reach_the_builder",
    },
    ("task", "detection"): {
        "weights": BOXES + "the_loss_is_the_weighted_mean_times_the_images",
        "metrics": BOXES + "precision_over_ranks_is_that_of_torchmetrics",
    },
    ("task", "distillation"): {
        "weights": TEACHER + "teacher_is_an_auxiliary_module_and_metrics_are_those_of_classification"
    },
    ("task", "gan"): {"latent": "builtin/test_every_option.py::test_noise_of_the_gan_task_has_the_size_of_its_option"},
    ("task", "language_modeling"): {
        "loss_chunk": "builtin/tasks/test_chunked.py::test_only_one_chunk_of_logits_is_in_memory"
    },
    ("task", "model_loss"): {
        "shift": OWN_LOSS + "models_of_transformers_return_the_loss_over_targets",
        "weights": OWN_LOSS + "several_losses_are_added_with_weights_and_reported_each",
        "evaluation_loss": OWN_LOSS + "a_model_may_return_only_losses_in_training_and_only_outputs_in_evaluations",
    },
    ("optimizer", "adamw"): {"fused": FUSED},
    ("optimizer", "sgd"): {"fused": FUSED},
    ("callback", "corruption_check"): {
        "every": "features/test_silent_corruption.py::test_flip_of_a_weight_between_checks_is_found_by_the_next_check",
        "local_gradients": "features/test_silent_corruption.py::test_replicas_of_fsdp_are_compared",
        "action": "features/test_silent_corruption.py::test_training_goes_on_if_the_check_only_warns",
    },
    ("callback", "diffusion_samples"): dict.fromkeys(
        ("shape", "images", "steps"),
        "builtin/tasks/test_diffusion_task.py::test_samples_callback_logs_images_at_every_evaluation",
    ),
    ("callback", "early_stopping"): {
        "metric": "builtin/callbacks/test_early_stopping.py::test_improvement_must_exceed_min_delta",
        "patience": "builtin/callbacks/test_early_stopping.py::test_improvement_must_exceed_min_delta",
        "min_delta": "builtin/callbacks/test_early_stopping.py::test_improvement_must_exceed_min_delta",
        "mode": "training/test_metric_direction.py::test_the_mode_is_required_if_the_direction_is_unknown",
    },
    ("callback", "ema"): {
        "decay": "builtin/callbacks/test_ema.py::test_twenty_steps_match_the_formula",
        "warmup": "builtin/callbacks/test_ema.py::test_warmup_averages_the_first_weights_less",
        "every": "builtin/callbacks/test_ema.py::test_twenty_steps_match_the_formula",
        "evaluate": "builtin/callbacks/test_ema.py::test_evaluate_false_keeps_live_weights_in_evaluation",
    },
    ("callback", "reduce_on_plateau"): {
        **dict.fromkeys(("patience", "factor", "min_lr_ratio"), RATES + "plateau_lowers_the_rate_down_to_the_minimum"),
        **dict.fromkeys(
            ("metric", "min_delta", "mode"), RATES + "plateau_uses_the_direction_of_the_metric_and_ignores_nan"
        ),
    },
    ("callback", "spike_guard"): {
        **dict.fromkeys(("ratio", "window"), RATES + "losses_that_are_not_spikes_keep_the_rate"),
        **dict.fromkeys(("min_lr_ratio", "steps"), RATES + "spike_lowers_the_rate_for_some_steps"),
        "rollback": RATES + "spike_rolls_back_and_skips_its_steps",
    },
    ("callback", "throughput"): dict.fromkeys(
        ("flops_per_sample", "peak_flops"),
        "builtin/callbacks/test_throughput.py::test_utilisation_counts_the_samples_of_the_window_on_all_devices",
    ),
    ("callback", "warmup_after_rollback"): dict.fromkeys(
        ("steps", "min_lr_ratio"), RATES + "rate_warms_up_after_a_rollback"
    ),
    ("data", "coco_detection"): {
        **dict.fromkeys(("annotations", "images", "crowds"), BOXES + "annotations_become_images_and_boxes"),
        "flip": BOXES + "flips_move_the_boxes",
        "class_names": "app/test_class_names.py::"
        "test_boxes_of_an_evaluation_set_have_the_numbers_of_their_categories_in_the_training_data",
    },
    ("data", "hugging_face"): {
        **dict.fromkeys(
            ("path", "split", "columns", "data_files", "streaming", "shuffle"), TABLES + "hugging_face_reads_files"
        ),
        **dict.fromkeys(("shard_lengths", "interleave"), TABLES + "hugging_face_streams_with_and_without_known_shards"),
        "shuffle_buffer": SHARDS + "every_window_of_every_lane_is_shuffled_differently",
        "index": TABLES + "row_index_avoids_counting_again",
        "classes": "app/test_class_names.py::test_class_names_of_torch_and_hugging_face_objects",
    },
    ("data", "parquet"): {
        **dict.fromkeys(
            ("path", "columns", "shuffle", "shuffle_buffer", "interleave"), TABLES + "parquet_rows_are_read_once"
        ),
        "classes": "builtin/test_every_option.py::test_classes_of_a_parquet_file_are_those_of_its_option",
    },
    ("data", "tar"): {
        **dict.fromkeys(("path", "fields", "classes"), TABLES + "tar_reads_images_and_classes"),
        "images": "builtin/datasets/test_images.py::test_gray_with_more_than_8_bits_has_the_channels_of_the_option",
        "transforms": TABLES + "transforms_of_tar_images_are_seeded_by_epoch_and_sample",
        "shuffle": SHARDS + "epochs_have_different_orders_if_shards_are_shuffled",
        "shuffle_buffer": SHARDS + "every_window_of_every_lane_is_shuffled_differently",
        "interleave": SHARDS + "every_window_of_every_lane_is_shuffled_differently",
        "index": TABLES + "tar_index_avoids_reading_headers_again",
    },
    ("data", "text"): {"random_offsets": TEXT + "random_offsets_shift_samples_within_their_blocks_per_epoch"},
    ("data", "tokens"): dict.fromkeys(
        ("path", "block_size", "dtype", "vocab_size"), TABLES + "token_files_are_memory_mapped_and_split_into_blocks"
    ),
    ("data", "torchvision"): {
        **dict.fromkeys(("name", "split", "root"), PICTURES + "mnist_has_grey_images_from_0_to_1_and_labels"),
        "transforms": PICTURES + "transforms_run_per_sample_and_depend_on_the_seed",
        **dict.fromkeys(("mean", "std"), PICTURES + "normalisation_subtracts_the_mean_and_divides_by_the_deviation"),
        "download": PICTURES + "missing_files_name_the_folder_and_the_option_that_fetches_them",
    },
    ("strategy", "ddp"): {
        **dict.fromkeys(
            ("bucket_cap_mb", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"),
            DDP + "the_options_are_passed_to_the_wrapped_model",
        ),
        "compression": DDP + "gradients_are_reduced_in_the_dtype_of_the_contract",
    },
    ("strategy", "deepspeed"): {
        "stage": ZERO + "the_contract_depends_on_the_stage",
        **dict.fromkeys(
            ("offload_optimizer", "offload_parameters", "extra"), ZERO + "the_configuration_follows_from_the_recipe"
        ),
    },
    ("strategy", "fsdp"): {
        "replicas": SHARDED + "replicas_average_over_all_ranks_and_count_each_element_once",
        "context": "strategies/test_context_parallel.py::test_positions_are_split_once_with_equal_attention_cost",
        "experts": "strategies/test_expert_parallel.py::"
        "test_each_rank_holds_its_experts_and_steps_equal_those_of_one_process",
        "tensor": TENSOR + "a_rank_holds_the_predicted_number_of_elements",
        "plan": "strategies/test_sharding_plan.py::test_a_module_has_the_first_style_that_matches_its_name",
        **dict.fromkeys(("sequence_parallel", "loss_parallel"), TENSOR + "losses_and_norms_equal_those_of_one_process"),
        "reshard_after_forward": SHARDED + "block_weights_are_freed_after_forward_if_resharding_is_enabled",
        "no_sync": SHARDED + "reductions_are_deferred_to_the_last_micro_batch_if_possible",
        "all_gather_dtype": SHARDED + "blocks_are_gathered_in_the_dtype_of_the_recipe_and_other_weights_in_fp32",
        "cpu_offload": "distributed/test_context_parallel.py::test_fsdp_options_keep_the_losses_of_whole_sequences",
        "meta": SHARDED + "a_model_on_meta_has_the_same_initial_weights",
    },
    ("strategy", "pipeline"): {
        "stages": "strategies/test_pipeline_segments.py::test_each_rank_has_its_stages",
        "schedule": "strategies/test_pipeline_segments.py::test_each_rank_has_its_stages",
        "split_points": "strategies/test_pipeline_segments.py::test_the_recipe_may_set_the_split_points",
        "data": "strategies/test_pipeline_errors.py::test_gradients_of_two_pipelines_are_averaged_once",
        **dict.fromkeys(
            ("tensor", "plan", "sequence_parallel", "loss_parallel"),
            STAGES + "the_loss_curve_equals_that_of_ddp_with_tensor_parallel_stages",
        ),
    },
}

# Options of other services, which no test reaches: (kind, component, option).
UNREACHED = {("data", "hugging_face", "name"), ("data", "hugging_face", "revision")}


def options_of(kind: str, name: str) -> list[str]:
    return list(REGISTRY.options_model(kind, name, Path()).model_fields)


BUILT_IN = [
    (kind, entry.name) for kind in KINDS for entry in REGISTRY.entries(kind) if entry.distribution == "ddpforge"
]


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_every_option_has_a_test_that_asserts_it(kind: str, name: str) -> None:
    here = CASES[kind, name][2] if (kind, name) in CASES else {}
    elsewhere = ELSEWHERE.get((kind, name), {})
    unreached = {option for *component, option in UNREACHED if component == [kind, name]}
    assert not here.keys() & elsewhere.keys()
    assert {*here, *elsewhere, *unreached} == {*options_of(kind, name)}


def test_tests_that_assert_options_elsewhere_exist() -> None:
    named = {where for options in ELSEWHERE.values() for where in options.values()}
    files = {where.partition("::")[0] for where in named}
    existing = {
        f"{file}::{node.name}"
        for file in files
        for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert named - existing == set()


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Writes small files into the folder `files` of a new working folder."""
    folder = tmp_path_factory.mktemp("options")
    (folder / "files").mkdir()
    (folder / "files/one.txt").write_text("abcdefghij" * 6)
    (folder / "files/two.md").write_text("klmnopqrs" * 6)
    (folder / "files/rows.csv").write_text("a,b,y\n1,2,5\n3,4,7\n")
    (folder / "files/more.csv").write_text("a,b,y\n1,2,5\n9,4,7\n")
    (folder / "files/odd.csv").write_text("a,b;c\n1,2;3\n4,5;6\n")
    for place, name in enumerate(("pictures/cats/one", "pictures/cats/two", "pictures/dogs/one", "others/cats/one")):
        file = folder / f"files/{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        values = (np.arange(8 * 8 * 3).reshape(8, 8, 3) * (place + 2) % 251).astype(np.uint8)
        Image.fromarray(values).save(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def built(kind: str, name: str, shared: Options, option: str, value: Any) -> Any:
    """Builds the component with one value of an option, from the same random numbers."""
    torch.manual_seed(0)
    own = (
        {(key or option): one for key, one in value.items()}
        if isinstance(value, dict) and "" in value
        else {option: value}
    )
    options = {
        key: one() if callable(one) and key in ("params", "base") else one for key, one in (shared | own).items()
    }
    return REGISTRY.load(kind, name)(**options)


@pytest.mark.parametrize(
    ("kind", "name", "option"),
    [(*component, option) for component, (_, _, values) in CASES.items() for option in values],
)
def test_another_value_of_an_option_gives_another_result(kind: str, name: str, option: str) -> None:
    shared, observe, values = CASES[kind, name]
    inputs_differ = option == "channels_in"
    found = []
    for value in values[option]:
        component = built(kind, name, shared, option, value)
        if inputs_differ:
            found.append(repr([tuple(one.shape) for one in component.parameters()]))
        else:
            found.append(repr(plain(observe(component))))
    assert found[0] != found[1]
    again = built(kind, name, shared, option, values[option][0])
    if not inputs_differ:
        assert repr(plain(observe(again))) == found[0], "the observation does not depend on anything else"


# ---------------------------------------------------------------------------------------------- apart
@pytest.mark.parametrize("latent", [4, 9])
def test_noise_of_the_gan_task_has_the_size_of_its_option(latent: int) -> None:
    seen: list[tuple[int, ...]] = []

    class Model(nn.Module):
        def forward(self, part: str, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return torch.zeros(len(x), 1, 8, 8) if part == "generator" else x.flatten(1)[:, :1]

    task = Adversarial(latent=latent)
    task.rng = torch_numbers()
    for update in task.updates:
        task.loss(Model(), IMAGES, update)
    assert seen.count((2, latent)) == 2  # one for each update


@pytest.mark.parametrize("classes", [None, 7])
def test_classes_of_a_parquet_file_are_those_of_its_option(classes: int | None) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"x": [1.0, 2.0], "y": [0, 1]})
    parquet.write_table(table, "files/table.parquet")
    data = REGISTRY.load("data", "parquet")(path="files/table.parquet", columns=["x", "y"], classes=classes)
    assert getattr(data, "classes", None) == classes
