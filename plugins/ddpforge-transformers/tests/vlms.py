"""Tiny processors, models and chats with pictures, of four families."""

import json
from pathlib import Path
from typing import Any

import torch
from chats import byte_tokenizer
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 450,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 400,
    },
    "qwen2_vl": {
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "embed_dim": 16,
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "mlp_ratio": 2,
        },
        "image_token_id": 401,
        "video_token_id": 402,
        "vision_start_token_id": 403,
        "vision_end_token_id": 404,
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": 400,
        "scale_factor": 2,
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 8, "sliding_window": 16},
        "vision_config": VISION | {"vision_use_head": False},
        "image_token_index": 407,
        "boi_token_index": 405,
        "eoi_token_index": 406,
        "mm_tokens_per_image": 4,
    },
}
_SPECIAL = [
    "<image>",  # 400
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<boi>",  # 405
    "<eoi>",
    "<soft>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]
_PLACES = {
    "llava": "<image>\n",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
    "gemma3": "<boi>",
}


def template(family: str) -> str:
    """Returns a template of parts with generation marks."""
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}{% generation %}{% for part in message.content %}{{ part.text }}"
        "{% endfor %}<|im_end|>{% endgeneration %}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}" + _PLACES[family] + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
        "<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer_of(family: str, folder: Path) -> Any:
    """Returns a tokenizer of bytes with the special tokens of all families from 400 on."""
    made = AutoTokenizer.from_pretrained(byte_tokenizer(folder / "bytes", template(family)))
    filler = [f"<filler-{number}>" for number in range(400 - len(made))]
    made.add_special_tokens({"additional_special_tokens": [*filler, *_SPECIAL]})
    assert made.convert_tokens_to_ids("<image>") == 400
    if family == "gemma3":
        own = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
        made.save_pretrained(folder / "bytes")
        made = PreTrainedTokenizerFast.from_pretrained(folder / "bytes", extra_special_tokens=own)
        made.add_special_tokens({"additional_special_tokens": [*filler, *_SPECIAL]})
    return made


def processor(family: str, folder: Path) -> Path:
    """Writes a processor into a folder."""
    import transformers as t

    tokenizer, text = tokenizer_of(family, folder.parent), template(family)
    size = {"height": 16, "width": 16}
    made: Any
    if family == "llava":
        images: Any = t.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
        made = t.LlavaProcessor(
            images,
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            chat_template=text,
            num_additional_image_tokens=1,
        )
    elif family == "qwen2_vl":
        images = t.Qwen2VLImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
        video = t.Qwen2VLVideoProcessor(patch_size=4, merge_size=2)
        made = t.Qwen2VLProcessor(images, tokenizer, video, chat_template=text)
    elif family == "smolvlm":
        images = t.SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        made = t.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=text)
    else:
        images = t.Gemma3ImageProcessor(size=size)
        made = t.Gemma3Processor(images, tokenizer, chat_template=text, image_seq_length=4)
    made.save_pretrained(folder)
    return folder


COLOURS = {"red": (220, 30, 30), "green": (20, 200, 40), "blue": (30, 40, 210), "white": (250, 250, 250)}
SIZES = ((20, 30), (32, 16), (24, 24))


def pictures(folder: Path) -> list[tuple[str, str]]:
    """Writes twelve small pictures; returns the name of each file, relative to `folder`, and its colour."""
    (folder / "pictures").mkdir(exist_ok=True)
    found = []
    for number in range(12):
        colour = list(COLOURS)[number % 4]
        name = f"pictures/{number}.png"
        picture = Image.new("RGB", SIZES[number % 3], COLOURS[colour])
        picture.paste((number * 20, 90, 60), (2, 3, 9, 8 + number % 5))
        picture.save(folder / name)
        found.append((name, colour))
    return found


def chats(folder: Path, images: tuple[int, ...] = (1, 2, 0, 1)) -> list[dict[str, Any]]:
    """Returns 24 chats whose numbers of images repeat `images`, in TRL's form; writes the pictures."""
    known, rows = pictures(folder), []
    for number in range(24):
        mine = [known[(number * 5 + place) % 12] for place in range(images[number % len(images)])]
        content: list[Any] = [{"type": "image"} for _ in mine]
        content.append({"type": "text", "text": "Which colours" + " are these" * (number % 3) + "?"})
        said = " and ".join(colour for _, colour in mine) or "no picture"
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": said}]},
        ]
        rows.append({"messages": messages, "images": [name for name, _ in mine]})
    return rows


def prepare(family: str, folder: Path, rows: list[dict[str, Any]] | None = None) -> None:
    """Writes `model`, with its processor, and `train.jsonl` into a folder."""
    from ddpforge_transformers.models import image_text_to_text

    torch.manual_seed(0)
    model: Any = image_text_to_text(model_type=family, options=FAMILIES[family])
    model.save_pretrained(folder / "model")
    processor(family, folder / "model")
    rows = chats(folder) if rows is None else rows
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
