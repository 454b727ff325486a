"""Draws pictures of shapes, and writes chats about them and a tiny model, for sft-images. Downloads nothing.

`image-model/` is a LLaVA of 0.2 M parameters with random weights, and its processor. For a real model set `pretrained`
and `processor` in the recipe to its folder or its name on the hub, and `path` to your own file.
"""

import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>{% endgeneration %}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
}
SHAPES = ("circle", "square", "bar")
QUESTION = "Which colour is it?"

random.seed(0)
folder = Path("shapes")
folder.mkdir(exist_ok=True)
chats = []
for number in range(150):
    name, shape = list(COLOURS)[number % 5], SHAPES[number % 3]
    picture = Image.new("RGB", (32, 32), (235, 235, 235))
    left, top, size = random.randrange(2, 8), random.randrange(2, 8), random.randrange(14, 22)
    box = (left, top, left + size, top + (size // 2 if shape == "bar" else size))
    pen = ImageDraw.Draw(picture)
    (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=COLOURS[name])
    file = f"shapes/{number:03}-{name}.png"
    picture.save(file)
    asked = [{"type": "image", "image": file}, {"type": "text", "text": QUESTION}]
    chats.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {name}."}]})
for name in COLOURS:  # chats without an image
    asked = [{"type": "text", "text": f"Name a colour like {name}."}]
    chats.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {name}."}]})
Path("image-chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats), encoding="utf-8")

words = ByteLevelBPETokenizer()
texts = [part["text"] for chat in chats for part in chat["messages"][0]["content"] if part["type"] == "text"]
texts += [chat["messages"][1]["content"] for chat in chats] + ["user\nassistant\nsystem\n"]
special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<image>"]
words.train_from_iterator(texts, vocab_size=400, special_tokens=special, show_progress=False)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words._tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=TEMPLATE
)
size = {"height": 32, "width": 32}
processor = LlavaProcessor(
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
    tokenizer,
    patch_size=8,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,  # the CLS token, which "default" leaves out
    chat_template=TEMPLATE,
)
text = {
    "model_type": "llama",
    "vocab_size": len(tokenizer),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
vision = {
    "model_type": "clip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
torch.manual_seed(0)
config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=special.index("<image>"))
model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
model.save_pretrained("image-model")
processor.save_pretrained("image-model")
print(f"image-model/ ({model.num_parameters():,} parameters), {len(chats)} chats, shapes/ (150 pictures)")
