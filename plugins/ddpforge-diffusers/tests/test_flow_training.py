"""Runs: each step is that of a loop by hand, on any ranks; resumes, exports, and samples that look like digits."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ddpforge as forge
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ddpforge.builtin.datasets.digits import Digits
from ddpforge.interfaces import mix
from diffusers import DDPMScheduler, DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler, UNet2DModel
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from safetensors.torch import save_file
from small_nets import RECIPE, SD3, UNET, UNET_TEXT, table
from torch import Tensor

from ddpforge_diffusers.data import DiffusionData
from ddpforge_diffusers.export import export
from ddpforge_diffusers.latents import Latents
from ddpforge_diffusers.models import diffusers_model
from ddpforge_diffusers.sampling import sample

SHIPPED = Path(__file__).parents[1] / "recipes" / "digits-flow.toml"
SEED = 3
SPLITS = {
    "one rank": (1, ()),
    "accumulation": (1, ("train.micro_batch=2",)),
    "two ranks": (2, ("strategy.use=ddp",)),
    "fsdp": (2, ("strategy.use=fsdp", "train.micro_batch=2")),
    "fsdp, recomputed": (2, ("strategy.use=fsdp", "train.activation_checkpointing=true")),
}


def recipe(model: str = "", data: str = "", task: str = "") -> str:
    """Returns the small recipe with other sections."""
    text = RECIPE
    for name, section in (("model", model), ("data.train", data), ("task", task)):
        if section:
            head, _, rest = text.partition(f"[{name}]\n")
            text = f"{head}[{name}]\n{section}\n[{rest.partition(chr(10) + '[')[2]}"
    return text


# ---------------------------------------------------------------------------------------------- a loop by hand
def own_numbers(index: int) -> Iterator[torch.Generator]:
    """Yields the generators of a sample in the first epoch: one for its time, its noise, and its dropout."""
    torch.manual_seed(mix(SEED, 0, index))
    seed = int(torch.randint(2**62, ()))
    for number in range(1, 4):
        yield torch.Generator().manual_seed(mix(seed, number))


def flow_by_hand(model: Any, row: dict[str, Tensor], index: int, kind: str) -> Tensor:
    """Returns the loss of a sample, as diffusers' `train_dreambooth_sd3.py` computes it."""
    for_time, for_noise, for_drop = own_numbers(index)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    u = compute_density_for_timestep_sampling("logit_normal", 1, 0.3, 1.2, None, generator=for_time)
    place = (u * scheduler.config.num_train_timesteps).long()
    time, sigma = scheduler.timesteps[place], scheduler.sigmas[place].view(1, 1, 1, 1)
    data = row["sample"][None]
    noise = torch.randn(data.shape[1:], generator=for_noise)[None]
    dropped = bool(torch.rand((), generator=for_drop) < 0.2)
    if kind == "label":
        given: dict[str, Any] = {"class_labels": torch.tensor([10]) if dropped else row["label"][None]}
    else:
        given = {"encoder_hidden_states": row["embeddings"][None] * (not dropped)}
        if "pooled" in row:
            given["pooled_projections"] = row["pooled"][None] * (not dropped)
    found = model((1.0 - sigma) * data + sigma * noise, timestep=time, return_dict=False, **given)[0]
    weight = compute_loss_weighting_for_sd3("cosmap", sigma)
    return (weight * (found - (noise - data)) ** 2).reshape(1, -1).mean(1).sum()


def ddpm_by_hand(model: Any, row: dict[str, Tensor], index: int, kind: str) -> Tensor:
    """Returns the loss of a sample, as diffusers' `train_text_to_image.py` computes it with `--snr_gamma 5`."""
    for_time, for_noise, _ = own_numbers(index)
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    time = (torch.rand((), generator=for_time) * 1000).long()[None]
    data = row["sample"][None]
    noise = torch.randn(data.shape[1:], generator=for_noise)[None]
    found = model(scheduler.add_noise(data, noise, time), time).sample
    snr = compute_snr(scheduler, time)
    weight = torch.stack([snr, 5.0 * torch.ones_like(time)], dim=1).min(dim=1)[0] / (snr + 1)
    loss = F.mse_loss(found, scheduler.get_velocity(data, noise, time), reduction="none")
    return (loss.mean(dim=[1, 2, 3]) * weight).sum()


def by_hand(model: Any, data: Any, loss_of: Any, kind: str) -> list[tuple[float, float]]:
    """Trains for 10 steps of 8 samples by SGD; returns the losses and the norms of the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(10):
        rows = [(step * 8 + place) % len(data) for place in range(8)]
        loss = torch.stack([loss_of(model, data[index], index, kind) for index in rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        found.append((loss.item(), float(norm)))
    return found


FLOW = 'use = "flow_matching"\ndensity = "logit_normal"\nlogit_mean = 0.3\nlogit_std = 1.2\nshift = 3.0\ngrid = 1000\n'
FLOW += 'weighting = "cosmap"\ndropout = 0.2\n'
DDPM = 'use = "ddpm"\nprediction = "v_prediction"\nbeta_schedule = "squaredcos_cap_v2"\nmin_snr_gamma = 5.0'
LATENTS = 'use = "diffusion_data"\nrange = "any"\nof = { use = "latents", path = "latents.safetensors", scale = 0.5 }'


def built(arch: str, options: dict[str, Any]) -> str:
    return f'use = "diffusers"\narch = "{arch}"\noptions = {table(options)}'


CASES: dict[str, tuple[str, Any, str]] = {
    "dit": (recipe(task=FLOW + 'condition = "label"'), flow_by_hand, "label"),
    "unet": (recipe(model=built("UNet2DModel", UNET), task=DDPM), ddpm_by_hand, "none"),
    "unet of embeddings": (
        recipe(built("UNet2DConditionModel", UNET_TEXT), LATENTS, FLOW + 'condition = "embeddings"'),
        flow_by_hand,
        "embeddings",
    ),
    "sd3": (
        recipe(built("SD3Transformer2DModel", SD3), LATENTS, FLOW + 'condition = "embeddings"'),
        flow_by_hand,
        "embeddings",
    ),
}


def write_latents(folder: Path, *, pooled: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    tensors = {
        "latents": torch.randn(96, 4, 8, 8, generator=draws),
        "embeddings": torch.randn(96, 5, 12, generator=draws),
        **({"pooled": torch.randn(96, 6, generator=draws)} if pooled else {}),
    }
    save_file(tensors, folder / "latents.safetensors")


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_each_step_is_that_of_a_loop_by_hand_on_any_ranks(
    ddpforge: Callable[..., str], rows: Callable[..., list[dict[str, float]]], tmp_path: Path, name: str
) -> None:
    text, loss_of, kind = CASES[name]
    (tmp_path / "flow.toml").write_text(text)
    if kind == "embeddings":
        write_latents(tmp_path, pooled=name == "sd3")
        data = DiffusionData(of=Latents(path=tmp_path / "latents.safetensors", scale=0.5), range="any")
    else:
        data = DiffusionData(of=Digits(split="train", samples=96))
    largest, wanted = 0.0, None
    for split, (ranks, sets) in SPLITS.items():
        run = split.replace(", ", "-").replace(" ", "-")
        ddpforge("run", "flow.toml", *(f"--set={one}" for one in (*sets, f"name={run}")), ranks=ranks)
        if wanted is None:
            model = forge.load(tmp_path / "runs" / run).bare()
            wanted = by_hand(model.train(), data, loss_of, kind)
            assert len({round(loss, 4) for loss, _ in wanted}) == 10
        found = [(row["train/loss"], row["train/grad_norm"]) for row in rows(run)]
        differences = np.abs(np.array(found) / np.array(wanted) - 1)
        assert differences.shape == (10, 2)
        assert differences.max() < 1e-5, split
        largest = max(largest, float(differences.max()))
    print(f"{name}: largest relative difference {largest:.1e}")


@pytest.mark.full
def test_a_resumed_run_continues_the_curve(
    ddpforge: Callable[..., str], rows: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    (tmp_path / "flow.toml").write_text(recipe().replace('every = "10st"', 'every = "5st"'))
    ddpforge("run", "flow.toml")
    ddpforge("run", "flow.toml", "--set=name=resumed", "--set=train.length=5st")
    ddpforge("run", "flow.toml", "--set=name=resumed", ranks=2)
    whole, resumed = rows("flow"), rows("resumed")
    for key in ("train/loss", "train/grad_norm"):
        assert [row[key] for row in resumed] == pytest.approx([row[key] for row in whole], rel=1e-5)


# ---------------------------------------------------------------------------------------------- a short run
def test_the_recipe_of_the_guide_is_the_one_of_the_package() -> None:
    guide = (SHIPPED.parents[3] / "docs/guides/flow-matching.md").read_text()
    shown = guide.split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(shown) == tomllib.loads(SHIPPED.read_text())


def test_two_ranks_with_fsdp_train_like_one_and_the_export_computes_the_same(
    ddpforge: Callable[..., str], rows: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    text = recipe().replace("dropout = 0.2", "dropout = 0.2\nsamples = { images = 4, steps = 2, guidance = 2.0 }")
    text = text.replace('length = "10st"', 'length = "3st"\neval_every = "3st"') + "[callbacks.ema]\ndecay = 0.5\n"
    text += '[data.eval]\nuse = "diffusion_data"\nof = { use = "digits", split = "test", samples = 24 }\n'
    (tmp_path / "flow.toml").write_text(text)
    ddpforge("run", "flow.toml", "--set=train.micro_batch=4")
    ddpforge("run", "flow.toml", "--set=name=two", "--set=strategy.use=fsdp", ranks=2)
    for key in ("train/loss", "train/grad_norm"):
        assert [row[key] for row in rows("two")] == pytest.approx([row[key] for row in rows("flow")], rel=1e-5)
    assert list((tmp_path / "runs/two/shown/samples").glob("*.png"))

    place = export(tmp_path / "runs/two", tmp_path / "exported")
    assert place == tmp_path / "exported/transformer"
    model = DiTTransformer2DModel.from_pretrained(place).eval()
    trained = forge.load(tmp_path / "runs/two").model()
    live = forge.load(tmp_path / "runs/two", weights="model").model()
    x, times, labels = torch.randn(2, 1, 8, 8), torch.tensor([30.5, 900.0]), torch.tensor([3, 10])
    with torch.no_grad():
        found, averaged, last = (one(x, timestep=times, class_labels=labels).sample for one in (model, trained, live))
    assert torch.equal(found, averaged)
    assert not torch.equal(found, last)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "exported", subfolder="scheduler")
    assert scheduler.config.shift == 1.0
    again = diffusers_model(pretrained=tmp_path / "exported", subfolder="transformer")
    assert torch.equal(again.eval()(x, timestep=times, class_labels=labels).sample, found)


@pytest.mark.full
def test_adapters_are_merged_into_the_export(
    ddpforge: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    UNet2DModel(**UNET).save_pretrained(tmp_path / "base")
    model = 'use = "diffusers"\npretrained = "base"\nlora = { targets = ["to_q", "to_v"], r = 2 }'
    (tmp_path / "flow.toml").write_text(recipe(model=model, task='use = "ddpm"'))
    ddpforge("run", "flow.toml", "--set=strategy.use=fsdp", ranks=2)
    trained = forge.load(tmp_path / "runs/flow").model()
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        wanted = trained(x, torch.tensor([3, 900])).sample
        base = UNet2DModel.from_pretrained(tmp_path / "base").eval()(x, torch.tensor([3, 900])).sample
        model = UNet2DModel.from_pretrained(export(tmp_path / "runs/flow", tmp_path / "out")).eval()
        found = model(x, torch.tensor([3, 900])).sample
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(base, wanted, rtol=0, atol=1e-4)


@pytest.mark.full
def test_samples_of_the_recipe_are_the_digits_of_their_classes(ddpforge: Callable[..., str], tmp_path: Path) -> None:
    """Measured by a support vector machine that is trained on the real digits."""
    svm = pytest.importorskip("sklearn.svm", reason="scikit-learn is not installed")
    (tmp_path / "digits.toml").write_text(SHIPPED.read_text())
    from ddpforge.testing.ranks import run_ddpforge

    done = run_ddpforge("run", "digits.toml", cwd=tmp_path, timeout=1500)
    assert done.returncode == 0, done.stderr
    run = forge.load(tmp_path / "runs/digits-flow")
    labels = torch.arange(200) % 10
    noise = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = sample(run.model(), run.task().scheduler(), noise, steps=20, labels=labels, null=10, guidance=2.0)
    train, test = Digits(split="train"), Digits(split="test")
    judge = svm.SVC(gamma=1.0).fit(train.images.flatten(1).numpy(), train.labels.numpy())
    assert judge.score(test.images.flatten(1).numpy(), test.labels.numpy()) > 0.97
    images = ((found + 1) / 2).clamp(0, 1)
    accuracy = judge.score(images.flatten(1).numpy(), labels.numpy())
    print(f"accuracy on generated digits: {accuracy:.3f}")
    assert accuracy > 0.9
    spread = torch.stack([images[labels == one].var(0).mean() for one in range(10)])
    real = torch.stack([train.images[train.labels == one].var(0).mean() for one in range(10)])
    assert (spread / real).min() > 0.3  # not one and the same picture of a class
