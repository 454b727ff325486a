"""Built-in models as functions with their options. Calling a function imports torch and the model's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

if TYPE_CHECKING:
    from torch import nn

__all__ = ["cnn", "denoiser", "gan", "gpt", "mlp", "moe_gpt", "unet"]

_Size = Annotated[int, Field(ge=1, le=2**24)]
_Channels = Annotated[int, Field(ge=1, le=4096)]
_Count = Annotated[int, Field(ge=1, le=2**16)]
_Classes = Annotated[int, Field(ge=1, le=2**20, description="Number of classes.")]
_ImageChannels = Annotated[_Channels, Field(description="Channels of the images: 1 for grey, 3 for RGB.")]

_VocabSize = Annotated[int, Field(ge=2, le=2**24, description="Number of different tokens.")]
_BlockSize = Annotated[int, Field(ge=1, le=2**24, description="Maximum sequence length, in tokens.")]
_Layers = Annotated[int, Field(ge=1, le=1000, description="Number of transformer blocks.")]
_Heads = Annotated[int, Field(ge=1, le=1024, description="Attention heads per block; must divide `width`.")]
_Width = Annotated[int, Field(ge=1, le=2**17, description="Number of channels of the residual stream.")]
_Dropout = Annotated[
    float, Field(ge=0, lt=1, description="Dropout probability of embeddings, attention weights and residual branches.")
]


def mlp(
    *,
    inputs: Annotated[_Size, Field(description="Number of values per sample, after flattening.")],
    outputs: Annotated[_Size, Field(description="Number of output values per sample, e.g. classes.")],
    hidden: Annotated[
        Sequence[_Size],
        Field(max_length=1000, description="Width of each hidden layer; empty for a linear model."),
    ] = (128,),
    activation: Annotated[
        Literal["relu", "gelu", "silu", "tanh"], Field(description="Activation after each hidden layer.")
    ] = "relu",
    dropout: Annotated[float, Field(ge=0, lt=1, description="Probability of zeroing a hidden unit in training.")] = 0.0,
) -> nn.Module:
    """Builds an MLP: linear layers with an activation and dropout between them.

    Takes [B, …] with `inputs` values per sample, returns [B, outputs]. Initial weights are those of nn.Linear.
    """
    from ddpforge.builtin.models.mlp import MLP

    return MLP(inputs=inputs, outputs=outputs, hidden=hidden, activation=activation, dropout=dropout)


def cnn(
    *,
    channels_in: _ImageChannels = 1,
    classes: _Classes = 10,
    width: Annotated[_Channels, Field(description="Channels of the first stage; the second has twice as many.")] = 32,
    dropout: Annotated[
        float, Field(ge=0, lt=1, description="Probability of zeroing a feature before the last layer.")
    ] = 0.0,
) -> nn.Module:
    """Builds a CNN: four 3 x 3 convolutions with BatchNorm, one max-pooling, the mean over pixels, a linear layer.

    Takes [B, channels_in, H, W] with H and W of at least 2, returns logits [B, classes]. Initial weights are those of
    torch's layers.
    """
    from ddpforge.builtin.models.cnn import CNN

    return CNN(channels_in=channels_in, classes=classes, width=width, dropout=dropout)


def unet(
    *,
    classes: _Classes,
    channels_in: _ImageChannels = 1,
    width: Annotated[
        _Channels, Field(description="Channels of the first stage; each further one has twice as many.")
    ] = 16,
    depth: Annotated[int, Field(ge=1, le=8, description="Number of times that the image is halved.")] = 2,
) -> nn.Module:
    """Builds a U-Net: halves the image `depth` times, then doubles it again with skip connections.

    Takes [B, channels_in, H, W] with H and W divisible by 2^depth, returns logits [B, classes, H, W]. It has no
    BatchNorm, so results are the same on any number of ranks. Ronneberger et al. 2015, arXiv:1505.04597.
    """
    from ddpforge.builtin.models.unet import UNet

    return UNet(classes=classes, channels_in=channels_in, width=width, depth=depth)


def denoiser(
    *,
    channels: Annotated[_Count, Field(description="Number of channels of an image.")] = 1,
    width: Annotated[
        int, Field(ge=8, le=2**16, multiple_of=8, description="Number of channels of hidden layers.")
    ] = 32,
    layers: Annotated[_Count, Field(description="Number of residual blocks.")] = 3,
) -> nn.Module:
    """Builds a denoiser: takes images [B, channels, H, W] and times [B] from 0 to 1, returns the noise, same shape.

    Residual blocks of two convolutions each; between them, activations are scaled and shifted depending on the time.
    There is no pooling: each block extends the receptive field by two pixels in each direction.
    """
    from ddpforge.builtin.models.denoiser import Denoiser

    return Denoiser(channels=channels, width=width, layers=layers)


def gan(
    *,
    shape: Annotated[Sequence[_Size], Field(min_length=1, description="Shape of an image, with values 0 to 1.")],
    latent: Annotated[_Size, Field(description="Number of noise values per generated image.")] = 32,
    width: Annotated[_Size, Field(description="Width of the hidden layers.")] = 256,
    dropout: Annotated[float, Field(ge=0, lt=1, description="Dropout of the discriminator's hidden layers.")] = 0.5,
) -> nn.Module:
    """Builds a GAN: two networks in one model. Each forward pass names one: `generator` or `discriminator`."""
    from ddpforge.builtin.models.gan import GAN

    return GAN(shape=shape, latent=latent, width=width, dropout=dropout)


def gpt(
    *,
    vocab_size: _VocabSize = 256,
    block_size: _BlockSize = 256,
    layers: _Layers = 4,
    heads: _Heads = 4,
    width: _Width = 128,
    dropout: _Dropout = 0.0,
    tie_embeddings: Annotated[
        bool, Field(description="Use the token embedding also as the weights of the output layer.")
    ] = True,
    bias: Annotated[bool, Field(description="Give linear layers and LayerNorms a bias.")] = True,
    causal: Annotated[
        bool, Field(description="Attend only to the position itself and earlier ones; else to all positions.")
    ] = True,
    classes: Annotated[
        int | None,
        Field(ge=2, le=2**20, description="Return logits of N classes per sequence, not of tokens."),
    ] = None,
) -> nn.Module:
    """Builds a GPT, which predicts the next token: [B, T] int64 → logits [B, T, vocab_size], T ≤ block_size.

    With `classes` it returns logits [B, classes] of a head on the mean over positions instead.

    Initial weights are N(0, 0.02²), divided by √(2·layers) in layers that write to the residual stream; biases are
    zero. Every layer initializes its weights in `reset_parameters`, so these methods also initialize a model that was
    built on the meta device. With tied embeddings the output layer has no parameter of its own.

    Raises ValueError if `heads` does not divide `width`.
    """

    from ddpforge.builtin.models.gpt import GPT

    return GPT(
        vocab_size=vocab_size,
        block_size=block_size,
        layers=layers,
        heads=heads,
        width=width,
        dropout=dropout,
        tie_embeddings=tie_embeddings,
        bias=bias,
        causal=causal,
        classes=classes,
    )


def moe_gpt(
    *,
    vocab_size: _VocabSize = 256,
    block_size: _BlockSize = 256,
    layers: _Layers = 4,
    heads: _Heads = 4,
    width: _Width = 128,
    dropout: _Dropout = 0.0,
    experts: Annotated[int, Field(ge=2, le=4096, description="Number of experts per block.")] = 8,
    top_k: Annotated[int, Field(ge=1, le=64, description="Number of experts per token; less than `experts`.")] = 2,
    capacity_factor: Annotated[
        float,
        Field(
            gt=0, le=4096, description="Capacity of an expert, as a multiple of its even share of a sequence's choices."
        ),
    ] = 1.5,
) -> nn.Module:
    """Builds a mixture-of-experts GPT: [B, T] int64 → `Routed`, for the task `moe_language_modeling`.

    Each token is routed to its `top_k` most probable experts. An expert accepts `capacity_factor` times its even share
    of a sequence's choices, earlier tokens first. Choices beyond this capacity are dropped: their expert adds nothing
    to the residual stream. Each sequence is routed separately, so dropped choices and expert usage do not depend on
    ranks or micro-batches.
    """
    from ddpforge.builtin.models.moe import MoEGPT

    return MoEGPT(
        vocab_size=vocab_size,
        block_size=block_size,
        layers=layers,
        heads=heads,
        width=width,
        dropout=dropout,
        experts=experts,
        top_k=top_k,
        capacity_factor=capacity_factor,
    )
