"""Mistakes of users: parts of the small recipe, their replacement, and words of the message."""

from small_nets import DIT, SD3, UNET, UNET_TEXT, table

_MODEL = f'arch = "DiTTransformer2DModel"\noptions = {table(DIT)}'
_TASK = 'condition = "label"\ndropout = 0.2'
_DATA = 'use = "diffusion_data"\nof = { use = "digits", split = "train", samples = 96 }'


def _model(arch: str, options: dict[str, object]) -> str:
    return f'arch = "{arch}"\noptions = {table(options)}'


def _own(name: str) -> str:
    return f'use = "diffusion_data"\nof = {{ use = "./own.py:{name}" }}'


def _latents(path: str, more: str = "") -> str:
    return f'use = "diffusion_data"\nrange = "any"\nof = {{ use = "latents", path = "{path}"{more} }}'


MISTAKES: dict[str, tuple[str, str, str]] = {
    # the model
    "unknown class": (_MODEL, 'arch = "UNet2DModle"', "did you mean `UNet2DModel`"),
    "an autoencoder": (_MODEL, 'arch = "AutoencoderKL"', "no UNet or transformer `AutoencoderKL`"),
    "a model of packed latents": (_MODEL, 'arch = "FluxTransformer2DModel"', "cannot call `FluxTransformer2DModel`"),
    "unknown option": ("num_layers", "layers", "no option `layers`"),
    "option of a wrong type": (_MODEL, _model("DiTTransformer2DModel", DIT | {"num_layers": [2]}), "refuses"),
    "no class and no folder": (_MODEL, "", "set either `arch`"),
    "class and folder": (_MODEL, _MODEL + '\npretrained = "there"', "set either `arch`"),
    "missing folder": (_MODEL, 'pretrained = "nowhere"', "has no config.json"),
    "options of a saved model": (_MODEL, 'pretrained = "x"\noptions = { in_channels = 1 }', "options are for `arch`"),
    "subfolder without pretrained": (_MODEL, _MODEL + '\nsubfolder = "unet"', "subfolder is for `pretrained`"),
    "adapters of absent layers": (_MODEL, _MODEL + '\nlora = { targets = ["q_proj"] }', "q_proj"),
    "levels do not fit": (
        _MODEL,
        _model("UNet2DModel", UNET | {"block_out_channels": [16], "num_class_embeds": 11}),
        "UNet2DModel` refuses",
    ),
    "a model that is not of diffusers": (
        f'use = "diffusers"\n{_MODEL}',
        'use = "denoiser"',
        "needs a model of diffusers",
    ),
    "other channels": (_MODEL, _model("DiTTransformer2DModel", DIT | {"in_channels": 3}), "in_channels = 3"),
    "a learned variance": (_MODEL, _model("DiTTransformer2DModel", DIT | {"out_channels": 2}), "out_channels = 2"),
    "another size": (_MODEL, _model("DiTTransformer2DModel", DIT | {"sample_size": 16}), "sample_size = 16"),
    "a patch that does not divide": (
        _MODEL,
        _model("DiTTransformer2DModel", DIT | {"patch_size": 3}),
        "patch_size = 3",
    ),
    # the condition
    "too few labels": (_MODEL, _model("DiTTransformer2DModel", DIT | {"num_embeds_ada_norm": 9}), "11 are needed"),
    "no label for dropout": (_MODEL, _model("UNet2DModel", UNET | {"num_class_embeds": 10}), "11 are needed"),
    "no embedding of classes": (_MODEL, _model("UNet2DModel", UNET), "no embedding of classes"),
    "classes are not given": (_TASK, "", 'set task.condition = "label"'),
    "embeddings for a model of classes": ('condition = "label"', 'condition = "embeddings"', "takes classes"),
    "labels for a model of text": (
        _MODEL,
        _model("UNet2DConditionModel", UNET_TEXT | {"in_channels": 1, "out_channels": 1}),
        "class",
    ),
    "data without embeddings": (
        f"{_MODEL}|{_TASK}",
        _model("UNet2DConditionModel", UNET_TEXT | {"in_channels": 1, "out_channels": 1}) + '|condition = "embeddings"',
        "takes `embeddings`, but samples have",
    ),
    "embeddings of another size": (
        f"{_MODEL}|{_DATA}|{_TASK}",
        _model("SD3Transformer2DModel", SD3 | {"joint_attention_dim": 16})
        + f'|{_latents("good.npz")}|condition = "embeddings"',
        "size 16",
    ),
    "dropout without a condition": (
        f"{_MODEL}|{_TASK}",
        _model("UNet2DModel", UNET) + "|dropout = 0.1",
        "there are none",
    ),
    "guidance without dropout": (_TASK, 'condition = "label"\nsamples = { guidance = 3.0 }', "guidance compares"),
    "unknown option of samples": (_TASK, _TASK + "\nsamples = { number = 3 }", "number"),
    "pictures of latents": (
        f"{_DATA}|{_TASK}",
        _DATA.replace("of =", 'range = "any"\nof =') + f"|{_TASK}\nsamples = {{ images = 4 }}",
        "pictures need 1 or 3 channels",
    ),
    # the task
    "unknown density": (_TASK, _TASK + '\ndensity = "lognormal"', "logit_normal"),
    "a mean of another density": (_TASK, _TASK + "\nlogit_mean = 1.0", "logit_mean and logit_std are for"),
    "weights without a bound": (_TASK, _TASK + '\nweighting = "sigma_sqrt"', "set grid = 1000"),
    "shift of zero": (_TASK, _TASK + "\nshift = 0.0", "shift"),
    "epsilon with zero SNR": ('"flow_matching"', '"ddpm"\nzero_terminal_snr = true', "pure noise"),
    "betas in the other order": ('"flow_matching"', '"ddpm"\nbeta_start = 0.1', "is not less than"),
    "option of the other task": ('"flow_matching"', '"ddpm"\nshift = 3.0', "shift"),
    # the data
    "data without seeds": (_DATA, 'use = "digits"\nsplit = "train"', "no seeds for times and noise"),
    "pixels of 0 to 255": (_DATA, _own("Bytes"), "divide bytes by 255"),
    "values out of range": (_DATA, _own("Wide"), 'range = "unit" is 0 to 1'),
    "a row of numbers": (_DATA, _own("Flat"), "expected [C, H, W]"),
    "unknown key of a sample": (_DATA, _own("Keys"), "unknown key `caption`"),
    "images of different sizes": (_DATA, _own("Sizes"), "resize all to one"),
    "too few classes": (_DATA, _DATA + "\nclasses = 4", "has 10 classes"),
    "missing latents": (_DATA, _latents("nowhere"), "there is no file or folder nowhere"),
    "latents of another format": (_DATA, _latents("own.py"), "is not a .safetensors or .npz file"),
    "damaged latents": (_DATA, _latents("damaged.safetensors"), "cannot be read"),
    "a file without latents": (_DATA, _latents("other.npz"), "has no tensor `latents`"),
    "fewer labels than latents": (_DATA, _latents("fewer.npz"), "but 3 `labels`"),
    # how it is run
    "weights on the meta device": ("seed = 3", 'seed = 3\n[strategy]\nuse = "fsdp"\nmeta = true', "meta"),
}
OWN = """
import torch


class Bytes:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.zeros(1, 8, 8, dtype=torch.uint8), index % 10


class Wide(Bytes):
    def __getitem__(self, index):
        return torch.full((1, 8, 8), 7.5), index % 10


class Flat(Bytes):
    def __getitem__(self, index):
        return torch.zeros(64), index % 10


class Keys(Bytes):
    def __getitem__(self, index):
        return {"sample": torch.zeros(1, 8, 8), "caption": "a digit"}


class Sizes(Bytes):
    classes = 10

    def __getitem__(self, index):
        return torch.zeros(1, 8 + 2 * (index == 5), 8), index % 10
"""
