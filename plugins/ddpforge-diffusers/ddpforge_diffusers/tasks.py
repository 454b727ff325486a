"""Tasks of generative training: `flow_matching`, and `ddpm` with epsilon, velocity or sample as the target."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

import torch
from ddpforge.errors import UsageError
from ddpforge.interfaces import SampleRNG, Task, World
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from pydantic import Field
from torch import Tensor, nn

from ddpforge_diffusers.fit import Condition, check_fit
from ddpforge_diffusers.models import class_rows, denoise
from ddpforge_diffusers.sampling import Samples, SamplesOptions

__all__ = ["DDPM", "FlowMatching"]

ddpforge_plugin_api = 3

Batch = Mapping[str, Tensor]

_ConditionOption = Annotated[
    Condition,
    Field(
        description='Input of the model besides sample and time: "none", the class ("label"), or "embeddings" of text'
        " [T, D], with `pooled` [D] if the model takes it."
    ),
]
_Dropout = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        description="Probability that a sample has no condition, for classifier-free guidance: the label is then the"
        " last one of the model, embeddings are zeros.",
    ),
]
_Samples = Annotated[
    SamplesOptions | None, Field(description="Pictures at every evaluation: { images, steps, guidance }; absent: none.")
]


class _Generative(Task):
    """Task with times and noise for each sample of the dataset `diffusion_data`, drawn by the sample's seed."""

    def __init__(self, condition: Condition, dropout: float, samples: SamplesOptions | None) -> None:
        if dropout and condition == "none":
            raise ValueError('dropout drops conditions, but there are none; set condition = "label", or remove dropout')
        if samples and samples.guidance != 1 and not (dropout and condition == "label"):
            raise ValueError(
                "samples: guidance compares samples with and without a class; it needs"
                ' condition = "label" and dropout > 0, e.g. 0.1'
            )
        self.condition, self.dropout, self.samples = condition, dropout, samples
        self._shape: tuple[int, ...] = ()
        self._rows = 0
        if samples:
            self.callback = Samples(samples, self.scheduler, self._setting)

    def start(self, model: nn.Module, world: World) -> None:
        """Keeps the number of labels of the model."""
        self._rows = class_rows(model)

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError for data without seeds, and for a model that does not fit the data or the condition."""
        check_fit(model, data, condition=self.condition, dropout=self.dropout, samples=self.samples is not None)

    @abstractmethod
    def scheduler(self) -> Any:
        """Returns a scheduler of diffusers that generates samples with a model of this task."""

    @abstractmethod
    def noisy(self, sample: Tensor, draws: SampleRNG) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns noisy samples [B, C, H, W], the model's times [B], targets [B, C, H, W] and weights [B]."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum over samples of the weighted mean squared error of a sample, and the predictions."""
        sample = batch["sample"]
        self._shape = tuple(sample.shape[1:])
        draws = SampleRNG(batch["seed"].tolist())
        noisy, times, target, weight = self.noisy(sample, draws)
        found = denoise(model, noisy, times, self._conditions(batch, draws))
        errors = (found - target).square().flatten(1).mean(1)
        return (weight * errors).sum(), found

    def predict(self, model: nn.Module, batch: Any) -> NoReturn:
        """Raises UsageError: these tasks have no predictions for samples."""
        raise UsageError(
            "this task generates samples from noise, and cannot predict anything for the samples in the data",
            hints=[
                "show pictures at every evaluation with `samples = { images = 16 }` of the task",
                "or write the model for diffusers with `python -m ddpforge_diffusers.export RUN -o FOLDER`",
            ],
        )

    def _conditions(self, batch: Batch, draws: SampleRNG) -> dict[str, Tensor]:
        """Returns the model's conditions; those of some samples are dropped."""
        if self.condition == "none":
            return {}
        size, device = len(batch["sample"]), batch["sample"].device
        dropped = draws.rand(size, device=device) < self.dropout if self.dropout else None
        if self.condition == "label":
            label = batch["label"]
            return {"class_labels": label if dropped is None else torch.where(dropped, self._rows - 1, label)}
        kept = 1.0 if dropped is None else (~dropped).float()
        found = {"encoder_hidden_states": batch["embeddings"]}
        if "pooled" in batch:
            found["pooled_projections"] = batch["pooled"]
        if isinstance(kept, Tensor):
            found = {name: value * kept.view(-1, *[1] * (value.ndim - 1)) for name, value in found.items()}
        return found

    def _setting(self) -> tuple[tuple[int, ...], int, int | None]:
        if self.condition != "label":
            return self._shape, 0, None
        return self._shape, self._rows - bool(self.dropout), self._rows - 1


class FlowMatching(_Generative):
    """Flow matching (rectified flow): learns the velocity noise - x of x_t = (1 - t) x + t noise.

    The direction of time is that of diffusers: t = 0 is data, t = 1 is noise; the model's time is t * 1000. A number u
    in [0, 1) is drawn from `density` for each sample; t is 1 - u, rounded up to a multiple of 1 / grid, and then
    shift * t / (1 + (shift - 1) * t). These are the times of diffusers' training scripts for Stable Diffusion 3. The
    loss of a sample is the mean squared error over its values, times the weight. See Lipman et al. (2023), Liu et al.
    (2023), and Esser et al. (2024) for densities and weights.
    """

    def __init__(
        self,
        *,
        density: Annotated[
            Literal["uniform", "logit_normal", "mode"], Field(description="Distribution of the times.")
        ] = "uniform",
        logit_mean: Annotated[
            float, Field(ge=-100, le=100, description='Mean of the logit of u for "logit_normal"; > 0: less noise.')
        ] = 0.0,
        logit_std: Annotated[
            float, Field(gt=0, le=100, description='Standard deviation of the logit for "logit_normal".')
        ] = 1.0,
        mode_scale: Annotated[
            float, Field(ge=-1, le=1.7519, description='Scale of "mode": > 0 prefers times in the middle.')
        ] = 1.29,
        shift: Annotated[
            float, Field(gt=0, le=1000, description="Shift of times towards noise, for large images: 3 in SD 3.")
        ] = 1.0,
        grid: Annotated[
            int | None,
            Field(ge=2, le=2**20, description="Number of different times, as in diffusers: 1000; absent: any time."),
        ] = None,
        weighting: Annotated[
            Literal["none", "sigma_sqrt", "cosmap"], Field(description="Weights of times, with the names of diffusers.")
        ] = "none",
        condition: _ConditionOption = "none",
        dropout: _Dropout = 0.0,
        samples: _Samples = None,
    ) -> None:
        if density != "logit_normal" and (logit_mean, logit_std) != (0.0, 1.0):
            raise ValueError('logit_mean and logit_std are for density = "logit_normal"')
        if density != "mode" and mode_scale != 1.29:
            raise ValueError('mode_scale is for density = "mode"')
        if weighting == "sigma_sqrt" and grid is None:
            raise ValueError('weighting = "sigma_sqrt" is 1 / t², which has no bound near 0; set grid = 1000')
        super().__init__(condition, dropout, samples)
        self.density, self.logit_mean, self.logit_std, self.mode_scale = density, logit_mean, logit_std, mode_scale
        self.shift, self.grid, self.weighting = shift, grid, weighting

    def scheduler(self) -> Any:
        """Returns the Euler scheduler with the same shift."""
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=self.grid or 1000, shift=self.shift)

    def noisy(self, sample: Tensor, draws: SampleRNG) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns noisy samples, times, velocities and weights."""
        times = self.times(draws, len(sample)).to(sample.device)
        noise = draws.randn(*sample.shape, device=sample.device)
        t = times.view(-1, 1, 1, 1)
        return (1 - t) * sample + t * noise, times * (self.grid or 1000), noise - sample, self.weights(times)

    def times(self, draws: SampleRNG, size: int) -> Tensor:
        """Returns times [size] in (0, 1], float32: 1 is noise."""
        if self.density == "logit_normal":
            u = torch.sigmoid(self.logit_mean + self.logit_std * draws.randn(size))
        else:
            u = draws.rand(size)
        if self.density == "mode":
            u = 1 - u - self.mode_scale * (torch.cos(torch.pi * u / 2).square() - 1 + u)
        if self.grid:
            t = (self.grid - (u * self.grid).long().clamp(0, self.grid - 1)) / self.grid
        else:
            t = 1 - u
        return self.shift * t / (1 + (self.shift - 1) * t)

    def weights(self, times: Tensor) -> Tensor:
        """Returns the weights of times, as `compute_loss_weighting_for_sd3` of diffusers."""
        if self.weighting == "sigma_sqrt":
            return times**-2.0
        if self.weighting == "cosmap":
            return 2 / (torch.pi * (1 - 2 * times + 2 * times.square()))
        return torch.ones_like(times)


class DDPM(_Generative):
    """Denoising diffusion with discrete times and the noise schedules of diffusers' `DDPMScheduler`.

    The noisy sample is √a x + √(1 - a) noise, and a is `alphas_cumprod` at a uniform time of 0 to timesteps - 1. The
    target is the noise, the velocity √a noise - √(1 - a) x (Salimans and Ho, 2022), or x. With `min_snr_gamma`, weights
    are those of Min-SNR (Hang et al., 2023), as in diffusers' training scripts. Pictures are generated by DDIM.
    """

    def __init__(
        self,
        *,
        prediction: Annotated[
            Literal["epsilon", "v_prediction", "sample"], Field(description="Target: noise, velocity or the sample.")
        ] = "epsilon",
        timesteps: Annotated[int, Field(ge=2, le=2**20, description="Number of times.")] = 1000,
        beta_schedule: Annotated[
            Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"], Field(description="Schedule of beta.")
        ] = "linear",
        beta_start: Annotated[float, Field(gt=0, lt=1, description="Beta of the first time.")] = 0.0001,
        beta_end: Annotated[float, Field(gt=0, lt=1, description="Beta of the last time.")] = 0.02,
        zero_terminal_snr: Annotated[
            bool, Field(description="Rescale beta so that the last time is pure noise (Lin et al., 2024).")
        ] = False,
        min_snr_gamma: Annotated[
            float | None, Field(gt=0, le=1000, description="Gamma of Min-SNR weights, e.g. 5; absent: all weights 1.")
        ] = None,
        clip_sample: Annotated[bool, Field(description="Clip generated samples to -1 to 1; false for latents.")] = True,
        condition: _ConditionOption = "none",
        dropout: _Dropout = 0.0,
        samples: _Samples = None,
    ) -> None:
        if beta_start >= beta_end:
            raise ValueError(f"beta_start = {beta_start:g} is not less than beta_end = {beta_end:g}")
        if zero_terminal_snr and prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr: pure noise does not show the sample, so epsilon cannot be learned there; set"
                ' prediction = "v_prediction"'
            )
        super().__init__(condition, dropout, samples)
        self.prediction, self.min_snr_gamma, self.clip_sample = prediction, min_snr_gamma, clip_sample
        self._config = {
            "num_train_timesteps": timesteps,
            "beta_schedule": beta_schedule,
            "beta_start": beta_start,
            "beta_end": beta_end,
            "prediction_type": prediction,
            "rescale_betas_zero_snr": zero_terminal_snr,
            "clip_sample": clip_sample,
        }
        self._signal: Tensor = DDPMScheduler(**self._config).alphas_cumprod

    def scheduler(self) -> Any:
        """Returns the DDIM scheduler of the same noise schedule."""
        return DDIMScheduler(**self._config, timestep_spacing="trailing")

    def noisy(self, sample: Tensor, draws: SampleRNG) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns noisy samples, times, targets and weights."""
        count = len(self._signal)
        times = (draws.rand(len(sample)) * count).long().clamp(max=count - 1)
        a = self._signal[times].to(sample.device)
        noise = draws.randn(*sample.shape, device=sample.device)
        signal, spread = a.sqrt().view(-1, 1, 1, 1), (1 - a).sqrt().view(-1, 1, 1, 1)
        target = {"epsilon": noise, "sample": sample, "v_prediction": signal * noise - spread * sample}[self.prediction]
        return signal * sample + spread * noise, times.to(sample.device), target, self.weights(a)

    def weights(self, signal: Tensor) -> Tensor:
        """Returns the weights of times with the fractions `signal` of variance from the sample."""
        if self.min_snr_gamma is None:
            return torch.ones_like(signal)
        snr = signal / (1 - signal)
        least = snr.clamp(max=self.min_snr_gamma)
        return {"epsilon": least / snr, "v_prediction": least / (snr + 1), "sample": least}[self.prediction]
