"""Models of transformers: from a config with random weights, or from saved weights."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from ddpforge.builtin.models.lora import Adapters
from ddpforge.builtin.models.quantized import Quantization
from pydantic import Field
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,  # noqa: F401 - its libraries warn at their import; while a component is imported, this is not shown
)

from ddpforge_transformers.building import (
    adapted,
    body_of,
    check_new_rows_are_trained,
    check_quantize,
    check_tables,
    config_of,
    is_plain_linear,
    model_of,
    quantize_blocks,
    resize,
)
from ddpforge_transformers.image_parts import (
    ImagePart,
    check_parts,
    freeze_parts,
    freeze_unused_layers,
    in_language_model,
)
from ddpforge_transformers.stages import say_steps
from ddpforge_transformers.token_mixers import separate_documents

__all__ = [
    "base_model",
    "causal_lm",
    "image_text_to_text",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
]

ddpforge_plugin_api = 3

_ModelType = Annotated[
    str | None, Field(description='Type of a model with random weights, e.g. "llama"; or set `pretrained`.')
]
_Pretrained = Annotated[
    str | None,
    Field(description="Folder in which transformers saved a model, or a name on the hub to download."),
]
_Weights = Annotated[bool, Field(description="False: uses only the config of `pretrained`; weights are random.")]
_Options = Annotated[Mapping[str, Any], Field(description="Keys of the config, e.g. { hidden_size = 64 }.")]
_Attention = Annotated[
    Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None,
    Field(description="Implementation of attention; absent: the default of transformers."),
]
_LoRA = Annotated[
    Adapters | None,
    Field(description='Train only adapters: options of ddpforge\'s `lora`, e.g. { targets = ["q_proj"] }.'),
]
_Quantize = Annotated[
    Quantization | None,
    Field(description="Format of the frozen linear layers in blocks, under `lora` (QLoRA); needs `pretrained`."),
]
_DoubleQuant = Annotated[
    bool | None, Field(description='Quantize the scales of "nf4", too, which saves 0.4 bits of each weight.')
]
_Resize = Annotated[
    int | None,
    Field(
        ge=1,
        le=2**24,
        description="Number of tokens with new ones of the tokenizer; the embeddings of these are new, and trained.",
    ),
]


def causal_lm(
    *,
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    resize_vocabulary: _Resize = None,
    lora: _LoRA = None,
    quantize: _Quantize = None,
    double_quant: _DoubleQuant = None,
) -> nn.Module:
    """Builds a causal language model, for this package's task and data.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters or a quantization that
    do not fit.
    """
    check_quantize(quantize, double_quant, lora, saved=pretrained is not None and weights)
    config = config_of(model_type, pretrained, options)
    model, new = model_of(AutoModelForCausalLM, config, pretrained if weights else None, attention)
    separate_documents(model)
    if resize_vocabulary is not None:
        resize(model, resize_vocabulary, saved=pretrained is not None)
    say_steps(model)
    if lora and lora.init and not (pretrained and weights):
        raise ValueError(
            f'lora.init = "{lora.init}" needs the saved weights of `pretrained` when the model is built: remove'
            " `weights = false`, or lora.init"
        )
    original: dict[str, Tensor] = {}
    if quantize:
        if lora and lora.init == "loftq":
            original = {
                path: module.weight.detach() for path, module in model.named_modules() if is_plain_linear(module)
            }
        quantize_blocks(model, quantize, double=bool(double_quant))
    found = adapted(model, lora, new, original)
    if resize_vocabulary is not None and lora:
        check_new_rows_are_trained(found)
    return found


def image_text_to_text(
    *,
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    resize_vocabulary: _Resize = None,
    freeze: Annotated[
        Sequence[ImagePart], Field(description="Parts of the model that are not trained; not with `lora`.")
    ] = (),
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a language model that also takes images, for the task `causal_lm` and the data `image_chat`.

    `options` of parts of the config are tables, e.g. { text_config = { hidden_size = 64 } }. Layers of the vision tower
    whose output the model does not read (`vision_feature_layer` of the config) are frozen. `lora` adapts layers of the
    language model, if its targets are not globs, and freezes all other parameters.

    Raises ValueError for unknown types and keys, if there is no saved model, for a model without a vision tower, and
    for adapters or parts that do not fit.
    """
    if freeze and lora:
        raise ValueError("`lora` freezes the model, except its adapters and lora.train; remove `freeze`")
    config = config_of(model_type, pretrained, options)
    check_tables(config, options)
    model, new = model_of(AutoModelForImageTextToText, config, pretrained if weights else None, attention)
    check_parts(model)
    if resize_vocabulary is not None:
        resize(model, resize_vocabulary, saved=pretrained is not None)
    freeze_unused_layers(model)
    freeze_parts(model, freeze)
    found = adapted(model, in_language_model(model, lora), new)
    if resize_vocabulary is not None and lora:
        check_new_rows_are_trained(found)
    return found


def masked_lm(
    *,
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a masked language model, for ddpforge's task `masked_lm`; set its `mask_token` to that of the tokenizer.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = config_of(model_type, pretrained, options)
    model, new = model_of(AutoModelForMaskedLM, config, pretrained if weights else None, attention)
    return adapted(model, lora, new)


def sequence_classification(
    *,
    classes: Annotated[int, Field(ge=1, le=2**20, description="Number of classes.")],
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a text classifier with `classes` classes. The head is new if the saved head has another size.

    With `lora` a new head is trained, too.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = config_of(model_type, pretrained, options)
    model = _classifier(
        AutoModelForSequenceClassification, config, classes, pretrained if weights else None, attention, lora
    )
    model.outputs = classes  # type: ignore[assignment]  # any attribute may be set on a module
    return model


def token_classification(
    *,
    classes: Annotated[int, Field(ge=2, le=2**20, description="Number of tags.")],
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a model that gives each token one of `classes` tags. The head is new if the saved head has another size.

    With `lora` a new head is trained, too.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = config_of(model_type, pretrained, options)
    return _classifier(
        AutoModelForTokenClassification, config, classes, pretrained if weights else None, attention, lora
    )


def seq2seq_lm(
    *,
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds an encoder-decoder model such as T5 or BART, for this package's task `seq2seq_lm`.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = config_of(model_type, pretrained, options)
    if not config.is_encoder_decoder:
        raise ValueError(f'a {config.model_type} model has no encoder and decoder: set model.use = "causal_lm"')
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as in saved models of T5
    model, new = model_of(AutoModelForSeq2SeqLM, config, pretrained if weights else None, attention)
    return adapted(model, lora, new)


def _classifier(
    auto: Any, config: Any, classes: int, pretrained: str | None, attention: str | None, lora: Adapters | None
) -> nn.Module:
    """Builds a classifier; without saved weights its head is new."""
    config.num_labels = classes
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a recomputed block would attend to the keys of its first pass, too
    model, new = model_of(auto, config, pretrained, attention)
    if pretrained is None:
        new = {name for name, _ in model.named_parameters() if not name.startswith(f"{body_of(model)}.")}
    return adapted(model, lora, new)


def base_model(
    model_type: str | None, pretrained: str | None, options: Mapping[str, Any], attention: str | None, *, weights: bool
) -> nn.Module:
    """Builds a model without a head, for other plugins; the arguments are those of `causal_lm`.

    Raises ValueError for unknown types and keys, if there is no saved model, and for weights that are not saved.
    """
    config = config_of(model_type, pretrained, options)
    model, new = model_of(AutoModel, config, pretrained if weights else None, attention)
    if lost := sorted(name for name in new if not name.startswith("pooler.")):
        raise ValueError(
            f"{len(lost)} weights of `{pretrained}` are not saved in the shape of this model, and would become random,"
            f" e.g. `{lost[0]}`; remove `options` for shapes"
        )
    return model


_builders: tuple[Any, ...] = (
    *(causal_lm, image_text_to_text, masked_lm),
    *(seq2seq_lm, sequence_classification, token_classification),
)
for _builder in _builders:
    _builder.export_format = "transformers"  # of `ddpforge export` into a folder
