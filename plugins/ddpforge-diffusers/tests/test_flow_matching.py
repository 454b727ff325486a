"""Times, noise, targets, weights and losses of the tasks, and those of diffusers and torchcfm."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddpforge.interfaces import SampleRNG, World
from ddpforge.ranks.collectives import SingleRank
from diffusers import DDIMPipeline, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from small_nets import DIT, UNET
from torch import Tensor, nn

from ddpforge_diffusers.models import diffusers_model
from ddpforge_diffusers.sampling import SamplesOptions, sample
from ddpforge_diffusers.tasks import DDPM, FlowMatching

WORLD = World(
    global_ranks=SingleRank(torch.device("cpu")),
    dp_ranks=SingleRank(torch.device("cpu")),
    device=torch.device("cpu"),
    local_rank=0,
)


class OneGenerator(SampleRNG):
    """RNG with one generator for all samples, as scripts of diffusers use it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def rand(self, *shape: int, device: torch.device | None = None) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def randn(self, *shape: int, device: torch.device | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator)


class Returns(nn.Module):
    """Model that returns what `answer` computes from the noisy samples and the times."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.answer, self.labels = answer, list[int]()

    def forward(self, x: Tensor, timestep: Tensor, return_dict: bool, class_labels: Any = None) -> tuple[Tensor]:
        self.labels += [] if class_labels is None else class_labels.tolist()
        return (self.answer(x, timestep),)


def batch_of(size: int, **more: Tensor) -> dict[str, Tensor]:
    return {"sample": torch.rand(size, 1, 4, 4) * 2 - 1, "seed": torch.arange(size) * 7 + 1, **more}


# ---------------------------------------------------------------------------------------------- flow matching
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(
    "options",
    [
        {"density": "uniform"},
        {"density": "logit_normal"},
        {"density": "logit_normal", "logit_mean": -0.7, "logit_std": 1.6},
        {"density": "mode"},
        {"density": "mode", "mode_scale": -0.5},
    ],
)
def test_times_and_noisy_samples_are_those_of_diffusers(options: dict[str, Any], shift: float) -> None:
    """As in diffusers' `train_dreambooth_sd3.py`: an index into the scheduler's times from the density."""
    task = FlowMatching(**options, shift=shift, grid=1000)
    data = torch.randn(500, 1, 2, 2)
    draws = OneGenerator(5)
    noisy, times, target, weights = task.noisy(data, draws)

    generator, scheduler = torch.Generator().manual_seed(5), FlowMatchEulerDiscreteScheduler(shift=shift)
    u = compute_density_for_timestep_sampling(
        weighting_scheme=options["density"],
        batch_size=500,
        logit_mean=options.get("logit_mean", 0.0),
        logit_std=options.get("logit_std", 1.0),
        mode_scale=options.get("mode_scale", 1.29),
        generator=generator,
    )
    index = (u * 1000).long()
    noise = torch.randn(data.shape, generator=generator)
    assert torch.allclose(times, scheduler.timesteps[index], rtol=0, atol=1e-3)
    assert len(set(times.tolist())) > 200
    expected = scheduler.scale_noise(data, scheduler.timesteps[index], noise)
    assert torch.allclose(noisy, expected, rtol=0, atol=1e-5)
    assert torch.allclose(target, noise - data, rtol=0, atol=1e-6)
    assert weights.tolist() == [1.0] * 500


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_weights_are_those_of_diffusers(scheme: Any) -> None:
    sigmas = torch.arange(1, 1001) / 1000
    found = FlowMatching(weighting=scheme, grid=1000).weights(sigmas)
    assert torch.allclose(found, compute_loss_weighting_for_sd3(scheme, sigmas), rtol=1e-6, atol=0)


def test_continuous_times_have_the_density_of_the_grid() -> None:
    """Without a grid a time is at most 1 / grid below that with a grid."""
    for density in ("uniform", "logit_normal", "mode"):
        fine = FlowMatching(density=density).times(OneGenerator(1), 1000)  # type: ignore[arg-type]
        coarse = FlowMatching(density=density, grid=100).times(OneGenerator(1), 1000)  # type: ignore[arg-type]
        assert (coarse - fine).min() + 1e-6 >= 0
        assert (coarse - fine).max() <= 0.01 + 1e-6


@pytest.mark.full  # it imports much
def test_paths_and_velocities_are_those_of_torchcfm_in_the_other_direction_of_time() -> None:
    torchcfm = pytest.importorskip("torchcfm.conditional_flow_matching", reason="torchcfm is not installed")
    data = torch.randn(64, 3, 4, 4)
    noisy, times, target, _ = FlowMatching().noisy(data, OneGenerator(2))
    generator = torch.Generator().manual_seed(2)
    t = 1 - torch.rand(64, generator=generator)
    noise = torch.randn(data.shape, generator=generator)
    matcher = torchcfm.ConditionalFlowMatcher(sigma=0.0)
    theirs, x, velocity = matcher.sample_location_and_conditional_flow(noise, data, t=1 - t)
    assert torch.allclose(times / 1000, 1 - theirs, rtol=0, atol=1e-6)
    assert torch.allclose(noisy, x, rtol=0, atol=1e-6)
    assert torch.allclose(target, -velocity, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------- DDPM
@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_noise_targets_and_weights_of_ddpm_are_those_of_diffusers(prediction: Any, schedule: Any, gamma: Any) -> None:
    """As in diffusers' `train_text_to_image.py` with `--snr_gamma`."""
    data = torch.randn(200, 1, 2, 2)
    task = DDPM(prediction=prediction, beta_schedule=schedule, min_snr_gamma=gamma)
    noisy, times, target, weights = task.noisy(data, OneGenerator(4))
    scheduler = DDPMScheduler(beta_schedule=schedule, prediction_type=prediction)
    generator = torch.Generator().manual_seed(4)
    assert times.tolist() == (torch.rand(200, generator=generator) * 1000).long().tolist()
    noise = torch.randn(data.shape, generator=generator)
    assert torch.allclose(noisy, scheduler.add_noise(data, noise, times), rtol=0, atol=1e-6)
    velocity = scheduler.get_velocity(data, noise, times)
    wanted = {"epsilon": noise, "sample": data, "v_prediction": velocity}[prediction]
    assert torch.allclose(target, wanted, rtol=0, atol=1e-6)
    snr = compute_snr(scheduler, times)
    least = torch.minimum(snr, torch.tensor(gamma or 1.0))
    scripts = {"epsilon": least / snr, "v_prediction": least / (snr + 1), "sample": least}[prediction]
    assert torch.allclose(weights, scripts if gamma else torch.ones(200), rtol=2e-5, atol=0)


# ---------------------------------------------------------------------------------------------- losses
@pytest.mark.parametrize("task", [FlowMatching(), FlowMatching(weighting="cosmap"), DDPM(min_snr_gamma=5.0)])
def test_loss_is_a_sum_over_samples_that_does_not_depend_on_the_batch(task: Any) -> None:
    batch, model = batch_of(6), Returns(lambda x, t: x / 2 + t.view(-1, 1, 1, 1) / 1000)
    whole, outputs = task.loss(model, batch)
    parts = [task.loss(model, {name: value[n : n + 1] for name, value in batch.items()})[0] for n in range(6)]
    assert outputs.shape == (6, 1, 4, 4)
    assert float(whole) == pytest.approx(sum(map(float, parts)), rel=1e-6)
    assert len({round(float(part), 6) for part in parts}) == 6


def test_a_model_that_knows_the_data_has_no_loss() -> None:
    data = torch.full((50, 1, 4, 4), 0.5)
    batch = {"sample": data, "seed": torch.arange(50)}
    knows = Returns(lambda x, t: (x - 0.5) / (t.view(-1, 1, 1, 1) / 1000))  # (x_t - x) / t = noise - x
    assert float(FlowMatching(grid=1000).loss(knows, batch)[0]) == pytest.approx(0, abs=1e-3)


def test_dropped_labels_are_the_last_ones_of_the_model() -> None:
    task = FlowMatching(condition="label", dropout=0.25)
    task.start(diffusers_model(arch="DiTTransformer2DModel", options=DIT), WORLD)
    model = Returns(lambda x, t: x)
    task.loss(model, batch_of(2000, label=torch.arange(2000) % 10))
    dropped = [place for place, label in enumerate(model.labels) if label == 10]
    assert len(dropped) / 2000 == pytest.approx(0.25, abs=0.03)
    assert all(label == place % 10 for place, label in enumerate(model.labels) if label != 10)


def test_dropped_embeddings_are_zeros() -> None:
    seen: dict[str, Tensor] = {}

    def model(x: Tensor, timestep: Tensor, return_dict: bool, **given: Tensor) -> tuple[Tensor]:
        seen.update(given)
        return (x,)

    task = FlowMatching(condition="embeddings", dropout=0.5)
    task.loss(model, batch_of(400, embeddings=torch.ones(400, 3, 2), pooled=torch.ones(400, 2)))  # type: ignore[arg-type]
    kept = seen["encoder_hidden_states"].flatten(1).mean(1)
    assert set(kept.tolist()) == {0.0, 1.0}
    assert float(kept.mean()) == pytest.approx(0.5, abs=0.08)
    assert torch.equal(seen["pooled_projections"].mean(1), kept)


# ---------------------------------------------------------------------------------------------- sampling
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_samples_are_euler_steps_with_guidance(shift: float, guidance: float) -> None:
    """By hand, as in diffusers' `StableDiffusion3Pipeline`: x + (sigma_next - sigma) * velocity."""
    torch.manual_seed(0)
    model = diffusers_model(arch="DiTTransformer2DModel", options=DIT).eval()
    noise, labels = torch.randn(3, 1, 8, 8), torch.tensor([0, 4, 9])
    scheduler = FlowMatching(shift=shift).scheduler()
    found = sample(model, scheduler, noise, steps=7, labels=labels, null=10, guidance=guidance)
    other = FlowMatchEulerDiscreteScheduler(shift=shift)
    other.set_timesteps(7)
    x = noise
    with torch.no_grad():
        for sigma, after in zip(other.sigmas[:-1], other.sigmas[1:], strict=True):
            time = (sigma * 1000).expand(3)
            within = model(x, timestep=time, class_labels=labels).sample
            without = model(x, timestep=time, class_labels=torch.full((3,), 10)).sample
            x = x + (after - sigma) * (without + guidance * (within - without))
    assert torch.allclose(found, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_ddpm_samples_are_those_of_the_pipeline_of_diffusers(prediction: Any) -> None:
    torch.manual_seed(0)
    unet = diffusers_model(arch="UNet2DModel", options=UNET).eval()
    task = DDPM(prediction=prediction)
    pipeline = DDIMPipeline(unet, task.scheduler())
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(2, torch.Generator().manual_seed(1), num_inference_steps=6, output_type="np").images
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = ((sample(unet, task.scheduler(), noise, steps=6) + 1) / 2).clamp(0, 1)
    assert torch.allclose(found, torch.from_numpy(images).permute(0, 3, 1, 2), rtol=0, atol=1e-5)


def test_pictures_are_shown_at_evaluations_from_the_same_noise() -> None:
    task = FlowMatching(samples=SamplesOptions(images=5, steps=3))
    knows = Returns(lambda x, t: (x - 0.5) / (t.view(-1, 1, 1, 1) / 1000))
    task.loss(knows, batch_of(2))
    shown: list[Any] = []
    from contextlib import nullcontext

    run: Any = SimpleNamespace(
        model=knows, world=WORLD, forward=nullcontext, log_media=lambda *one: shown.append(one), folder=Path()
    )
    callback: Any = task.callback
    callback.on_start(run)
    assert callback.while_evaluating(3) == {}
    ((name, images, kind),) = shown
    assert (name, kind, images.shape) == ("samples", "image", (5, 1, 4, 4))
    assert torch.allclose(images, torch.full((5, 1, 4, 4), 0.75), atol=0.01)
