"""Diffusion: prediction of noise at any time, and sampling of images."""

import math
from pathlib import Path

import pytest
import torch
from support.doubles import Elsewhere, run_of
from torch import Tensor, nn

from ddpforge.builtin.callbacks.samples import DiffusionSamples
from ddpforge.builtin.models.denoiser import Denoiser
from ddpforge.builtin.tasks.diffusion import Diffusion, sample
from ddpforge.interfaces import World


class Knows(nn.Module):
    """Oracle for images that are `value` everywhere: returns exactly their noise."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.x, self.times = 2 * value - 1, list[float]()

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        self.times += times.tolist()
        signal = torch.cos(times * math.pi / 2).square().clamp(1e-4, 1 - 1e-4).view(-1, 1, 1, 1)
        return (images - signal.sqrt() * self.x) / (1 - signal).sqrt()


def test_oracle_has_zero_loss_at_any_time() -> None:
    images, knows = torch.full((200, 1, 4, 4), 0.75), Knows(0.75)
    loss, outputs = Diffusion().loss(knows, [images, torch.zeros(200)])
    assert loss.item() == pytest.approx(0.0, abs=1e-3)
    assert (outputs.mean().item(), outputs.std().item()) == pytest.approx((0.0, 1.0), abs=0.05)
    assert min(knows.times) < 0.05 < 0.95 < max(knows.times)


def test_loss_is_averaged_over_values_and_summed_over_images() -> None:
    """Predicts zero noise: the error is the variance of the noise, one per image."""
    loss, _ = Diffusion().loss(lambda x, t: torch.zeros_like(x), torch.rand(400, 1, 8, 8))  # type: ignore[arg-type]
    assert loss.item() / 400 == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("steps", [1, 10, 50])
def test_sampling_with_the_oracle_returns_its_image(steps: int) -> None:
    found = sample(Knows(0.75), torch.randn(3, 1, 4, 4), steps)
    assert torch.allclose(found, torch.full((3, 1, 4, 4), 0.75), atol=0.02)


def test_sampling_step_draws_from_the_posterior() -> None:
    """Computes equations 6 and 7 of Ho et al. for a model that predicts half of its input as noise."""
    seen: list[Tensor] = []

    def half(x: Tensor, time: Tensor) -> Tensor:
        seen.append(x)
        return x / 2

    torch.manual_seed(3)
    sample(half, torch.randn(1, 1, 2, 2) / 50, 4)  # type: ignore[arg-type]
    torch.manual_seed(3)
    _, _, *noises = [torch.randn(1, 1, 2, 2) for _ in range(4)]
    signals = [math.cos(time * math.pi / 2) ** 2 for time in (0.75, 0.5, 0.25)]
    for now, then, x, found, noise in zip(signals, signals[1:], seen[1:], seen[2:], noises, strict=False):
        alpha, beta = now / then, 1 - now / then
        image = ((x - math.sqrt(1 - now) * x / 2) / math.sqrt(now)).clamp(-1, 1)
        mean = (math.sqrt(then) * beta * image + math.sqrt(alpha) * (1 - then) * x) / (1 - now)
        assert torch.allclose(found, mean + math.sqrt((1 - then) / (1 - now) * beta) * noise, atol=1e-5)


def test_denoiser_output_has_the_shape_of_the_images_and_depends_on_time() -> None:
    model = Denoiser(channels=2, width=8, layers=1)
    x = torch.rand(3, 2, 6, 5)
    early, late = model(x, torch.zeros(3)), model(x, torch.ones(3))
    assert early.shape == x.shape
    assert (early - late).abs().max() > 1e-3  # also if each channel is normalized separately


def test_samples_callback_logs_images_at_every_evaluation() -> None:
    ranks, shown = Elsewhere(), list[tuple[str, Tensor, str]]()
    world = World(global_ranks=ranks, dp_ranks=ranks, device=torch.device("cpu"), local_rank=0)
    callback = DiffusionSamples(shape=[1, 4, 4], images=5, steps=3)
    callback.on_start(run_of(Knows(0.25), world, log_media=lambda *one: shown.append(one), folder=Path()))
    assert callback.while_evaluating(7) == {}
    ((name, images, kind),) = shown
    assert (name, kind, images.shape) == ("samples", "image", (5, 1, 4, 4))
    assert torch.allclose(images, torch.full((5, 1, 4, 4), 0.25), atol=0.05)
